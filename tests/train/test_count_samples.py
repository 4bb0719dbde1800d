"""The number of samples in a batch that `count_samples` finds: right, or the stage has to define it."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from toys import Classify

from headway.errors import UsageError

X, Y = torch.ones(4, 3, 8, 8), torch.ones(4, dtype=torch.long)
Pair = namedtuple("Pair", "image label")


@dataclass
class Record:
    name: list[str]
    x: Tensor


COUNTED: dict[str, tuple[Any, int]] = {
    "a tensor": (X, 4),
    "torch's pair": ([X, Y], 4),
    "a named tuple": (Pair(X, Y), 4),
    "arrays of numpy": ((np.ones((4, 2)), np.ones(4)), 4),
    "a dict": ({"name": ["a"] * 4, "x": X}, 4),
    "nested dicts": ({"inputs": {"ids": X}, "size": torch.tensor(1.0)}, 4),
    "a dataclass": (Record(["a"] * 4, X), 4),
    "two views and labels": ([[X[:, :2], X], Y], 4),
    "images of several sizes and their numbers": ((list(X), Y), 4),
    "a pair in a tuple": ((Pair(X, Y), "train"), 4),
    "texts": (["a", "b", "c"], 3),
    "columns of texts": ({"text": ["a", "b"], "score": [1, 2.5]}, 2),
    "a number": (7, 1),
    "a text": ("abc", 1),
    "nothing": (None, 1),
    "a single number": (torch.tensor(3.0), 1),
}


@pytest.mark.parametrize("case", COUNTED)
def test_samples_are_counted(case: str) -> None:
    batch, expected = COUNTED[case]
    assert Classify().count_samples(batch) == expected


class Graph:
    """As a batch of PyTorch Geometric: its tensors have rows for nodes, not for graphs."""

    x = torch.ones(9, 2)


REFUSED: dict[str, Any] = {
    "samples of torchvision's detection": tuple(zip(*[(x, {"boxes": Y}) for x in X], strict=True)),
    "two views in a list": [[X, X]],
    "two views in dicts": [{"x": X}, {"x": X}],
    "samples in a list": [{"image": image, "label": 3} for image in X],
    "samples of images alone": [{"image": image} for image in X],
    "samples in named tuples": [Pair(image, 3) for image in X],
    "samples in dataclasses": [Record(["a", "b"], image) for image in X],
    "sequences": pack_sequence([torch.ones(3), torch.ones(2)]),
    "a graph": Graph(),
    "lists of tokens": [[1, 2, 3], [4, 5]],
    "one sample": (3, "a"),
    "a dict without tensors": {"id": 3},
    "an empty batch": (),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_batch_whose_samples_cannot_be_counted_is_refused(case: str) -> None:
    with pytest.raises(UsageError, match=r"cannot count the samples of a batch of type \w+: define"):
        Classify().count_samples(REFUSED[case])
