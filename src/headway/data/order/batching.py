"""Passes over the data: where each begins, how it is cut into global batches, and what happens to its last samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, final, get_args

import numpy as np

from headway.data.order.batch_split import BatchSplit
from headway.data.order.lookup import locate_samples
from headway.data.order.order import Order
from headway.data.order.permutation import Ints
from headway.data.order.timeline import Timeline
from headway.errors import UsageError, unknown_name

TailPolicy = Literal["carry", "drop", "pad"]

_MAX_POSITIONS = 8192  # located at a time


class GlobalBatch(NamedTuple):
    """A batch of all ranks together."""

    rows: Ints
    """lane, dataset, epoch, shard, sample; sorted by lane, padding at the end"""
    real: int
    """rows that are not padding"""
    end: int
    """the position after it"""


@final
class EpochBatcher:
    """Cuts the stream of samples into passes and batches.

    A pass is as many samples as all datasets have together, or `steps` batches.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        split: BatchSplit,
        *,
        shuffle: bool,
        tail: TailPolicy,
        steps: int | None = None,
    ) -> None:
        if tail not in get_args(TailPolicy):
            raise unknown_name("tail", tail, get_args(TailPolicy))
        if steps is not None and (steps < 1 or not shuffle):
            raise UsageError(
                f"steps_per_epoch={steps}: give at least 1, and for training only; with shuffle=False, an epoch is "
                "every sample once"
            )
        self._steps = steps
        self._orders, self._split, self._shuffle, self._tail = orders, split, shuffle, tail
        self.samples = sum(order.samples for order in orders)
        self.anchor = 0, 0
        """an epoch and the position at which it begins; changes when datasets are added or removed"""

    def size(self) -> int:
        """Returns the number of samples in a full batch, over all ranks."""
        return self._split.global_size()

    def pass_samples(self) -> int:
        """Returns the number of samples in a pass, over all ranks."""
        return self.samples if self._steps is None else self._steps * self.size()

    def check(self) -> None:
        """Refuses a batch size larger than a pass, if all batches must be full."""
        if self.size() > self.pass_samples() and not (self._may_be_short() or self._tail == "pad"):
            raise UsageError(
                f"a global batch has {self.size()} samples, but all datasets together have {self.samples}: "
                'use a smaller batch, or tail="pad"'
            )

    def start(self, epoch: int) -> int:
        """Returns the position at which a pass begins."""
        start = self._boundary(epoch)
        if start < 0:
            raise UsageError(
                f"epoch {epoch} cannot be restored: datasets were added or removed in epoch {self.anchor[0]}; "
                "continue from a later epoch"
            )
        return start // self.size() * self.size() if self.carries() else start

    def carries(self) -> bool:
        """Whether the next pass begins with the samples that did not fill a batch."""
        return self._shuffle and self._tail == "carry"

    def length(self, epoch: int) -> int:
        """Returns the number of batches of this rank in a whole pass."""
        whole, rest = divmod(self._boundary(epoch + 1) - self.start(epoch), self.size())
        if self._tail == "pad":
            return whole + bool(rest)
        mine = self._split.rank_slice(rest)
        return whole + (mine.start < mine.stop and self._may_be_short())

    def batches(self, timeline: Timeline, epoch: int, position: int) -> Iterator[GlobalBatch]:
        """Yields the batches of a pass, from a position on."""
        size, stop = self.size(), self._boundary(epoch + 1)
        count, most = 1, max(1, _MAX_POSITIONS // size)
        while position < stop:
            whole = min(count, (stop - position) // size)
            count = min(2 * count, most)  # few at first, so that the first batch is ready soon
            if not (whole or self._may_be_short() or self._tail == "pad"):
                return
            samples = whole * size or stop - position
            table = self._locate(timeline, np.arange(position, position + samples))
            for rows in np.split(table, max(whole, 1)):
                position += len(rows)
                by_lane, real = rows[np.argsort(rows[:, 0], kind="stable")], len(rows)
                if real < size and self._tail == "pad":
                    first = self._first_positions(timeline, epoch, size - real)
                    by_lane = np.concatenate([by_lane, self._locate(timeline, first)])
                yield GlobalBatch(by_lane, real, position)

    def _first_positions(self, timeline: Timeline, epoch: int, count: int) -> Ints:
        """Returns positions of the first samples of a pass, repeated as needed, without those of removed datasets."""
        first = max(self._boundary(epoch), timeline.first_drawable() if self._shuffle else 0)
        return first + np.arange(count) % (self._boundary(epoch + 1) - first)

    def _boundary(self, epoch: int) -> int:
        """Returns the position of the first sample of an epoch, which may lie within a batch."""
        return self.anchor[1] + (epoch - self.anchor[0]) * self.pass_samples()

    def _may_be_short(self) -> bool:
        """Whether the last batch may be short, and ranks may differ by one batch: only in validation."""
        return not self._shuffle and self._tail == "carry"

    def _locate(self, timeline: Timeline, positions: Ints) -> Ints:
        return locate_samples(self._orders, timeline if self._shuffle else None, positions)
