"""Mixes samples among neighboring batches, because samples that were read together are often alike.

In every group of `num_batches` batches, each new batch gets an equal slice of each old one. Otherwise the order stays
the same, no sample is lost, and batches keep their sizes. The last group may have fewer batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import torch

from headway.errors import UsageError


def interleave_batches(
    iterable: Iterable[torch.Tensor], num_batches: int, pin_memory: bool = False
) -> Iterator[torch.Tensor]:
    """Mixes the samples of every `num_batches` batches. Each resulting batch has its own memory.

    >>> [batch.tolist() for batch in interleave_batches([torch.tensor([0, 1]), torch.tensor([2, 3])], 2)]
    [[0, 2], [1, 3]]
    """
    named = ({"": batch} for batch in iterable)
    return (batch[""] for batch in interleave_dict_batches(named, num_batches, pin_memory))


def interleave_dict_batches(
    iterable: Iterable[Mapping[str, torch.Tensor]], num_batches: int, pin_memory: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Mixes batches that are dicts of tensors as `interleave_batches` does; all tensors are mixed alike.

    for batch in hw.data.interleave_dict_batches(batches, num_batches=4):
        batch["x"], batch["y"]                              # of four batches, mixed alike
    """
    if num_batches < 1:
        raise UsageError(f"num_batches={num_batches}: give at least 1")
    return _interleave(iterable, num_batches, pin_memory)


def _interleave(
    iterable: Iterable[Mapping[str, torch.Tensor]], num_batches: int, pin_memory: bool
) -> Iterator[dict[str, torch.Tensor]]:
    waiting: list[Mapping[str, torch.Tensor]] = []
    for batch in iterable:
        waiting.append(batch)
        if len(waiting) == num_batches:
            yield from _mix(waiting, pin_memory)
            waiting = []
    yield from _mix(waiting, pin_memory)


def _mix(batches: list[Mapping[str, torch.Tensor]], pin_memory: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Yields as many batches of the same sizes, made of the first slices of all, then of the second ones, and so on.

    If all slices are equal, batch i consists of the i-th slice of each.
    """
    columns = {name: _regroup([batch[name] for batch in batches]) for name in (batches[0] if batches else ())}
    for _ in batches:
        yield {name: _join(next(column), pin_memory) for name, column in columns.items()}


def _regroup(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields the slices of each new batch. Batches may be shorter than there are slices, and the last batch of a
    dataset may have any size, so a slice is cut where a batch is full."""
    slices = [tensor.tensor_split(len(tensors)) for tensor in tensors]
    waiting = deque(each[number] for number in range(len(tensors)) for each in slices)
    for tensor in tensors:
        parts, missing = list[torch.Tensor](), len(tensor)
        while missing > 0:
            part = waiting.popleft()
            if len(part) > missing:
                waiting.appendleft(part[missing:])
            parts.append(part[:missing])
            missing -= len(parts[-1])
        yield parts or [tensor]


def _join(parts: list[torch.Tensor], pin_memory: bool) -> torch.Tensor:
    joined = torch.cat(parts)  # new memory: an asynchronous copy may still read the previous batch
    return joined.pin_memory() if pin_memory else joined
