"""Interleaving: every sample once, slices from all batches, memory of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from headway.data import interleave_batches, interleave_dict_batches
from headway.errors import UsageError


def numbered(sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.arange(sum(sizes)).split(sizes))


def test_each_batch_gets_a_slice_of_each() -> None:
    mixed = interleave_batches(numbered([4, 4]), 2)
    assert [batch.tolist() for batch in mixed] == [[0, 1, 4, 5], [2, 3, 6, 7]]


@given(sizes=st.lists(st.integers(1, 9), max_size=12), num_batches=st.integers(1, 5))
def test_nothing_is_lost_or_doubled(sizes: list[int], num_batches: int) -> None:
    """Rounds that are not full and short last batches included; batches have the sizes that they had."""
    mixed = list(interleave_batches(numbered(sizes), num_batches))
    assert [len(batch) for batch in mixed] == sizes
    assert sorted(torch.cat(mixed).tolist() if mixed else []) == list(range(sum(sizes)))


def test_batches_of_fewer_samples_than_batches_are_mixed_and_none_is_empty() -> None:
    """The mean over an empty batch is not a number."""
    mixed = interleave_batches(numbered([2, 2, 2, 2]), 4)
    assert [batch.tolist() for batch in mixed] == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_one_at_a_time_is_the_input_once() -> None:
    assert [batch.tolist() for batch in interleave_batches(numbered([2, 2]), 1)] == [[0, 1], [2, 3]]


def test_batches_may_be_kept() -> None:
    """A copy to a device may still be reading a batch when the next one is made."""
    kept = list(interleave_batches(numbered([2, 2, 2, 2]), 2))
    assert [batch.tolist() for batch in kept] == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_dicts_are_mixed_alike() -> None:
    batches = [{"x": x, "y": -x} for x in numbered([4, 4, 4])]
    mixed = list(interleave_dict_batches(batches, 3))
    assert all(torch.equal(batch["x"], -batch["y"]) for batch in mixed)
    assert sorted(torch.cat([batch["x"] for batch in mixed]).tolist()) == list(range(12))


def test_it_is_lazy() -> None:
    def endless() -> object:
        while True:
            yield torch.zeros(2)

    assert len(next(iter(interleave_batches(endless(), 2)))) == 2


@pytest.mark.parametrize("function", [interleave_batches, interleave_dict_batches])
def test_a_bad_number_is_refused_at_once(function: object) -> None:
    with pytest.raises(UsageError, match="num_batches=0"):
        function([], 0)
