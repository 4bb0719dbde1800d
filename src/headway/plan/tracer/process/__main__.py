"""`python -m headway.plan.tracer.process FOLDER` reads requests from standard input and writes 0.json, 1.json, ..."""

from __future__ import annotations

import json
import re
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from headway.plan.tracer.process import allocator, standins, user_code
from headway.plan.tracer.process.meter import replay
from headway.plan.tracer.process.step import Request, Step

_OTHERS = {"forward": "activations", "backward": "temporaries", "optimizer": "temporaries", "build": "other"}


def main() -> None:
    folder, requests = Path(sys.argv[1]), json.load(sys.stdin)
    warnings.simplefilter("ignore")  # the user's model speaks when it really runs
    kept = standins.install()
    for index, request in enumerate(requests):
        partial = folder / f"{index}.partial"
        partial.write_text(json.dumps(_traced(Request(**request))))
        partial.replace(folder / f"{index}.json")
    del kept


def _traced(request: Request) -> dict[str, Any]:
    step = Step(request)
    try:
        step.run()
        return _result(step)
    except user_code.NotFound as error:
        return {"error": str(error), "kind": "usage"}
    except (UnsupportedOperatorException, DataDependentOutputException, DynamicOutputShapeException) as error:
        return _failure(step, f"the operation {error.func} cannot be traced without data")
    except Exception as error:  # noqa: BLE001 - the user's own code failed, in whatever way: the parent reports it
        return _failure(step, f"{type(error).__name__}: {error}{_where(error)}")


def _where(error: Exception) -> str:
    """The last line of the user's own that led there."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if not frame.filename.startswith(ours)), None)
    return "" if last is None else f" ({Path(last.filename).name}:{last.lineno})"


def _result(step: Step) -> dict[str, Any]:
    meter = step.meter
    allocated, reserved = allocator.play(list(meter.events), built=step.built_at, start=step.measured_from)
    peak, by_label, by_module, by_operation = replay(meter, _OTHERS, step.measured_from)
    counts = Counter(work for _, work in meter.queue)
    numbers = {work: number for number, work in enumerate(counts)}
    return {
        "parameters": step.parameters,
        "trainable": step.trainable,
        "peak": peak,
        "allocated": allocated,
        "reserved": reserved,
        "by_label": by_label,
        "by_module": _grouped(by_module),
        "by_operation": by_operation,
        "flops": sum(work.flops for _, work in meter.queue),
        "work": [[*work, count] for work, count in counts.items()],
        "queue": [[phase, numbers[work]] for phase, work in meter.queue],
        "notes": step.notes,
    }


def _failure(step: Step, said: str) -> dict[str, Any]:
    """What is known without running: the states."""
    return {
        "error": said,
        "parameters": step.parameters,
        "trainable": step.trainable,
        "state_bytes": step.state_bytes,
    }


def _grouped(by_module: dict[str, int]) -> dict[str, int]:
    """Layers that differ only by their number count together."""
    found: dict[str, int] = {}
    for name, size in by_module.items():
        key = re.sub(r"\.\d+(?=\.|$)", ".*", name) or "(outside any module)"
        found[key] = found.get(key, 0) + size
    return found


if __name__ == "__main__":
    main()
