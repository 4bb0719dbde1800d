"""The numbers do not depend on the ranks, and ranks that disagree are told so by name."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as c10d
from torch import Tensor
from toys import Batches, Classify, make_pipe

import headway as hw
from headway.errors import UsageError
from headway.testing import ranks
from headway.train.metrics.epoch_metrics import check_names, compute_metrics
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


class RankDependent:
    def __init__(self, step: float) -> None:
        self.step = step

    def compute(self) -> Tensor:
        return torch.tensor([1.0 + self.step * hw.rank(), math.nan])

    def reset(self) -> None: ...


@ranks(2)
def test_metrics_that_ranks_compute_are_equal_or_refused() -> None:
    """Ranks decide by them when to stop. Rounding on a GPU is no difference; all get rank 0's value."""
    (value,) = compute_metrics({"val/f1": RankDependent(1e-6)}, {}).values()
    assert isinstance(value, list) and value[0] == 1.0
    with pytest.raises(UsageError, match=r"'val/f1' is \[1.0, nan\] on rank 0 and \[2.0, nan\] on rank 1"):
        compute_metrics({"val/f1": RankDependent(1.0)}, {})


class OfRoot(RankDependent):
    def compute(self) -> Any:
        return {"f1": 1.0} if hw.is_root() else {}


@ranks(2)
def test_a_metric_that_only_rank_0_computes_is_refused_on_all_ranks() -> None:
    with pytest.raises(UsageError, match=r"'val/f1' is 1.0 on rank 0 and None on rank 1"):
        compute_metrics({"val": OfRoot(0.0)}, {})
    assert hw.all_gather_object(hw.rank()) == [0, 1], "the ranks are at the same exchange"


@ranks(3)
def test_rank_0_alone_compares_what_ranks_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A confusion matrix of each of 64 ranks would be gigabytes if every rank got all of them."""
    sent: list[int] = []
    put = c10d.PrefixStore.set
    monkeypatch.setattr(
        c10d.PrefixStore, "set", lambda store, key, value: (sent.append(len(value)), put(store, key, value))
    )
    compute_metrics({"val/f1": RankDependent(1e-6)}, {})
    own = len(json.dumps({"value": {"val/f1": [1.0, math.nan]}}))
    assert sent and max(sent) < 1.5 * own


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


@ranks(2)
def test_a_value_of_weight_0_counts_in_no_reduction() -> None:
    meter, nan = MetricAccumulator(CPU), float("nan")
    for weight in (0, torch.tensor(0), torch.tensor(False)):
        for kind, value in (("min", 0.0), ("max", 9.0), ("sum", 5.0), ("last", nan)):
            for each in (value, torch.tensor(value)):
                if hw.rank() == 1:
                    meter.log(kind, 3.0, reduce=kind)  # type: ignore[arg-type]
                meter.log(kind, each, weight=weight, reduce=kind)  # type: ignore[arg-type]
    found = meter.reduce()
    assert found.values == {"min": 3.0, "max": 3.0, "sum": 18.0, "last": 3.0}
    assert found.not_finite == {}


def test_of_a_value_the_host_does_not_read_the_weight() -> None:
    """It would wait for the device: a tensor without values stands for one whose values are not there yet."""
    device = torch.device("meta")
    meter = MetricAccumulator(device)
    for kind in ("mean", "sum", "min", "max", "last"):
        for value in (1.0, torch.ones((), device=device)):
            meter.log(kind, value, weight=torch.ones((), device=device), reduce=kind)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="meta"):
        meter.reduce()


@pytest.mark.parametrize("kind", ["min", "max"])
def test_nan_is_the_least_and_the_most(kind: Any) -> None:
    nan = float("nan")
    for values in ((nan,), (1.0, nan), (nan, 1.0), (torch.tensor(2.0), nan), (nan, torch.tensor(2.0))):
        meter = MetricAccumulator(CPU)
        for value in values:
            meter.log("a", value, reduce=kind)
        point = meter.reduce()
        assert math.isnan(point.values["a"])  # type: ignore[arg-type]
        assert point.not_finite == {"a": [0]}


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
        ({"weight": torch.ones(3)}, "metric 'loss' was logged with a weight of shape (3,): give a number"),
    ],
)
def test_bad_calls_name_the_metric_and_the_remedy(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"name": "loss", "value": 1.0} | change
    with pytest.raises(UsageError) as caught:
        MetricAccumulator(CPU).log(**arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_numbers_of_numpy_are_logged() -> None:
    meter = MetricAccumulator(CPU)
    for value in (np.float32(0.5), np.float64(1.5)):
        meter.log("f1", value)
        meter.log("count", np.int64(3), reduce="sum")
    assert meter.reduce().values == {"f1": 1.0, "count": 6.0}


def test_a_metric_keeps_its_shape_and_reduction() -> None:
    meter = MetricAccumulator(CPU)
    meter.log("loss", torch.zeros(3))
    with pytest.raises(UsageError, match=r"shape \(3,\) and now has shape \(2,\)"):
        meter.log("loss", torch.zeros(2))
    with pytest.raises(UsageError, match='"mean" and now with "sum"'):
        meter.log("loss", torch.zeros(3), reduce="sum")


# --- against brute force


class Logged(NamedTuple):
    """What a rank logs, and which number that is."""

    name: str
    value: Tensor | float
    weight: Tensor | float
    numbers: list[float]
    """the value, flat"""
    factor: float
    """the weight"""


KINDS: dict[str, tuple[str, str, tuple[int, ...]]] = {  # name: reduction, group, shape
    f"{group}{kind}{'-'.join(map(str, shape))}": (kind, group, shape)
    for group in ("", "a/", "b/")
    for kind in ("mean", "sum", "min", "max", "last")
    for shape in ((), (2,))
}
NUMBERS = (0.0, 1.0, -2.5, 7.0, 0.25, 3.0, -1.0)  # of which sums are exact in any order
ODD = (math.nan, math.inf, -math.inf)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16)


def draw(random: random.Random, name: str) -> Logged:
    shape = KINDS[name][2]
    dtype = random.choice(DTYPES)
    numbers = [random.choice(ODD if random.random() < 0.05 else NUMBERS) for _ in range(math.prod(shape))]
    if not dtype.is_floating_point:
        numbers = [float(int(n)) if math.isfinite(n) else 1.0 for n in numbers]
    if dtype == torch.bool:
        numbers = [float(n != 0) for n in numbers]
    value: Tensor | float = torch.tensor(numbers).to(dtype).reshape(shape)
    if not shape and random.random() < 0.5:
        value = {torch.int64: int, torch.bool: bool}.get(dtype, float)(numbers[0])
    weight: Tensor | float = random.choice((0, 0.0, 1, 2, 0.5, True, 8))
    factor = float(weight)
    if random.random() < 0.4:
        weight = torch.tensor(weight)
    return Logged(name, value, weight, numbers, factor)


def plan(seed: int, size: int) -> list[list[list[Logged]]]:
    """For each log point what each rank logs: of a group all names at first, then any, or nothing."""
    drawn, known = random.Random(seed), [set[str]() for _ in range(size)]
    names = sorted(drawn.sample(sorted(KINDS), 8))
    points = []
    for _ in range(3):
        points.append([list[Logged]() for _ in range(size)])
        for rank in range(size):
            for group in ("", "a/", "b/"):
                mine = [name for name in names if KINDS[name][1] == group]
                if drawn.random() < 0.3:
                    continue
                first = mine if group not in known[rank] else []
                known[rank].add(group)
                for name in [*first, *drawn.choices(mine, k=drawn.randrange(5) if mine else 0)]:
                    points[-1][rank].append(draw(drawn, name))
    return points


def plain_reduce(kind: str, logged: Sequence[Logged]) -> list[float] | None:
    """The reduction of what was logged, as one would write it for a list of numbers."""
    counted = [each for each in logged if each.factor]
    if not counted:
        return None
    if kind == "last":
        return counted[-1].numbers
    found = []
    for column in zip(*(each.numbers for each in counted), strict=True):
        if kind == "mean":
            total = sum(n * each.factor for n, each in zip(column, counted, strict=True))
            found.append(total / sum(each.factor for each in counted))
        elif kind == "sum":
            found.append(sum(column))
        else:
            extreme = min(column) if kind == "min" else max(column)
            found.append(math.nan if any(map(math.isnan, column)) else extreme)
    return found


def plain_results(points: Sequence[Sequence[Sequence[Logged]]]) -> dict[str, list[float]]:
    """The metrics of all ranks over some log points, flat: "last" is that of the lowest rank at the last of them."""
    found = {}
    for name, (kind, *_) in KINDS.items():
        by_point = [[[one for one in rank if one.name == name] for rank in ranks] for ranks in points]
        if kind == "last":
            counted = [rank for ranks in by_point for rank in ranks[::-1] if any(one.factor for one in rank)]
            by_point = [[list(counted[-1])]] if counted else []
        result = plain_reduce(kind, [one for ranks in by_point for rank in ranks for one in rank])
        if result is not None:
            found[name] = result
    return found


def flat(values: Any) -> dict[str, str]:
    """Comparable, also NaN."""
    return {name: str(value if isinstance(value, list) else [value]) for name, value in values.items()}


def check_against_brute_force(rank: int, size: int) -> None:
    for seed in range(40):
        meter, points = MetricAccumulator(CPU), plan(seed, size)
        for ranks_ in points:
            for one in ranks_[rank]:
                kind, group, _ = KINDS[one.name]
                meter.log(one.name, one.value, weight=one.weight, reduce=kind, group=group)  # type: ignore[arg-type]
                meter.log(f"rank/{one.name}", one.value, weight=one.weight, reduce=kind, scope="rank")  # type: ignore[arg-type]
            point = meter.reduce()
            assert flat(point.values) == flat(plain_results([ranks_])), seed
            local = {f"rank/{name}": value for name, value in plain_results([[ranks_[rank]]]).items()}
            assert flat(point.local) == flat(local), seed
            by_rank = [plain_results([[mine]]) for mine in ranks_]
            odd = {
                name: [n for n, each in enumerate(by_rank) if not all(map(math.isfinite, each.get(name, ())))]
                for name in point.values
            }
            assert dict(point.not_finite) == {name: who for name, who in odd.items() if who}, seed
        assert flat(meter.finish_epoch()) == flat(plain_results(points)), seed


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=ranks(2)), pytest.param(3, marks=ranks(3))])
def test_any_sequence_of_calls_equals_brute_force(size: int) -> None:
    check_against_brute_force(hw.rank() if size > 1 else 0, size)


@ranks(3)
def test_a_rank_may_have_nothing_of_a_group_but_not_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, calls, gather = MetricAccumulator(CPU), list[int](), c10d.all_gather
    monkeypatch.setattr(c10d, "all_gather", lambda *a: (calls.append(1), gather(*a))[1])
    for _ in range(2):
        calls.clear()
        meter.log("val/loss", 1.0, group="val/")
        if hw.rank() != 1:
            meter.log("ood/loss", 2.0 + hw.rank(), group="ood/")
            meter.log("ood/f1", 3.0, group="ood/")
        assert meter.reduce().values == {"val/loss": 1.0, "ood/loss": 3.0, "ood/f1": 3.0}
    assert len(calls) == 1  # once they agree
    meter.log("ood/loss", 1.0, group="ood/")
    with pytest.raises(UsageError, match=r"different metrics: 'ood/f1' \(mean\) on rank 0, 2 only\. Log"):
        meter.reduce()
    meter = MetricAccumulator(CPU)
    meter.log("ood/x", 1.0, group="val/" if hw.rank() else "ood/")
    with pytest.raises(
        UsageError, match=r"'ood/x' \(mean\) on rank 0 only; 'ood/x' \(mean\) on rank 1, 2 only"
    ):
        meter.reduce()


@pytest.mark.parametrize("name", ["loss\x1b[2J", "loss\u202e", "a\nb"])
def test_a_metric_has_a_name_that_a_terminal_shows(name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid name of a metric: give a line of printable text"):
        MetricAccumulator(CPU).log(name, 1.0)
    with pytest.raises(UsageError, match="is not a valid name of a metric: give a line of printable text"):
        check_names([name], {})


def test_a_secret_in_the_name_of_a_metric_does_not_reach_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "ghp_" + "a1B2" * 9
    monkeypatch.setenv("SITE_TOKEN", "correct-horse-battery")
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(2))

    class Named(Classify):
        def step(self, batch: Any) -> Tensor:
            loss = super().step(batch)
            self.log(f"loss/{secret}", loss)
            self.log("loss/correct-horse-battery", loss, scope="rank")
            return loss

    pipe.append_stage(Named(), max_epochs=1)
    pipe.enable_checkpointing(tmp_path, every="1ep")
    pipe.run()
    texts = [path.read_bytes() for path in tmp_path.rglob("*.jsonl")]
    assert any(b"loss/[redacted]" in text for text in texts)
    for text in texts:
        assert secret.encode() not in text and b"correct-horse-battery" not in text
