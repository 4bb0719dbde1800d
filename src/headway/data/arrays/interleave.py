"""Mixing batches among their neighbours: samples of a batch that was read in one piece are often alike.

Of every `num_batches` batches, each new one gets an equal slice of each old one. Order is kept otherwise, and nothing
is lost: the last batches, too few for a full round, are mixed among each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from headway.errors import UsageError


def interleave_batches(
    iterable: Iterable[torch.Tensor], num_batches: int, pin_memory: bool = False
) -> Iterator[torch.Tensor]:
    """Mixes the samples of every `num_batches` batches. Each batch that comes out has memory of its own.

    >>> [batch.tolist() for batch in interleave_batches([torch.tensor([0, 1]), torch.tensor([2, 3])], 2)]
    [[0, 2], [1, 3]]
    """
    named = ({"": batch} for batch in iterable)
    return (batch[""] for batch in interleave_dict_batches(named, num_batches, pin_memory))


def interleave_dict_batches(
    iterable: Iterable[Mapping[str, torch.Tensor]], num_batches: int, pin_memory: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """`interleave_batches` for batches that are dicts of tensors, all mixed alike."""
    if num_batches < 1:
        raise UsageError(f"num_batches={num_batches}: give a number of at least 1")
    return _interleave(iterable, num_batches, pin_memory)


def _interleave(
    iterable: Iterable[Mapping[str, torch.Tensor]], num_batches: int, pin_memory: bool
) -> Iterator[dict[str, torch.Tensor]]:
    waiting: list[Mapping[str, torch.Tensor]] = []
    for batch in iterable:
        waiting.append(batch)
        if len(waiting) == num_batches:
            yield from _mixed(waiting, pin_memory)
            waiting = []
    yield from _mixed(waiting, pin_memory)


def _mixed(batches: list[Mapping[str, torch.Tensor]], pin_memory: bool) -> Iterator[dict[str, torch.Tensor]]:
    """As many batches as came, of the same sizes: batch i is made of the i-th slice of each."""
    count = len(batches)
    slices = [_sliced(batch, count) for batch in batches]
    for number in range(count):
        yield {name: _joined([parts[name][number] for parts in slices], pin_memory) for name in batches[0]}


def _sliced(batch: Mapping[str, torch.Tensor], count: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """Each tensor in `count` slices, as equal as can be: the last batch of a dataset may have any size."""
    return {name: tensor.tensor_split(count) for name, tensor in batch.items()}


def _joined(parts: list[torch.Tensor], pin_memory: bool) -> torch.Tensor:
    joined = torch.cat(parts)  # new memory: a copy to the device may still read the batch before
    return joined.pin_memory() if pin_memory else joined
