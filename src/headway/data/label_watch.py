"""`LabelWatch`: warns early of shards that are sorted by class, from the first labels that a loader reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import final

from headway.data.shards.label_order import LabelOrder
from headway.system.log import logger

_CHECK_AT = (256, 1024, 4096)  # labels of a dataset


@final
class LabelWatch:
    """Warns once for each dataset whose neighbors in shards have the same label more often than by chance."""

    def __init__(self, *, watching: bool) -> None:
        self.watching = watching
        """whether labels are still needed"""
        self._orders: dict[int, LabelOrder] = defaultdict(LabelOrder)
        self._done: set[int] = set()

    def add(self, labels: Iterable[tuple[int, int, int, int]], names: Sequence[str]) -> None:
        """Adds rows of dataset, shard, sample and label, given the names of the datasets."""
        for dataset, shard, sample, label in labels:
            if dataset not in self._done:
                order = self._orders[dataset]
                before = len(order)
                order.add(shard, sample, label)
                if len(order) > before and len(order) in _CHECK_AT:
                    self._check(dataset, names)
        self.watching = len(self._done) < len(names)

    def end_pass(self, names: Sequence[str]) -> None:
        """Checks datasets with fewer labels, all of which have been read by now."""
        for dataset in self._orders.keys() - self._done:
            self._check(dataset, names)
        self._orders.clear()
        self._done.update(range(len(names)))
        self.watching = False

    def _check(self, dataset: int, names: Sequence[str]) -> None:
        order = self._orders[dataset]
        dependence = order.dependence()
        if dependence:
            logger.warning(
                f"dataset {names[dataset]!r}: {dependence}, so that batches have too few classes: write its shards in "
                "random order, as `headway data pack` does"
            )
        if dependence or len(order) >= _CHECK_AT[-1]:
            self._done.add(dataset)
            del self._orders[dataset]
