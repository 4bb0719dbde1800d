"""DINO (after facebookresearch/dino), by hand and ported: a student, a teacher that follows it, and a center."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

import headway as hw

CROPS, GLOBAL_CROPS, WIDTH, OUT, EPOCHS, STEPS = 4, 2, 8, 12, 2, 5


def backbone() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, OUT))


def loader() -> Any:
    crops = torch.randn(40, CROPS, WIDTH, generator=torch.Generator().manual_seed(6))
    return hw.data.DataLoader(TensorDataset(crops), global_batch_size=8, shuffle=True, seed=2)


def momentum(step: int) -> float:
    """The cosine from 0.9 to 1 that DINO's teacher follows."""
    return 1 - 0.1 * (math.cos(math.pi * step / (EPOCHS * STEPS)) + 1) / 2


class DinoLoss(nn.Module):
    """Cross entropy between the views of student and teacher, whose outputs are centered over all ranks."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, OUT))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        views = (student / 0.1).chunk(CROPS)
        targets = F.softmax((teacher - self.center) / 0.04, dim=-1).detach().chunk(GLOBAL_CROPS)
        terms = [
            -(target * F.log_softmax(view, dim=-1)).sum(-1).mean()
            for i, target in enumerate(targets)
            for j, view in enumerate(views)
            if i != j
        ]
        self.update_center(teacher.detach())
        return torch.stack(terms).mean()

    @torch.no_grad()
    def update_center(self, teacher: Tensor) -> None:
        total = teacher.sum(0, keepdim=True)
        if hw.world_size() > 1:
            c10d.all_reduce(total)
        self.center.mul_(0.9).add_(total / (len(teacher) * hw.world_size()), alpha=0.1)


def views(crops: Tensor) -> tuple[Tensor, Tensor]:
    """All crops one below the other, and the global ones."""
    stacked = crops.transpose(0, 1)
    return stacked.flatten(0, 1), stacked[:GLOBAL_CROPS].flatten(0, 1)


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, decay: float) -> None:
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.mul_(decay).add_(fast, alpha=1 - decay)


class Dino(hw.TrainValStage):
    def __init__(self, *, stop_at: int | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.stop_at = stop_at

    def step(self, batch: Any) -> Tensor:
        if self.steps_done == self.stop_at:
            raise KeyboardInterrupt
        every, large = views(batch[0])
        with torch.no_grad():
            targets = self.models["teacher"](large)
        loss: Tensor = self.models["loss"](self.models["student"](every), targets)
        return loss

    def optimize(self) -> None:
        super().optimize()
        registered = self.pipe.registered_models
        follow(registered["teacher"].bare, registered["student"].bare, momentum(self.steps_done))


def ported(directory: Path, stop_at: int | None = None) -> hw.Pipeline:
    torch.manual_seed(3)
    student = backbone()
    pipe = hw.Pipeline(name="dino", root=directory)
    pipe.register_model("student", student)
    pipe.register_model("teacher", copy.deepcopy(student).requires_grad_(False), parallel="none")
    pipe.register_model("loss", DinoLoss(), parallel="none")
    pipe.register_optimizer("adamw", lambda ps: optim.AdamW(ps, lr=0.01), model="student")
    pipe.register_dataset("train", loader())
    pipe.append_stage(Dino(stop_at=stop_at, gradient_clip=3.0), max_epochs=EPOCHS)
    pipe.enable_checkpointing(directory, every="2 steps", background=False)
    pipe.run()
    return pipe


def by_hand() -> tuple[nn.Module, nn.Module, Tensor]:
    """Returns student, teacher and center."""
    torch.manual_seed(3)
    student = backbone()
    teacher, criterion = copy.deepcopy(student), DinoLoss()
    model: Any = nn.parallel.DistributedDataParallel(student) if hw.world_size() > 1 else student
    optimizer, train, step = optim.AdamW(student.parameters(), lr=0.01), loader(), 0
    for epoch in range(EPOCHS):
        train.set_epoch(epoch)
        for (crops,) in train:
            every, large = views(crops)
            with torch.no_grad():
                targets = teacher(large)
            loss = criterion(model(every), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 3.0)
            optimizer.step()
            follow(teacher, student, momentum(step))
            step += 1
    return student, teacher, criterion.center
