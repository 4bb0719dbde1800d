"""Runs a step and returns the outcome as JSON values: memory and kernels, or why it could not be traced."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from headway.plan.tracer.process import allocator, user_code
from headway.plan.tracer.process.memory_meter import replay_peak
from headway.plan.tracer.process.step import StepTracer

_UNLABELED = {
    "forward": "activations",
    "backward": "temporaries",
    "optimizer": "temporaries",
    "build": "other",
}


def trace_step(step: StepTracer) -> dict[str, Any]:
    """Runs the step; returns the values that `TraceResult.of` reads."""
    try:
        step.run()
        return _result(step)
    except user_code.UserCodeError as error:
        return {"error": str(error), "kind": "usage"}
    except (UnsupportedOperatorException, DataDependentOutputException, DynamicOutputShapeException) as error:
        return _failure(step, f"the operation {error.func} cannot be traced without data")
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the parent reports it
        return _failure(step, f"{type(error).__name__}: {error}{_where(error)}")


def _where(error: Exception) -> str:
    """Returns file and line of the last frame in the user's own code."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if not frame.filename.startswith(ours)), None)
    return "" if last is None else f" ({Path(last.filename).name}:{last.lineno})"


def _result(step: StepTracer) -> dict[str, Any]:
    meter = step.meter
    allocated, reserved = allocator.replay(meter.events, built=step.built_at, start=step.measured_from)
    by_label, by_module = replay_peak(meter, _UNLABELED, step.measured_from)
    counts = Counter(kernel for _, kernel in meter.queue)
    numbers = {kernel: number for number, kernel in enumerate(counts)}
    return {
        "parameters": step.parameters,
        "trainable": step.trainable,
        "allocated": allocated,
        "reserved": reserved,
        "by_label": by_label,
        "by_module": _grouped(by_module),
        "kernels": [[*kernel, count] for kernel, count in counts.items()],
        "queue": [[phase, numbers[kernel]] for phase, kernel in meter.queue],
        "notes": step.notes,
    }


def _failure(step: StepTracer, message: str) -> dict[str, Any]:
    """Reports the model states of a module that did not run."""
    return {
        "error": message,
        "parameters": step.parameters,
        "trainable": step.trainable,
        "state_bytes": step.state_bytes,
    }


def _grouped(by_module: dict[str, int]) -> dict[str, int]:
    """Adds up layers whose names differ only by their number."""
    found: dict[str, int] = {}
    for name, size in by_module.items():
        key = re.sub(r"\.\d+(?=\.|$)", ".*", name) or "(outside any module)"
        found[key] = found.get(key, 0) + size
    return found
