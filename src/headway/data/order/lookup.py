"""Finds the samples of a batch from the loader's order and the batch's span in it, without data or torch.

`loader.order()` describes the order in plain values. `loader.last_span()` is the range of positions of the latest
batch, counted in samples of all ranks. With both saved, the samples can be looked up at any later time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import numpy as np

from headway.data.order.order import ORDER_VERSION, Order, Shuffle
from headway.data.order.permutation import Ints, distinct_values
from headway.data.order.timeline import Timeline, WeightSegment


@runtime_checkable
class TraceableLoader(Protocol):
    """A loader whose batches can be traced to their samples."""

    def last_span(self) -> tuple[int, int] | None: ...

    def order(self) -> dict[str, Any] | None: ...


def describe_order(
    counts: Mapping[str, Sequence[int]],
    shuffles: Sequence[Shuffle] | None,
    timeline: Timeline | None = None,
) -> dict[str, Any]:
    """Describes an order in plain values: samples per shard of each dataset, their shuffles and their weights.

    The shuffles are in the order of the sorted names.
    """
    segments = [[segment.start, dict(segment.weights)] for segment in timeline.segments] if timeline else None
    settings = [[own.seed, own.lanes, own.window] for own in shuffles] if shuffles else None
    return {
        "version": ORDER_VERSION,
        "datasets": {name: list(map(int, of)) for name, of in counts.items()},
        "shuffles": settings,
        "segments": segments,
    }


@final
class SampleLookup:
    """Looks up the samples at any positions of an order that `describe_order` described.

    >>> SampleLookup(loader.order()).samples(0, 3)  # rows of dataset, shard, sample
    array([[0, 0, 17], [0, 0, 4], [0, 0, 90]])
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        counts: Mapping[str, Sequence[int]] = order["datasets"]
        shuffles = order["shuffles"] or [None] * len(counts)
        self._names = sorted(counts)
        self._single_shard = [len(of) for of in counts.values()] == [1]
        self._orders = [
            Order(counts[name], own and Shuffle(seed=own[0], lanes=own[1], window=own[2]))
            for name, own in zip(self._names, shuffles, strict=True)
        ]
        segments = order["segments"]
        self._timeline = segments and Timeline(
            [WeightSegment(int(start), dict(weights)) for start, weights in segments], self._names
        )

    def samples(self, start: int, stop: int) -> Ints:
        """Returns rows of dataset, shard and sample, in the order of the global batch."""
        table: Ints = locate_samples(self._orders, self._timeline, np.arange(start, stop))[:, [1, 3, 4]]
        return table

    def labels(self, start: int, stop: int) -> list[str]:
        """Returns the samples as text: the sample's number, with dataset and shard where there are several."""
        rows = self.samples(start, stop).tolist()
        if self._single_shard:
            return [str(sample) for _, _, sample in rows]
        return [f"{self._names[dataset]} shard {shard} sample {sample}" for dataset, shard, sample in rows]


def locate_samples(orders: Sequence[Order], timeline: Timeline | None, positions: Ints) -> Ints:
    """Returns rows of lane, dataset, epoch, shard and sample; without a timeline, datasets follow each other."""
    dataset, own_position = timeline.draw(positions) if timeline else _in_sequence(orders, positions)
    table = np.empty((len(positions), 5), np.int64)
    for number in distinct_values(dataset):
        here = dataset == number
        found = orders[number].locate(own_position[here])
        table[here] = np.stack(
            [found.lane, np.full_like(found.lane, number), found.epoch, found.shard, found.sample], 1
        )
    return table


def _in_sequence(orders: Sequence[Order], positions: Ints) -> tuple[Ints, Ints]:
    sizes = np.array([order.samples for order in orders])
    epoch, within = np.divmod(positions, sizes.sum())
    ends = np.cumsum(sizes)
    dataset = np.searchsorted(ends, within, side="right")
    return dataset, epoch * sizes[dataset] + within - (ends - sizes)[dataset]
