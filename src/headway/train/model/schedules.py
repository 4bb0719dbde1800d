"""Learning rates: warm-up with cosine decay, and scaling with the global batch size."""

from __future__ import annotations

import math
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from headway import dist
from headway.errors import UsageError


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

    `batch_size` is that of one rank, and is multiplied by the number of ranks. "linear" suits SGD, "sqrt" suits Adam.

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
