"""Traces the user's module without a GPU: peak memory by category, FLOPs, and the roofline of its kernels.

The trace runs in a process of its own (`headway.plan.tracer.process`), because some operations abort the interpreter.
"""

from __future__ import annotations

import inspect
import json
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError, UsageError
from headway.interpreter import import_path, module_command, module_environment
from headway.plan import checks
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.efficiency import scoped_calibration
from headway.plan.machine.hardware import Node
from headway.plan.report.estimates import Estimate
from headway.plan.tracer.result import TraceResult, extrapolate_depth, make_estimate
from headway.plan.tracer.settings import TraceSettings

FunctionReference = str | Callable[..., Any]


def trace(
    module_factory: FunctionReference,
    example_inputs: FunctionReference | None = None,
    *,
    loss: FunctionReference | None = None,
    optimizer: FunctionReference = "adamw",
    precision: str = "amp",
    batch_size: int | None = None,
    accumulate: int = 1,
    arguments: dict[str, int] | None = None,
    fsdp: int = 1,
    checkpoint: bool = False,
    node: Node | None = None,
    calibration: Calibration | None = None,
    extrapolate: tuple[str, int] | None = None,
    timeout: float = 600.0,
) -> Estimate:
    """Estimates memory and time of any `nn.Module` without a GPU.

    Pass functions defined at the top level of a file, or their names as `"FILE.py:name"`.
    `extrapolate=("layers", 96)` calls the factory with `layers=2` and `layers=4` and extrapolates to 96.

    >>> plan = trace("train.py:make_model", "train.py:batch", batch_size=8)    # doctest: +SKIP
    >>> plan.answers["memory.allocated"]    # doctest: +SKIP
    """
    settings = TraceSettings(
        factory=function_reference(module_factory),
        inputs=None if example_inputs is None else function_reference(example_inputs),
        loss=None if loss is None else function_reference(loss),
        optimizer=function_reference(optimizer),
        precision=precision,
        batch_size=batch_size,
        accumulate=accumulate,
        arguments=arguments or {},
        fsdp=fsdp,
        checkpoint=checkpoint,
    )
    return estimate_module(
        settings, node=node, calibration=calibration, extrapolate=extrapolate, timeout=timeout
    )


def estimate_module(
    settings: TraceSettings,
    *,
    node: Node | None = None,
    calibration: Calibration | None = None,
    extrapolate: tuple[str, int] | None = None,
    timeout: float = 600.0,
) -> Estimate:
    """Estimates memory and time of one traced step; if it may not fit, also traces changes that may make it fit."""
    node = node or Node("h200-sxm1")
    constants, notes = scoped_calibration(calibration, node.device)
    found = trace_module(settings, extrapolate=extrapolate, timeout=timeout)
    found = replace(found, notes=[*found.notes, *notes])
    plan = make_estimate(settings.factory, found, settings, node, constants)
    if (plan.fits and not plan.tight) or found.error is not None:
        return plan
    changes = _changes(settings, node)
    traces = trace_modules(list(changes.values()), extrapolate=extrapolate, timeout=timeout)
    tried = list(zip(changes, traces, strict=True))
    return make_estimate(settings.factory, found, settings, node, constants, tried)


def _changes(settings: TraceSettings, node: Node) -> dict[str, TraceSettings]:
    """Returns the settings to try if a module does not fit, by the name of the change."""
    changes = {}
    if not settings.checkpoint:
        changes["checkpoint blocks"] = replace(settings, checkpoint=True)
    if settings.fsdp == 1 and node.gpus > 1:
        changes[f"FSDP over {node.gpus}"] = replace(settings, fsdp=node.gpus)
    if settings.batch_size is not None and settings.batch_size > 1:
        changes["half the batch"] = replace(settings, batch_size=settings.batch_size // 2)
        changes["batch 1"] = replace(settings, batch_size=1)
    return changes


def trace_module(
    settings: TraceSettings, *, extrapolate: tuple[str, int] | None = None, timeout: float = 600.0
) -> TraceResult:
    """Traces one module, or its factory at two depths to extrapolate to a third."""
    return trace_modules([settings], extrapolate=extrapolate, timeout=timeout)[0]


def trace_modules(
    every: Sequence[TraceSettings], *, extrapolate: tuple[str, int] | None = None, timeout: float = 600.0
) -> list[TraceResult]:
    """Traces several modules, in one process unless a trace ends it."""
    if extrapolate is None:
        return _trace_all(every, timeout)
    name, depth = extrapolate
    checks.require_int(f"extrapolate {name}", depth)
    depths = (2, 4) if depth > 4 else (depth,)
    found = _trace_all(
        [replace(one, arguments={**one.arguments, name: n}) for one in every for n in depths], timeout
    )
    if len(depths) == 1:
        return found
    return [
        extrapolate_depth(two, four, depth, sharded=one.fsdp > 1)
        for one, two, four in zip(every, found[::2], found[1::2], strict=True)
    ]


def _trace_all(every: Sequence[TraceSettings], timeout: float) -> list[TraceResult]:
    found: list[TraceResult] = []
    # a trace that ends its process is reported, and a new process traces the rest
    while len(found) < len(every):
        for result in _trace_in_process(every[len(found) :], timeout):
            if result.get("kind") == "usage":
                raise UsageError(result["error"])
            found.append(TraceResult.of(result))
    return found


def _trace_in_process(every: Sequence[TraceSettings], timeout: float) -> list[dict[str, Any]]:
    """Starts one process, and returns its results up to and including the first trace that ended it."""
    with tempfile.TemporaryDirectory(prefix="headway-trace-") as directory:
        # hide all devices, so that the user's own `is_available()` takes the CPU path
        environment = {**module_environment(), "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        try:
            done = subprocess.run(
                module_command("headway.plan.tracer.process", directory),
                input=json.dumps(
                    {"import_path": import_path(), "traces": [each.to_dict() for each in every]}
                ),
                capture_output=True,
                text=True,
                errors="replace",  # the user's code may write any bytes
                env=environment,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise HeadwayError(
                f"tracing {every[0].factory} took longer than {timeout:.0f} s; trace fewer layers, with extrapolate"
            ) from error
        results: list[dict[str, Any]] = []
        for index in range(len(every)):
            file = Path(directory) / f"{index}.json"
            if not file.exists():
                return [*results, {"error": f"the tracing process {process_failure(done)}"}]
            results.append(json.loads(file.read_text()))
        return results


def process_failure(done: subprocess.CompletedProcess[str]) -> str:
    """Returns how a process ended, with the last line that it wrote, as the end of a sentence."""
    code = done.returncode
    last = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "no output")
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{how}: {last[:300]}"


def function_reference(function: FunctionReference) -> str:
    """Returns `FILE.py:name` of a function defined at the top level of a file."""
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", "")
    file = inspect.getsourcefile(function)
    if not name or "<" in name or file is None:
        raise UsageError(
            f"{name or function!r} cannot be imported by another process; expected a function at the top level of "
            "a file: define it with def, outside other functions"
        )
    return f"{file}:{name}"
