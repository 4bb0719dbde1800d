"""A run that is cut off and goes on is the run that was not: the same losses and weights, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from toys import FEATURES, Classify, make_net, sgd, warm_up

import headway as hw
from headway.testing import ranks
from headway.train import Pipeline, Stage

alone = pytest.mark.usefixtures("alone")

SAMPLES = 88
BATCH = 8  # of all ranks together: 11 steps in an epoch


class Cut(Exception):
    """The run ends here, as if it had been killed: nobody gets to save anything."""


def dataset(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


class Traced(Classify):
    """Knows its losses by step, and is cut off where the test wants."""

    def __init__(self, *, cut: Any = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.by_step: dict[int, list[float]] = {}
        self.cut = cut  # a step of training, or ("val", step), or ("epoch", epoch)
        self.validations: list[tuple[int, int]] = []

    def step(self, batch: Any) -> Tensor:
        step = self.pipe.step + 1
        if self.cut == (step if self.training else ("val", self.pipe.step)):
            raise Cut
        loss = super().step(batch)
        if self.training:
            self.by_step.setdefault(step, []).append(self.losses[-1])
        return loss

    def post_epoch(self) -> None:
        if self.cut == ("epoch", self.pipe.epoch):
            raise Cut


def make(folder: Path, stage: Stage, *, every: Any = 3, model: Any = None, **options: Any) -> Pipeline:
    """A run of three epochs of 11 steps."""
    scheduler = options.pop("scheduler", None)
    keep = {name: options.pop(name) for name in ("resume", "keep_best", "background") if name in options}
    epochs, loader = options.pop("max_epochs", 3), options.pop("loader", None)
    pipe = Pipeline(name="toy", root=folder)
    pipe.register_model("net", make_net() if model is None else model(), **options)
    pipe.register_optimizer("sgd", sgd, scheduler=scheduler, model="net")
    train = loader or hw.data.DataLoader(dataset(), global_batch_size=BATCH, shuffle=True, seed=3)
    pipe.register_dataset("train", train)
    pipe.register_dataset("val", hw.data.DataLoader(dataset(19), global_batch_size=BATCH))
    pipe.append_stage(stage, max_epochs=epochs, name="train")
    pipe.enable_checkpointing(every=every, **keep)
    return pipe


def seeded(pipe: Pipeline) -> Pipeline:
    """Random numbers as in a fresh process; they differ from rank to rank."""
    hw.seed(5, scope="rank")
    return pipe


def weights(pipe: Pipeline) -> dict[str, Tensor]:
    found = dict(pipe.registered["net"].bare.state_dict())
    if (ema := pipe.registered["net"].ema) is not None:
        found |= {f"average.{name}": tensor for name, tensor in ema.state_dict().items()}
    return found


def assert_same(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert ours.keys() == truth.keys()
    for name, tensor in truth.items():
        if hw.rank() == 0 or "running" not in name:  # DDP's buffers are those of rank 0
            assert torch.equal(ours[name], tensor), name


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulate": ({"accumulate": 2}, {}),  # 6 steps in an epoch, the last of one batch
    "all": (
        {"accumulate": 2, "precision": "bf16", "gradient_clip": 0.5, "val_every": "4 steps"},
        {"ema": 0.9, "scheduler": warm_up},
    ),
}
CUTS = {
    "plain": [1, 2, 8, 12, 13, ("val", 11), ("epoch", 1), ("epoch", 3), 33],
    "accumulate": [2, 6, 7, ("val", 6)],
    "all": [5, ("val", 4), ("val", 8), 14],
}


def compare(folder: Path, case: str, cut: Any) -> None:
    settings, options = CASES[case]
    whole = Traced(log_every=5, **settings)
    golden = seeded(make(folder / "golden", whole, **options))
    golden.run()

    first = Traced(log_every=5, cut=cut, **settings)
    with pytest.raises(Cut):
        seeded(make(folder / "cut", first, **options)).run()
    second = Traced(log_every=5, **settings)
    torch.manual_seed(99)  # another process has other random numbers
    pipe = make(folder / "cut", second, **options)
    pipe.run()

    assert pipe.step == golden.step
    assert first.by_step | second.by_step == whole.by_step
    assert set(second.by_step) == set(range(min(second.by_step, default=34), golden.step + 1))
    assert_same(weights(pipe), weights(golden))
    assert pipe.history["val/loss"] == golden.history["val/loss"]
    assert pipe.history["train/loss"] == pytest.approx(golden.history["train/loss"], rel=1e-12)
    hw.barrier()  # the root writes how it ended
    assert pipe.directory.info()["attempts"][-1]["status"] == "done"
    assert len(pipe.directory.info()["attempts"]) == 2


@alone
@pytest.mark.parametrize(("case", "cut"), [(case, cut) for case, cuts in CUTS.items() for cut in cuts])
def test_one_process(case: str, cut: Any, tmp_path: Path) -> None:
    compare(tmp_path, case, cut)


@ranks(2)
@pytest.mark.parametrize(("case", "cut"), [("plain", 8), ("all", ("val", 8)), ("accumulate", 7)])
def test_two_ranks(case: str, cut: Any, tmp_path: Path) -> None:
    compare(tmp_path, case, cut)
