"""`hw.data.split`: two parts with the labels in the same proportions, by a seed of their own."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import headway as hw
from headway.errors import UsageError


def dataset(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def labels_of(sizes: dict[str, int], seed: int = 1) -> list[str]:
    every = [label for label, count in sizes.items() for _ in range(count)]
    return [every[number] for number in np.random.default_rng(seed).permutation(len(every))]


def indices(part: Any) -> list[int]:
    return list(part.indices)


def test_parts_have_the_labels_in_proportion() -> None:
    sizes = {"cat": 500, "dog": 300, "owl": 180, "eel": 13, "ant": 7}
    labels = labels_of(sizes)
    train, val = hw.data.split(dataset(1000), 0.1, by=labels, seed=0)
    assert sorted(indices(train) + indices(val)) == list(range(1000)), "each sample once"
    assert indices(train) == sorted(indices(train)), "in their order"
    assert len(val) == 100
    counts = Counter(labels[number] for number in indices(val))
    assert counts == {"cat": 50, "dog": 30, "owl": 18, "eel": 1, "ant": 1}  # 1.3 and 0.7 of them
    for label, count in sizes.items():
        assert abs(counts[label] - count / 10) < 1


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_labels_of_any_kind_give_the_same_parts(kind: Any) -> None:
    numbers = [number % 3 for number in range(60)]
    expected = indices(hw.data.split(dataset(60), 0.25, by=numbers, seed=4)[1])
    assert indices(hw.data.split(dataset(60), 0.25, by=kind(numbers), seed=4)[1]) == expected


def test_only_the_seed_decides() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    first = indices(hw.data.split(dataset(50), 10, seed=3)[1])
    torch.manual_seed(2)
    np.random.seed(2)
    before = torch.get_rng_state()
    assert indices(hw.data.split(dataset(50), 10, seed=3)[1]) == first
    assert torch.equal(torch.get_rng_state(), before), "nor does it draw from it"
    assert indices(hw.data.split(dataset(50), 10, seed=4)[1]) != first
    assert len(first) == 10
    with pytest.raises(
        UsageError, match="seed=None: give a whole number"
    ):  # else each rank would draw its own
        hw.data.split(dataset(50), 10, seed=None)
    drawn = Counter(n for seed in range(400) for n in indices(hw.data.split(dataset(20), 5, seed=seed)[1]))
    assert all(60 < drawn[n] < 140 for n in range(20)), "each sample is drawn in a quarter of the cases"


@pytest.mark.parametrize("size", [0, 1.0, 50, 1.5, -1, 0.001])
def test_a_part_without_samples_is_refused(size: Any) -> None:
    with pytest.raises(
        UsageError, match=f"split: size={size!r} of 50 samples leaves a part without any: give"
    ):
        hw.data.split(dataset(50), size)


@pytest.mark.parametrize("size", [True, "10%", [0.9, 0.1]])
def test_a_size_that_is_not_a_number_is_refused(size: Any) -> None:
    with pytest.raises(UsageError, match=f"split: size={re.escape(repr(size))} is not a number: give"):
        hw.data.split(dataset(50), size)


def test_labels_must_fit() -> None:
    with pytest.raises(UsageError, match="split: by has labels of the types NoneType, which have no order"):
        hw.data.split(dataset(50), 0.1, by=[None] * 50)
    with pytest.raises(UsageError, match="split: a list_iterator has no length"):
        hw.data.split(iter([1, 2]), 0.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"split: by has the shape \(49,\) for 50 samples: give one label"):
        hw.data.split(dataset(50), 0.1, by=[0] * 49)
