"""`python -m headway.plan.tracer.process DIRECTORY` reads a request from standard input, writes 0.json, 1.json, ..."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from headway.plan.tracer.process import cuda_emulation, user_code
from headway.plan.tracer.process.outcome import trace_step
from headway.plan.tracer.process.step import StepTracer
from headway.plan.tracer.settings import TraceSettings


def main() -> None:
    directory, request = Path(sys.argv[1]), json.load(sys.stdin)
    user_code.extend_import_path(request["import_path"])
    warnings.simplefilter("ignore")  # the user sees them when the model really runs
    rules = cuda_emulation.install()
    for index, settings in enumerate(request["traces"]):
        partial = directory / f"{index}.partial"
        partial.write_text(json.dumps(trace_step(StepTracer(TraceSettings(**settings)))))
        partial.replace(directory / f"{index}.json")
    del rules


if __name__ == "__main__":
    main()
