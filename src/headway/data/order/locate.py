"""Which samples were in a batch? A pure function of the loader's order and the batch's place in it; no torch, no data.

`loader.order()` says in plain values what the order is, and `loader.given()` where the batch that was handed out last
lies in it: a stretch of positions, counted in samples of all ranks. Whoever keeps the two can ask at any time later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import numpy as np

from headway.data.order.mix import Segment, Timeline
from headway.data.order.order import Ints, Order, Shuffle, distinct


@runtime_checkable
class Traceable(Protocol):
    """A loader that knows which samples it gives."""

    def given(self) -> tuple[int, int] | None: ...

    def order(self) -> dict[str, Any] | None: ...


def describe(
    counts: Mapping[str, Sequence[int]],
    shuffles: Sequence[Shuffle] | None,
    timeline: Timeline | None = None,
) -> dict[str, Any]:
    """An order in plain values: the samples of each shard of each dataset, how each is shuffled, and their weights."""
    segments = [[segment.start, dict(segment.weights)] for segment in timeline.segments] if timeline else None
    hows = [[how.seed, how.lanes, how.window] for how in shuffles] if shuffles else None
    return {
        "datasets": {name: list(map(int, of)) for name, of in counts.items()},
        "shuffles": hows,
        "segments": segments,
    }


@final
class Which:
    """The samples at any place of an order that `describe` has described.

    >>> Which(loader.order()).samples(0, 3)  # rows of dataset, shard, sample
    array([[0, 0, 17], [0, 0, 4], [0, 0, 90]])
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        counts: Mapping[str, Sequence[int]] = order["datasets"]
        hows = order["shuffles"] or [None] * len(counts)
        self._names = list(counts)
        self._plain = [len(of) for of in counts.values()] == [1]
        self._orders = [
            Order(of, how and Shuffle(seed=how[0], lanes=how[1], window=how[2]))
            for of, how in zip(counts.values(), hows, strict=True)
        ]
        segments = order["segments"]
        self._timeline = segments and Timeline([Segment(int(at), dict(weights)) for at, weights in segments])

    def samples(self, start: int, stop: int) -> Ints:
        """Rows of dataset, shard and sample, in the order of the global batch."""
        table: Ints = locate(self._orders, self._timeline, np.arange(start, stop))[:, [1, 3, 4]]
        return table

    def words(self, start: int, stop: int) -> list[str]:
        """The same for people: the sample's number; where there are several of them, with shard and dataset."""
        rows = self.samples(start, stop).tolist()
        if self._plain:
            return [str(sample) for _, _, sample in rows]
        return [f"{self._names[dataset]} shard {shard} sample {sample}" for dataset, shard, sample in rows]


def locate(orders: Sequence[Order], timeline: Timeline | None, positions: Ints) -> Ints:
    """Rows of lane, dataset, epoch, shard, sample; without a timeline, one dataset after the other."""
    dataset, cursor = timeline.draw(positions) if timeline else _as_stored(orders, positions)
    table = np.empty((len(positions), 5), np.int64)
    for number in distinct(dataset):
        here = dataset == number
        places = orders[number].locate(cursor[here])
        table[here] = np.stack(
            [places.lane, np.full_like(places.lane, number), places.epoch, places.shard, places.sample], 1
        )
    return table


def _as_stored(orders: Sequence[Order], positions: Ints) -> tuple[Ints, Ints]:
    sizes = np.array([order.samples for order in orders])
    epoch, within = np.divmod(positions, sizes.sum())
    ends = np.cumsum(sizes)
    dataset = np.searchsorted(ends, within, side="right")
    return dataset, epoch * sizes[dataset] + within - (ends - sizes)[dataset]
