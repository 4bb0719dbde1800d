"""Clearing of gradients without torch's profiler record."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer


def fast_zero_grad(optimizer: Optimizer) -> Callable[[], None]:
    """Returns a function that does what `optimizer.zero_grad()` does, without its profiler record (40 us per call).

    An optimizer with a `zero_grad` of its own keeps it.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        return optimizer.zero_grad

    def zero_grad() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return zero_grad
