"""What people who come from other libraries try: it works as it does there, or one sentence says what to write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torchmetrics
from torch import Tensor, nn
from toys import Batches, Classify, Net, make_pipe

import headway as hw
from headway.checkpoint.settings import CheckpointSettings
from headway.errors import UsageError
from headway.testing import ranks
from headway.train import Pipeline, TrainSettings
from headway.train.settings import limit_batches

alone = pytest.mark.usefixtures("alone")


class Unsized:
    def __init__(self, count: int) -> None:
        self._batches = Batches(count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)


class Fit(Classify):
    """Notes the steps at which it validates, and how many batches each validation has; may stop after a step."""

    def __init__(self, *, stop_after: int | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.stop_after = stop_after
        self.validated: list[int] = []

    def step(self, batch: Any) -> Tensor:
        if self.training and self.steps_done == self.stop_after:
            raise KeyboardInterrupt  # right after the checkpoint of the step before
        return super().step(batch)

    def val_step(self, batch: Any) -> Tensor:
        self.validated.append(self.pipe.steps_done)
        return super().step(batch)


def fit(
    folder: Path, *, batches: int = 10, val: int = 1, epochs: int = 2, train: Any = None, **settings: Any
) -> Fit:
    pipe = make_pipe(folder)
    pipe.register_dataset("train", Batches(batches, rank=hw.rank()) if train is None else train)
    pipe.register_dataset("val", Batches(val))
    stage = Fit(**settings)
    pipe.append_stage(stage, epochs)  # by position, as `Trainer(max_epochs=...)` and others are called
    pipe.enable_checkpointing(folder, every=1, background=False)
    if stage.stop_after is None:
        pipe.run()
    else:
        with pytest.raises(KeyboardInterrupt):
            pipe.run()
    return stage


def due(part: float, *, batches: int, accumulate: int = 1, epochs: int = 2) -> list[int]:
    """By hand, in exact fractions: the first step of each epoch by which each further part of its batches is done."""
    found, size = [], math.ceil(batches / accumulate)
    for epoch in range(epochs):
        before = 0
        for step in range(1, size + 1):
            done = Fraction(min(step * accumulate, batches), batches) // Fraction(str(part))
            if done > before:
                found.append(epoch * size + step)
            before = done
    return found


@alone
@pytest.mark.parametrize(
    ("batches", "part", "accumulate"), [(10, 0.25, 1), (10, 0.25, 3), (7, 0.1, 1), (9, 0.4, 2)]
)
def test_validations_by_parts_of_an_epoch(batches: int, part: float, accumulate: int, tmp_path: Path) -> None:
    expected = due(part, batches=batches, accumulate=accumulate)
    settings: dict[str, Any] = {"val_every": part, "accumulate": accumulate, "batches": batches}
    whole = fit(tmp_path / "whole", **settings)
    assert whole.validated == expected
    assert len(whole.pipe.history["val/loss"]) == 2, "the last one of each epoch is the epoch's"
    if part != 0.25:
        return
    for stop_after in (2, 3, 4, expected[-2]):  # in between, right before a validation, and right after one
        folder = tmp_path / str(stop_after)
        before = fit(folder, stop_after=stop_after, **settings)
        after = fit(folder, **settings)
        assert before.validated + after.validated == expected, stop_after
        assert after.pipe.history["val/loss"] == whole.pipe.history["val/loss"]


def test_the_steps_by_hand() -> None:
    assert due(0.25, batches=8) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert due(0.25, batches=10, epochs=1) == [3, 5, 8, 10]
    assert due(0.25, batches=8, accumulate=2, epochs=1) == [1, 2, 3, 4], "after the same batches"


@alone
def test_parts_of_limited_epochs_and_sets_without_anything_to_validate(tmp_path: Path) -> None:
    stage = fit(
        tmp_path / "a", batches=40, limit_train_batches=0.2, val_every=0.5, val=29, limit_val_batches=0.1
    )
    assert stage.steps_done == 16 and stage.validated == [4, 4, 8, 8, 12, 12, 16, 16]
    whole = fit(tmp_path / "b", val_every=1.0, limit_train_batches=1.0, limit_val_batches=1, val=3)
    assert whole.validated == [10, 20] and whole.steps_done == 20

    class Trains(Fit):
        def val_dataset(self) -> None:
            return None

    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(8))
    pipe.append_stage(Trains(val_every=0.25), max_epochs=1)
    pipe.enable_checkpointing(tmp_path / "c", every=1, keep_last=10, background=False)
    run = pipe.run()
    saved = len(list((run.path / "checkpoints").glob("step-*")))
    assert saved >= 5, "what is due and has nothing to do does not hold up checkpoints"
    stream = fit(tmp_path / "d", train=Unsized(8), val_every=0.5, limit_train_batches=4, epochs=1)
    assert stream.validated == [2, 4], "a limit is a length"


@ranks(2)
def test_parts_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    stage = fit(tmp_path, val_every=0.25, accumulate=3)
    assert stage.validated == due(0.25, batches=10, accumulate=3)
    assert hw.all_gather_object(stage.validated) == [stage.validated] * 2


def test_a_part_of_batches_is_rounded_down() -> None:
    for count in (1, 3, 7, 10, 29, 100, 1000):
        for hundredths in range(1, 100):
            part = hundredths / 100
            settings, exact = TrainSettings(limit_val_batches=part), count * hundredths // 100
            if exact:
                assert limit_batches(settings, "limit_val_batches", range(count)) == exact, (count, part)


class Two(Net):
    pass


def collection(folder: Path) -> object:
    """A collection of metrics under one name."""

    class Collected(Classify):
        def pre_stage(self) -> None:
            kinds = {"mean": torchmetrics.MeanMetric(), "max": torchmetrics.MaxMetric()}
            self.metrics = torchmetrics.MetricCollection(kinds)  # type: ignore[arg-type]
            self.add_metric("val/all", self.metrics)

        def val_step(self, batch: Any) -> None:
            self.metrics.update(float(len(batch[1])))

    pipe = make_pipe(folder)
    pipe.register_dataset("train", Batches(2))
    pipe.register_dataset("val", Batches(2, sizes=lambda number: 10 + 4 * number))
    pipe.append_stage(Collected(), 1)
    pipe.run()
    return {name: pipe.history[f"val/all/{name}"] for name in ("mean", "max")}


WORKS: dict[str, tuple[Callable[[Path], object], object]] = {
    "max_epochs by position": (lambda folder: fit(folder, epochs=3, batches=2).steps_done, 6),
    "val_every=1.0": (lambda folder: fit(folder, batches=2, val_every=1.0).validated, [2, 4]),
    "val_every=0.5": (lambda folder: fit(folder, batches=2, val_every=0.5).validated, [1, 2, 3, 4]),
    "limit_train_batches=0.5": (lambda folder: fit(folder, limit_train_batches=0.5).steps_done, 10),
    "add_metric(name, MetricCollection)": (collection, {"mean": [12.0], "max": [14.0]}),
}


def tried(**settings: Any) -> Callable[[Path], object]:
    return lambda folder: fit(folder / "no", **settings)


def pipeline(call: Callable[[Pipeline], object]) -> Callable[[Path], object]:
    return lambda folder: call(make_pipe(folder))


def saving(**settings: Any) -> Callable[[Path], object]:
    return lambda folder: make_pipe(folder).enable_checkpointing(**settings)


WHOLE = "give a whole number of at least 1"
BATCHES = "give a whole number of batches of at least 1, a part of them such as 0.1, or None for all"
RESUME = 'is not valid: use "auto", "never", "must" or a run directory'
BEST = 'is not valid: give a metric such as "val/loss" or "max:val/accuracy"'
NAMES = "is not a valid model of the pipeline (did you mean 'net'?); valid: net"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "val_every=0.25, no length": (
        tried(val_every=0.25, train=Unsized(4)),
        "val_every=0.25 is a part of an epoch, and a Unsized has no exact length: give steps, such as",
    ),
    "limit_train_batches=0.1, no length": (
        tried(limit_train_batches=0.1, train=Unsized(4)),
        "limit_train_batches=0.1 is a part of all batches, and a Unsized has no exact length: give a number of",
    ),
    "limit_train_batches=0.01 of 10": (
        tried(limit_train_batches=0.01),
        "limit_train_batches=0.01 of 10 batches is less than one batch: give a larger part, or a number of batches",
    ),
    "limit_val_batches=0.1 of 3": (
        tried(limit_val_batches=0.1, val=3),
        "limit_val_batches=0.1 of 3 batches is less than one batch: give a larger part, or a number of batches",
    ),
    "limit_val_batches=0": (
        tried(limit_val_batches=0),
        f"limit_val_batches=0: {BATCHES}, or val_every=None for no validation",
    ),
    "limit_train_batches=1.5": (tried(limit_train_batches=1.5), f"limit_train_batches=1.5: {BATCHES}"),
    "limit_train_batches=-1": (tried(limit_train_batches=-1), f"limit_train_batches=-1: {BATCHES}"),
    "limit_train_batches='10%'": (tried(limit_train_batches="10%"), f"limit_train_batches='10%': {BATCHES}"),
    "limit_train_batches=True": (tried(limit_train_batches=True), f"limit_train_batches=True: {BATCHES}"),
    "val_every=2": (
        tried(val_every=2),
        'val_every=2 could mean steps or epochs: give "2 steps" or "2 epochs"',
    ),
    "val_every=2.5": (tried(val_every=2.5), "val_every=2.5 is not a valid interval: give"),
    "max_epochs='3'": (tried(epochs="3"), f"max_epochs='3': {WHOLE}"),
    "max_epochs=-1": (tried(epochs=-1), f"max_epochs=-1: {WHOLE}"),
    "accumulate=2.5": (tried(accumulate=2.5), f"accumulate=2.5: {WHOLE}"),
    "resume=True": (saving(resume=True), f"resume=True {RESUME}"),
    "resume='yes'": (saving(resume="yes"), f"resume='yes' {RESUME}"),
    "keep_best='min'": (saving(keep_best="min"), f"keep_best='min' {BEST}"),
    "keep_best='max:'": (saving(keep_best="max:"), f"keep_best='max:' {BEST}"),
    "early_stop='min'": (tried(early_stop="min"), f"early_stop='min' {BEST}"),
    "a class for a model": (
        pipeline(lambda pipe: pipe.register_model("two", nn.Linear)),  # type: ignore[arg-type]
        "model 'two' is the class Linear: register an instance, such as Linear(...)",
    ),
    "strict=False alone": (
        pipeline(lambda pipe: pipe.register_model("two", Two(), strict=False)),
        "strict=False does nothing without init_from: pass the source of the weights, such as",
    ),
    "rename alone": (
        pipeline(lambda pipe: pipe.register_model("two", Two(), rename={"a.": "b."})),
        "rename={'a.': 'b.'} does nothing without init_from: pass the source of the weights, such as",
    ),
    "init_from='nosuch'": (
        pipeline(lambda pipe: pipe.register_model("two", Two(), init_from="nosuch")),
        "there are no weights at ",
    ),
    "a misspelled model": (
        lambda folder: run_with(folder, step=lambda self, _: self.models["nett"]),
        f"'nett' {NAMES}",
    ),
    "a misspelled model in validation": (
        lambda folder: run_with(folder, val_step=lambda self, _: self.models["nett"]),
        f"'nett' {NAMES}",
    ),
    "add_metric(MetricCollection)": (
        lambda _: Classify().add_metric(torchmetrics.MetricCollection([torchmetrics.MeanMetric()])),  # type: ignore[arg-type]
        "add_metric got a MetricCollection instead of a name: give both, such as",
    ),
}


def run_with(folder: Path, **methods: Any) -> None:
    pipe = make_pipe(folder)
    pipe.register_dataset("train", Batches(2))
    pipe.register_dataset("val", Batches(1))
    pipe.append_stage(type("Odd", (Classify,), methods)(), max_epochs=1)
    pipe.run()


@alone
def test_what_people_try_works(tmp_path: Path) -> None:
    found = {case: call(tmp_path / str(n)) for n, (case, (call, _)) in enumerate(WORKS.items())}
    assert found == {case: expected for case, (_, expected) in WORKS.items()}


@alone
def test_or_is_refused_with_one_sentence(tmp_path: Path) -> None:
    wrong = []
    for case, (call, message) in REFUSED.items():
        try:
            call(tmp_path)
        except UsageError as error:
            if not (str(error).startswith(message) and ": " in str(error) and "\n" not in str(error)):
                wrong.append((case, str(error)))
        except Exception as error:  # noqa: BLE001  each case is to be seen
            wrong.append((case, f"{type(error).__name__}: {error}"))
        else:
            wrong.append((case, "accepted"))
    assert wrong == []


def test_a_run_that_is_there_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yes").mkdir()
    assert CheckpointSettings(resume="yes").resume == "yes"
