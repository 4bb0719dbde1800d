"""Schedulers: all of torch, stepped after each step or each epoch, and closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler as lrs

import headway as hw
from variants.base import Train, Variant, momentum

Make = Callable[[Optimizer], Any]


def each_step(scheduler: Make, **fields: Any) -> Variant:
    return Variant(optimizer=momentum, scheduler=scheduler, **fields)


def each_epoch(scheduler: Make, **options: Any) -> Variant:
    return Variant(optimizer=momentum, scheduler=scheduler, scheduler_options={"every": "epoch", **options})


def counting(optimizer: Optimizer) -> lrs.LambdaLR:
    """A closure that counts its own calls."""
    calls = 0

    def factor(step: int) -> float:  # noqa: ARG001
        nonlocal calls
        calls += 1
        return 0.9**calls

    return lrs.LambdaLR(optimizer, factor)


def listing(optimizer: Optimizer) -> lrs.LambdaLR:
    """A closure over a list that it changes."""
    seen: list[int] = []

    def factor(step: int) -> float:
        seen.append(step)
        return 0.9 ** len(seen)

    return lrs.LambdaLR(optimizer, factor)


class Callable_:
    """A function with a state: torch saves it with the scheduler."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:  # noqa: ARG002
        self.calls += 1
        return 0.9**self.calls


class Own(lrs.LRScheduler):
    """Remembers the last rates, in a list and a dict."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.trail: list[float] = []
        self.marks: dict[str, int] = {}
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        self.trail = [*self.trail, 0.97 ** len(self.trail)][-20:]
        self.marks["calls"] = self.marks.get("calls", 0) + 1
        return [base * self.trail[-1] for base in self.base_lrs]


def sequence(optimizer: Optimizer) -> lrs.SequentialLR:
    first = lrs.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    return lrs.SequentialLR(optimizer, [first, lrs.CosineAnnealingLR(optimizer, 14)], milestones=[4])


def three(optimizer: Optimizer) -> lrs.SequentialLR:
    parts = [lrs.ConstantLR(optimizer, 0.5, 3), lrs.ExponentialLR(optimizer, 0.9), lrs.StepLR(optimizer, 2)]
    return lrs.SequentialLR(optimizer, parts, milestones=[3, 9])


def chained(optimizer: Optimizer) -> lrs.ChainedScheduler:
    return lrs.ChainedScheduler([lrs.ExponentialLR(optimizer, 0.95), lrs.StepLR(optimizer, 5, 0.5)])


def averaged(optimizer: Optimizer) -> torch.optim.swa_utils.SWALR:
    return torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=8)


def tensor_rate(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=torch.tensor(0.05), momentum=0.9)


def two_groups(parameters: Any) -> Optimizer:
    every = list(parameters)
    return torch.optim.SGD([{"params": every[:2]}, {"params": every[2:], "lr": 0.2}], lr=0.05)


class ByHand(Train):
    """Steps its scheduler itself."""

    def pre_stage(self) -> None:
        self.schedule = lrs.LambdaLR(self.pipe.optimizers["main"], lambda step: 0.9**step)

    def optimize(self) -> None:
        super().optimize()
        self.schedule.step()


def registered(pipe: hw.Pipeline) -> None:
    stage = pipe.stages[0]
    stage.schedule = lrs.ExponentialLR(pipe.optimizers["main"], 0.9)  # type: ignore[attr-defined]
    pipe.register_state("schedule", stage.schedule)  # type: ignore[attr-defined]


class Uses(Train):
    def optimize(self) -> None:
        super().optimize()
        self.schedule.step()


VARIANTS = {
    "lambda": each_step(lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step))),
    "lambda-object": each_step(lambda o: lrs.LambdaLR(o, Callable_())),
    "lambda-counting": each_step(counting, named="calls"),
    "lambda-listing": each_step(listing, named="seen"),
    "lambda-groups": Variant(
        optimizer=two_groups, scheduler=lambda o: lrs.LambdaLR(o, [lambda s: 0.9**s, lambda s: 0.8**s])
    ),
    "multiplicative": each_step(lambda o: lrs.MultiplicativeLR(o, lambda _: 0.95)),
    "step": each_step(lambda o: lrs.StepLR(o, 4)),
    "multistep": each_step(lambda o: lrs.MultiStepLR(o, [3, 7, 14], 0.5)),
    "constant": each_step(lambda o: lrs.ConstantLR(o, 0.3, 7)),
    "linear": each_step(lambda o: lrs.LinearLR(o, 0.1, total_iters=10)),
    "exponential": each_step(lambda o: lrs.ExponentialLR(o, 0.9)),
    "polynomial": each_step(lambda o: lrs.PolynomialLR(o, 18, 2.0)),
    "cosine": each_step(lambda o: lrs.CosineAnnealingLR(o, 10)),
    "cosine-restarts": each_step(lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2)),
    "cyclic": each_step(lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=4)),
    "cyclic-function": each_step(
        lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=4, scale_fn=lambda x: 0.9**x)
    ),
    "one-cycle": each_step(lambda o: lrs.OneCycleLR(o, 0.1, total_steps=18)),
    "one-cycle-three-phases": each_step(
        lambda o: lrs.OneCycleLR(o, 0.1, epochs=3, steps_per_epoch=6, three_phase=True)
    ),
    "sequential": each_step(sequence),
    "sequential-three": each_step(three),
    "chained": each_step(chained),
    "swa": each_step(averaged),
    "own-class": each_step(Own),
    "tensor-rate": Variant(optimizer=tensor_rate, scheduler=lambda o: lrs.ExponentialLR(o, 0.9)),
    "warmup-cosine": each_step(lambda o: hw.train.warmup_cosine(o, warmup=4, total=18)),
    "plateau": each_epoch(
        lambda o: lrs.ReduceLROnPlateau(o, patience=0, threshold=1.0), monitor="train/loss"
    ),
    "epoch-exponential": each_epoch(lambda o: lrs.ExponentialLR(o, 0.5)),
    "epoch-cosine": each_epoch(lambda o: lrs.CosineAnnealingLR(o, 3)),
    "by-hand": Variant(optimizer=momentum, stage=ByHand, named="schedule"),
    "by-hand-registered": Variant(optimizer=momentum, stage=Uses, prepare=registered),
}
