"""Every validation draws the same random numbers, so that its curve shows the weights; training does not notice it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchLoader, Dataset
from toys import sgd

import headway as hw
from headway.testing import ranks


class Windows(Dataset[Tensor]):
    """Draws a window of each series, as a dataset of signals does."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([torch.rand(()), random.random(), float(np.random.random()), float(number)])


class Validate(hw.TrainValStage):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen: dict[int, list[Tensor]] = {}
        self.drawn: list[Tensor] = []

    def step(self, batch: Tensor) -> Tensor:
        self.drawn.append(torch.rand(2))
        loss: Tensor = self.models["net"](batch[:, :2]).square().mean()
        return loss

    def val_step(self, batch: Tensor) -> Tensor:
        self.seen.setdefault(self.pipe.steps_done, []).append(torch.cat([batch.flatten(), torch.rand(1)]))
        return batch.mean()


def run(root: Path, loader: Callable[..., Any], **settings: Any) -> tuple[Validate, hw.Pipeline]:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    pipe, stage = hw.Pipeline(name="val", root=root), Validate(**settings)
    pipe.register_model("net", nn.Linear(2, 1))
    pipe.register_optimizer("sgd", sgd, model="net")
    pipe.register_dataset("train", hw.data.DataLoader(Windows(), global_batch_size=4, shuffle=True))
    pipe.register_dataset("val", loader(Windows(), batch_size=2))
    pipe.append_stage(stage, max_epochs=3)
    pipe.run()
    return stage, pipe


LOADERS: dict[str, Callable[..., Any]] = {
    "headway": hw.data.DataLoader,
    "shuffled": lambda *given, **named: hw.data.DataLoader(*given, **named, shuffle=True),
    "torch": TorchLoader,
}


@ranks(2)
@pytest.mark.parametrize("name", LOADERS)
def test_windows_are_the_same_in_every_validation(name: str, tmp_path: Path) -> None:
    stage, pipe = run(tmp_path / "run", LOADERS[name], val_every="1 steps")
    assert [*stage.seen] == [1, 2, 3, 4, 5, 6]
    first = stage.seen[1]
    for batches in stage.seen.values():
        assert len(batches) == len(first)
        assert all(torch.equal(batch, as_before) for batch, as_before in zip(batches, first, strict=True))
    losses = [value for _, value in pipe.history.points("val/loss")]
    assert len(set(losses)) == 1
    evaluated = pipe.validate(stage, weights="current")
    assert evaluated["val/loss"] == pytest.approx(losses[0], rel=1e-12)


@pytest.mark.parametrize("name", LOADERS)
def test_training_draws_the_same_whether_it_validates_or_not(name: str, tmp_path: Path) -> None:
    often, _ = run(tmp_path / "often", LOADERS[name], val_every="1 steps")
    never, _ = run(tmp_path / "never", LOADERS[name], val_every="1000 steps")
    assert len(often.drawn) == len(never.drawn) == 6
    assert all(torch.equal(one, other) for one, other in zip(often.drawn, never.drawn, strict=True))
