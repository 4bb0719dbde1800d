"""The tensors of a batch, nested to any depth in tuples, lists and dicts."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from typing import Any

from torch import Tensor


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns the batch with a function applied to its tensors; containers keep their types.

    >>> map_tensors({"x": (torch.ones(1), "name")}, torch.Tensor.neg)
    {'x': (tensor([-1.]), 'name')}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, tuple | list):
        return like(batch, [map_tensors(part, function) for part in batch])
    if isinstance(batch, Mapping):
        return like_mapping(batch, {name: map_tensors(part, function) for name, part in batch.items()})
    return batch


def find_tensors(batch: Any) -> Iterator[Tensor]:
    """Yields the tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from find_tensors(part)


def like(batch: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    """Returns the parts in a container of the batch's type."""
    make = getattr(type(batch), "_make", type(batch))  # of named tuples
    return make(parts)


def like_mapping(batch: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """Returns the parts in a mapping of the batch's type; in a dict if that type cannot be constructed from one.

    A copy keeps the batch's other attributes, such as the factory of a defaultdict. Only dicts and `UserDict`s are
    copied: a shallow copy of another mapping may share its items with the batch.
    """
    kind: Any = type(batch)
    if kind is dict:
        return parts
    if isinstance(batch, dict | UserDict):
        with suppress(TypeError):  # it may be immutable
            made = copy(batch)
            for name, part in parts.items():
                made[name] = part
            return made
    try:
        return kind(parts)
    except TypeError:
        return parts
