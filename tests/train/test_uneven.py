"""Ranks with different numbers of batches: all stop with the shortest, or those without more wait for the longest."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader as TorchLoader, IterableDataset
from toys import FEATURES, Batches, Classify, by_hand, make_net, make_pipe

import headway as hw
from headway.errors import UsageError
from headway.system.log import logger
from headway.testing import ranks
from headway.train import Pipeline, Stage
from headway.train.batches import FirstBatch, exact_count

LENGTHS = (7, 10)


class Stream(Batches):
    """Batches without a length."""

    __len__ = None  # type: ignore[assignment]


def batches(*, sized: bool = False, lengths: tuple[int, ...] = LENGTHS) -> Batches:
    return (Batches if sized else Stream)(lengths[hw.rank()], rank=hw.rank())


def run(
    folder: Path, stage: Stage, loader: Batches, *, epochs: int = 1, **model: Any
) -> tuple[Pipeline, list[str]]:
    """Returns the pipeline, and the warnings of this rank."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        pipe = make_pipe(folder, **model)
        pipe.register_dataset("train", loader)
        pipe.append_stage(stage, max_epochs=epochs)
        pipe.run()
    finally:
        logger.removeHandler(handler)
    return pipe, lines


def assert_weights(pipe: Pipeline, net: torch.nn.Module, *, exact: bool) -> None:
    for ours, expected in zip(
        pipe.registered_models["net"].bare.state_dict().values(), net.state_dict().values(), strict=True
    ):
        whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(
            whole, expected, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6})
        )


def line(steps: int) -> str:
    return (
        f"epoch 1 of stage 'classify' ended at step {steps}, when rank 0 had no more batches, with 3 batches left on "
        'rank 1: give all ranks the same number, or pass uneven="longest"'
    )


@ranks(2)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_all_ranks_stop_with_the_shortest(accumulate: int, tmp_path: Path) -> None:
    """The steps are those of DDP by hand on as many batches as the shortest rank has."""
    net = make_net()
    torch.manual_seed(hw.rank())
    losses, _ = by_hand(net, Batches(7, rank=hw.rank()), accumulate=accumulate)
    stage, ours = Classify(accumulate=accumulate), make_net()
    torch.manual_seed(hw.rank())
    pipe, lines = run(tmp_path / "one", stage, batches(), net=ours)
    ends = hw.all_gather_object(time.monotonic())
    assert max(ends) - min(ends) < 1.0
    assert stage.losses == losses
    assert_weights(pipe, net, exact=True)
    steps = -(-7 // accumulate)
    assert pipe.steps_done == steps
    assert lines == ([line(steps)] if hw.rank() == 0 else [])
    again, lines = run(tmp_path / "two", Classify(accumulate=accumulate), batches(), epochs=2)
    assert again.steps_done == 2 * steps
    assert len(lines) == (hw.rank() == 0), "it is said once"


@ranks(2)
def test_lengths_that_are_known_are_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, lines = run(tmp_path / "sized", Classify(uneven="shortest"), batches(sized=True))
    assert (pipe.steps_done, lines) == (7, [line(7)] if hw.rank() == 0 else [])
    pipe, lines = run(tmp_path / "even", Classify(), batches(lengths=(4, 4)))
    assert (pipe.steps_done, lines) == (4, [])
    pipe, lines = run(tmp_path / "limited", Classify(limit_train_batches=8), batches())
    assert pipe.steps_done == 7, "a limit beyond the end of a stream is not its length"
    with pytest.raises(UsageError, match=r'limit_train_batches, or uneven="shortest"'):
        run(tmp_path / "refused", Classify(), batches(sized=True))
    exchanges: list[int] = []
    monkeypatch.setattr("headway.train.uneven.BatchAgreement._bounds", lambda *_: exchanges.append(1))
    run(tmp_path / "equal", Classify(), batches(sized=True, lengths=(5, 5)))
    assert exchanges == [], "no exchange between ranks per step"


def longest_by_hand(accumulate: int) -> tuple[torch.nn.Module, list[float]]:
    """One process with the batches of all ranks that have some."""
    net = make_net(norm=False, dropout=0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    every = [list(Batches(count, rank=rank)) for rank, count in enumerate(LENGTHS)]
    losses = []
    for start in range(0, max(LENGTHS), accumulate):
        parts = [part for mine in every for part in mine[start : start + accumulate]]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, losses


class Weighted(Classify):
    def step(self, batch: Any) -> Any:
        return super().step(batch), len(batch[1])


@ranks(2)
def test_the_longest_rank_decides_if_asked(tmp_path: Path) -> None:
    for number, (kind, accumulate, sized, parallel) in enumerate(
        [
            (Classify, 1, False, "ddp"),
            (Classify, 3, True, "ddp"),
            (Classify, 1, True, "fsdp"),
            (Weighted, 4, False, "ddp"),
        ]
    ):
        stage = kind(accumulate=accumulate, uneven="longest", log_every=1)
        net = make_net(norm=False, dropout=0.0)
        pipe, lines = run(tmp_path / str(number), stage, batches(sized=sized), net=net, parallel=parallel)
        expected, losses = longest_by_hand(accumulate)
        assert lines == []
        assert pipe.steps_done == -(-10 // accumulate)
        assert_weights(pipe, expected, exact=False)
        assert [value for _, value in pipe.history.points("train/loss")] == pytest.approx(losses, rel=1e-5)


class Breaks(Classify):
    """Fails on all ranks in one step."""

    def __init__(self, *, at: int | None, **settings: Any) -> None:
        super().__init__(**settings)
        self.at = at

    def train_step(self, batch: Any) -> Any:
        if self.pipe.steps_done == self.at:
            raise ZeroDivisionError
        return super().train_step(batch)


@ranks(2)
@pytest.mark.parametrize(
    ("uneven", "sized", "at"),
    [
        (None, False, 5),
        ("longest", False, 5),
        ("longest", False, 9),
        ("shortest", True, 5),
        ("longest", True, 5),
        ("longest", True, 9),
    ],
)
def test_a_run_that_resumes_ends_at_the_same_step(uneven: Any, sized: bool, at: int, tmp_path: Path) -> None:
    def train(folder: Path, at: int | None) -> Pipeline:
        pipe = make_pipe(folder, net=make_net(norm=False, dropout=0.0))
        pipe.register_dataset("train", batches(sized=sized))
        pipe.append_stage(Breaks(at=at, uneven=uneven), max_epochs=2)
        pipe.enable_checkpointing(folder, every="2 steps", background=False)
        if at is None:
            pipe.run()
        else:
            with pytest.raises(ZeroDivisionError):
                pipe.run()
        return pipe

    golden = train(tmp_path / "golden", None)
    train(tmp_path / "cut", at)
    again = train(tmp_path / "cut", None)
    assert again.steps_done == golden.steps_done == (20 if uneven == "longest" else 14)
    assert_weights(again, golden.registered_models["net"].bare, exact=True)


class Own(Stage):
    def run_epoch(self) -> None:
        for x, y in self.batches("train"):
            F.cross_entropy(self.models["net"](x), y).backward()
            self.step_optimizer("sgd")
            self.pipe.optimizers["sgd"].zero_grad()


@ranks(2)
def test_a_loop_of_ones_own_ends_with_the_shortest(tmp_path: Path) -> None:
    """Whether loaders know their lengths or not: the steps are those of DDP by hand on as many batches."""
    net = make_net()
    torch.manual_seed(hw.rank())
    by_hand(net, Batches(7, rank=hw.rank()))
    for sized in (False, True):
        ours = make_net()
        torch.manual_seed(hw.rank())
        pipe, lines = run(tmp_path / str(sized), Own(), batches(sized=sized), net=ours)
        assert pipe.steps_done == 7
        assert_weights(pipe, net, exact=True)
        expected = line(7).replace("'classify'", "'own'").removesuffix(', or pass uneven="longest"')
        assert lines == ([expected] if hw.rank() == 0 else [])


class Claims(IterableDataset[Any]):
    """Claims to have 20 samples, and gives others: torch documents the length of its loader as an estimate."""

    def __init__(self, given: int) -> None:
        self.given = given

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.given)
        for number in range(self.given):
            yield torch.randn(FEATURES, generator=generator), number % 3


def claims(given: int) -> Any:
    return TorchLoader(Claims(given), batch_size=5)


OF_TORCH = "ignore:Length of IterableDataset"  # it warns of each sample that is too many


@ranks(2)
@pytest.mark.filterwarnings(OF_TORCH)
def test_the_length_of_an_iterable_dataset_is_not_relied_on(tmp_path: Path) -> None:
    for kind in (Classify, Own):
        pipe, lines = run(tmp_path / kind.__name__, kind(), claims(40 + 5 * hw.rank()))
        assert pipe.steps_done == 8
        assert len(lines) == (hw.rank() == 0)
        assert all("with 1 batch left on rank 1:" in line for line in lines)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings(OF_TORCH)
def test_saves_go_on_after_the_end_that_an_iterable_dataset_claims(tmp_path: Path) -> None:
    assert exact_count(claims(40)) is None and exact_count(FirstBatch(claims(40))) == 4
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", claims(40))
    pipe.append_stage(Classify(), max_epochs=1)
    pipe.enable_checkpointing(tmp_path, every="2 steps", keep_last=10, background=False)
    saved = sorted(path.name for path in pipe.run().checkpoints_dir.glob("step-????????????"))
    assert [int(name[5:]) for name in saved] == [0, 2, 4, 6, 8]


@ranks(2)
def test_what_is_left_of_an_endless_stream_is_not_counted_for_long(tmp_path: Path) -> None:
    def endless() -> Any:
        for number in range(10**9 if hw.rank() else 3):
            yield next(iter(Batches(1, rank=number % 50)))

    pipe, lines = run(tmp_path, Classify(), endless())  # type: ignore[arg-type]
    assert pipe.steps_done == 3
    if hw.rank() == 0:
        assert "with at least 1 batch left on rank 1" in lines[0]
