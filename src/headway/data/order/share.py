"""Whose samples: this rank's place among the ranks that share the data, and its share of a batch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import final

import torch.distributed as c10d

from headway import dist
from headway.data.order.order import piece
from headway.errors import UsageError


@final
@dataclass(frozen=True, kw_only=True)
class Share:
    """How global batches are cut: one size for all ranks together, or one for each."""

    batch_size: int | None
    """samples of each rank"""
    global_batch_size: int | None
    """samples of all ranks together: the batches then do not depend on the number of ranks"""
    rank: int | None = None
    world_size: int | None = None
    """the group that shares the data; by default, all ranks of the run"""

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.global_batch_size is None):
            raise UsageError(
                f"batch_size={self.batch_size}, global_batch_size={self.global_batch_size}: give one of them"
            )
        wanted = self.global_batch_size if self.batch_size is None else self.batch_size
        if wanted is None or wanted < 1:
            raise UsageError(f"a batch of {wanted} samples: give at least 1")
        if (self.rank is None) != (self.world_size is None):
            raise UsageError(f"rank={self.rank}, world_size={self.world_size}: give both or neither")
        if self.rank is not None and not 0 <= self.rank < (self.world_size or 0):
            raise UsageError(
                f"rank={self.rank} is not one of the {self.world_size} ranks 0 to world_size - 1"
            )

    def place(self) -> tuple[int, int]:
        """Rank and number of ranks. Asked for late: a loader may be made before the ranks have met."""
        if self.rank is not None and self.world_size is not None:
            return self.rank, self.world_size
        if dist.is_initialized():
            return dist.rank(), dist.world_size()
        if c10d.is_available() and c10d.is_initialized():
            return c10d.get_rank(), c10d.get_world_size()
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError(
                f"this is one of {os.environ['WORLD_SIZE']} processes, but it has not joined the others, and all of "
                "them would get the same samples: call headway.init() before the first batch"
            )
        return 0, 1

    def batch(self, world_size: int) -> int:
        """Samples of all ranks together in a full batch."""
        if self.batch_size is not None:
            return self.batch_size * world_size
        total = self.global_batch_size or 0
        if total % world_size:
            raise UsageError(
                f"global_batch_size={total} cannot be cut into {world_size} equal parts, one for each rank: "
                f"choose a multiple of {world_size}, or another number of ranks"
            )
        return total

    def of(self, count: int) -> slice:
        """This rank's part of a global batch of `count` samples."""
        return piece(count, *self.place())

    def of_node(self, count: int) -> slice:
        """The part of all ranks of this node, where they follow each other; else about that."""
        rank, world_size = self.place()
        first = last = rank
        if self.rank is None and dist.is_initialized():
            first = rank - dist.local_rank()
            last = min(first + dist.local_world_size(), world_size) - 1
        return slice(piece(count, first, world_size).start, piece(count, last, world_size).stop)
