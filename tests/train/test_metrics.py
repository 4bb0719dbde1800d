"""The numbers do not depend on the ranks, and ranks that disagree are told so by name."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as c10d
from torch import Tensor

import headway as hw
from headway.errors import UsageError
from headway.testing import ranks
from headway.train.metrics.meter import MetricAccumulator

CPU = torch.device("cpu")
SAMPLES = 1_003
BATCH = 64


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, generator=generator), torch.randint(0, 10, (SAMPLES,), generator=generator)


def evaluate(rank: int, world_size: int) -> dict[str, object]:
    """Metrics over unpadded shards, as a validation computes them: uneven shards, short last batches."""
    losses, labels = samples()
    meter = MetricAccumulator(CPU)
    mine = range(rank, SAMPLES, world_size)
    for start in range(0, len(mine), BATCH):
        index = torch.tensor(mine[start : start + BATCH])
        loss, label = losses[index], labels[index]
        meter.log("loss", loss.mean(), weight=len(index))
        meter.log("tokens", (loss * label).sum() / label.sum(), weight=label.sum())  # weights may be tensors
        meter.log("correct", (label == 3).sum(), reduce="sum")  # integers
        meter.log("classes", torch.bincount(label, minlength=10), reduce="sum")  # vectors
        meter.log("number", float(loss.mean()), weight=len(index))  # numbers
        meter.log("least", loss.min(), reduce="min")
        meter.log("most", float(loss.max()), reduce="max")
        if start == 2 * BATCH:
            meter.reduce()  # a log point in the middle changes nothing
    meter.reduce()
    return dict(meter.finish_epoch())


def check_against_truth(found: dict[str, object]) -> None:
    losses, labels = samples()
    losses64 = losses.double()
    assert found["correct"] == (labels == 3).sum().item()
    assert found["classes"] == torch.bincount(labels, minlength=10).tolist()
    assert found["least"] == losses.min().item()
    assert found["most"] == losses.max().item()
    assert found["loss"] == pytest.approx(losses64.mean().item(), rel=1e-6)
    assert found["number"] == pytest.approx(losses64.mean().item(), rel=1e-6)
    weighted = (losses64 * labels).sum() / labels.sum()
    assert found["tokens"] == pytest.approx(weighted.item(), rel=1e-6)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=ranks(2)), pytest.param(3, marks=ranks(3))])
def test_evaluation_is_the_same_on_one_two_and_three_ranks(size: int) -> None:
    rank = hw.rank() if size > 1 else 0
    found = evaluate(rank, size)
    check_against_truth(found)
    if size > 1:
        assert hw.all_gather_object(found) == [found] * size  # to the last bit on all ranks


@ranks(4)
def test_evaluation_is_the_same_on_four_ranks() -> None:
    check_against_truth(evaluate(hw.rank(), 4))


@ranks(3)
def test_a_rank_without_any_data_takes_part() -> None:
    meter = MetricAccumulator(CPU)
    for value in (1.0, 2.0) if hw.rank() != 1 else ():
        meter.log("loss", torch.tensor(value), weight=2)
        meter.log("vector", torch.tensor([value, 0.0]), reduce="max")
    assert meter.reduce().values == {"loss": 1.5, "vector": [2.0, 0.0]}
    meter.log("loss", 3.0) if hw.rank() == 0 else None
    assert meter.reduce().values == {"loss": 3.0}
    assert meter.finish_epoch() == {"loss": (8 * 1.5 + 3) / 9, "vector": [2.0, 0.0]}
    assert meter.finish_epoch() == {}


@ranks(3)
def test_different_names_are_an_error_that_names_ranks_and_metrics() -> None:
    meter = MetricAccumulator(CPU)
    meter.log("loss", 1.0)
    meter.reduce()
    meter.log("loss", 1.0)
    if hw.rank() == 1:
        meter.log("accuracy", torch.zeros(5))
    else:
        meter.log("f1", 1.0)
    with pytest.raises(UsageError) as caught:
        meter.reduce()
    message = str(caught.value)
    assert "'accuracy' (mean of shape (5,)) on rank 1 only" in message
    assert "'f1' (mean) on rank 0, 2 only" in message
    assert "'loss'" not in message


@ranks(3)
def test_a_metric_that_one_rank_alone_adds_later_is_noticed_by_all() -> None:
    meter = MetricAccumulator(CPU)
    meter.log("loss", 1.0)
    meter.reduce()
    meter.log("loss", 1.0)
    if hw.rank() == 2:
        meter.log("extra", 1.0)
    with pytest.raises(UsageError, match=r"'extra' \(mean\) on rank 2 only"):
        meter.reduce()


@ranks(2)
def test_a_log_point_is_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("all_reduce", "all_gather", "broadcast", "all_gather_object"):
        original = getattr(c10d, name)
        monkeypatch.setattr(
            c10d, name, lambda *a, _n=name, _f=original, **k: (calls.append(_n), _f(*a, **k))[1]
        )
    meter = MetricAccumulator(CPU)

    def log_all() -> None:
        for number in range(20):
            meter.log(f"metric-{number}", torch.tensor(1.0), weight=3)
        meter.log("least", 1.0, reduce="min")

    log_all()
    meter.reduce()  # the first one agrees on the names
    calls.clear()
    log_all()
    assert calls == []
    meter.reduce(flags=1)
    assert calls == ["all_gather"]


@ranks(3)
def test_flags_ride_along() -> None:
    meter = MetricAccumulator(CPU)
    assert meter.reduce(flags=5 if hw.rank() == 2 else 0).flags == [0, 0, 5]


@ranks(2)
def test_rank_metrics_stay_on_their_rank() -> None:
    meter = MetricAccumulator(CPU)
    meter.log("wait", float(hw.rank()), scope="rank")
    if hw.rank() == 1:
        meter.log("odd", 7, scope="rank")
    point = meter.reduce()
    assert point.values == {}
    assert point.local == ({"wait": 0.0} if hw.rank() == 0 else {"wait": 1.0, "odd": 7.0})


@ranks(2)
def test_who_brought_the_nan_is_known() -> None:
    meter = MetricAccumulator(CPU)
    meter.log("loss", torch.tensor(float("nan") if hw.rank() == 1 else 1.0))
    meter.log("fine", 1.0)
    assert meter.reduce().not_finite == {"loss": [1]}


def test_a_value_of_weight_0_does_not_count() -> None:
    meter, nan = MetricAccumulator(CPU), float("nan")
    for value in (nan, torch.tensor(nan)):
        for weight in (0, torch.tensor(0)):
            meter.log("a", value, weight=weight)
    meter.log("a", 2**24 + 1, weight=torch.tensor(3))
    meter.log("a", torch.tensor(2**24 + 1), weight=torch.tensor(3))
    assert meter.reduce().values == {"a": 2**24 + 1}


def test_a_value_is_taken_when_it_is_logged() -> None:
    """Users update buffers in place; what was logged is what was there then."""
    meter, value = MetricAccumulator(CPU), torch.tensor(1.0)
    meter.log("mean", value)
    meter.log("last", value, reduce="last")
    value.fill_(100.0)
    assert meter.reduce().values == {"mean": 1.0, "last": 1.0}


def test_last_is_the_last() -> None:
    meter = MetricAccumulator(CPU)
    for value in (1.0, torch.tensor(2.0), 3.0):
        meter.log("lr", value, reduce="last")
        meter.reduce()
    assert meter.finish_epoch() == {"lr": 3.0}


def test_logging_keeps_no_graph() -> None:
    meter = MetricAccumulator(CPU)
    parameter = torch.ones((), requires_grad=True)
    meter.log("loss", parameter * 2)
    assert not meter._cells["loss"].total.requires_grad


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float16, torch.uint8])
def test_values_of_any_type(dtype: torch.dtype) -> None:
    meter = MetricAccumulator(CPU)
    meter.log("mean", torch.ones((), dtype=dtype), weight=3)
    meter.log("most", torch.ones((), dtype=dtype), reduce="max")
    assert meter.reduce().values == {"mean": 1.0, "most": 1.0}


def test_counts_are_exact_beyond_single_precision() -> None:
    meter = MetricAccumulator(CPU)
    meter.log("tokens", torch.tensor(2**40 + 1), reduce="sum")
    meter.log("tokens", torch.tensor(1), reduce="sum")
    assert meter.reduce().values == {"tokens": 2**40 + 2}


def test_state_survives_as_json() -> None:
    meter = MetricAccumulator(CPU)
    meter.log("loss", torch.tensor([1.0, 3.0]), weight=3)
    meter.reduce()
    restored = MetricAccumulator(CPU)
    restored.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    for one in (meter, restored):
        one.log("loss", torch.tensor([5.0, 7.0]), weight=1)
        one.reduce()
    assert restored.finish_epoch() == meter.finish_epoch() == {"loss": [2.0, 4.0]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduce": "median"}, "metric 'loss': reduce='median' is unknown: use one of \"mean\", \"sum\""),
        ({"scope": "node"}, "metric 'loss': scope='node' is unknown: use \"global\" or \"rank\""),
        ({"value": "0.5"}, "metric 'loss' is of type str: log a number or a tensor"),
    ],
)
def test_bad_calls_name_the_metric_and_the_remedy(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"name": "loss", "value": 1.0} | change
    with pytest.raises(UsageError) as caught:
        MetricAccumulator(CPU).log(**arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_metric_keeps_its_shape_and_reduction() -> None:
    meter = MetricAccumulator(CPU)
    meter.log("loss", torch.zeros(3))
    with pytest.raises(UsageError, match=r"shape \(3,\) and now has shape \(2,\)"):
        meter.log("loss", torch.zeros(2))
    with pytest.raises(UsageError, match='"mean" and now with "sum"'):
        meter.log("loss", torch.zeros(3), reduce="sum")
