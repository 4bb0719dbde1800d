"""A step that returns a loss and its weight: batches and ranks are averaged as one process averages all tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import make_net, make_pipe

import headway as hw
from headway.errors import UsageError
from headway.testing import ranks
from headway.train import Fsdp, Pipeline, TrainValStage

IGNORED = -100
BATCHES, TOKENS, FEATURES = 7, 12, 10
LAST = 5  # the batch in which one rank has a single token


def batch_of(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens, of which each rank and batch trains on another number."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    x = torch.randn(TOKENS, FEATURES, generator=generator)
    y = x[:, :3].argmax(1)
    trained = 1 if (number, rank) == (LAST, 1) else 1 + int(torch.randint(TOKENS, (), generator=generator))
    y[trained:] = IGNORED
    return x, y


def mean_over_tokens(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    return F.cross_entropy(net(x), y, ignore_index=IGNORED)


class Tokens(TrainValStage):
    def __init__(
        self, weigh: Callable[[Tensor], Any] = lambda y: (y != IGNORED).sum(), **settings: Any
    ) -> None:
        super().__init__(**{"log_every": 1} | settings)
        self.weigh = weigh

    def step(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        loss = F.cross_entropy(self.models["net"](x).float(), y, ignore_index=IGNORED)
        return loss, self.weigh(y)


def train(folder: Path, stage: Tokens, *, rank: int, **model: Any) -> Pipeline:
    pipe = Pipeline(name="toy", root=folder)
    pipe.register_model("net", make_net(norm=False, dropout=0.0), **model)
    pipe.register_optimizer("sgd", lambda ps: torch.optim.SGD(ps, lr=0.3), model="net")
    pipe.register_dataset("train", [batch_of(number, rank) for number in range(BATCHES)])
    pipe.register_dataset("val", [batch_of(number, rank) for number in range(2)])
    pipe.append_stage(stage, max_epochs=1)
    pipe.run()
    return pipe


def check(pipe: Pipeline, *, accumulate: int, size: int) -> None:
    """Compares weights and losses with those of one process that has the batches of all ranks in one."""
    net = make_net(norm=False, dropout=0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    losses = []
    for start in range(0, BATCHES, accumulate):
        numbers = range(start, min(start + accumulate, BATCHES))
        optimizer.zero_grad()
        loss = mean_over_tokens(net, [batch_of(number, rank) for number in numbers for rank in range(size)])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    got = [value for _, value in pipe.history.points("train/loss")]
    assert got == pytest.approx(losses, rel=1e-5)
    for (name, ours), expected in zip(
        pipe.registered_models["net"].bare.state_dict().items(), net.state_dict().values(), strict=True
    ):
        whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6, msg=name)
    with torch.no_grad():
        expected = mean_over_tokens(
            net, [batch_of(number, rank) for number in range(2) for rank in range(size)]
        )
    assert pipe.history["val/loss"] == pytest.approx([expected.item()], rel=1e-5)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_process_averages_a_window_over_tokens(accumulate: int, tmp_path: Path) -> None:
    check(train(tmp_path, Tokens(accumulate=accumulate), rank=0), accumulate=accumulate, size=1)


@ranks(2)
def test_two_ranks_equal_one_process_with_the_concatenated_batch(tmp_path: Path) -> None:
    for number, (accumulate, model) in enumerate(
        [(1, {}), (3, {}), (7, {}), (1, {"parallel": "fsdp"}), (3, {"parallel": Fsdp(blocks=(nn.Linear,))})]
    ):
        stage = Tokens(accumulate=accumulate, gradient_clip=1e9)
        pipe = train(tmp_path / str(number), stage, rank=hw.rank(), **model)
        check(pipe, accumulate=accumulate, size=2)


@ranks(2)
def test_weights_may_be_numbers_and_samples_stay_samples(tmp_path: Path) -> None:
    pipe = train(tmp_path, Tokens(lambda y: int((y != IGNORED).sum()), accumulate=2), rank=hw.rank())
    check(pipe, accumulate=2, size=2)
    assert pipe.steps_done == 4


@pytest.mark.usefixtures("alone")
def test_a_window_of_fp16_does_not_overflow_by_its_weights(tmp_path: Path) -> None:
    """Gradients times 60,000 tokens and the first loss scale, 65,536, are beyond the range of fp16."""
    stage = Tokens(lambda y: (y != IGNORED).sum() * 5_000, accumulate=3, precision="fp16")
    pipe = train(tmp_path, stage, rank=0)
    assert [value for _, value in pipe.history.points("train/skipped_steps")] == [0.0] * 3


class Shrinking(Tokens):
    """Its first batch has by far the most tokens; a run of it may be cut."""

    def __init__(self, cut_at: int | None) -> None:
        super().__init__(accumulate=2, precision="fp16", val_every=None)
        self.cut_at = cut_at

    def step(self, batch: Any) -> Any:
        if self.pipe.steps_done == self.cut_at:
            raise ZeroDivisionError
        loss, weight = super().step(batch)
        return loss, weight * (1 if self.pipe.steps_done else 5_000)


@pytest.mark.usefixtures("alone")
def test_weights_of_fp16_are_counted_in_the_same_unit_after_a_resume(tmp_path: Path) -> None:
    units = []
    for folder, cut_at in (("whole", None), ("cut", 2), ("cut", None)):
        pipe = Pipeline(name="toy", root=tmp_path / folder)
        pipe.register_model("net", make_net(norm=False, dropout=0.0))
        pipe.register_optimizer("sgd", lambda ps: torch.optim.SGD(ps, lr=0.3), model="net")
        pipe.register_dataset("train", [batch_of(number, 0) for number in range(BATCHES)])
        stage = Shrinking(cut_at)
        pipe.append_stage(stage, max_epochs=1)
        pipe.enable_checkpointing(tmp_path / folder, every="1 step", background=False)
        with pytest.raises(ZeroDivisionError) if cut_at else nullcontext():
            pipe.run()
        units.append(stage._loop.optimizer_step._unit.item())
    assert units == units[:1] * 3 and units[0] > 100


@pytest.mark.usefixtures("alone")
def test_a_step_without_tokens_changes_nothing(tmp_path: Path) -> None:
    for accumulate in (1, 2):
        pipe = train(tmp_path, Tokens(lambda _: 0.0, accumulate=accumulate, val_every=None), rank=0)
        for ours, start in zip(
            pipe.models["net"].parameters(), make_net(norm=False).parameters(), strict=True
        ):
            assert torch.equal(ours, start)


class OnePadding(Tokens):
    """The third batch is all padding: the mean over no token is NaN, with the weight 0."""

    def step(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        padding = torch.equal(x, batch_of(2, 0)[0])
        return super().step((x, torch.full_like(y, IGNORED) if padding else y))


@pytest.mark.usefixtures("alone")
def test_a_batch_of_padding_has_no_part_in_the_mean(tmp_path: Path) -> None:
    pipe = Pipeline(name="toy", root=tmp_path)
    net = make_net(norm=False, dropout=0.0)
    pipe.register_model("net", net)
    pipe.register_optimizer("sgd", torch.optim.SGD(net.parameters(), lr=0.3))
    for name in ("train", "val"):
        pipe.register_dataset(name, [batch_of(number, 0) for number in range(BATCHES)])
    pipe.append_stage(OnePadding(accumulate=2), max_epochs=1)
    pipe.run()
    assert all(p.isfinite().all() for p in net.parameters())
    assert [value == value for _, value in pipe.history.points("train/loss")] == [True] * 4
    with torch.no_grad():
        expected = mean_over_tokens(net, [batch_of(number, 0) for number in range(BATCHES) if number != 2])
    assert pipe.history["val/loss"] == pytest.approx([expected.item()], rel=1e-5)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("weigh", "message"),
    [
        (lambda _: -1, "stage 'tokens' returned the weight -1 with its loss: give a number of at least 0"),
        (lambda y: y, "stage 'tokens' returned the weight tensor"),
        (lambda _: None, "stage 'tokens' returned the weight None with its loss"),
    ],
)
def test_other_weights_are_refused(weigh: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        train(tmp_path, Tokens(weigh), rank=0)


class Mixed(Tokens):
    def step(self, batch: Any) -> Any:
        returned = super().step(batch)
        return returned if self.pipe.current_stage is not self or len(self.seen) % 2 else returned[0]

    def train_step(self, batch: Any) -> Any:
        self.seen.append(1)
        return self.step(batch)

    def pre_stage(self) -> None:
        self.seen: list[int] = []


class MixedValidation(Tokens):
    def val_step(self, batch: Any) -> Any:
        returned = self.step(batch)
        return returned if torch.equal(batch[0], batch_of(2, 0)[0]) else returned[0]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("stage", "steps"),
    [
        (Mixed(accumulate=2), 0),  # within a step
        (Mixed(log_every=50), 1),  # between two steps, and not only at the log point after them
        (Mixed(), 1),  # or after it: the mean of the epoch is not one of samples and tokens
        (MixedValidation(), BATCHES),
    ],
)
def test_weights_of_some_batches_are_refused_where_they_differ(
    stage: Tokens, steps: int, tmp_path: Path
) -> None:
    pipe = make_pipe(tmp_path, net=make_net(norm=False, dropout=0.0))
    for name in ("train", "val"):
        pipe.register_dataset(name, [batch_of(number, 0) for number in range(BATCHES)])
    pipe.append_stage(stage, max_epochs=1)
    with pytest.raises(UsageError, match="returned a weight with the loss of some batches only: return"):
        pipe.run()
    assert pipe.steps_done == steps


class OnSomeRanks(Tokens):
    def step(self, batch: Any) -> Any:
        returned = super().step(batch)
        return returned if hw.rank() else returned[0]


@ranks(2)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_on_some_ranks_are_refused_on_all(accumulate: int, tmp_path: Path) -> None:
    """They would run other collectives than the rest, and all would wait."""
    with pytest.raises(UsageError, match="returned a weight with the loss on rank 1 only: return"):
        train(tmp_path, OnSomeRanks(accumulate=accumulate), rank=hw.rank())
