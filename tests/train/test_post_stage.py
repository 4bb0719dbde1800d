"""What `post_stage` changes is in the last checkpoint of its stage; one that was cut off is repeated, and no other."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import Cut, Traced, assert_same, make, seeded, weights
from test_stopping import wait_for_the_word
from torch import Tensor

import headway as hw
from headway.checkpoint.write import disk
from headway.errors import Stopped, UsageError
from headway.testing import ranks
from headway.train import Callback, Pipeline, Stage
from headway.train.resume import checkpointer, rng

alone = pytest.mark.usefixtures("alone")
LAST = 22  # the last step of two epochs


class Finishing(Traced):
    """Replaces weights when training is done, as `update_bn` or an average of weights does."""

    stop_at: int | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls = 0

    def step(self, batch: Any) -> Tensor:
        if self.training and self.pipe.steps_done + 1 == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for_the_word()
        return super().step(batch)

    def post_stage(self) -> None:
        self.calls += 1
        net = self.pipe.registered_models["net"].bare
        with torch.no_grad():
            net.first.bias.mul_(3.0)
            if self.cut == "middle":
                raise Cut
            net.last.bias.add_(torch.rand(3))
        self.log("added", net.last.bias.sum().item())
        if self.cut == "end":
            raise Cut


class Plain(Traced):
    """A second stage."""


def make_two(folder: Path, stage: Stage, *, cut: Any = None, **options: Any) -> tuple[Pipeline, Plain]:
    second = Plain(cut=cut)
    pipe = make(folder, stage, max_epochs=2, **options)
    pipe.append_stage(second, max_epochs=1, name="second")
    return pipe, second


def saved(pipe: Pipeline, step: int) -> dict[str, Tensor]:
    return hw.checkpoint.load(pipe.directory.checkpoint_dir(step)).state["models"]["net"]  # type: ignore[no-any-return]


def assert_ends_alike(ours: Pipeline, truth: Pipeline) -> None:
    assert_same(weights(ours), weights(truth))
    assert_same(saved(ours, truth.steps_done), weights(truth))
    assert ours.history.epochs == truth.history.epochs
    assert ours.history["train/added"] == truth.history["train/added"]
    assert rng.random_state(ours.device) == rng.random_state(truth.device)


@pytest.fixture
def truth(alone: None, tmp_path: Path) -> Pipeline:  # noqa: ARG001
    pipe = seeded(make(tmp_path / "truth", Finishing(), every="1 epoch", max_epochs=2))
    pipe.run()
    return pipe


def test_what_it_changes_is_in_the_last_checkpoint(truth: Pipeline, tmp_path: Path) -> None:
    assert_same(saved(truth, LAST), weights(truth))
    kept = hw.checkpoint.load(truth.directory.checkpoint_dir(LAST))
    assert kept.metrics["val/loss"] == truth.history["val/loss"][-1]
    assert kept.metrics["train/added"] == truth.history["train/added"][-1]
    assert not [path for path in truth.directory.checkpoints_dir.iterdir() if path.name.startswith(".")]
    stage = Finishing()
    again = make(tmp_path / "truth", stage, every="1 epoch", max_epochs=2, resume=str(truth.directory.path))
    again.run()
    assert stage.calls == 0 and not stage.by_step, "a finished run is restored"
    assert_same(weights(again), weights(truth))


POINTS = {
    "checkpoint.before_rename": 1,  # how often the resumed run calls the hook
    "checkpoint.replacing": 1,
    "checkpoint.after_rename": 0,
    "checkpoint.committed": 0,
}


@pytest.mark.parametrize("cut", ["middle", "end", *POINTS])
def test_one_that_was_cut_off_is_repeated(
    cut: str, truth: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the hook, or in the save that replaces the checkpoint of the last epoch."""
    stage, passed = Finishing(cut=cut), disk.failpoint

    def fail(point: str) -> None:
        if stage.calls and point == cut:
            raise Cut
        passed(point)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "failpoint", fail)
        with pytest.raises(Cut):
            seeded(make(tmp_path / "cut", stage, every="1 epoch", max_epochs=2)).run()
    stage = Finishing()
    again = make(tmp_path / "cut", stage, every="1 epoch", max_epochs=2)
    again.run()
    assert not stage.by_step, "no step is repeated"
    assert stage.calls == POINTS.get(cut, 1)
    assert_ends_alike(again, truth)


@alone
def test_one_that_was_assigned_to_a_callback_is_repeated_too(tmp_path: Path) -> None:
    calls: list[str] = []

    def post_stage(stage: Stage) -> None:
        calls.append(stage.name)
        if len(calls) == 1:
            raise Cut

    for number in (1, 2):
        callback = Callback()
        callback.post_stage = post_stage  # type: ignore[method-assign]
        pipe = make(tmp_path, Traced(), every="1 epoch", max_epochs=1)
        pipe.add_callback(callback)
        with pytest.raises(Cut) if number == 1 else nullcontext():
            pipe.run()
    assert calls == ["train"] * 2


@alone
@pytest.mark.parametrize("at", [LAST, LAST + 5])
def test_between_two_stages(at: int, tmp_path: Path) -> None:
    """The second stage is cut off before it saves for the first time: the hook of the first is over."""
    whole, _ = make_two(tmp_path / "whole", Finishing(), every="1 epoch")
    seeded(whole).run()
    first = Finishing()
    with pytest.raises(Cut):
        seeded(make_two(tmp_path / "cut", first, cut=at + 1, every="1 epoch")[0]).run()
    assert first.calls == 1
    first = Finishing()
    again, second = make_two(tmp_path / "cut", first, every="1 epoch")
    again.run()
    assert first.calls == 0 and not first.by_step and len(second.by_step) == 11
    assert_ends_alike(again, whole)


def test_a_run_that_was_stopped_in_its_last_step_saves_its_end(truth: Pipeline, tmp_path: Path) -> None:
    """The checkpoint of the stop has the last step, but neither its validation nor the end of the epoch."""
    stage = Finishing()
    stage.stop_at = LAST
    with pytest.raises(Stopped, match=f"after step {LAST}, with a checkpoint"):
        seeded(make(tmp_path / "cut", stage, every="1h", max_epochs=2)).run()
    stage = Finishing()
    again = make(tmp_path / "cut", stage, every="1h", max_epochs=2)
    again.run()
    assert stage.calls == 1 and not stage.by_step
    assert_ends_alike(again, truth)
    progress = hw.checkpoint.load(again.directory.checkpoint_dir(LAST)).state["progress"]
    assert progress == {"step": LAST, "epoch": 2}


def collect_warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets the warnings of this rank."""
    said: list[str] = []

    def log(level: int, message: str) -> None:
        if level == logging.WARNING:
            said.append(message)

    monkeypatch.setattr(checkpointer.logger, "log", log)
    return said


@alone
def test_without_checkpoints_a_state_from_after_the_hook_says_so(tmp_path: Path) -> None:
    pipe = make(tmp_path, Finishing(), max_epochs=1)
    pipe._state.checkpointer = None
    pipe.run()
    stage = Finishing()
    again = make(tmp_path / "again", stage, max_epochs=1)
    again._state.checkpointer = None
    again.load_state_dict(pipe.state_dict())
    again.run()
    assert stage.calls == 0 and not stage.by_step


class Rebuilding(Traced):
    """Has other parameters when training is done, as a merge of adapters does."""

    def post_stage(self) -> None:
        net = self.pipe.registered_models["net"].bare
        self.trained = {key: tensor.clone() for key, tensor in net.state_dict().items()}
        net.last = torch.nn.Linear(net.last.in_features, 3)


@alone
def test_a_model_that_the_hook_rebuilds_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned = collect_warnings(monkeypatch)
    stage = Rebuilding()
    pipe = make(tmp_path, stage, every="1 epoch", max_epochs=1)
    pipe.run()
    (said,) = warned
    assert "'sgd' has parameters that no model has" in said and "post_run" in said
    assert_same(saved(pipe, 11), stage.trained)
    with pytest.raises(UsageError, match=r"'sgd' has parameters that no model has.*post_run"):
        make(tmp_path / "first", Rebuilding(), every="1h", max_epochs=1).run()


class OnOneRank(Callback):
    def __init__(self, value: float | None) -> None:
        self.value = value

    def post_stage(self, stage: Stage) -> None:
        if self.value is not None:
            stage.pipe.registered_models["net"].bare.first.bias.data.fill_(self.value)


class FillOnOneRank(Callback):
    def post_stage(self, stage: Stage) -> None:
        if hw.rank() == 0 and stage.name == "train":
            for parameter in stage.pipe.registered_models["net"].bare.parameters():
                parameter.data.fill_(1.0)


@ranks(2)
@pytest.mark.parametrize("every", ["1h", "1 epoch"])
def test_what_one_rank_has_changed_is_never_mixed(
    every: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no checkpoint is from before the hook, and in the next stage, checkpoints have what rank 0 has."""
    warned = collect_warnings(monkeypatch)
    pipe, _ = make_two(tmp_path, Traced(), every=every)
    pipe.add_callback(FillOnOneRank())
    pipe.run()
    found = saved(pipe, LAST + 11)
    if hw.rank() == 0:
        assert_same(found, weights(pipe))
        said = (
            "checkpoints have the state of rank 0"
            if every == "1h"
            else f"not in the checkpoint of step {LAST}: "
        )
        assert said in warned[0] and "'net' differs between ranks" in warned[0]


@ranks(2)
def test_ranks_agree_that_one_of_them_has_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has changed on that rank alone would be half of a checkpoint, and is not saved."""
    warned = collect_warnings(monkeypatch)
    for value in (None, 1.0):
        pipe = make(tmp_path / str(value), Traced(), every="1 epoch", max_epochs=1)
        if hw.rank() == 0:
            pipe.add_callback(OnOneRank(value))
        pipe.run()
        state = hw.checkpoint.load(pipe.directory.checkpoint_dir(11)).state
        assert state["stages"]["train"]["post_stage_due"] is (value is not None)
        assert not (state["models"]["net"]["first.bias"] == 1.0).any()
        assert len(warned) == (value is not None and hw.rank() == 0), warned
        assert all("model 'net' differs between ranks" in text for text in warned)
