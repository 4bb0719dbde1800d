"""A run that is cut off and goes on is the run that was not: the same losses and weights, to the last bit."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import warm
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader as TorchLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from toys import FEATURES, Classify, Net, make_net, sgd, warm_up
from waiting import check_exit

import headway as hw
from headway.errors import Stopped
from headway.run import Run
from headway.testing import ranks
from headway.train import Callback, Fsdp, Pipeline, Stage
from headway.train.evaluate import val_schedule
from headway.train.resume.positions import RankState
from headway.watch.report import account_run

alone = pytest.mark.usefixtures("alone")

SAMPLES = 88
BATCH = 8  # of all ranks together: 11 steps in an epoch


class Cut(Exception):
    """The run ends here, as if it had been killed: nobody gets to save anything."""


def dataset(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


class Noisy(Dataset[Any]):
    """Samples with noise of their own, another one in each epoch of the loader."""

    def __init__(self, count: int) -> None:
        self.samples = dataset(count)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        x, y = self.samples[number]
        return x + torch.rand(()), y


class Traced(Classify):
    """Knows its losses by step, and is cut off where the test wants."""

    def __init__(self, *, cut: Any = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.by_step: dict[int, list[float]] = {}
        self.cut = cut  # a step of training, or ("val", step), or ("epoch", epoch)
        self.validations: list[tuple[int, int]] = []

    def step(self, batch: Any) -> Tensor:
        step = self.pipe.steps_done + 1
        if self.cut == (step if self.training else ("val", self.pipe.steps_done)):
            raise Cut
        loss = super().step(batch)
        if not self.training:
            torch.rand(1)  # a validation may draw random numbers, too
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
    if loader is None:
        loader = hw.data.DataLoader(dataset(), global_batch_size=BATCH, shuffle=True, seed=3)
    pipe.register_dataset("train", loader)
    pipe.register_dataset("val", hw.data.DataLoader(Noisy(19), global_batch_size=BATCH))
    pipe.append_stage(stage, max_epochs=epochs, name="train")
    keep.setdefault("background", False)  # so that a cut does not take along what is in flight
    pipe.enable_checkpointing(every=every, **keep)
    return pipe


def seeded(pipe: Pipeline) -> Pipeline:
    """Random numbers as in a fresh process; they differ from rank to rank."""
    hw.seed(5)
    return pipe


def weights(pipe: Pipeline) -> dict[str, Tensor]:
    found = dict(pipe.registered_models["net"].bare.state_dict())
    if (ema := pipe.registered_models["net"].ema) is not None:
        found |= {f"average.{name}": tensor for name, tensor in ema.state_dict().items()}
    return found


def assert_same(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert ours.keys() == truth.keys()
    for name, tensor in truth.items():
        if hw.rank() == 0 or "running" not in name:  # DDP's buffers are those of rank 0
            assert torch.equal(ours[name], tensor), name


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "fp16": ({"precision": "fp16"}, {}),
    "best": ({}, {"keep_best": "train/accuracy", "every": "1h"}),
    "accumulate": ({"accumulate": 2}, {}),  # 6 steps in an epoch, the last of one batch
    "all": (
        {"accumulate": 2, "precision": "bf16", "gradient_clip": 0.5, "val_every": "4 steps"},
        {"ema": 0.9, "scheduler": warm_up, "keep_best": "val/loss"},
    ),
}
CUTS = {
    "plain": [1, 2, 8, 12, 13, ("val", 11), ("epoch", 1), ("epoch", 3), 33],
    "fp16": [8],
    "best": [13],
    "accumulate": [2, 6, 7, ("val", 6)],
    "all": [5, ("val", 4), ("val", 8), 11, 14],
}


_golden: dict[str, tuple[Pipeline, Traced]] = {}


def uninterrupted(folder: Path, case: str) -> tuple[Pipeline, Traced]:
    """The run to compare with; one process makes it once."""
    if case in _golden:
        return _golden[case]
    settings, options = CASES[case]
    stage = Traced(log_every=5, **settings)
    pipe = seeded(make(folder, stage, **options))
    pipe.run()
    if hw.world_size() == 1:
        _golden[case] = pipe, stage
    return pipe, stage


def compare(folder: Path, case: str, cut: Any) -> None:
    settings, options = CASES[case]
    golden, whole = uninterrupted(folder / "golden", case)
    first = Traced(log_every=5, cut=cut, **settings)
    with pytest.raises(Cut):
        seeded(make(folder / "cut", first, **options)).run()
    second = Traced(log_every=5, **settings)
    torch.manual_seed(99)  # another process has other random numbers
    pipe = make(folder / "cut", second, **options)
    pipe.run()

    assert pipe.steps_done == golden.steps_done
    assert first.by_step | second.by_step == whole.by_step
    assert set(second.by_step) == set(range(min(second.by_step, default=34), golden.steps_done + 1))
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


@alone
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", ["plain", "fp16", "all"])
def test_on_a_gpu(case: str, tmp_path: Path) -> None:
    """Dropout draws from the device's random numbers there."""
    compare(tmp_path, case, 8)


@ranks(2)
@pytest.mark.parametrize(("case", "cut"), [("plain", 8), ("all", ("val", 8)), ("accumulate", 7)])
def test_two_ranks(case: str, cut: Any, tmp_path: Path) -> None:
    compare(tmp_path, case, cut)


@ranks(2)
def test_sharded_models(tmp_path: Path) -> None:
    """FSDP2: every rank saves its shards, and gets them back to the last bit."""
    model = partial(Net, width=7, norm=False)  # 7 rows on two ranks: shards of different sizes
    results = []
    for folder, cuts in (("golden", (None,)), ("cut", (8, ("val", 22), None))):
        by_step: dict[int, list[float]] = {}
        for number, cut in enumerate(cuts):
            torch.manual_seed(7)
            stage = Traced(cut=cut, gradient_clip=0.5)
            pipe = make(tmp_path / folder, stage, model=model, parallel=Fsdp(blocks=(nn.Linear,)), ema=0.9)
            if number == 0:
                hw.seed(5)
            with nullcontext() if cut is None else pytest.raises(Cut):
                pipe.run()
            by_step |= stage.by_step
        results.append((by_step, {name: w.full_tensor() for name, w in weights(pipe).items()}))  # type: ignore[attr-defined]
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


# --- loops of one's own, and loaders of others


class Gan(Stage):
    """Two players, two passes over the data in each epoch, and noise."""

    def __init__(self, cut: int | None = None) -> None:
        super().__init__(log_every=4)
        self.cut = cut
        self.by_step: dict[int, tuple[float, float]] = {}

    def run_epoch(self) -> None:
        players: Any = self.models
        for dataset in ("train", "more"):
            for x, _ in self.batches(dataset):
                if self.pipe.steps_done + 1 == self.cut:
                    raise Cut
                fake = players["maker"](torch.randn_like(x))
                loss_d = (
                    F.softplus(-players["judge"](x)).mean()
                    + F.softplus(players["judge"](fake.detach())).mean()
                )
                self.move("judge", loss_d)
                loss_g = F.softplus(-players["judge"](fake)).mean()
                self.move("maker", loss_g)
                self.log("loss_d", loss_d, weight=len(x))
                self.by_step[self.pipe.steps_done + 1] = (loss_d.item(), loss_g.item())

    def move(self, player: str, loss: Tensor) -> None:
        self.pipe.optimizers[player].zero_grad()
        loss.backward()
        self.step_optimizer(player)


def make_gan(folder: Path, stage: Gan) -> Pipeline:
    torch.manual_seed(0)
    pipe = Pipeline(name="gan", root=folder)
    for name, out in (("maker", FEATURES), ("judge", 1)):
        pipe.register_model(name, nn.Linear(FEATURES, out), ema=0.9)
        pipe.register_optimizer(name, sgd, model=name, scheduler=warm_up)
    for name, count in (("train", 40), ("more", 24)):  # 5 and 3 steps
        pipe.register_dataset(
            name, hw.data.DataLoader(dataset(count), global_batch_size=BATCH, shuffle=True, seed=1)
        )
    pipe.append_stage(stage, max_epochs=3)
    pipe.enable_checkpointing(every=1, background=False)
    return pipe


def compare_gan(folder: Path, cut: int) -> None:
    whole, first, second = Gan(), Gan(cut), Gan()
    golden = seeded(make_gan(folder / "golden", whole))
    golden.run()
    with pytest.raises(Cut):
        seeded(make_gan(folder / "cut", first)).run()
    pipe = make_gan(folder / "cut", second)
    pipe.run()
    assert pipe.steps_done == golden.steps_done == 24
    assert first.by_step | second.by_step == whole.by_step
    for name in ("maker", "judge"):
        ours, truth = (each.registered_models[name].bare.state_dict() for each in (pipe, golden))
        assert_same(ours, truth)
    assert len(pipe.history["loss_d"]) == 3


@alone
@pytest.mark.parametrize("cut", [1, 3, 6, 7, 9, 14, 24])  # within and between the passes and the epochs
def test_a_loop_of_ones_own(cut: int, tmp_path: Path) -> None:
    compare_gan(tmp_path, cut)


@ranks(2)
def test_a_loop_of_ones_own_on_two_ranks(tmp_path: Path) -> None:
    compare_gan(tmp_path, 7)


class Seldom(Stage):
    """Steps its optimizer in every fourth iteration, as GANs do with one of their players."""

    def __init__(self, cut: int | None = None) -> None:
        super().__init__(log_every=1)
        self.cut = cut

    def run_epoch(self) -> None:
        for x, y in self.batches("train"):
            if self.pipe.steps_done + 1 == self.cut:
                raise Cut
            if self.pipe.steps_done % 4 == 0:
                self.pipe.optimizers["sgd"].zero_grad()
                F.cross_entropy(self.models["net"](x), y).backward()
                self.step_optimizer("sgd")


@alone
def test_learning_rates_are_those_of_the_last_step_after_a_resume_too(tmp_path: Path) -> None:
    """The scheduler has changed the rate since; the optimizer does not step before the next log points."""
    golden = make(tmp_path / "golden", Seldom(), every=2, scheduler=warm_up, max_epochs=1)
    golden.run()
    for cut in (8, None):
        pipe = make(tmp_path / "cut", Seldom(cut), every=2, scheduler=warm_up, max_epochs=1)
        with pytest.raises(Cut) if cut else nullcontext():
            pipe.run()
    assert pipe.history.points("lr/sgd") == golden.history.points("lr/sgd")


class Unsized:
    """Batches of an unknown number, in an order of its own, without a position."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        order = torch.randperm(
            self.count
        )  # drawn from the model's random numbers, as torch's own loader does
        x, y = dataset().tensors
        for start in order.tolist():
            yield x[start : start + BATCH], y[start : start + BATCH]


@alone
@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("torch", 5),
        ("torch", ("val", 11)),
        ("unsized", 12),
        ("unsized", ("val", 11)),
        ("limited", 6),
        ("limited", 13),
        ("validated first", 5),
    ],
)
def test_loaders_without_a_position_are_read_again(kind: str, cut: Any, tmp_path: Path) -> None:
    def loader() -> Any:
        if kind == "unsized":
            return Unsized(11)
        return TorchLoader(dataset(200 if kind == "limited" else SAMPLES), batch_size=BATCH, shuffle=True)

    limited = {"limit_train_batches": 11, "limit_val_batches": 2, "val_every": "4 steps"}
    first: dict[str, Any] = {
        "val_at_start": True
    }  # a validation draws random numbers before the loader is opened
    settings: dict[str, Any] = {"limited": limited, "validated first": first}.get(kind, {})
    stages = [Traced(**settings), Traced(cut=cut, **settings), Traced(**settings)]
    golden = seeded(make(tmp_path / "golden", stages[0], loader=loader(), every=1))
    golden.run()
    with pytest.raises(Cut):
        seeded(make(tmp_path / "cut", stages[1], loader=loader(), every=1)).run()
    pipe = make(tmp_path / "cut", stages[2], loader=loader(), every=1)
    pipe.run()
    assert stages[1].by_step | stages[2].by_step == stages[0].by_step
    assert_same(weights(pipe), weights(golden))
    assert pipe.history["val/loss"] == golden.history["val/loss"]


@alone
def test_a_new_order_on_other_ranks_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader without a position has a new order on another number of ranks; the next resume keeps that one."""
    restore, steps = RankState.restore, list[Any]()

    def restore_as_other(state: RankState, loaded: Any) -> None:
        restore(state, replace(loaded, world_size=2))

    for folder, cuts in (("golden", (5, None)), ("cut", (5, 8, None))):
        by_step: dict[int, list[float]] = {}
        for number, cut in enumerate(cuts):
            loader = TorchLoader(dataset(), batch_size=BATCH, shuffle=True)
            stage = Traced(cut=cut)
            pipe = make(tmp_path / folder, stage, loader=loader, every=1, max_epochs=1)
            torch.manual_seed(5 if number == 0 else 99)
            with monkeypatch.context() as patch, pytest.raises(Cut) if cut else nullcontext():
                if number == 1:
                    patch.setattr(RankState, "restore", restore_as_other)
                pipe.run()
            by_step |= stage.by_step
        steps.append(by_step)
    assert steps[1] == steps[0]


class Jittered(Dataset[Any]):
    """Samples with noise from a generator of the dataset's own."""

    def __init__(self, generator: Any) -> None:
        self.samples, self.generator = dataset(), generator

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        x, y = self.samples[number]
        return x + self.generator.random(), y


class Counting(IterableDataset[Any]):
    """Counts its own epochs, which nothing saves."""

    epochs = 0

    def __iter__(self) -> Any:
        self.epochs += 1
        x, y = dataset().tensors
        for i in torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epochs)).tolist():
            yield x[i], y[i]


def random_loader(kind: str) -> Any:
    samples, generator = dataset(), torch.Generator().manual_seed(7)
    match kind:
        case "generator":
            return TorchLoader(samples, BATCH, shuffle=True, generator=generator)
        case "sampler":
            sampler = RandomSampler(samples, replacement=True, num_samples=SAMPLES, generator=generator)
            return TorchLoader(samples, BATCH, sampler=sampler)
        case "weighted":
            weights = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=generator)
            return TorchLoader(samples, batch_sampler=BatchSampler(weights, BATCH, drop_last=False))
        case "numpy":
            return TorchLoader(Jittered(np.random.default_rng(1)), BATCH, shuffle=True)
        case "old numpy":
            return TorchLoader(Jittered(np.random.RandomState(1)), BATCH, shuffle=True)
        case "python":
            return TorchLoader(Subset(Jittered(random.Random(1)), range(SAMPLES)), BATCH, shuffle=True)
        case "persistent":
            return TorchLoader(samples, BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    return TorchLoader(samples, BATCH, shuffle=True, num_workers=1, generator=generator)


@pytest.fixture
def no_workers_left() -> Iterator[None]:
    """Ends persistent workers with their loaders, which refer to themselves: others count and kill processes."""
    before = set(multiprocessing.active_children())
    yield
    gc.collect()
    assert set(multiprocessing.active_children()) <= before


@alone
@pytest.mark.parametrize(
    "kind",
    ["generator", "sampler", "weighted", "numpy", "old numpy", "python", "persistent", "workers"],
)
@pytest.mark.usefixtures("no_workers_left")
def test_random_numbers_of_the_loaders_own_are_restored(kind: str, tmp_path: Path) -> None:
    """Cut in the first epoch, in the second, and between the two: the last resume follows a resume."""
    settings: dict[str, Any] = {"val_every": "4 steps"}
    whole = Traced(**settings)
    golden = seeded(make(tmp_path / "golden", whole, loader=random_loader(kind), every=1, max_epochs=2))
    golden.run()
    by_step: dict[int, list[float]] = {}
    for cut in (4, 12, 17, None):
        stage = Traced(cut=cut, **settings)
        pipe = make(tmp_path / "cut", stage, loader=random_loader(kind), every=1, max_epochs=2)
        torch.manual_seed(5 if cut == 4 else 99)
        with pytest.raises(Cut) if cut else nullcontext():
            (seeded(pipe) if cut == 4 else pipe).run()
        by_step |= stage.by_step
    assert by_step == whole.by_step
    assert_same(weights(pipe), weights(golden))


class ReadsItself(Traced):
    """Reads a loader in a hook, without a pass, as loops of one's own do to validate."""

    where = ""

    def pre_epoch(self) -> None:
        self.read("pre_epoch")

    def post_epoch(self) -> None:
        self.read("post_epoch")
        super().post_epoch()

    def read(self, where: str) -> None:
        if self.where == where:
            self.seen = [y.tolist() for _, y in self.datasets["more"]]


@alone
@pytest.mark.parametrize(("where", "cut"), [("pre_epoch", 12), ("post_epoch", 16)])
@pytest.mark.usefixtures("no_workers_left")
def test_persistent_workers_that_a_hook_started_draw_their_seed_once(
    where: str, cut: int, tmp_path: Path
) -> None:
    """Cut between two epochs and within one; torch draws a seed where workers start, and in no later pass."""
    by_step: dict[int, list[float]] = {}
    for folder, at in (("golden", None), ("cut", cut), ("cut", None)):
        stage = ReadsItself(cut=at)
        stage.where = where
        pipe = make(tmp_path / folder, stage, every=1)
        more = TorchLoader(dataset(16), BATCH, shuffle=True, num_workers=1, persistent_workers=True)
        pipe.register_dataset("more", more)
        torch.manual_seed(5 if at or folder == "golden" else 99)
        with pytest.raises(Cut) if at else nullcontext():
            pipe.run()
        if folder == "golden":
            golden, whole = pipe, stage
        else:
            by_step |= stage.by_step
    assert by_step == whole.by_step and stage.seen == whole.seen
    assert_same(weights(pipe), weights(golden))


class ByEpoch(RandomSampler):
    """A sampler that has an order only once it was told of its epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(16, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class ReadsLater(ReadsItself):
    """Prepares in a hook what the workers of the loader need that another hook reads."""

    where = "pre_epoch"

    def pre_stage(self) -> None:
        more: Any = self.datasets["more"]
        assert more._iterator is None, "they would be copies of a dataset that is not complete"
        more.dataset.ready = True


class Prepared(TensorDataset):
    ready = False

    def __getitem__(self, index: int) -> Any:
        assert self.ready
        return super().__getitem__(index)


@alone
@pytest.mark.usefixtures("no_workers_left")
def test_workers_of_a_resumed_run_start_when_their_loader_is_ready(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After the hooks and `set_epoch`; those of a loader that has become another one do not start for nothing."""
    for persistent, cut in ((True, 12), (True, 23), (False, None)):  # each between two epochs
        pipe = make(tmp_path, ReadsLater(cut=cut), every=1)
        samples = Prepared(*dataset(16).tensors)
        workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True} if persistent else {}
        pipe.register_dataset("more", TorchLoader(samples, BATCH, sampler=ByEpoch(samples), **workers))
        capfd.readouterr()
        with pytest.raises(Cut) if cut else nullcontext():
            pipe.run()
        assert ("was not saved" in capfd.readouterr().err) is (cut == 23)


class LogsFirst(Traced):
    """Logs in the hooks that a resume calls again."""

    def pre_stage(self) -> None:
        self.log("begun", 1.0, reduce="sum")

    def pre_epoch(self) -> None:
        self.log("opened", 1.0, reduce="sum")


@alone
def test_what_hooks_log_counts_once(tmp_path: Path) -> None:
    """Resumed within the first epoch, between two epochs, and within the second."""
    for cut in (5, 12, 16, None):
        pipe = make(tmp_path, LogsFirst(cut=cut), every=1)
        with pytest.raises(Cut) if cut else nullcontext():
            pipe.run()
    found = [
        {name: row.values.get(f"train/{name}") for name in ("begun", "opened")} for row in pipe.history.epochs
    ]
    assert found == [{"begun": 1.0, "opened": 1.0}, *[{"begun": None, "opened": 1.0}] * 2]


class LogsGap(Callback):
    """Logs after a validation what the next log point of training reduces."""

    def log_point(self, stage: Stage, kind: str, point: Any) -> None:
        if kind == "validation":
            stage.log("gap", point.values["val/loss"])
            stage.log("steps", torch.tensor(float(stage.steps_done)), weight=torch.tensor(2.0))


@alone
def test_what_is_logged_between_a_log_point_and_a_save_counts_once(tmp_path: Path) -> None:
    results = []
    for folder, cuts in (
        ("golden", (None,)),
        ("cut", (6, 10, None)),
    ):  # saved after the validations of 4 and 8
        for number, cut in enumerate(cuts):
            pipe = make(tmp_path / folder, Traced(cut=cut, log_every=5, val_every="4 steps"), every=4)
            pipe.add_callback(LogsGap())
            torch.manual_seed(99 if number else 5)
            with pytest.raises(Cut) if cut else nullcontext():
                pipe.run()
        results.append([pipe.history.points(name) for name in ("train/gap", "train/steps")])
    assert results[1] == results[0]


class Pairs(Stage):
    """Two datasets side by side: a batch of each is one step."""

    def __init__(self, cut: int | None = None) -> None:
        super().__init__(log_every=4)
        self.cut, self.by_step = cut, dict[int, float]()

    def run_epoch(self) -> None:
        net: Any = self.models["net"]
        for (x, y), (z, _) in zip(self.batches("train"), self.batches("more"), strict=False):
            step = self.pipe.steps_done + 1
            if step == self.cut:
                raise Cut
            self.pipe.optimizers["sgd"].zero_grad()
            loss = F.cross_entropy(net(x), y) + net(z).square().mean()
            loss.backward()
            self.step_optimizer("sgd")
            self.by_step[step] = loss.item()


@alone
def test_datasets_side_by_side_are_one_step(tmp_path: Path) -> None:
    by_step: dict[int, float] = {}
    for folder, cut in (("golden", None), ("cut", 5), ("cut", 16), ("cut", 24), ("cut", None)):
        stage = Pairs(cut)
        pipe = make(tmp_path / folder, stage, every=1)
        more = hw.data.DataLoader(dataset(96), global_batch_size=BATCH, shuffle=True, seed=8)
        pipe.register_dataset("more", more)
        torch.manual_seed(5 if folder == "golden" or cut == 5 else 99)
        with pytest.raises(Cut) if cut else nullcontext():
            pipe.run()
        if folder == "golden":
            golden, whole = pipe, stage
        else:
            by_step |= stage.by_step
    assert list(whole.by_step) == list(range(1, 34))
    assert by_step == whole.by_step
    assert_same(weights(pipe), weights(golden))


class Ends(Stage):
    """Reads two datasets, the second of which has 3 batches, in several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def run_epoch(self) -> None:
        if self.how == "nested":
            for _ in self.batches("few"):
                for _ in self.batches("train"):
                    break
            return
        for made, _ in enumerate(zip(self.batches("train"), self.batches("few"), strict=False), 1):
            if str(made) == self.how:
                break


@alone
@pytest.mark.parametrize(("how", "steps"), [("1", 1), ("2", 2), ("shorter", 3), ("nested", 6)])
def test_a_loop_over_two_datasets_counts_the_steps_that_it_made(how: str, steps: int, tmp_path: Path) -> None:
    pipe = make(tmp_path, Ends(how), every=1, max_epochs=2)
    pipe.register_dataset("few", [torch.zeros(2)] * 3)
    pipe.run()
    assert pipe.steps_done == 2 * steps


@alone
def test_other_batches_than_before_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def start(cut: int | None) -> None:
        loader = TorchLoader(Counting(), BATCH)
        make(tmp_path, Traced(cut=cut), loader=loader, every=1, max_epochs=2).run()

    for cut in (5, 16):
        with pytest.raises(Cut):
            start(cut)
        assert "is not the one" not in capfd.readouterr().err, "the first epoch is read again as it was"
    start(None)
    said = capfd.readouterr().err
    assert "batch 1 of this epoch is not the one that was trained on before" in said
    assert "use hw.data.DataLoader" in said


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples in an order of its own; goes on after the last one given."""

    def __init__(self) -> None:
        self.samples, self.at = Noisy(SAMPLES), 0

    def __iter__(self) -> Any:
        while self.at < SAMPLES:
            self.at += 1
            yield self.samples[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@alone
@pytest.mark.parametrize("kind", ["workers", "shards", "stream"])
def test_what_is_loaded_ahead_is_not_consumed(kind: str, tmp_path: Path) -> None:
    """Workers and threads are many batches ahead of the step; in shards, the rest of a pass begins the next one."""
    x, y = dataset().tensors
    hw.data.pack(
        [{"__key__": f"{n:03d}", "cls": n} for n in range(SAMPLES)], tmp_path / "shards", shard_size=20_480
    )

    def loader(**how: Any) -> Any:
        if kind == "workers":
            return hw.data.DataLoader(
                Noisy(SAMPLES), batch_size=7, shuffle=True, num_workers=1, prefetch_factor=4
            )
        if kind == "stream":
            return hw.data.DataLoader(Stream(), batch_size=7, num_workers=1, prefetch_factor=4)
        return hw.data.ShardLoader(
            tmp_path / "shards",
            batch_size=7,
            transform=lambda sample, random: (x[sample["cls"]] + random.random(), y[sample["cls"]]),
            collate_fn=default_collate,
            **how,
        )

    results = []
    for folder, cuts in (("golden", (None,)), ("cut", (6, 16, None))):
        by_step: dict[int, list[float]] = {}
        for number, cut in enumerate(cuts):
            stage = Traced(cut=cut, val_every="4 steps", limit_val_batches=2)
            pipe = make(tmp_path / folder, stage, loader=loader(), every=1)
            if kind == "shards":
                pipe.datasets["val"] = loader(shuffle=False)
            if kind == "stream":
                pipe.datasets["val"] = loader()
            if number == 0:
                seeded(pipe)
            with nullcontext() if cut is None else pytest.raises(Cut):
                pipe.run()
            by_step |= stage.by_step
        results.append((by_step, weights(pipe), pipe.history["val/loss"]))
    assert len(results[0][0]) == (37 if kind == "shards" else 39)
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])
    assert results[0][2] == results[1][2]


@alone
@pytest.mark.parametrize("cut", [3, 8, 12, 14])
def test_several_stages_and_an_early_end(cut: int, tmp_path: Path) -> None:
    """The first stage stops itself, the second is bounded by steps; hooks draw random numbers."""

    class Early(Traced):
        def step(self, batch: Any) -> Tensor:
            if self.training and self.name == "train" and self.pipe.steps_done == 6:
                self.stop_stage()
            return super().step(batch)

        def pre_stage(self) -> None:
            torch.rand(3)

        def pre_epoch(self) -> None:
            torch.rand(self.epoch + 1)

    def build(folder: Path, at: int | None) -> tuple[Pipeline, list[Early]]:
        stages = [Early(cut=at, log_every=4), Early(cut=at, log_every=4)]
        pipe = make(folder, stages[0])
        pipe.append_stage(stages[1], max_steps=7, name="second")
        return pipe, stages

    golden, whole = build(tmp_path / "golden", None)
    seeded(golden).run()
    assert golden.steps_done == 15
    first, before = build(tmp_path / "cut", cut)
    with pytest.raises(Cut):
        seeded(first).run()
    second, after = build(tmp_path / "cut", None)
    torch.manual_seed(99)
    second.run()
    for number in (0, 1):
        assert before[number].by_step | after[number].by_step == whole[number].by_step
    assert_same(weights(second), weights(golden))
    assert [row.step for row in second.history.epochs] == [row.step for row in golden.history.epochs]


@alone
def test_killed_after_the_last_save(tmp_path: Path) -> None:
    """All is trained and saved, but the end was not noted: only what comes after the training is made again."""

    class Last(Callback):
        calls = 0

        def post_run(self, pipe: Pipeline) -> None:  # noqa: ARG002
            Last.calls += 1
            if Last.calls == 1:
                raise Cut

    for number in (1, 2):
        stage = Traced()
        pipe = make(tmp_path, stage)
        pipe.add_callback(Last())
        with pytest.raises(Cut) if number == 1 else nullcontext():
            pipe.run()
    assert stage.by_step == {} and pipe.steps_done == 33 and Last.calls == 2


@alone
def test_random_numbers_after_the_last_stage_go_on(tmp_path: Path) -> None:
    """All stages have ended, so that none of them restores the random state; `post_run` was not called before."""
    drawn: list[float] = []

    class Last(Callback):
        def post_run(self, pipe: Pipeline) -> None:  # noqa: ARG002
            drawn.append(torch.rand(1).item())
            if len(drawn) == 1:
                raise Cut

    for number in (1, 2):
        pipe = make(tmp_path, Traced(), max_epochs=1, every="1 epoch")
        pipe.add_callback(Last())
        torch.manual_seed(5 if number == 1 else 99)
        with pytest.raises(Cut) if number == 1 else nullcontext():
            pipe.run()
    assert drawn[0] == drawn[1]


# --- other numbers of ranks: real processes, killed

SCRIPT = Path(__file__).with_name("resumable.py")


def launch(folder: Path, nproc: int, *words: str, fault: str = "") -> tuple[int, str]:
    """Runs the script on so many ranks; exit code and output."""
    environ = {**os.environ, "HEADWAY_WATCHDOG": "60"}  # a run that hangs says where, before its time is over
    if fault:
        environ["HEADWAY_FAILPOINT"] = fault
    command = [
        sys.executable,
        "-m",
        "headway",
        "run",
        "--nproc",
        str(nproc),
        str(SCRIPT),
        str(folder),
        *words,
    ]
    done = warm.run(command, env=environ, capture_output=True, text=True, timeout=300, cwd=folder)
    if fault:
        check_exit(folder, time.time())
    return done.returncode, done.stdout + done.stderr


def by_hand() -> tuple[list[list[int]], list[float]]:
    """The samples of each step, and the loss of each, from a loop that knows nothing of ranks."""
    from resumable import EPOCHS, GLOBAL_BATCH, Numbered

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    adamw = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = hw.data.DataLoader(
        Numbered(), global_batch_size=GLOBAL_BATCH, shuffle=True, seed=2, rank=0, world_size=1
    )
    samples, losses = [], []
    for _ in range(EPOCHS):
        for numbers, x in loader:
            loss = F.mse_loss(net(x), x[:, :2].cumsum(1))
            adamw.zero_grad()
            loss.backward()
            adamw.step()
            samples.append(numbers.tolist())
            losses.append(loss.item())
    return samples, losses


def test_batches_of_each_rank_are_told_to_change_with_the_number_of_ranks(tmp_path: Path) -> None:
    code, text = launch(tmp_path, 2, "each", fault="train.step:rank=1:nth=7:kill9")
    assert code != 0, text
    code, text = launch(tmp_path, 1, "each")
    assert code == 0, text
    assert (
        "headway: dataset 'train': batch_size=4 is per rank, so a step has 4 samples instead of 8: "
        "pass global_batch_size to keep it constant" in text
    ), text


def test_the_rest_of_an_epoch_may_have_fewer_batches_on_some_ranks(tmp_path: Path) -> None:
    """Whole epochs have equally many on three ranks. Two steps of one rank leave 56 samples: 9 batches of 6, and two
    samples for three ranks, none of them for rank 0. A rank is killed in that epoch, too, and all of them end it."""
    code, text = launch(tmp_path, 1, "ordered", "slow", fault="train.step:rank=0:nth=4:kill9")
    assert code != 0, text
    code, text = launch(tmp_path, 3, "ordered", "slow", fault="train.step:rank=1:nth=6:kill9")
    assert code != 0 and "saved by 1 ranks, now 3" in text, text
    code, text = launch(tmp_path, 3, "ordered")
    assert code == 0 and "done at step 31" in text, text
    assert (
        "epoch 1 of stage 'witness' ended at step 11, when rank 0 had no more batches, with 1 batch left on "
        "rank 1, 1 batch left on rank 2: " in text
    ), text


CHAINS = [(3, 2, 1), (4, 3, 2), (4, 2, 1), (4, 1, 3)]
LONG = pytest.mark.skipif(os.environ.get("HEADWAY_FAULTS") != "full", reason="HEADWAY_FAULTS=full")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("parallel", "sizes"),
    [
        ("ddp", (3, 2, 1)),
        ("fsdp", (3, 2)),
        *(pytest.param(kind, sizes, marks=LONG) for kind, sizes in product(("ddp", "fsdp"), CHAINS)),
    ],
)
def test_other_numbers_of_ranks_see_the_same_samples(
    parallel: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """Begun on 3 ranks and killed, gone on with 2 and killed, finished by 1."""
    kills = ["train.step:rank=1:nth=7:kill9", "train.step:rank=0:nth=5:kill9"][: len(sizes) - 1]
    for number, (size, fault) in enumerate(zip(sizes, [*kills, ""], strict=True)):
        code, text = launch(tmp_path, size, parallel, "workers", fault=fault)
        assert code != 0 if fault else code == 0, text
        assert "was killed by SIGKILL" in text if fault else "done at step 15" in text, text
        if number:
            assert f"saved by {sizes[number - 1]} ranks, now {size}: the samples are the same" in text, text
    samples, losses = by_hand()
    lines: dict[tuple[int, int], list[Any]] = {}
    for rank in range(max(sizes)):
        for line in (tmp_path / f"steps-{rank}.jsonl").read_text().splitlines():
            told = json.loads(line)
            lines.setdefault((told["step"], told["ranks"]), []).append(told)
    assert {step for step, _ in lines} == set(range(1, 16))
    assert {ranks for _, ranks in lines} == set(sizes)
    for (step, size), told in lines.items():
        if len(told) == size:  # else the kill came before all ranks had written
            assert [number for each in told for number in each["samples"]] == samples[step - 1]
            mean = sum(each["loss"] for each in told) / size
            assert mean == pytest.approx(losses[step - 1], rel=1e-4), (step, size)
    (run,) = (tmp_path / "runs").iterdir()
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    # A rank 0 that was killed could not write how its attempt ended: the failure record says it
    assert [each["exit_code"] for each in attempts] == [1] * (len(sizes) - 1) + [0]
    for before, after in pairwise(attempts):
        assert after["step_started"] > before["step_started"]
    assert attempts[0]["step_ended"] in (6, 7), "rank 0 recorded it when rank 1 was gone"
    if len(sizes) > 2:
        assert attempts[1]["step_ended"] == attempts[1]["step_started"] + 5, (
            "its agent recorded it for rank 0"
        )
    repeated = account_run(Run.open(run)).repeated
    made = len(
        (tmp_path / "steps-0.jsonl").read_text().splitlines()
    )  # with one that a kill cut short, perhaps
    assert repeated.is_exact and repeated.count in (made - 16, made - 15)


class Timed(Traced):
    """Each of its steps takes a second of a clock that starts anywhere, as that of another process does."""

    def __init__(self, *, stop: int | None = None, start_s: float = 0.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.signal_at, self.now_s = stop, start_s

    def monotonic(self) -> float:
        return self.now_s

    def step(self, batch: Any) -> Tensor:
        loss = super().step(batch)
        if self.training:
            self.now_s += 1
            if self.signal_at == self.pipe.steps_done + 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return loss


@alone
@pytest.mark.parametrize(
    "end",
    [
        {"cut": 3},
        {"cut": 8},
        {"cut": ("val", 8)},
        {"cut": 9},
        {"cut": 15},
        {"cut": ("epoch", 1)},
        {"stop": 8},
    ],
    ids=str,
)
def test_validations_by_time_come_at_the_same_steps(
    end: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time since the last validation is kept, and so is the request for one that was not made any more."""

    def run(folder: Path, stage: Timed) -> Pipeline:
        monkeypatch.setattr(val_schedule, "time", stage)
        pipe = make(folder, stage, every=3)
        pipe.run()
        return pipe

    settings: dict[str, Any] = {"log_every": 2, "val_every": "7s"}
    hw.seed(5)
    golden = run(tmp_path / "golden", Timed(**settings))
    assert [step for step, _ in golden.history.points("val/loss")] == [8, 15, 22, 30]  # a save is a log point
    hw.seed(5)
    with pytest.raises((Cut, Stopped)):
        run(tmp_path / "cut", Timed(**settings, **end))
    resumed = run(tmp_path / "cut", Timed(**settings, start_s=1e6))
    assert resumed.history.points("val/loss") == golden.history.points("val/loss")
    assert_same(weights(resumed), weights(golden))
