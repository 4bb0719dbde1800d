"""`python -m headway.plan.tracer.probe OUT` reads a request from standard input and writes its measurements to OUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from headway.plan.tracer.probe.machine import measure_machine
from headway.plan.tracer.probe.steps import measure_steps
from headway.plan.tracer.process.user_code import UserCodeError, extend_import_path
from headway.plan.tracer.settings import TraceSettings


def main() -> None:
    out, request = Path(sys.argv[1]), json.load(sys.stdin)
    extend_import_path(request["import_path"])
    result: dict[str, Any]
    try:
        if request["kind"] == "machine":
            result = measure_machine(Path(request["directory"]), request["loader"])
        else:
            result = measure_steps(
                TraceSettings(**request["trace"]), request["batch_sizes"], request["steps"]
            )
    except UserCodeError as error:
        result = {"error": str(error)}
    except torch.OutOfMemoryError as error:
        result = {"error": f"out of memory on the device: {error}"}
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
