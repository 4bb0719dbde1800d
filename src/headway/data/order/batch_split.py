"""How a global batch is split between the ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import final

import torch.distributed as c10d

from headway.data.order.order import whole_number
from headway.dist import seeding
from headway.dist.group import is_initialized, world  # called for every batch: no lazy lookup
from headway.errors import UnevenBatch, UsageError


@final
@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """How global batches are split, given either the size for each rank or the size for all ranks together."""

    batch_size: int | None
    """samples of each rank"""
    global_batch_size: int | None
    """samples of all ranks together: batches then do not depend on the number of ranks"""
    rank: int | None = None
    world_size: int | None = None
    """the group that shares the data; by default, all ranks of the run"""

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value))
        if (self.batch_size is None) == (self.global_batch_size is None):
            raise UsageError(
                f"batch_size={self.batch_size}, global_batch_size={self.global_batch_size}: give one of them"
            )
        size = self.global_batch_size if self.batch_size is None else self.batch_size
        if size is None or size < 1:
            raise UsageError(f"a batch has {size} samples: give at least 1")
        if (self.rank is None) != (self.world_size is None):
            raise UsageError(f"rank={self.rank}, world_size={self.world_size}: give both or neither")
        if self.rank is not None and not 0 <= self.rank < (self.world_size or 0):
            raise UsageError(
                f"rank={self.rank} is not one of the {self.world_size} ranks 0 to world_size - 1"
            )

    def rank_and_world_size(self) -> tuple[int, int]:
        """Returns rank and number of ranks as they are now, because a loader may be created before `init()`."""
        if self.rank is not None and self.world_size is not None:
            return self.rank, self.world_size
        if is_initialized():
            return world().rank, world().world_size
        if c10d.is_available() and c10d.is_initialized():
            return c10d.get_rank(), c10d.get_world_size()
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError(
                f"this is one of {os.environ['WORLD_SIZE']} processes, but it has not joined the others, and all of "
                "them would get the same samples: call headway.init() before the first batch"
            )
        return 0, 1

    def separate_streams(self) -> None:
        """Gives this rank its own random numbers from the first batch on; ranks with the same batches share them."""
        rank, world_size = self.rank_and_world_size()
        ranks = c10d.get_world_size() if c10d.is_available() and c10d.is_initialized() else 1
        seeding.separate_streams(rank, ranks_share=world_size < ranks)

    def global_size(self) -> int:
        """Returns the number of samples in a full batch, over all ranks."""
        world_size = self.rank_and_world_size()[1]
        if self.batch_size is not None:
            return self.batch_size * world_size
        total = self.global_batch_size or 0
        if total % world_size:
            raise UnevenBatch(total, world_size)
        return total

    def rank_slice(self, count: int) -> slice:
        """Returns this rank's slice of a global batch of `count` samples."""
        return rank_slice(count, *self.rank_and_world_size())

    def node_slice(self, count: int) -> slice:
        """Returns the slice of all ranks of this node; an approximation unless these ranks are consecutive."""
        rank, world_size = self.rank_and_world_size()
        first = last = rank
        if self.rank is None and is_initialized():
            first = rank - world().local_rank
            last = min(first + world().local_world_size, world_size) - 1
        return slice(rank_slice(count, first, world_size).start, rank_slice(count, last, world_size).stop)


def rank_slice(count: int, rank: int, world_size: int) -> slice:
    """Returns one rank's slice of `count` elements: all ranks' slices cover them in order, as equally as possible.

    >>> [rank_slice(7, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 7, None)]
    """
    return slice(rank * count // world_size, (rank + 1) * count // world_size)
