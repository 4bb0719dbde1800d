"""The user's own module, traced without a GPU: peak memory by category, FLOPs, and a roofline of its kernels.

The tracing happens in a process of its own (`headway.plan.tracer.process`), which may abort without taking the planner
along."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError, UsageError
from headway.plan import checks
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.hardware import Node
from headway.plan.report.estimates import Estimate
from headway.plan.tracer.result import Traced, estimate_of, extend

PRECISIONS = ("amp", "fp32", "pure-bf16")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What to trace. Functions are named `FILE.py:name`; `batch` without a file means the factory's own."""

    factory: str
    """Returns the module, or (module, batch), or (module, (inputs, target), loss)."""
    inputs: str | None = None
    """Returns the batch, given a batch size if it takes one; the function `batch` beside the factory if not given."""
    loss: str | None = None
    """cross_entropy, mse, or a function of (output, target); without it the module returns its loss."""
    optimizer: str = "adamw"
    """adamw, adam, sgd, sgd-momentum, or a function of the parameters."""
    precision: str = "amp"
    """amp (autocast to bf16), fp32, or pure-bf16."""
    batch_size: int | None = None
    """Samples of one batch, if the function that makes it wants to know."""
    accumulate: int = 1
    """Microbatches per step."""
    arguments: dict[str, int] = field(default_factory=dict)
    """Passed to the factory."""
    fsdp: int = 1
    """Ranks that shard the model (FSDP2, each repeated block its own unit)."""
    checkpoint: bool = False
    """Recompute each repeated block in the backward pass."""

    def __post_init__(self) -> None:
        checks.one_of("precision", self.precision, PRECISIONS)
        for key in ("accumulate", "fsdp"):
            checks.whole(key, getattr(self, key))
        if self.batch_size is not None:
            checks.whole("batch_size", self.batch_size)
        place, _, name = self.factory.rpartition(":")
        if not place or not name:
            raise UsageError(f"{self.factory!r} names no function; expected FILE.py:function")
        if place.endswith(".py") and not Path(place).is_file():
            raise UsageError(f"there is no file {place} in {Path.cwd()}; expected FILE.py:function")

    def request(self) -> dict[str, object]:
        """What the tracing process reads: every function with its file."""
        place = self.factory.rpartition(":")[0]
        known = {
            "optimizer": ("adamw", "adam", "sgd", "sgd-momentum"),
            "loss": ("cross_entropy", "mse"),
            "inputs": (),
        }
        plain = asdict(self)
        for key, names in known.items():
            value = plain[key]
            if value is not None and ":" not in value and value not in names:
                plain[key] = f"{place}:{value}"
        return plain


Reference = str | Callable[..., Any]


def trace(
    module_factory: Reference,
    example_inputs: Reference | None = None,
    *,
    loss: Reference | None = None,
    optimizer: Reference = "adamw",
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
    """Memory and time of any `nn.Module` before it meets a GPU.

    The functions may be given as such, if they stand at the top of a file, or as `"FILE.py:name"`.
    `extrapolate=("layers", 96)` calls the factory with `layers=2` and `layers=4` and extends to 96.

    >>> plan = trace("train.py:make_model", "train.py:batch", batch_size=8)    # doctest: +SKIP
    >>> plan.answers["memory.allocated"]    # doctest: +SKIP
    """
    settings = Trace(
        factory=reference(module_factory),
        inputs=None if example_inputs is None else reference(example_inputs),
        loss=None if loss is None else reference(loss),
        optimizer=reference(optimizer),
        precision=precision,
        batch_size=batch_size,
        accumulate=accumulate,
        arguments=arguments or {},
        fsdp=fsdp,
        checkpoint=checkpoint,
    )
    return trace_plan(settings, node=node, calibration=calibration, extrapolate=extrapolate, timeout=timeout)


def trace_plan(
    settings: Trace,
    *,
    node: Node | None = None,
    calibration: Calibration | None = None,
    extrapolate: tuple[str, int] | None = None,
    timeout: float = 600.0,
) -> Estimate:
    """The same from settings; when it does not fit, what would."""
    node, constants = node or Node("h200-sxm1"), calibration or Calibration()
    found = run(settings, extrapolate=extrapolate, timeout=timeout)
    plan = estimate_of(settings.factory, found, settings, node, constants)
    if plan.fits or found.error is not None:
        return plan
    names, others = zip(*_changes(settings, node), strict=True)
    tried = run_all(others, extrapolate=extrapolate, timeout=timeout)
    return estimate_of(
        settings.factory, found, settings, node, constants, list(zip(names, tried, strict=True))
    )


def _changes(settings: Trace, node: Node) -> list[tuple[str, Trace]]:
    found = []
    if not settings.checkpoint:
        found.append(("checkpoint blocks", replace(settings, checkpoint=True)))
    if settings.fsdp == 1 and node.gpus > 1:
        found.append((f"FSDP over {node.gpus}", replace(settings, fsdp=node.gpus)))
    if settings.batch_size is not None and settings.batch_size > 1:
        found.append(("half the batch", replace(settings, batch_size=settings.batch_size // 2)))
        found.append(("batch 1", replace(settings, batch_size=1)))
    return found


def run(settings: Trace, *, extrapolate: tuple[str, int] | None = None, timeout: float = 600.0) -> Traced:
    """Traces once, or at two depths to extend to a third."""
    return run_all([settings], extrapolate=extrapolate, timeout=timeout)[0]


def run_all(
    every: Sequence[Trace], *, extrapolate: tuple[str, int] | None = None, timeout: float = 600.0
) -> list[Traced]:
    """Traces several, in one process as long as it lives."""
    if extrapolate is None:
        return _run(every, timeout)
    name, depth = extrapolate
    checks.whole(f"extrapolate {name}", depth)
    depths = (2, 4) if depth > 4 else (depth,)
    found = _run(
        [replace(one, arguments={**one.arguments, name: n}) for one in every for n in depths], timeout
    )
    if len(depths) == 1:
        return found
    return [extend(two, four, depth) for two, four in zip(found[::2], found[1::2], strict=True)]


def _run(every: Sequence[Trace], timeout: float) -> list[Traced]:
    found: list[Traced] = []
    while len(found) < len(
        every
    ):  # a trace that kills its process is reported, and the rest goes on in a new one
        found += _run_process(every[len(found) :], timeout)
    return found


def _run_process(every: Sequence[Trace], timeout: float) -> list[Traced]:
    """Results up to and including the first that killed the process."""
    with tempfile.TemporaryDirectory(prefix="headway-trace-") as folder:
        # without devices in sight, the user's own `is_available()` takes the CPU path
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "headway.plan.tracer.process", folder],
                input=json.dumps([settings.request() for settings in every]),
                capture_output=True,
                text=True,
                env=environment,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise HeadwayError(
                f"tracing {every[0].factory} took longer than {timeout:.0f} s; trace fewer layers and extrapolate"
            ) from error
        found: list[Traced] = []
        for index in range(len(every)):
            file = Path(folder) / f"{index}.json"
            if not file.exists():
                return [*found, Traced(error=_what_killed_it(done.returncode, done.stderr))]
            result = json.loads(file.read_text())
            if result.get("kind") == "usage":
                raise UsageError(result["error"])
            found.append(Traced.of(result))
        return found


def _what_killed_it(code: int, stderr: str) -> str:
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "it said nothing")
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"the tracing process {how}: {last[:300]}"


def reference(function: Reference) -> str:
    """`FILE.py:name` of a function at the top of a file."""
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", "")
    file = inspect.getsourcefile(function)
    if not name or "<" in name or file is None:
        raise UsageError(
            f"{name or function!r} cannot be found again by another process; expected a function at the top of a "
            "file: write it with def, outside other functions"
        )
    return f"{file}:{name}"
