"""A stage ends when its metric does not improve anymore, at the same epoch with and without a kill on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Batches, Classify, make_net, make_pipe, sgd

import headway as hw
from headway.errors import UsageError
from headway.testing import ranks
from headway.train import Pipeline, TrainSettings
from headway.train.evaluate import val_schedule
from headway.train.metrics.early_stopping import EarlyStopping

alone = pytest.mark.usefixtures("alone")
SCORES = [5.0, 3.0, 4.0, 2.5, 2.45, 2.6, 2.5, 1.0, 0.5]  # by epoch, or by validation


def by_hand(scores: list[float], *, patience: int, min_delta: float = 0.0, sign: int = 1) -> int:
    """After how many values a person with this patience stops: none of the last ones is better than all before."""
    for end in range(1, len(scores) + 1):
        best = 0
        for number in range(1, end):
            if sign * scores[number] < sign * scores[best] - min_delta:
                best = number
        if end - 1 - best >= patience:
            return end
    return len(scores)


@pytest.mark.parametrize("patience", [1, 2, 3, 4])
@pytest.mark.parametrize("min_delta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_number_of_values_is_that_of_a_person(mode: Any, min_delta: float, patience: int) -> None:
    sign = 1 if mode == "min" else -1
    stopping = EarlyStopping("m", mode=mode, patience=patience, min_delta=min_delta)
    seen = 0
    for score in SCORES:
        seen += 1
        if stopping.observe(sign * score, seen):
            break
    assert seen == by_hand(
        [sign * score for score in SCORES], patience=patience, min_delta=min_delta, sign=sign
    )


def test_a_value_that_is_not_a_number_is_not_better() -> None:
    stopping = EarlyStopping("m", mode="min", patience=2, min_delta=0.0)
    assert [stopping.observe(value, 1) for value in (float("nan"), 3.0, float("nan"), float("nan"))] == [
        False,
        False,
        False,
        True,
    ]


class Scored(Classify):
    """Validations with known scores; one rank may be killed when it has ended an epoch."""

    def __init__(self, *, kill_after: int | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.kill_after = kill_after

    def val_step(self, batch: Any) -> None:
        number = self.steps_done // 2 - 1 if self._loop.settings.validates_between_steps else self.epoch
        self.log("score", SCORES[number], weight=len(batch[1]))

    def pre_epoch(self) -> None:
        if self.epoch == self.kill_after:
            raise KeyboardInterrupt  # between two epochs, with the checkpoint of the last one


def train(folder: Path, *, epochs: int = 9, **settings: Any) -> Pipeline:
    pipe = make_pipe(folder)
    pipe.register_dataset("train", Batches(4, rank=hw.rank()))
    pipe.register_dataset("val", Batches(2, rank=hw.rank()))
    pipe.append_stage(Scored(**settings), max_epochs=epochs)
    pipe.enable_checkpointing(folder, every="1 epoch", background=False)
    if settings.get("kill_after") is not None:
        with pytest.raises(KeyboardInterrupt):
            pipe.run()
    else:
        pipe.run()
    return pipe


@ranks(2)
def test_a_kill_between_two_epochs_changes_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"early_stop": "val/score", "patience": 2}
    golden = train(tmp_path / "golden", **settings)
    assert golden.epoch == by_hand(SCORES, patience=2) == 7
    for kill_after in (3, 5, 6):  # right after a best value, and one after it
        train(tmp_path / str(kill_after), kill_after=kill_after, **settings)
        again = train(tmp_path / str(kill_after), **settings)
        assert again.epoch == golden.epoch
        assert again.history["val/score"] == golden.history["val/score"]
    finished = train(tmp_path / "golden", **settings)
    assert finished.epoch == golden.epoch


@alone
def test_validations_within_epochs_count_each(tmp_path: Path) -> None:
    hw.init()
    pipe = train(tmp_path, epochs=4, early_stop="min:val/score", patience=2, val_every="2 steps")
    assert len(pipe.history.points("val/score")) == by_hand(SCORES, patience=2) == 7
    assert pipe.steps_done == 14
    assert pipe.stages[0]._loop.status.stop_agreed


@alone
def test_epochs_without_the_metric_do_not_count(tmp_path: Path) -> None:
    hw.init()
    pipe = train(tmp_path, early_stop="max:val/score", patience=1, val_every="2 epochs")
    assert pipe.epoch == 4, "its second value is no better"


class ByTheClock(Classify):
    """Validates with the same score every ten seconds, which end between two epochs."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def val_step(self, batch: Any) -> None:  # noqa: ARG002
        self.log("score", 1.0)

    def post_epoch(self) -> None:
        self.now_s += 10


@alone
def test_a_validation_before_the_first_step_of_an_epoch_may_end_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = ByTheClock(early_stop="val/score", patience=1, val_every="10s")
    monkeypatch.setattr(val_schedule, "time", stage)
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(4))
    pipe.register_dataset("val", Batches(2))
    pipe.append_stage(stage, max_epochs=9)
    pipe.run()
    assert [step for step, _ in pipe.history.points("val/score")] == [4, 8]
    assert pipe.steps_done == 8, "the third epoch has no step, since its first validation is no better"


class Logs(Classify):
    def post_epoch(self) -> None:
        self.log("after", 1.0)


MISSING: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "early_stop is 'val/los'": ({"early_stop": "val/los"}, {}, {}),
    "keep_best is 'val/los'": ({}, {"keep_best": "val/los"}, {}),
    "the monitor of optimizer 'sgd' is 'val/los'": ({}, {}, {"monitor": "val/los"}),
}


@alone
@pytest.mark.parametrize("expected", MISSING)
@pytest.mark.parametrize("every", [1, 2])
def test_a_metric_that_never_appears_is_an_error_after_the_first_epoch(
    every: int, expected: str, tmp_path: Path
) -> None:
    stage, kept, optimizer = MISSING[expected]
    pipe = Pipeline(name="toy", root=tmp_path)
    pipe.register_model("net", make_net())
    plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau if optimizer else None
    pipe.register_optimizer("sgd", sgd, scheduler=plateau, **optimizer)
    pipe.register_dataset("train", Batches(1))
    pipe.register_dataset("val", Batches(1))
    pipe.append_stage(Logs(val_every=f"{every} epochs", **stage), max_epochs=5)
    pipe.enable_checkpointing(tmp_path, background=False, **kept)
    with pytest.raises(UsageError) as raised:
        pipe.run()
    known = "lr/sgd, train/accuracy, train/after, train/loss, val/accuracy, val/loss"
    assert str(raised.value) == (
        f"{expected}, which no epoch has logged so far: give one of {known}, or log it in every epoch"
    )
    assert pipe.epoch == every, "the first that could have it"
    assert (pipe.directory.checkpoint_dir(pipe.steps_done) / "manifest.json").exists(), (
        "the epoch is not lost"
    )


@alone
def test_a_metric_of_the_last_stage_may_come_late(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(1))
    pipe.append_stage(Classify(val_every=None), max_epochs=2, name="first")
    pipe.append_stage(Logs(early_stop="train/after", patience=1), max_epochs=4)
    pipe.enable_checkpointing(tmp_path, background=False, keep_best="train/after")
    pipe.run()
    assert pipe.epoch == 4, "a constant is better once"


def test_settings_are_checked() -> None:
    for given, message in (
        ({"patience": 5}, "patience=5 does nothing without early_stop: pass the metric"),
        ({"early_stop": "best:val/loss"}, "early_stop='best:val/loss' is not valid: give a metric"),
        ({"early_stop": "max:a", "mode": "min"}, "early_stop='max:a' and mode='min' differ: give one"),
        ({"early_stop": "a", "mode": "up"}, "mode='up' is unknown: use"),
        ({"early_stop": "a", "patience": 0}, "patience=0: give a whole number of at least 1"),
        ({"early_stop": "a", "min_delta": -1}, "min_delta=-1: give a number of at least 0"),
    ):
        with pytest.raises(UsageError) as raised:
            TrainSettings(**given)  # type: ignore[arg-type]
        assert str(raised.value).startswith(message)
    stopping = TrainSettings(early_stop="a", mode="max", patience=2, min_delta=0.5).make_early_stopping()
    assert stopping is not None and (stopping.mode, stopping.patience, stopping.min_delta) == ("max", 2, 0.5)
