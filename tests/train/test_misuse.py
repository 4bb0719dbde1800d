"""Mistakes of users of the training API are refused with one sentence, or there is nothing to be mistaken in."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from toys import FEATURES, Batches, Classify, make_net, make_pipe, sgd

import headway as hw
from headway.checkpoint.settings import CheckpointSettings
from headway.errors import UsageError
from headway.system.log import logger
from headway.testing import ranks
from headway.train import Callback, Pipeline, Stage, TrainValStage
from headway.train.model.ema import Ema
from headway.train.settings import TrainSettings

alone = pytest.mark.usefixtures("alone")


def run(folder: Path, stage: Stage, *, batches: int = 4, epochs: int = 1, val: bool = True) -> Pipeline:
    pipe = make_pipe(folder)
    pipe.register_dataset("train", Batches(batches))
    if val:
        pipe.register_dataset("val", Batches(2))
    pipe.append_stage(stage, max_epochs=epochs)
    pipe.run()
    return pipe


def stage_with(**methods: Any) -> Callable[[Path], object]:
    """Runs a stage with these methods."""
    return lambda folder: run(folder, type("Odd", (Classify,), methods)())


class OnlyTraining(TrainValStage):
    def train_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.models["net"](batch[0]), batch[1])


class Changing(Classify):
    """Trains on a registered loader in the first epoch only."""

    def train_dataset(self) -> Any:
        return Batches(4) if self.epoch else self.datasets["train"]


class TwoLosses(Classify):
    def step(self, batch: Any) -> Tensor:
        loss = super().step(batch)
        self.log("loss", 5.0)
        return loss


class TwoValLosses(Classify):
    def val_step(self, batch: Any) -> Tensor:
        self.log("loss", 5.0)
        return super().step(batch)


class Own(Stage):
    """A loop of one's own that does nothing."""

    def run_epoch(self) -> None:
        for _ in self.batches():
            pass


class Unknown(Own):
    def run_epoch(self) -> None:
        self.step_optimizer("sdg")


class Assigned(Classify):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(3, 3)


class AssignedLater(Classify):
    def pre_stage(self) -> None:
        self.parts = {"critic": nn.Linear(3, 3)}


class Same(Classify):
    def pre_stage(self) -> None:
        self.add_metric("train/accuracy", torchmetrics.MeanMetric())


class LogsTwice(Classify):
    def post_epoch(self) -> None:
        self.log("accuracy", 1.0)


class Words:
    def compute(self) -> str:
        return "good"

    def reset(self) -> None: ...


class Worded(Classify):
    def pre_stage(self) -> None:
        self.add_metric("train/word", Words())


def unregistered(stage: Stage) -> list[torch.optim.Optimizer]:
    return [sgd(stage.models["net"].parameters())]


def settings(**given: Any) -> Callable[[Path], object]:
    return lambda _: Classify(**given)


def checkpoints(**given: Any) -> Callable[[Path], object]:
    return lambda _: CheckpointSettings(**given)


def optimizer(*given: Any, **more: Any) -> Callable[[Path], object]:
    return lambda folder: make_pipe(folder).register_optimizer("second", *given, **more)


def flat(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(made, lambda _: 1.0)


WHOLE = "give a whole number of at least 1"
BATCHES = "give a whole number of batches of at least 1, a part of them such as 0.1, or None for all"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "accumulate as text": (settings(accumulate="2"), f"accumulate='2': {WHOLE}"),
    "yes": (settings(max_skips=True), f"max_skips=True: {WHOLE}"),
    "never a log point": (settings(log_every=None), f"log_every=None: {WHOLE}"),
    "never, by hand": (lambda _: Own(log_every=None), f"log_every=None: {WHOLE}"),  # type: ignore[arg-type]
    "which ranks": (settings(uneven="most"), "uneven='most' is unknown: use"),
    "minus one": (settings(limit_val_batches=-1), f"limit_val_batches=-1: {BATCHES}"),
    "no batch": (settings(limit_val_batches=0), f"limit_val_batches=0: {BATCHES}"),
    "clip as text": (
        settings(gradient_clip="1"),
        "gradient_clip='1': give a norm above 0, or None for no clipping",
    ),
    "clip at nan": (settings(gradient_clip=float("nan")), "gradient_clip=nan: give a norm above 0, or None"),
    "clip by method": (
        stage_with(gradient_clip=lambda _: -1),
        "gradient_clip()=-1: give a norm above 0, or None",
    ),
    "keep a number": (checkpoints(keep_best=1), "keep_best=1 is not valid: give a metric such as"),
    "background": (checkpoints(background="no"), "background='no' is not valid: give True or False"),
    "when": (
        optimizer(sgd, scheduler=flat, every="epok"),
        'every=\'epok\' is unknown: use "step" or "epoch"',
    ),
    "when, alone": (optimizer(sgd, every="epok"), 'every=\'epok\' is unknown: use "step" or "epoch"'),
    "monitor": (
        optimizer(sgd, scheduler=flat, monitor="val/loss"),
        "monitor='val/loss' needs every=\"epoch\"",
    ),
    "optimizer": (
        optimizer("adam"),
        "optimizer 'second' is 'adam': give an optimizer, or a function that makes one",
    ),
    "made nothing": (
        optimizer(lambda _: None),
        "optimizer 'second' is None: give an optimizer, or a function",
    ),
    "scheduler": (
        optimizer(sgd, scheduler="cosine"),
        "the scheduler of optimizer 'second' is 'cosine': give a",
    ),
    "scheduler of another": (
        optimizer(sgd, scheduler=flat(sgd(nn.Linear(2, 1).parameters()))),
        "the scheduler of optimizer 'second' was made for another optimizer",
    ),
    "no stage": (
        lambda folder: make_pipe(folder).append_stage(None, max_epochs=1),
        "append_stage got None: pass an",
    ),  # type: ignore[arg-type]
    "not a model": (
        lambda folder: make_pipe(folder).register_model("b", 3),
        "model 'b' is of type int: register a",
    ),  # type: ignore[arg-type]
    "ema as text": (lambda folder: make_pipe(folder, ema="0.9"), "ema='0.9' is not a valid decay"),
    "callback": (
        lambda folder: make_pipe(folder).add_callback(print),
        "add_callback got <built-in function print>",
    ),  # type: ignore[arg-type]
    "a name": (
        lambda folder: make_pipe(folder).register_model(None, make_net()),
        "None is not a valid name of a model",
    ),  # type: ignore[arg-type]
    "a name of two lines": (
        lambda folder: make_pipe(folder).register_dataset("val\n", []),
        r"'val\n' is not a valid name of a dataset: give a line of printable text",
    ),
    "a stage of two lines": (
        lambda folder: make_pipe(folder).append_stage(Classify(), max_epochs=1, name="a\nb"),
        r"'a\nb' is not a valid name of a stage: give a line of printable text",
    ),
    "no optimizers": (
        stage_with(optimizers=lambda _: []),
        "optimizers() of stage 'odd' returned []: return those that",
    ),
    "by name": (
        stage_with(optimizers=lambda _: ["sgd"]),
        "optimizers() of stage 'odd' returned ['sgd']: return those",
    ),
    "one": (
        stage_with(optimizers=lambda self: self.pipe.optimizers["sgd"]),
        "optimizers() of stage 'odd' returned SGD",
    ),
    "none": (
        stage_with(optimizers=lambda _: None),
        "optimizers() of stage 'odd' returned None: return those",
    ),
    "not ours": (
        stage_with(optimizers=unregistered),
        "optimizers() of stage 'odd' returned an optimizer that is not",
    ),
    "a loader of one's own": (
        stage_with(train_dataset=lambda _: Batches(4)),
        "train_dataset() of stage 'odd' returned a Batches that is not registered, whose epoch would not be set",
    ),
    "a loader of one's own, in the second epoch": (
        lambda folder: run(folder, Changing(), epochs=2),
        "train_dataset() of stage 'changing' returned a Batches that is not registered",
    ),
    "step by name": (
        lambda folder: run(folder, Unknown()),
        "'sdg' is not a valid optimizer of the pipeline (did you mean",
    ),
    "only training": (
        lambda folder: run(folder, OnlyTraining()),
        "stage 'onlytraining' has no step for validation: define",
    ),
    "two losses": (
        lambda folder: run(folder, TwoLosses()),
        "'loss' is the name of the loss that step() returns: log",
    ),
    "two in validation": (
        lambda folder: run(folder, TwoValLosses()),
        "'loss' is the name of the loss that step()",
    ),
    "a metric for the loss": (
        lambda _: Classify().add_metric("train/loss", torchmetrics.MeanMetric()),
        "'train/loss' is the name of the loss that step() returns: add the metric under another name",
    ),
    "two of one name": (
        lambda folder: run(folder, Same()),
        "metric 'train/accuracy' is logged and added with",
    ),
    "logged again": (
        lambda folder: run(folder, LogsTwice()),
        "metric 'train/accuracy' was logged after the epoch that",
    ),
    "which validation": (
        lambda _: Classify(val_every="2 steps").add_metric("auroc", torchmetrics.MeanMetric()),
        "metric 'auroc' would mix the validations of an epoch: call it 'val/auroc' to compute it in each, or",
    ),
    "a word": (
        lambda folder: run(folder, Worded()),
        "metric 'train/word' computed 'good': return a number, a tensor",
    ),
    "a tensor": (
        stage_with(count_samples=lambda _, b: b[1].sum()),
        "count_samples of stage 'odd' returned a Tensor: re",
    ),
    "nothing": (
        stage_with(count_samples=lambda *_: None),
        "count_samples of stage 'odd' returned a NoneType: return",
    ),
    "not registered": (
        lambda folder: run(folder, Assigned()),
        "stage 'assigned' has a module with trainable parameters",
    ),
    "nor later": (
        lambda folder: run(folder, AssignedLater()),
        "stage 'assignedlater' has a module with trainable",
    ),
}


@alone
def test_mistakes_are_refused_with_one_sentence(tmp_path: Path) -> None:
    wrong = []
    for case, (cause, message) in REFUSED.items():
        try:
            cause(tmp_path)
        except UsageError as error:
            if not (str(error).startswith(message) and ": " in str(error) and "\n" not in str(error)):
                wrong.append((case, str(error)))
        except Exception as error:  # noqa: BLE001  each case is to be seen
            wrong.append((case, f"{type(error).__name__}: {error}"))
        else:
            wrong.append((case, "accepted"))
    assert wrong == []


@alone
def test_a_validation_may_read_a_loader_that_is_not_registered(tmp_path: Path) -> None:
    pipe = run(tmp_path, type("Odd", (Classify,), {"val_dataset": lambda _: Batches(3)})(), val=False)
    assert len(pipe.history["val/loss"]) == 1


@alone
def test_windows_without_samples_are_refused(tmp_path: Path) -> None:
    class Empty(Classify):
        def count_samples(self, _: Any) -> int:
            return 0

    with pytest.raises(UsageError, match="counts no sample in the 2 batches of a step: return how many"):
        run(tmp_path, Empty(accumulate=2))


@ranks(2)
def test_a_rank_without_samples_in_a_window_has_no_share_and_no_error(tmp_path: Path) -> None:
    """Sequences that are all padding: the other rank's samples are the mean."""

    def train(mine: int) -> list[torch.Tensor]:
        class Counted(Classify):
            def count_samples(self, _: Any) -> int:
                return mine

        net = make_net(norm=False, dropout=0.0)
        pipe = make_pipe(tmp_path, net=net)
        pipe.register_dataset("train", Batches(4))  # the same on both ranks
        pipe.append_stage(Counted(accumulate=2), max_epochs=1)
        pipe.run()
        return [parameter.detach().clone() for parameter in net.parameters()]

    for one, other in zip(train(3), train(0 if hw.rank() else 3), strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(UsageError, match="counts no sample in the 2 batches of a step"):
        train(0)


class Spread(Classify):
    """The number of batches that the metric has seen, in validations every two steps."""

    def pre_stage(self) -> None:
        self.metric, self.both = (
            torchmetrics.SumMetric(),
            torchmetrics.MetricCollection(
                {"low": torchmetrics.MinMetric(), "high": torchmetrics.MaxMetric()}
            ),
        )
        self.add_metric("val/seen", self.metric)
        self.add_metric("val/range", self.both)

    def val_step(self, _: Any) -> None:
        self.metric.update(1)
        self.both.update(self.pipe.steps_done)


@alone
def test_a_metric_of_validations_is_computed_in_each(tmp_path: Path) -> None:
    pipe = run(tmp_path, Spread(val_every="2 steps"), batches=5, epochs=2)
    assert pipe.history.points("val/seen") == [(step, 2.0) for step in (2, 4, 6, 8, 10)]
    assert pipe.history["val/seen"] == [2.0, 2.0]  # of the last validation in each epoch
    assert pipe.history["val/range/low"] == pipe.history["val/range/high"] == [4.0, 10.0]
    (file,) = tmp_path.glob("*/metrics/rank-00000.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["metrics"]["val/seen"] for row in rows if row["kind"] == "validation"] == [2.0] * 5


class Afterwards(Classify):
    def post_epoch(self) -> None:
        assert self.history["train/loss"]
        self.log("after", float(self.epoch), reduce="sum")

    def post_stage(self) -> None:
        self.log("last", 7.0)


@ranks(2)
def test_what_is_logged_after_an_epoch_belongs_to_it(tmp_path: Path) -> None:
    pipe = run(tmp_path, Afterwards(), epochs=3)
    assert pipe.history["train/after"] == [2.0, 4.0, 6.0]  # on two ranks
    assert [row.values.get("train/last") for row in pipe.history.epochs] == [None, None, 7.0]
    if hw.rank() == 0:
        (file,) = tmp_path.glob("*/metrics/rank-00000.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        after = [(row["epoch"], row["metrics"]) for row in rows if "train/after" in row.get("metrics", {})]
        assert after == [(0, {"train/after": 2.0}), (1, {"train/after": 4.0}), (2, {"train/after": 6.0})]


class Leaves(Stage):
    def run_epoch(self) -> None:
        for _ in range(2):
            for number, _ in enumerate(self.batches()):
                self.log("seen", 1.0, reduce="sum")
                if number == 2:
                    break


def test_settings_take_numbers_of_numpy() -> None:
    numbers: dict[str, Any] = {
        "accumulate": np.int64(2),
        "log_every": np.int32(3),
        "gradient_clip": np.float32(1),
    }
    assert TrainSettings(**numbers).accumulate == 2
    decay: Any = np.float32(0.5)
    assert type(Ema(make_net(), decay).decay) is float


@alone
def test_a_step_that_ends_with_break_counts(tmp_path: Path) -> None:
    stage = Leaves(log_every=3)
    pipe = run(tmp_path, stage, epochs=2)
    assert (stage.steps_done, pipe.steps_done) == (12, 12)
    assert pipe.history.points("seen") == [(3, 3.0), (6, 3.0), (9, 3.0), (12, 3.0)]


class Taught(Classify):
    """A frozen teacher and a loss without parameters, which need not be registered."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [make_net().requires_grad_(False) for _ in range(2)]
        self.criterion = nn.CrossEntropyLoss()
        self.modes: list[tuple[bool, bool, bool]] = []

    def step(self, batch: Any) -> Tensor:
        first, second = self.teachers
        self.modes.append((self.training, first.training, second.training))
        return super().step(batch)


class OwnModule(Own):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, 3)


@alone
def test_modules_of_a_stage_are_evaluated_in_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Taught()
    run(tmp_path, stage, batches=1, epochs=2)
    assert stage.modes == [(True,) * 3, (False,) * 3, (False,) * 3] * 2
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", warnings.append)
    run(tmp_path, OwnModule(), epochs=2)
    assert len(warnings) == 1 and "is not registered, 'net': it is not saved" in warnings[0]


@alone
def test_the_epochs_of_a_stage_may_be_given_by_position(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.append_stage(Classify(), 3)
    assert pipe.stages[0].max_epochs == 3


class Judged(Classify):
    """Logs what its scheduler monitors after the epoch."""

    def post_epoch(self) -> None:
        self.log("score", 1.0)


@alone
def test_a_scheduler_sees_what_is_logged_after_the_epoch(tmp_path: Path) -> None:
    pipe = Pipeline(name="toy", root=tmp_path)
    pipe.register_model("net", make_net())
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)
    pipe.register_optimizer("sgd", sgd, scheduler=plateau, monitor="train/score")  # type: ignore[arg-type]
    pipe.register_dataset("train", Batches(1))
    pipe.append_stage(Judged(val_every=None), max_epochs=3)
    before = sgd(make_net().parameters()).param_groups[0]["lr"]
    pipe.run()
    assert pipe.optimizers["sgd"].param_groups[0]["lr"] == pytest.approx(before / 100)


class Scored(Classify):
    """A metric over the steps of an epoch, saved with the run."""

    def pre_stage(self) -> None:
        self.metric = self.pipe._state.registered_state["count"]
        self.add_metric("train/count", self.metric)  # type: ignore[arg-type]

    def train_step(self, batch: Any) -> Tensor | None:
        self.metric(float(self.pipe.steps_done + 1))  # type: ignore[operator]
        if self.pipe.steps_done == 5 and (self.config or {}).get("fails"):
            raise ZeroDivisionError
        return super().train_step(batch)


class Averaged(torchmetrics.Metric):
    """A state that torchmetrics averages, by a number of updates that it does not save."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, value: float) -> None:
        self.mean = torch.tensor(value)

    def compute(self) -> Tensor:
        return self.mean


@alone
def test_a_module_that_is_no_metric_keeps_no_counts_of_updates(tmp_path: Path) -> None:
    """The states of metrics within it are not saved."""
    module = torch.nn.ModuleDict({"mean": Averaged()})
    module["mean"].update(2.0)
    pipe = make_pipe(tmp_path)
    pipe.register_state("module", module)
    saved = pipe.state_dict()
    assert saved["registered"]["module"] == {}


@alone
@pytest.mark.parametrize(
    "name",
    [
        *(
            "_state",
            "steps_done",
            "epoch",
            "current_stage",
            "directory",
            "world",
            "device",
            "history",
            "stages",
        ),
        *("models", "registered_models", "optimizers", "schedulers", "datasets"),
    ],
)
def test_the_loops_own_attributes_of_a_pipeline_are_not_replaced(name: str, tmp_path: Path) -> None:
    def early(self: Any, *arguments: Any, **keywords: Any) -> None:
        setattr(self, name, None)
        Pipeline.__init__(self, *arguments, **keywords)

    with pytest.raises(UsageError, match=f"Pipeline sets '{name}', which every pipeline has already"):
        setattr(make_pipe(tmp_path), name, None)
    for value in (None, lambda _: None):
        with pytest.raises(UsageError, match=f"Mine sets '{name}'"):
            type("Mine", (Pipeline,), {name: value})
    with pytest.raises(UsageError, match=f"Mine sets '{name}'"):
        type("Mine", (type("Mixin", (), {name: 3}), Pipeline), {})
    with pytest.raises(UsageError, match=f"Mine sets '{name}'"):
        type("Mine", (Pipeline,), {"__init__": early})(name="digits", root=tmp_path)


@alone
@pytest.mark.parametrize("name", ["name", "config"])
def test_name_and_config_of_a_pipeline_are_passed_to_it(name: str, tmp_path: Path) -> None:
    """A value in the class would not be used: the instance has its own."""
    with pytest.raises(
        UsageError, match=rf"Mine sets '{name}' itself: pass it to super\(\).__init__\({name}="
    ):
        type("Mine", (Pipeline,), {name: "digits"})
    pipe = make_pipe(tmp_path)
    setattr(pipe, name, "digits")
    assert getattr(pipe, name) == "digits"


@alone
def test_methods_of_a_pipeline_and_hooks_of_a_callback_stay_methods(tmp_path: Path) -> None:
    methods = [name for name in dir(Pipeline) if callable(getattr(Pipeline, name)) and name[0] != "_"]
    assert {"run", "pre_run", "validate", "enable_wandb"} <= set(methods)
    hooks = [name for name in dir(Callback) if name[0] != "_"]
    assert {"pre_run", "log_point"} <= set(hooks)
    for kind, names, made in ((Pipeline, methods, make_pipe(tmp_path)), (Callback, hooks, Callback())):
        for name in names:
            with pytest.raises(
                UsageError, match=rf"Mine sets '{name}' to 3, but .* calls? {name}\(\): define it"
            ):
                type("Mine", (kind,), {name: 3})
            with pytest.raises(UsageError, match=rf"{kind.__name__} sets '{name}' to \[\]"):
                setattr(made, name, [])
            type("Mine", (kind,), {name: lambda *_: None})


@alone
@pytest.mark.parametrize(
    ("metric", "expected"),
    [(torchmetrics.CatMetric, [float(step) for step in range(1, 9)]), (Averaged, 4.5)],
)
def test_metrics_that_are_registered_are_saved(metric: Any, expected: Any, tmp_path: Path) -> None:
    def make(*, fails: bool) -> Pipeline:
        pipe = make_pipe(tmp_path)
        pipe.config = {"fails": fails}
        pipe.register_state("count", metric())
        pipe.register_dataset("train", Batches(8))
        pipe.append_stage(Scored(), max_epochs=1)
        pipe.enable_checkpointing(tmp_path, every="2 steps", background=False, resume=resume)
        return pipe

    resume = "auto"
    first = make(fails=True)
    with pytest.raises(ZeroDivisionError):
        first.run()
    resume = str(first.directory.path)
    second = make(fails=False)
    second.run()
    assert second.history["train/count"] == [pytest.approx(expected)]


@ranks(2)
def test_metrics_of_many_ranks_are_not_saved_as_one(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="state 'count' is a metric, which has a different state on each of the 2 ranks"
    ):
        make_pipe(tmp_path).register_state("count", torchmetrics.SumMetric())
