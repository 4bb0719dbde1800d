"""A run whose hooks evaluate is, to the last bit, the run whose hooks do not: also when it is cut off and resumed."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from test_resume import BATCH, Cut, Noisy, Traced, assert_same, dataset, make, seeded, weights
from torch import Tensor
from torch.utils.data import DataLoader as TorchLoader

import headway as hw
from headway.dist.failure.capture import HEARTBEAT
from headway.errors import UsageError
from headway.train import Callback, Pipeline, Stage
from headway.train.evaluate import val_schedule
from headway.train.metrics import timing
from headway.train.metrics.epoch_metrics import keeping_counts
from headway.train.resume import rng
from headway.train.resume.positions import position

alone = pytest.mark.usefixtures("alone")
STEP_S = 100.0
"""of the clock by which validations are due: a validation in every seventh step or so"""


class StepClock:
    """A clock that goes on with the steps of training alone."""

    steps = 0

    def monotonic(self) -> float:
        return self.steps * STEP_S


class Mean:
    """A metric of one's own, which counts in a tensor and in a list."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.counts = torch.zeros(()), [0]

    def update(self, values: Tensor) -> None:
        self.total += values.sum()
        self.counts[0] += len(values)

    def compute(self) -> float:
        return float(self.total) / max(self.counts[0], 1)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.counts = state["total"].clone(), [*state["counts"]]


class Frozen(Traced):
    """A backbone with a batch norm in eval mode, validations by the clock, and a metric of all that is validated."""

    where = ""
    on: Any = "val"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.counted = Mean()

    def pre_stage(self) -> None:
        self.pipe.registered_models["net"].bare.norm.eval()
        self.add_metric("train/counted", self.counted)

    def step(self, batch: Any) -> Tensor:
        if not self.training:
            self.counted.update(batch[0])
        elif isinstance(val_schedule.time, StepClock):
            val_schedule.time.steps += 1
        return super().step(batch)

    def predict(self, batch: Any) -> Tensor:
        self.log("noise", torch.rand(()))
        return self.models["net"](batch[0])  # type: ignore[no-any-return]

    def evaluate(self, where: str) -> None:
        if self.where != where or (where == "log_point train" and self.pipe.steps_done % 3):
            return
        self.pipe.validate(self, self.on, weights="current")
        self.pipe.test(self, {"val": self.on, "other": self.pipe.datasets["other"]}, weights="current")
        self.pipe.validate(Traced(), "other", weights="current")
        out = Path(self.pipe.directory.path, f"{where}-{self.pipe.steps_done}.npy")
        out.unlink(missing_ok=True)  # by the attempt that was cut off
        self.pipe.predict(self, self.on, out, weights="current")

    def post_epoch(self) -> None:
        self.evaluate("post_epoch")
        super().post_epoch()


class AtLogPoints(Callback):
    def log_point(self, stage: Stage, kind: str, point: Any) -> None:  # noqa: ARG002
        assert HEARTBEAT.limit == float("inf"), "a hook may take any time"
        stage.evaluate(f"log_point {kind}")  # type: ignore[attr-defined]


class OwnLoop(Stage):
    """A loop of one's own, which evaluates between a batch and its step."""

    where = ""

    def __init__(self, *, cut: Any = None, **settings: Any) -> None:
        super().__init__(log_every=settings["log_every"])
        self.cut, self.by_step = cut, dict[int, list[float]]()

    def pre_stage(self) -> None:
        self.pipe.registered_models["net"].bare.norm.eval()

    def run_epoch(self) -> None:
        (optimizer,) = self.pipe.optimizers.values()
        for x, y in self.batches("train"):
            step = self.pipe.steps_done + 1
            if self.cut == step:
                raise Cut
            optimizer.zero_grad()
            loss = F.cross_entropy(self.models["net"](x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            if self.where == "step" and step % 7 == 2:
                out = Path(self.pipe.directory.path, f"{step}.npy")
                out.unlink(missing_ok=True)
                self.pipe.predict(self, "val", out, weights="current")
                self.pipe.validate(Traced(), "other", weights="current")
            optimizer.step()
            self.log("loss", loss, weight=len(y))
            self.by_step.setdefault(step, []).append(loss.item())

    def predict(self, batch: Any) -> Tensor:
        loss = self.models["net"](batch[0])
        self.log("loss", torch.rand(()))
        return loss  # type: ignore[no-any-return]


def run_all(
    folder: Path, kind: Callable[..., Any], where: str, cuts: tuple[Any, ...] = (), **settings: Any
) -> dict[str, Any]:
    """Runs until it is not cut off any more; returns all that the training has made."""
    loader, options = settings.pop("loader", None), {"log_every": 2, **settings}
    by_step: dict[int, list[float]] = {}
    for number, cut in enumerate((*cuts, None)):
        stage = kind(cut=cut, **options)
        stage.where = where
        pipe = make(folder, stage, every=3, loader=loader() if loader else None)
        pipe.register_dataset("other", TorchLoader(Noisy(11), batch_size=4, shuffle=True))
        if isinstance(stage, Frozen):
            pipe.add_callback(AtLogPoints())
            pipe.register_state("counted", stage.counted)
        if not number:
            seeded(pipe)
        with pytest.raises(Cut) if cut else torch.enable_grad():
            pipe.run()
        by_step |= stage.by_step
    return facts_of(pipe, by_step)


def facts_of(pipe: Pipeline, by_step: dict[int, list[float]]) -> dict[str, Any]:
    rows = [json.loads(line) for line in pipe.directory.metrics_file(0).read_text().splitlines()]
    points = {
        (row["kind"], row["step"]): row["metrics"]
        for row in rows
        if row["kind"] in ("train", "validation", "epoch")
    }
    return {
        "weights": weights(pipe),
        "steps": by_step,
        "points": points,
        "history": [(row.step, row.values) for row in (*pipe.history.epochs, *pipe.history.log_points)],
        "random": rng.random_state(pipe.device),
        "positions": [
            position(pipe.datasets[name], active=False)
            for name in ("train", "val")
            if isinstance(pipe.datasets[name], hw.data.DataLoader)
        ],
        "modes": {name: part.training for name, part in pipe.registered_models["net"].bare.named_modules()},
    }


def assert_equal(ours: dict[str, Any], truth: dict[str, Any]) -> None:
    assert_same(ours.pop("weights"), dict(truth["weights"]))
    for part in ours:
        assert ours[part] == truth[part], part


def torch_loader() -> TorchLoader[Any]:
    return TorchLoader(dataset(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(4))


@alone
@pytest.mark.parametrize(
    "loader, cases",
    [
        (
            None,
            [("post_epoch", (14, 16, ("epoch", 2))), ("log_point train", ())],
        ),  # 14: after a save of that epoch
        (torch_loader, [("log_point train", (8, 27)), ("log_point validation", (13,)), ("post_epoch", ())]),
    ],
)
def test_hooks_that_evaluate_change_nothing(
    loader: Any, cases: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(val_schedule, "time", StepClock())
    settings = {"val_every": "10min", "limit_val_batches": 2, "loader": loader}
    truth = run_all(tmp_path / "truth", Frozen, "", **settings)
    assert len([1 for kind, _ in truth["points"] if kind == "validation"]) >= 4
    assert truth["modes"]["norm"] is False and truth["modes"]["drop"] is True
    for number, (where, cuts) in enumerate(cases):
        assert_equal(run_all(tmp_path / str(number), Frozen, where, cuts, **settings), truth)


@alone
def test_a_loop_of_ones_own_that_evaluates_between_its_steps(tmp_path: Path) -> None:
    truth = run_all(tmp_path / "truth", OwnLoop, "")
    for number, cuts in enumerate([(), (8,)]):
        assert_equal(run_all(tmp_path / str(number), OwnLoop, "step", cuts), truth)


@alone
def test_a_loader_that_training_is_in_the_middle_of_is_refused(tmp_path: Path) -> None:
    stage = Frozen(log_every=3)
    pipe = make(tmp_path, stage)
    stage.where, stage.on = "log_point train", pipe.datasets["train"]
    pipe.register_dataset("other", [])
    pipe.add_callback(AtLogPoints())
    with pytest.raises(
        UsageError, match="'train' is in the middle of this DataLoader, which has one position"
    ):
        pipe.run()


class EvaluatesFirst(Frozen):
    """Evaluates on what it trains on, in the hooks that a resume within an epoch calls again."""

    evaluated = 0

    def step(self, batch: Any) -> Tensor:
        self.evaluated += not self.training
        return super().step(batch)

    def pre_stage(self) -> None:
        super().pre_stage()
        self.evaluate_training()

    def pre_epoch(self) -> None:
        self.evaluate_training()

    def evaluate_training(self) -> None:
        if self.where:
            before = self.evaluated
            found = self.pipe.validate(self, {"seen": self.pipe.datasets["train"]}, weights="current")
            assert self.evaluated - before == 11 and "seen/loss" in found, "all of it"


@alone
@pytest.mark.parametrize(("shuffle", "cuts"), [(False, (5, 16)), (True, (5,))])
def test_a_hook_before_an_epoch_may_evaluate_on_what_resumes(
    shuffle: bool, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    def loader() -> hw.data.DataLoader:
        return hw.data.DataLoader(dataset(), global_batch_size=BATCH, shuffle=shuffle)

    settings: dict[str, Any] = {"val_every": "4 steps", "loader": loader}
    truth = run_all(tmp_path / "truth", EvaluatesFirst, "", **settings)
    assert_equal(run_all(tmp_path / "cut", EvaluatesFirst, "hooks", cuts, **settings), truth)


@alone
def test_an_evaluation_outside_of_a_run_is_not_timed(tmp_path: Path) -> None:
    pipe = make(tmp_path, Traced())
    pipe.validate(pipe.stages[0], "val", weights="current")
    assert not pipe._state.timer.measuring and pipe._state.timer.take() == {}, (
        "the first log point would have it"
    )


def test_the_time_of_an_evaluation_is_not_that_of_what_it_interrupts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(now)))
    timer = timing.PhaseTimer(torch.device("cpu"))
    with timer.interrupted_by("validation"):  # in a step that is not measured
        timer.mark("data")
    assert timer.take() == {"validation": 1.0, "data": 1.0} and not timer.measuring
    timer.begin_step(50)
    timer.mark_step("compute")
    with timer.interrupted_by("validation"):
        pass
    timer.mark_step("optimizer")
    assert timer.take() == {"data": 50.0, "compute": 100.0, "validation": 1.0, "optimizer": 50.0}


class Row(list[int]):
    """A list of a class of one's own."""


class Tally:
    """Counts by name and in order."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.names, self.row = Counter[str](), Row()

    def update(self) -> None:
        self.names["cat"] += 1
        self.row.append(1)

    def compute(self) -> float:
        assert type(self.names) is Counter and type(self.row) is Row
        return self.names["cat"] + 10.0 * len(self.row)


@dataclass(slots=True)
class Slotted:
    """A metric without a `__dict__`."""

    total: Tensor
    last: int = 0

    def reset(self) -> None:
        self.total.zero_()
        self.last = 0

    def update(self) -> None:
        self.total += 1
        self.last += 1

    def compute(self) -> float:
        return float(self.total) + 10 * self.last


class Meter:
    """What many scripts have: it is reset, but computes nothing."""

    def __init__(self) -> None:
        self.sum = 0.0

    def reset(self) -> None:
        self.sum = 0.0


class Wrapping:
    """A metric that counts in others."""

    kind = torchmetrics.SumMetric  # a class has their methods, too, and counts nothing

    def __init__(self) -> None:
        self.inner, self.meter, self.factory = self.kind(), Meter(), self.kind
        self.more: dict[str, Any] = {"slots": [Slotted(torch.zeros(()))], "tallies": (Tally(),)}

    @property
    def parts(self) -> list[Any]:
        return [self.inner, *self.more["slots"], *self.more["tallies"]]

    def reset(self) -> None:
        for part in (*self.parts, self.meter):
            part.reset()

    def update(self) -> None:
        self.inner.update(1.0)
        self.meter.sum += 1
        for part in self.parts[1:]:
            part.update()

    def compute(self) -> float:
        return self.meter.sum + sum(float(part.compute()) for part in self.parts)


class WithNetwork(torchmetrics.Metric):
    """A metric of what a network finds, and with a part that is a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.parts = torch.nn.BatchNorm1d(2), torch.nn.ModuleList([torchmetrics.SumMetric()])
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.add_state("total", torch.zeros(()))

    def update(self) -> None:
        self.total += 1
        self.parts[0].update(2.0)

    def compute(self) -> Tensor:
        return self.total + self.parts[0].compute()  # type: ignore[no-any-return]

    def reset(self) -> None:
        super().reset()
        self.parts[0].reset()


class Table(dict[str, Any]):
    """A metric that is a dict, of numbers and of another metric."""

    def __init__(self) -> None:
        super().__init__(tally=Tally())

    def reset(self) -> None:
        self.pop("count", None)
        self["tally"].reset()

    def update(self) -> None:  # type: ignore[override]
        self["count"] = self.get("count", 0) + 1
        self["tally"].update()

    def compute(self) -> float:
        return 100.0 * self.get("count", 0) + self["tally"].compute()


class Lines(list[Tensor]):
    """A metric that is a list."""

    def reset(self) -> None:
        self.clear()

    def update(self) -> None:
        self.append(torch.ones(()))
        self[0] += 1

    def compute(self) -> float:
        return float(sum(self))


class Window(deque[list[int]]):
    """A metric that is a deque."""

    def reset(self) -> None:
        self.clear()

    def update(self) -> None:
        self.append([1])
        self[0][0] += 1

    def compute(self) -> int:
        return sum(each[0] for each in self)


class Seen(set[int]):
    """A metric that is a set."""

    def reset(self) -> None:
        self.clear()

    def update(self) -> None:  # type: ignore[override]
        self.add(len(self))

    def compute(self) -> int:
        return len(self)


class Halves(NamedTuple):
    hits: list[int]
    sums: Tensor


class Paired:
    """A metric that counts in tuples, whose items it changes in place."""

    def __init__(self) -> None:
        self.pair = ([0], torch.zeros(()))
        self.halves = Halves([0], torch.zeros(()))
        self.recent = deque([[0]], maxlen=1)

    def reset(self) -> None:
        for counts in (self.pair[0], self.halves.hits, self.recent[0]):
            counts[0] = 0
        for total in (self.pair[1], self.halves.sums):
            total.zero_()

    def update(self) -> None:
        for counts in (self.pair[0], self.halves.hits, self.recent[0]):
            counts[0] += 1
        for total in (self.pair[1], self.halves.sums):
            total += 1

    def compute(self) -> float:
        assert self.recent.maxlen == 1
        counts = self.pair[0][0] + 10 * self.halves.hits[0] + 100 * self.recent[0][0]
        return counts + 1000 * float(self.pair[1]) + 10_000 * float(self.halves.sums)


METRICS: dict[str, Callable[[], Any]] = {
    "dict": Table,
    "list": Lines,
    "deque": Window,
    "set": Seen,
    "tuples": Paired,
    "tally": Tally,
    "slots": lambda: Slotted(torch.zeros(())),
    "wrapping": Wrapping,
    "network": WithNetwork,
}


@pytest.mark.parametrize("make_metric", METRICS.values(), ids=METRICS)
def test_a_metric_has_afterwards_what_it_had_counted(make_metric: Callable[[], Any]) -> None:
    metric, same, once = make_metric(), make_metric(), make_metric()
    once.update()
    for _ in range(3):
        metric.update()
        same.update()
        counted = metric.compute()
        for _ in range(2):
            with keeping_counts([metric]):
                metric.update()
                assert metric.compute() == once.compute(), "it begins at zero"
            if isinstance(metric, torchmetrics.Metric):
                metric._computed = None  # the value of the last compute
            assert metric.compute() == counted == same.compute()


def test_the_networks_within_a_metric_stay_the_same_objects() -> None:
    metric = WithNetwork()
    metric.update()
    tensors = [*metric.parameters(), *metric.net.buffers()]
    with keeping_counts([metric]):
        metric.update()
    assert [id(each) for each in (*metric.parameters(), *metric.net.buffers())] == [*map(id, tensors)]
    assert all(isinstance(each, torch.nn.Parameter) for each in metric.parameters())
