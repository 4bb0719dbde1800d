"""Batches on their way from any loader to the step: to the device, counted, with the epoch told to whom it concerns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from headway.errors import UsageError


@runtime_checkable
class Epochal(Protocol):
    """A loader, sampler or dataset whose order depends on the epoch."""

    def set_epoch(self, epoch: int, /) -> object: ...


def set_epoch(loader: object, epoch: int, *, in_place: bool = False) -> None:
    """Tells the epoch to a loader and to its samplers and dataset, if they want to know: else order never changes.

    A loader that is `in_place` has been told its position, and is not told again.
    """
    parts: list[object] = [None if in_place else loader]
    for name in ("sampler", "batch_sampler", "dataset"):
        parts.append(getattr(loader, name, None))
    parts.append(getattr(parts[2], "sampler", None))
    for part in {id(part): part for part in parts}.values():
        if isinstance(part, Epochal):
            part.set_epoch(epoch)


@dataclass
class Pass:
    """How far one pass over a dataset has come, within an epoch."""

    of: int | None = None
    """batches of a whole pass, if the loader knows"""
    given: int = 0
    done: bool = False
    random: Mapping[str, Any] | None = None
    """random numbers at its beginning, for a loader that has no position of its own"""
    skip: int = 0
    """batches to read again and leave out"""
    loader: object = None

    @property
    def ends_here(self) -> bool:
        return self.of is not None and self.given >= self.of

    def state_dict(self) -> dict[str, Any]:
        return {"of": self.of, "given": self.given, "done": self.done}


def length(loader: Iterable[Any], limit: int | None) -> int | None:
    """How many batches will come; None if the loader does not know."""
    try:
        count = len(loader)  # type: ignore[arg-type]
    except TypeError:
        return limit
    return count if limit is None else min(count, limit)


@final
class FirstBatch:
    """A loader's first batch over and over, as often as the loader would give one: what is left costs the rest.

    If training is not faster with it, the loader is not what holds it up. HEADWAY_FAKE_DATA=1 puts it around every
    dataset of a pipeline.

    >>> list(FirstBatch([1, 2, 3]))
    [1, 1, 1]
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._first: list[Any] = []

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if not self._first:
            self._first = list(islice(self._loader, 1))
        count = length(self._loader, None)
        for first in self._first:  # none, if the loader is empty
            yield from repeat(first) if count is None else repeat(first, count)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; copies do not wait where the host's memory is pinned."""
    if isinstance(batch, (tuple, list)):
        parts = []
        for part in batch:  # plain tensors, as most are, without another call
            plain = type(part) is Tensor and part.is_cpu
            parts.append(part.to(device, non_blocking=True) if plain else to_device(part, device))
        kind = type(batch)
        return parts if kind is list else tuple(parts) if kind is tuple else _like(batch, parts)
    if isinstance(batch, Tensor):
        if batch.device == device:
            return batch
        if batch.device.type != "cpu":
            raise UsageError(
                f"a batch has a tensor on {batch.device}, but this rank works on {device}: let the loader give tensors "
                f"on the CPU or on {device}"
            )
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: to_device(part, device) for key, part in batch.items()})  # type: ignore[call-arg]
    return batch


def _like(batch: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    """The parts as what they were taken from; a named tuple is made from its parts one by one."""
    named = isinstance(batch, tuple) and "_fields" in type(batch).__dict__
    return type(batch)(*parts) if named else type(batch)(parts)


def first_tensor(batch: Any) -> Tensor | None:
    """The first tensor in a batch, wherever it is."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, tuple | list):
        return None
    for part in batch:
        found = first_tensor(part)
        if found is not None:
            return found
    return None
