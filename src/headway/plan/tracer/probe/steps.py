"""Runs a few real steps of the user's module on this machine's device, and measures time and memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_map

from headway.plan.tracer.process import user_code
from headway.plan.tracer.process.blocks import checkpoint_blocks
from headway.plan.tracer.process.step import call, make_batch, make_optimizer, named_loss
from headway.plan.tracer.settings import TraceSettings

_WARM_UP_STEPS = 3
_SETTLE_S = 1.0
"""A GPU's clocks settle under load: warm-up and measurement each take at least this long."""
_PHASES = ("forward", "backward", "optimizer")


def measure_steps(settings: TraceSettings, batch_sizes: list[int | None], steps: int) -> dict[str, Any]:
    """Measures each batch size; returns one row per batch size."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_dtype(torch.bfloat16 if settings.precision == "pure-bf16" else torch.float32)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    rows = []
    for size in batch_sizes:
        try:
            rows.append(_measure(settings, size, steps, device))
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". ")[0]
            raise user_code.UserCodeError(f"a batch of {size} does not fit on {name}: {reason}") from error
    return {"device": name, "torch": torch.__version__, "rows": rows}


def _measure(
    settings: TraceSettings, batch_size: int | None, steps: int, device: torch.device
) -> dict[str, Any]:
    gpu = device.type == "cuda"
    gc.collect()  # frees the model of the previous row
    model, batch, loss = _build(settings, batch_size, device)
    optimizer = make_optimizer(settings, model.parameters())

    def step() -> dict[str, float]:
        return _step(settings, model, batch, loss, optimizer, synchronize=gpu)

    least_s = _SETTLE_S if gpu else 0.0
    _repeat(step, _WARM_UP_STEPS, least_s)
    every = _repeat(step, steps, least_s)
    row: dict[str, Any] = {"batch_size": batch_size, "step_s": median(times["step"] for times in every)}
    if gpu:
        row["host_s"] = {phase: median(times[phase] for times in every) for phase in _PHASES}
        row |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return row


def _repeat(step: Callable[[], dict[str, float]], times: int, least_s: float) -> list[dict[str, float]]:
    """Runs the step at least `times` times and at least `least_s` seconds."""
    found: list[dict[str, float]] = []
    end = time.monotonic() + least_s
    while len(found) < times or time.monotonic() < end:
        found.append(step())
    return found


def _step(
    settings: TraceSettings,
    model: Any,
    batch: Any,
    loss: Any,
    optimizer: torch.optim.Optimizer,
    *,
    synchronize: bool,
) -> dict[str, float]:
    """Seconds of one step, and of the host in each phase, including waits for a full launch queue."""
    if synchronize:
        torch.cuda.synchronize()
    device = "cuda" if synchronize else "cpu"
    host_s = dict.fromkeys(_PHASES, 0.0)
    start = last = time.perf_counter()

    def end(phase: str) -> None:
        nonlocal last
        before, last = last, time.perf_counter()
        host_s[phase] += last - before

    for _ in range(settings.accumulate):
        with torch.autocast(device, torch.bfloat16, enabled=settings.precision == "amp"):
            value = _loss(model, batch, loss)
        end("forward")
        value.backward()  # type: ignore[no-untyped-call]
        del value
        end("backward")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    end("optimizer")
    if synchronize:
        torch.cuda.synchronize()
    return {"step": time.perf_counter() - start, **host_s}


def _build(settings: TraceSettings, batch_size: int | None, device: torch.device) -> tuple[Any, Any, Any]:
    with device:  # large models are initialized faster there
        made = user_code.load_function(settings.factory)(**settings.arguments)
    loss = named_loss(settings)
    if isinstance(made, tuple):
        made, batch, *rest = made
        loss = rest[0] if rest else loss
    else:
        batch = make_batch(settings, batch_size)
    model = made.cpu().train()
    if device.type == "cuda":  # the model is moved back below, as if it had been built on the CPU
        gc.collect()
        # workspaces of an earlier batch size would keep segments that a separate run does not have
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = model.to(device)
    if settings.checkpoint:
        checkpoint_blocks(model)
    return (
        model,
        tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch),
        loss,
    )


def _loss(model: Any, batch: Any, loss: Any) -> torch.Tensor:
    if loss is not None:
        inputs, target = batch
        out: torch.Tensor = loss(call(model, inputs), target)
        return out
    output = call(model, batch)
    if isinstance(output, dict):
        output = output.get("loss", output)
    found = getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor) or found.dim():
        raise user_code.UserCodeError(
            "the module returns no loss; give loss: cross_entropy, mse or FILE.py:function"
        )
    return found
