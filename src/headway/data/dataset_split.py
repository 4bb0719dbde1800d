"""`split`: divides a dataset in two at random, with the same proportions of labels in both parts if asked for."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Dataset, Subset

from headway.data.order.order import whole_number
from headway.errors import UsageError

Indices = npt.NDArray[np.int64]


def split(
    dataset: Dataset[Any], size: float, *, by: Sequence[Any] | Tensor | None = None, seed: int = 0
) -> tuple[Subset[Any], Subset[Any]]:
    """Splits a dataset in two: the second part has `size` of its samples, a fraction or a number, drawn by `seed`.

    The parts are the same on all ranks and in every attempt, whatever other random numbers a script has drawn. With
    `by`, a label for each sample, both parts have the labels in the same proportions, as far as whole samples allow.
    Samples keep their order.

        train, val = hw.data.split(dataset, 0.1, by=dataset.targets, seed=0)
    """
    if not isinstance(dataset, Sized):
        raise UsageError(
            f"split: a {type(dataset).__name__} has no length: give a dataset with len() and samples by their number"
        )
    total = len(dataset)
    count = _count(size, total)
    labels = np.zeros(total, dtype=np.int64) if by is None else _numbered(by, total)
    random = np.random.default_rng(whole_number("seed", seed))
    sizes = np.bincount(labels)
    chosen = [
        random.permutation(np.flatnonzero(labels == label))[:share]
        for label, share in enumerate(_shares(sizes, count))
    ]
    second = np.zeros(total, dtype=bool)
    second[np.concatenate(chosen)] = True
    first_part, second_part = np.flatnonzero(~second), np.flatnonzero(second)
    return Subset(dataset, first_part.tolist()), Subset(dataset, second_part.tolist())


def _count(size: object, total: int) -> int:
    """Returns how many samples the second part has; raises `UsageError` if a part would have none."""
    if isinstance(size, bool) or not isinstance(size, int | float | np.number):
        raise UsageError(
            f"split: size={size!r:.80} is not a number: give the size of the second part, a fraction such as 0.1 or a "
            "number of samples"
        )
    if isinstance(size, int | np.integer):
        count = int(size)
    else:
        count = round(float(size) * total) if 0 < size < 1 else 0
    if not 0 < count < total:
        raise UsageError(
            f"split: size={size!r} of {total:,} samples leaves a part without any: give a fraction between 0 and 1, or "
            "a number of samples for the second part"
        )
    return count


def _numbered(by: Any, total: int) -> Indices:
    """Returns the labels as numbers from 0."""
    labels = by.cpu().numpy() if isinstance(by, Tensor) else np.asarray(by)
    if labels.ndim != 1 or len(labels) != total:
        raise UsageError(
            f"split: by has the shape {labels.shape} for {total:,} samples: give one label for each sample"
        )
    try:
        return np.unique(labels, return_inverse=True)[1].astype(np.int64)
    except TypeError as error:
        kinds = ", ".join(sorted({type(label).__name__ for label in labels.tolist()}))
        raise UsageError(
            f"split: by has labels of the types {kinds}, which have no order: give numbers or strings"
        ) from error


def _shares(sizes: Indices, count: int) -> list[int]:
    """Divides `count` among labels in proportion to their samples, by the largest remainders."""
    exact = sizes * count / sizes.sum()
    shares = np.floor(exact).astype(np.int64)
    missing = count - int(shares.sum())
    largest = np.argsort(-(exact - shares), kind="stable")[:missing]
    shares[largest] += 1
    return [int(share) for share in shares]
