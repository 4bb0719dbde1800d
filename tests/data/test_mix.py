"""Mixing: exact counts at any time, each sample of exactly one dataset, weights that change at a position."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from headway.data import Mix
from headway.data.order.timeline import Timeline, WeightSegment, count_by_dataset, to_whole_numbers
from headway.errors import UsageError

WEIGHTS = st.lists(st.floats(0, 100), min_size=1, max_size=20).filter(lambda w: sum(w) > 1e-3)


def named(weights: list[float]) -> dict[str, float]:
    return {f"d{number}": weight for number, weight in enumerate(weights)}


@given(weights=WEIGHTS, start=st.integers(0, 2**45))
def test_counts_are_exact_within_the_depth_of_the_tree(weights: list[float], start: int) -> None:
    fixed = to_whole_numbers(named(weights))
    k = np.arange(start, start + 50)
    table = count_by_dataset(k, fixed)
    assert (table.sum(0) == k).all()
    for weight, row in zip(fixed, table, strict=True):
        for at, count in zip(k.tolist(), row.tolist(), strict=True):
            error = abs(count * sum(fixed) - at * weight) / sum(
                fixed
            )  # in whole numbers: 2**45 samples are many
            assert error <= max(1, math.ceil(math.log2(len(weights))))
            assert weight or not count


@given(weights=WEIGHTS, start=st.integers(0, 2**45))
def test_each_sample_adds_one_to_one_dataset(weights: list[float], start: int) -> None:
    steps = np.diff(count_by_dataset(np.arange(start, start + 50), to_whole_numbers(named(weights))), axis=1)
    assert set(np.unique(steps).tolist()) <= {0, 1}
    assert (steps.sum(0) == 1).all()


SEGMENTS = st.lists(
    st.tuples(st.integers(1, 200), st.lists(st.floats(0, 9), min_size=4, max_size=4)), max_size=4
)


def timeline_of(changes: list[tuple[int, list[float]]]) -> Timeline:
    timeline = Timeline([WeightSegment(0, named([1, 2, 3, 4]))])
    for position, weights in changes:
        assume(sum(weights) > 0.1)
        timeline = timeline.with_weights(position, named(weights))
    return timeline


@given(changes=SEGMENTS)
def test_every_dataset_counts_on_without_a_gap_over_all_segments(
    changes: list[tuple[int, list[float]]],
) -> None:
    timeline = timeline_of(changes)
    dataset, cursor = timeline.draw(np.arange(300))
    for number in range(4):
        mine = cursor[dataset == number]
        assert mine.tolist() == list(range(len(mine)))
        assert timeline.counts_at(300)[f"d{number}"] == len(mine)


@given(changes=SEGMENTS, at=st.integers(0, 300))
def test_a_position_means_the_same_alone(changes: list[tuple[int, list[float]]], at: int) -> None:
    timeline = timeline_of(changes)
    dataset, cursor = timeline.draw(np.arange(301))
    alone = timeline.draw(np.array([at]))
    assert (dataset[at], cursor[at]) == (alone[0][0], alone[1][0])


@given(changes=SEGMENTS, position=st.integers(1, 250))
def test_a_change_leaves_what_came_before_and_what_is_planned(
    changes: list[tuple[int, list[float]]], position: int
) -> None:
    before = timeline_of(changes)
    after = before.with_weights(position, {"d0": 50})
    past = np.arange(position)
    assert all(np.array_equal(one, two) for one, two in zip(before.draw(past), after.draw(past), strict=True))
    assert after.weights_at(position)["d0"] == 50
    planned = [segment for segment in before.segments if segment.start > position]
    assert [segment for segment in after.segments if segment.start > position] == planned


def test_proportions_are_those_asked_for() -> None:
    timeline = Timeline([WeightSegment(0, {"a": 0.5, "b": 0.3, "c": 0.2})])
    assert timeline.counts_at(10**6) == {"a": 500_000, "b": 300_000, "c": 200_000}
    assert timeline.counts_at(10**12) == {"a": 5 * 10**11, "b": 3 * 10**11, "c": 2 * 10**11}
    odd = {"x": 1 / 3, "y": 0.1, "z": 1e-9}
    counts = Timeline([WeightSegment(0, odd)]).counts_at(10**15)
    total = sum(map(Fraction, odd.values()))
    assert all(abs(counts[name] - Fraction(odd[name]) / total * 10**15) <= 2 for name in odd)


def test_a_schedule_keeps_the_weights_it_does_not_name() -> None:
    mix = Mix({"a": 1, "b": 2}, schedule=[(10, {"a": 5}), (20, {"b": 0})])
    assert mix.schedule == [(10, {"a": 5, "b": 2}), (20, {"a": 5, "b": 0})]
    assert mix.shards == {"a": "a", "b": "b"}


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Mix({}), "one of them above 0"),
        (lambda: Mix(["a", "b"]), "a weight for each name"),
        (lambda: Mix({"a": -1.0, "b": 2}), "finite and at least 0"),
        (lambda: Mix({"a": math.nan}), "finite and at least 0"),
        (lambda: Mix({"a": 0}), "above 0"),
        (lambda: Mix({"a": 1}, shards={"b": "x"}), "'b' is not a valid dataset of the mix; valid: a"),
        (lambda: Mix({"a": 1}, schedule=[(5, {"c": 1})]), "'c' is not a valid dataset of the mix"),
        (lambda: Mix({"a": 1}, schedule=[(5, {}), (5, {})]), "increasing numbers"),
        (lambda: Mix({"a": 1, "b": 1}, schedule=[(5, {"a": 0, "b": 0})]), "above 0"),
        (lambda: Timeline([WeightSegment(3, {"a": 1})]), "begins at position 0"),
        (lambda: Timeline([WeightSegment(0, {"a": 1}), WeightSegment(0, {"a": 1})]), "increasing positions"),
    ],
)
def test_bad_mixes_are_refused(build: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build()
