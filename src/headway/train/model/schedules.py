"""Learning rates: when schedulers step, warm-up with cosine decay, and scaling with the global batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from headway import dist
from headway.errors import UsageError

SchedulerLike: TypeAlias = LRScheduler | Callable[[Optimizer], LRScheduler]


@final
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning-rate scheduler, and when it steps."""

    scheduler: LRScheduler
    optimizer: Optimizer
    every: Literal["step", "epoch"]
    monitor: str | None
    used: list[float | Tensor | None] = field(default_factory=list, init=False)
    """the learning rate of each parameter group in the last step, if the scheduler steps after each"""

    def step(self) -> None:
        """Steps the scheduler after a step, and keeps the step's learning rates for the next log point."""
        rates = [group.get("lr") for group in self.optimizer.param_groups]
        # a scheduler changes the rates that are tensors in place
        self.used[:] = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        self.scheduler.step()

    def used_rates(self) -> list[float | None]:
        """Returns the learning rates of the last step as plain values, for a checkpoint."""
        return [None if rate is None else float(rate) for rate in self.used]

    def end_epoch(self, values: Mapping[str, Any]) -> None:
        """Steps the scheduler if it steps after each epoch; if it needs a metric, only if the epoch has it."""
        if self.every == "step":
            return
        if self.monitor is None:
            self.scheduler.step()
        elif self.monitor in values:
            self.scheduler.step(values[self.monitor])


def make_schedule(
    name: str,
    optimizer: Optimizer,
    scheduler: SchedulerLike | None,
    *,
    every: Literal["step", "epoch"],
    monitor: str | None,
) -> Schedule | None:
    """Returns the schedule of the optimizer that is registered as `name`; None if it has no scheduler."""
    if every not in ("step", "epoch"):
        raise UsageError(f'every={every!r} is unknown: use "step" or "epoch"')
    if scheduler is None:
        return None
    made: object = scheduler
    if not isinstance(made, LRScheduler) and callable(scheduler):
        made = scheduler(optimizer)
    if not isinstance(made, LRScheduler):
        raise UsageError(
            f"the scheduler of optimizer {name!r} is {made!r:.80}: give a scheduler, or a function that makes one from "
            "the optimizer"
        )
    if made.optimizer is not optimizer:
        raise UsageError(
            f"the scheduler of optimizer {name!r} was made for another optimizer, whose learning rate it would change: "
            "pass a function that makes it from the optimizer it gets"
        )
    if isinstance(made, ReduceLROnPlateau):
        every = "epoch"
        if monitor is None:
            raise UsageError(
                f"the scheduler of optimizer {name!r} needs a metric: pass its name, such as monitor='val/loss'"
            )
    if monitor is not None and every == "step":
        raise UsageError(f'monitor={monitor!r} needs every="epoch": pass both, or leave out monitor')
    return Schedule(scheduler=made, optimizer=optimizer, every=every, monitor=monitor)


def warmup_cosine(optimizer: Optimizer, *, warmup: int, total: int, floor: float = 0.0) -> LambdaLR:
    """Returns a schedule with a linear warm-up of `warmup` steps and a cosine decay.

    At step `total` the learning rate is `floor` times its peak.

    >>> pipe.register_optimizer("adamw", make, scheduler=lambda o: warmup_cosine(o, warmup=500, total=10_000))
    """
    if not 0 <= warmup < total:
        raise UsageError(f"warmup={warmup} and total={total}: give steps with 0 <= warmup < total")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / (total - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)


def scale_lr(
    lr: float, *, batch_size: int, base_batch_size: int, rule: Literal["linear", "sqrt"] = "linear"
) -> float:
    """Scales a learning rate that was tuned with `base_batch_size` to the global batch size of this run.

    `batch_size` is that of one rank, and is multiplied by the number of ranks; if a plan splits a model over ranks that
    share their batches, divide `batch_size` by their number. "linear" suits SGD, "sqrt" suits Adam.

    >>> hw.scale_lr(0.1, batch_size=64, base_batch_size=256)  # on 8 ranks
    0.2
    """
    if batch_size < 1 or base_batch_size < 1:
        raise UsageError(
            f"batch_size={batch_size}, base_batch_size={base_batch_size}: give at least 1 sample each"
        )
    ratio = batch_size * (dist.world_size() if dist.is_initialized() else 1) / base_batch_size
    if rule not in ("linear", "sqrt"):
        raise UsageError(f'rule={rule!r} is unknown: use "linear" or "sqrt"')
    return lr * (ratio if rule == "linear" else math.sqrt(ratio))
