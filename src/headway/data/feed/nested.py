"""The tensors of a batch, however deeply they are nested in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
        return type(batch)({name: map_tensors(part, function) for name, part in batch.items()})  # type: ignore[call-arg]
    return batch


def find_tensors(batch: Any) -> Iterator[Tensor]:
    """Yields the tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from find_tensors(part)


def like(batch: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    """Returns the parts in a container of the batch's type; a named tuple takes its parts as separate arguments."""
    named = isinstance(batch, tuple) and "_fields" in type(batch).__dict__
    return type(batch)(*parts) if named else type(batch)(parts)
