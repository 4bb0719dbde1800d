"""A small problem, a stage for it, and the loop that a careful person would write by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import headway as hw
from headway.dist.seeding import derive_seed
from headway.train import Pipeline, TrainValStage

BATCH = 16
FEATURES = 10


class Net(nn.Module):
    """Dropout, so that random numbers must be drawn in the same order; batch norm, so that there are buffers."""

    def __init__(self, *, width: int = 24, norm: bool = True, dropout: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))  # type: ignore[no-any-return]


def make_net(**settings: Any) -> Net:
    torch.manual_seed(7)
    return Net(**settings)


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def sgd_of_groups(parameters: Any) -> Optimizer:
    """Matrices first, then the rest: another order than the model's."""
    every = list(parameters)
    groups = [[p for p in every if p.ndim > 1], [p for p in every if p.ndim < 2]]
    return torch.optim.SGD([{"params": group} for group in groups], lr=0.05, momentum=0.9)


def warm_up(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))


class Batches:
    """Samples drawn from a seed: rank and position decide, so a loop by hand gets the same ones."""

    def __init__(self, count: int, *, rank: int = 0, sizes: Callable[[int], int] = lambda _: BATCH) -> None:
        self.count, self.rank, self.sizes = count, rank, sizes
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self.count):
            generator = torch.Generator().manual_seed(1000 * self.rank + number)
            x = torch.randn(self.sizes(number), FEATURES, generator=generator)
            yield x, x[:, :3].argmax(1)


class Classify(TrainValStage):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.losses: list[float] = []

    def step(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.models["net"](x)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), weight=len(y))
        loss = F.cross_entropy(logits.float(), y)
        if self.training:
            self.losses.append(loss.item())
        return loss


def make_pipe(folder: Path, **model: Any) -> Pipeline:
    net = model.pop("net", None) or make_net()
    scheduler, make = model.pop("scheduler", None), model.pop("optimizer", sgd)
    pipe = Pipeline(name="toy", root=folder)
    pipe.register_model("net", net, **model)
    pipe.register_optimizer("sgd", make, scheduler=scheduler, model="net")
    return pipe


def by_hand(
    net: nn.Module,
    batches: Batches,
    *,
    accumulate: int = 1,
    autocast: bool = False,
    scheduler: Callable[[Optimizer], LambdaLR] | None = None,
    decay: float | None = None,
    clip: float | None = None,
    make: Callable[[Any], Optimizer] = sgd,
) -> tuple[list[float], list[Tensor]]:
    """The losses of all batches, and the averaged weights."""
    world = hw.world_size() if hw.dist.is_initialized() else 1
    model: Any = DistributedDataParallel(net) if world > 1 else net
    optimizer = make(net.parameters())
    schedule = scheduler(optimizer) if scheduler else None
    average = [p.detach().clone() for p in net.parameters()]
    losses = []
    every = list(batches)
    if rank := hw.rank() if world > 1 else 0:  # from the first batch on, each rank draws its own numbers
        torch.manual_seed(derive_seed(torch.initial_seed(), "torch.rank", rank))
    for start in range(0, len(every), accumulate):
        window = every[start : start + accumulate]
        mine = sum(len(y) for _, y in window)
        total = torch.tensor(float(mine))
        if world > 1:
            c10d.all_reduce(total)
        optimizer.zero_grad()
        for x, y in window:
            local = (x, y) is not window[-1] and x is not window[-1][0]
            with model.no_sync() if local and world > 1 else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = F.cross_entropy(model(x).float(), y)
                if accumulate == 1:
                    loss.backward()
                else:  # the mean over all samples of all ranks; DDP divides by the ranks
                    (loss * (len(y) * world / total)).backward()
            losses.append(loss.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if decay is not None:
            for mean, p in zip(average, net.parameters(), strict=True):
                mean.lerp_(p.detach(), 1 - decay)
    return losses, average
