"""Runs the user's module for a few real steps on the device here and says how long and how much."""

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
from headway.plan.tracer.process.step import LOSSES, OPTIMIZERS, Request, call

WARM_UP = 3
SETTLE_S = 1.0
"""A GPU's clocks need a while under load: so long at least it is warmed up, and so long it is measured."""
PHASES = ("forward", "backward", "optimizer")


def measure_steps(request: Request, batch_sizes: list[int | None], steps: int) -> dict[str, Any]:
    """One row per batch size."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_dtype(torch.bfloat16 if request.precision == "pure-bf16" else torch.float32)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    rows = []
    for size in batch_sizes:
        try:
            rows.append(_measure(request, size, steps, device))
        except torch.OutOfMemoryError as error:
            said = str(error).partition(". ")[0]
            raise user_code.NotFound(f"a batch of {size} does not fit on {name}: {said}") from error
    return {"device": name, "torch": torch.__version__, "rows": rows}


def _measure(request: Request, batch_size: int | None, steps: int, device: torch.device) -> dict[str, Any]:
    gpu = device.type == "cuda"
    gc.collect()  # the model of the previous row
    model, batch, loss = _build(request, batch_size, device)
    optimizer = (OPTIMIZERS.get(request.optimizer) or user_code.find(request.optimizer))(model.parameters())

    def one() -> dict[str, float]:
        return _step(request, model, batch, loss, optimizer, synchronize=gpu)

    least_s = SETTLE_S if gpu else 0.0
    _repeated(one, WARM_UP, least_s)
    every = _repeated(one, steps, least_s)
    row: dict[str, Any] = {"batch_size": batch_size, "step_s": median(one["step"] for one in every)}
    if gpu:
        row["host_s"] = {phase: median(one[phase] for one in every) for phase in PHASES}
        row |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return row


def _repeated(one: Callable[[], dict[str, float]], times: int, least_s: float) -> list[dict[str, float]]:
    """So many times and so long at least."""
    found: list[dict[str, float]] = []
    end = time.monotonic() + least_s
    while len(found) < times or time.monotonic() < end:
        found.append(one())
    return found


def _step(
    request: Request,
    model: Any,
    batch: Any,
    loss: Any,
    optimizer: torch.optim.Optimizer,
    *,
    synchronize: bool,
) -> dict[str, float]:
    """Seconds of one step, and of those the host's in each phase, where the device does not keep it waiting."""
    if synchronize:
        torch.cuda.synchronize()
    device = "cuda" if synchronize else "cpu"
    took = dict.fromkeys(PHASES, 0.0)
    start = last = time.perf_counter()

    def ends(phase: str) -> None:
        nonlocal last
        before, last = last, time.perf_counter()
        took[phase] += last - before

    for _ in range(request.accumulate):
        with torch.autocast(device, torch.bfloat16, enabled=request.precision == "amp"):
            value = _loss(model, batch, loss)
        ends("forward")
        value.backward()  # type: ignore[no-untyped-call]
        del value
        ends("backward")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    ends("optimizer")
    if synchronize:
        torch.cuda.synchronize()
    return {"step": time.perf_counter() - start, **took}


def _build(request: Request, batch_size: int | None, device: torch.device) -> tuple[Any, Any, Any]:
    with device:  # big models are filled with random numbers there
        made = user_code.find(request.factory)(**request.arguments)
    loss = None if request.loss is None else LOSSES.get(request.loss) or user_code.find(request.loss)
    if isinstance(made, tuple):
        made, batch, *rest = made
        loss = rest[0] if rest else loss
    else:
        reference = request.inputs or f"{request.factory.rpartition(':')[0]}:batch"
        batch = user_code.call_with(user_code.find(reference), batch_size)
    model = made.cpu().train()
    if device.type == "cuda":  # and laid out anew, as if they had come from the CPU
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = model.to(device)
    if request.checkpoint:
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
        raise user_code.NotFound(
            "the module returns no loss; give one: cross_entropy, mse or FILE.py:function"
        )
    return found
