"""The tensors of a batch, nested to any depth in tuples, lists, dicts and dataclasses."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns the batch with a function applied to its tensors; containers keep their types.

    >>> map_tensors({"x": (torch.ones(1), "name")}, torch.Tensor.neg)
    {'x': (tensor([-1.]), 'name')}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if moves_itself(batch):
        return batch
    if isinstance(batch, tuple | list):
        return like(batch, [map_tensors(part, function) for part in batch])
    if isinstance(batch, Mapping):
        return like_mapping(batch, {name: map_tensors(part, function) for name, part in batch.items()})
    if is_record(batch):
        return map_fields(batch, lambda part: map_tensors(part, function))
    return batch


def find_tensors(batch: Any) -> Iterator[Tensor]:
    """Yields the tensors of a batch; not those within objects that move themselves."""
    return (leaf for leaf in find_leaves(batch) if isinstance(leaf, Tensor))


def find_leaves(batch: Any) -> Iterator[Any]:
    """Yields what a batch contains: tensors, objects that move themselves, numbers, strings and the like."""
    if isinstance(batch, Tensor) or moves_itself(batch):
        yield batch
    elif isinstance(batch, Mapping | tuple | list) or is_record(batch):
        for part in parts_of(batch):
            yield from find_leaves(part)
    else:
        yield batch


def parts_of(batch: Any) -> list[Any]:
    """Returns the parts of a batch, one level down; none of an object that is not a container."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, tuple | list):
        return [] if moves_itself(batch) else list(batch)
    return [getattr(batch, each.name, None) for each in fields(batch)] if is_record(batch) else []


def moves_itself(part: object) -> bool:
    """Whether an object moves its tensors with its own `to`, as `PackedSequence` does, which keeps some on the CPU."""
    kind = type(part)
    if kind in (tuple, list, dict, str, int, float) or isinstance(part, Tensor | Mapping | type):
        return False
    return callable(getattr(part, "to", None))


def is_record(part: object) -> bool:
    """Whether an object is an instance of a dataclass."""
    return is_dataclass(part) and not isinstance(part, type)


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


def map_fields(record: Any, function: Callable[[Any], Any]) -> Any:
    """Returns a copy of a dataclass instance with a function applied to its fields; itself if that changes nothing.

    `dataclasses.replace` would call its `__init__`, which may do more than keep its arguments.
    """
    before = {each.name: getattr(record, each.name) for each in fields(record) if hasattr(record, each.name)}
    after = {name: function(part) for name, part in before.items()}
    if all(after[name] is part for name, part in before.items()):
        return record
    made = copy(record)
    for name, part in after.items():
        object.__setattr__(made, name, part)  # it may be frozen
    return made
