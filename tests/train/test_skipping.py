"""`on_nan="skip"`: which steps are skipped, on all ranks alike, and what they leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toys import FEATURES, Batches, Classify, make_net, make_pipe

import headway as hw
from headway.errors import HeadwayError
from headway.testing import ranks
from headway.train import TrainValStage

alone = pytest.mark.usefixtures("alone")
PADDING = -100


class Padded(TrainValStage):
    """The labels of some batches are padding on the last rank: their loss is NaN, and its gradients are 0."""

    empty: tuple[int, ...] = ()

    def pre_stage(self) -> None:
        self.batches_seen = 0

    def step(self, batch: Any) -> Tensor:
        x, y = batch
        self.batches_seen += 1
        if self.batches_seen in self.empty and hw.rank() == hw.world_size() - 1:
            y = torch.full_like(y, PADDING)
        return F.cross_entropy(self.models["net"](x), y, ignore_index=PADDING)


def weights_of(folder: Path, *, skips: tuple[int, ...], batches: Any = None, **settings: Any) -> list[Any]:
    pipe, stage = make_pipe(folder, net=make_net(norm=False, dropout=0.0)), Padded(log_every=2, **settings)
    stage.empty = skips
    pipe.register_dataset("train", batches or Batches(6, rank=pipe.world.rank))
    pipe.append_stage(stage, max_epochs=1)
    pipe.run()
    skipped = len({(number - 1) // settings.get("accumulate", 1) for number in skips})
    assert pipe.history["train/skipped_steps"] == ([skipped] if skips else [])
    assert torch.tensor(pipe.history["train/loss"]).isfinite().all()
    return [p.tolist() for p in pipe.registered_models["net"].bare.parameters()]


class Without(Batches):
    """The same batches, without those that a step skips."""

    left_out: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.count - len(self.left_out)

    def __iter__(self) -> Any:
        return (batch for number, batch in enumerate(super().__iter__(), 1) if number not in self.left_out)


def check_skips(folder: Path, skips: tuple[int, ...], left_out: tuple[int, ...], **settings: Any) -> None:
    found = weights_of(folder, skips=skips, on_nan="skip", **settings)
    others = Without(6, rank=hw.rank())
    others.left_out = left_out
    assert found == weights_of(folder, skips=(), batches=others, **settings)
    assert hw.all_gather_object(found) == [found] * hw.world_size()


@alone
def test_a_loss_that_is_not_finite_is_skipped_though_its_gradients_are(tmp_path: Path) -> None:
    check_skips(tmp_path, (2, 3), (2, 3))
    check_skips(tmp_path, (3,), (3, 4), accumulate=2)


@ranks(2)
def test_all_ranks_skip_a_loss_that_is_not_finite_on_one(tmp_path: Path) -> None:
    check_skips(tmp_path, (2, 5), (2, 5))
    check_skips(tmp_path, (3,), (3, 4), accumulate=2)


@alone
def test_too_many_of_them_in_a_row_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        HeadwayError, match="losses or gradients of 3 steps in a row, up to step 4, are non-finite"
    ):
        weights_of(tmp_path, skips=(2, 3, 4), on_nan="skip", max_skips=2)


class Spoiling(Batches):
    """The second batch has NaN."""

    def __iter__(self) -> Any:
        for number, (x, y) in enumerate(super().__iter__(), 1):
            yield (x * float("nan") if number == 2 else x), y


@alone
@pytest.mark.parametrize("spoilt", [True, False])
def test_buffers_with_nan_are_saved_and_named_once(
    spoilt: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Batch norm computes its statistics in the forward pass, which a skipped step has made."""
    net = make_net()
    net.register_buffer("mask", torch.full((FEATURES,), float("-inf")))
    pipe = make_pipe(tmp_path, net=net)
    pipe.register_dataset("train", (Spoiling if spoilt else Batches)(6))
    pipe.append_stage(Classify(on_nan="skip"), max_epochs=1)
    pipe.enable_checkpointing(every=1, background=False)
    pipe.run()
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("buffers contain NaN") == spoilt
    named = "after step 2 and are saved as they are (net.norm.running_mean, net.norm.running_var)"
    assert said.count(named) == spoilt


class Apart(TrainValStage):
    """Every rank has a model of its own, whose loss overflows in other steps."""

    def step(self, batch: Any) -> Tensor:
        x, y = batch
        factor = 1e38 if self.steps_done in ((1,), (1, 2))[hw.rank()] else 1.0
        return F.cross_entropy(self.models["net"](x).float(), y) * factor


@ranks(2)
def test_steps_that_ranks_skip_apart_count_once(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path, net=make_net(norm=False), parallel="none")
    pipe.register_dataset("train", Batches(6, rank=hw.rank()))
    pipe.append_stage(Apart(precision="fp16", log_every=1), max_epochs=1)
    pipe.run()
    assert [value for _, value in pipe.history.points("train/skipped_steps")] == [0, 1, 1, 0, 0, 0]
