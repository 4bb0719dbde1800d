"""Default collation: joins samples part by part, into tensors where that changes no value."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from headway.data.images.batch import SAMPLES, Batch, finish_batch, join_crops, own_parts, parts_of
from headway.data.images.transforms import ImageTransform
from headway.data.order.permutation import Ints, UInts
from headway.data.shards.decode import KEY
from headway.errors import HeadwayError

_NUMBERS = int, float
_MIN_INT, _MAX_INT = -(2**63), 2**63 - 1
_MAX_EXACT_FLOAT = 2**53  # up to which float64 represents all whole numbers


def collate(samples: list[Any]) -> Any:
    """Collates dicts into a dict of batches: numbers, and arrays of one shape, become a tensor, all else a list.

    Tuples are collated by position, into a tuple. Samples must have the same parts: one that lacks a part would remove
    it from the whole batch.
    """
    if isinstance(samples[0], tuple):
        return _collate_tuples(samples)
    if not isinstance(samples[0], dict):
        return _collate(samples)
    names = samples[0].keys()
    if any(sample.keys() != names for sample in samples):
        names = dict.fromkeys(name for sample in samples for name in sample).keys()
    for sample in samples if len(names) > min(map(len, samples)) else ():
        if missing := [name for name in names if name not in sample]:
            raise HeadwayError(
                f"sample {sample.get(KEY)!r} has no {missing[0]!r}, as other samples of its batch have: add it, "
                "raise headway.errors.BadSample in a transform to replace such samples, or pass collate_fn"
            )
    return {name: _collate([sample[name] for sample in samples]) for name in names}


def _collate_tuples(samples: list[Any]) -> Any:
    kind, size = type(samples[0]), len(samples[0])
    if odd := next((each for each in samples if type(each) is not kind or len(each) != size), None):
        found = f"{type(odd).__name__} of {len(odd)}" if isinstance(odd, tuple) else type(odd).__name__
        raise HeadwayError(
            f"a transform returned a {found} and a {kind.__name__} of {size} for samples of one batch: return the "
            "same for each, raise headway.errors.BadSample to replace a sample, or pass collate_fn"
        )
    parts = [_collate(list(column)) for column in zip(*samples, strict=True)]
    return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)


def collate_crops(
    transform: ImageTransform,
    collate_rest: Callable[[list[Any]], Any],
    keys_of: Callable[[Ints], UInts],
    samples: list[dict[str, Any]],
) -> Batch:
    """Makes the batch of samples with the crops of a transform; `collate_rest` collates their other parts."""
    own = own_parts(transform)
    others = [{name: part for name, part in sample.items() if name not in own} for sample in samples]
    rest = parts_of(collate_rest(others))
    rows = np.array([sample[SAMPLES] for sample in samples])
    batch = Batch({SAMPLES: torch.from_numpy(rows), **join_crops(transform, samples), **rest})
    return finish_batch(batch, transform, keys_of(rows))


def _collate(samples: list[Any]) -> Any:
    first = samples[0]
    if isinstance(first, dict) and all(
        isinstance(each, dict) and each.keys() == first.keys() for each in samples
    ):
        return {name: _collate([sample[name] for sample in samples]) for name in first}
    if isinstance(first, _NUMBERS) and all(isinstance(each, _NUMBERS) for each in samples):
        return _join_numbers(samples)
    if isinstance(first, np.ndarray | np.generic) and _are_alike(samples) and _has_tensors(first.dtype):
        if first.ndim == 0:
            return torch.from_numpy(np.stack(samples))
        joined = np.concatenate(samples)  # a stack of the same bytes, without a new view of each
        return torch.from_numpy(joined.reshape(len(samples), *first.shape))
    if isinstance(first, torch.Tensor) and _are_alike(samples):
        return torch.stack(samples)
    return samples


def _join_numbers(samples: list[int | float]) -> Any:
    """Returns a tensor of 64-bit numbers, as torch's own loader does; a list if that would change a number."""
    whole = [each for each in samples if not isinstance(each, float)]
    if len(whole) == len(samples):
        fit, dtype = all(_MIN_INT <= each <= _MAX_INT for each in whole), None
    else:
        fit, dtype = all(abs(each) <= _MAX_EXACT_FLOAT for each in whole), torch.float64
    return torch.tensor(samples, dtype=dtype) if fit else samples


@lru_cache(256)
def _has_tensors(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of this type can become tensors; those of text, dates or records cannot."""
    try:
        torch.from_numpy(np.empty(0, dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True


def _are_alike(samples: list[Any]) -> bool:
    kind = type(samples[0])
    return len({(each.shape, each.dtype) if type(each) is kind else None for each in samples}) == 1
