"""Passes over the data: where each begins, how it is cut into batches of all ranks, and what becomes of its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, final, get_args

import numpy as np

from headway.data.order.locate import locate
from headway.data.order.mix import Timeline
from headway.data.order.order import Ints, Order
from headway.data.order.share import Share
from headway.errors import UsageError

Tail = Literal["carry", "drop", "pad"]

_AHEAD = 8192  # positions that are looked up at once, at most


class Batch(NamedTuple):
    """A batch of all ranks."""

    rows: Ints
    """lane, dataset, epoch, shard, sample; by lane, then what fills it up"""
    real: int
    """how many rows do not just fill it up"""
    end: int
    """the position after it"""


@final
class Passes:
    """How the stream of samples is cut. A pass is as many samples as all datasets have together."""

    def __init__(self, orders: Sequence[Order], share: Share, *, shuffle: bool, tail: Tail) -> None:
        if tail not in get_args(Tail):
            raise UsageError(f'tail={tail!r} is unknown: use "carry" (into the next pass), "drop" or "pad"')
        self._orders, self._share, self._shuffle, self._tail = orders, share, shuffle, tail
        self.samples = sum(order.samples for order in orders)

    def size(self) -> int:
        """Samples of all ranks together in a full batch."""
        return self._share.batch(self._share.place()[1])

    def check(self) -> None:
        """Refuses batches that would never be full, where they must be."""
        if self.size() > self.samples and not (self._may_be_short() or self._tail == "pad"):
            raise UsageError(
                f"a global batch of {self.size()} samples, but all datasets together have {self.samples}: "
                'take a smaller batch, or tail="pad"'
            )

    def start(self, epoch: int) -> int:
        """The position at which a pass begins."""
        start = epoch * self.samples
        return start // self.size() * self.size() if self.carries() else start

    def carries(self) -> bool:
        """Whether the next pass begins with what did not fill a batch."""
        return self._shuffle and self._tail == "carry"

    def length(self, epoch: int) -> int:
        """Batches of this rank in a whole pass."""
        whole, rest = divmod((epoch + 1) * self.samples - self.start(epoch), self.size())
        if self._tail == "pad":
            return whole + bool(rest)
        mine = self._share.of(rest)
        return whole + (mine.start < mine.stop and self._may_be_short())

    def batches(self, timeline: Timeline, epoch: int, position: int) -> Iterator[Batch]:
        """The batches of a pass, from a position on."""
        size, stop = self.size(), (epoch + 1) * self.samples
        many, most = 1, max(1, _AHEAD // size)
        while position < stop:
            whole = min(many, (stop - position) // size)
            many = min(2 * many, most)  # few at first: somebody waits for the first batch
            if not (whole or self._may_be_short() or self._tail == "pad"):
                return
            count = whole * size or stop - position
            table = self._locate(timeline, np.arange(position, position + count))
            for rows in np.split(table, max(whole, 1)):
                position += len(rows)
                by_lane, real = rows[np.argsort(rows[:, 0], kind="stable")], len(rows)
                if real < size and self._tail == "pad":
                    first = stop - self.samples + np.arange(size - real) % self.samples
                    by_lane = np.concatenate([by_lane, self._locate(timeline, first)])
                yield Batch(by_lane, real, position)

    def _may_be_short(self) -> bool:
        """Whether the last batch has what is left, and ranks may end a batch apart: in validation."""
        return not self._shuffle and self._tail == "carry"

    def _locate(self, timeline: Timeline, positions: Ints) -> Ints:
        return locate(self._orders, timeline if self._shuffle else None, positions)
