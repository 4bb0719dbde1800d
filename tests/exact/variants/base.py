"""A small training in parts, each of which a variant may replace."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import headway as hw

FEATURES, CLASSES, SAMPLES, BATCH = 6, 3, 48, 8
STEPS_PER_EPOCH, EPOCHS = 6, 3


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One start of a variant: where it writes its losses, and the step in which it is killed."""

    trace: Path
    kill: int
    """0: it is not killed"""

    def record(self, pipe: hw.Pipeline, loss: Tensor) -> None:
        """Notes the exact loss of a step, or kills the process if the test wants it here."""
        step = pipe.steps_done + 1
        if step == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        with self.trace.open("a") as file:
            file.write(json.dumps([step, float(loss.detach()).hex()]) + "\n")


current: list[Trial] = []
"""the trial of this process"""


def record(stage: hw.Stage, loss: Tensor) -> Tensor:
    """Notes the loss of this step: for loops of a variant's own."""
    current[0].record(stage.pipe, loss)
    return loss


class Train(hw.TrainValStage):
    """Trains model "net"; a variant overrides `loss` or hooks."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"log_every": 4, **settings})

    def train_step(self, batch: Any) -> Tensor:
        return record(self, self.loss(batch))

    def step(self, batch: Any) -> Tensor:
        return self.loss(batch)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.models["net"](x), y)


class Net(nn.Module):
    """Dropout, so that random numbers must be drawn in the same order."""

    def __init__(self, *, dropout: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 10)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(F.relu(self.features(x))))  # type: ignore[no-any-return]

    def features(self, x: Tensor) -> Tensor:
        return self.first(x)  # type: ignore[no-any-return]


def samples(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def shuffled() -> Iterable[Any]:
    return hw.data.DataLoader(samples(), global_batch_size=BATCH, shuffle=True, seed=3)


def adam(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def single_stage(pipe: hw.Pipeline, stage: Callable[[], hw.Stage]) -> None:
    pipe.append_stage(stage(), max_epochs=EPOCHS, name="train")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A training that differs from the plain one in one respect, and what becomes of it when it is killed."""

    optimizer: Callable[[Any], Optimizer] = adam
    scheduler: Callable[[Any], Any] | None = None
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = Net
    model_options: Mapping[str, Any] = field(default_factory=dict)
    loaders: Callable[[], Mapping[str, Iterable[Any]]] = lambda: {"train": shuffled()}
    stage: Callable[[], hw.Stage] = Train
    stages: Callable[[hw.Pipeline, Callable[[], hw.Stage]], None] = single_stage
    pipeline: Callable[..., hw.Pipeline] = hw.Pipeline
    prepare: Callable[[hw.Pipeline], None] = lambda _: None
    """called when all parts are registered"""
    kills: tuple[int, int] = (5, 13)
    """the steps in which the first and the second start are killed: within an epoch, and right after another one"""
    named: str = ""
    """the line that the first saves print, if a resumed run differs"""
    named_late: str = ""
    """the line that only a resumed run prints, if it differs: what differs is not known before"""
    refused: str = ""
    """the sentence with which the first start ends, if it cannot be saved"""

    def build(self, root: Path) -> hw.Pipeline:
        pipe = self.pipeline(name="exact", root=root)
        pipe.register_model("net", self.model(), **self.model_options)
        pipe.register_optimizer(
            "main", self.optimizer, scheduler=self.scheduler, model="net", **self.scheduler_options
        )
        for name, loader in self.loaders().items():
            pipe.register_dataset(name, loader)
        self.stages(pipe, self.stage)
        self.prepare(pipe)
        pipe.enable_checkpointing(every=2, background=False)
        return pipe
