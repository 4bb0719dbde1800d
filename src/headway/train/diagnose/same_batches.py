"""Detection of ranks that train on the same batches, because a dataset ignores ranks, at the first log point.

The loaders of `hw.data` split the samples of a dataset over ranks. An iterable dataset, a torch loader or a user's
loader has to do so itself: one that does not gives all of its samples to each rank, and nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from torch.utils.data import IterableDataset

from headway.data import DataLoader, ShardLoader
from headway.system.log import logger
from headway.train.batches import FirstBatch
from headway.train.metrics.meter import LogPoint
from headway.train.resume.replay import checksum

_LARGEST = 1 << 24  # whole numbers up to here are exact in single precision


@final
class SameBatches:
    """Compares the first batches of all ranks, once; a log point exchanges the numbers with its reduction."""

    def __init__(self) -> None:
        self._mine, self._source, self._compared = 0, "", False

    def note(self, loader: Iterable[Any], batch: Any) -> None:
        """Keeps a checksum of the first batch of this rank, if the loader may ignore ranks."""
        if self._compared or self._mine or not (source := _unsplit(loader)):
            return
        found = checksum(batch)
        if found is not None:
            self._mine, self._source = found % _LARGEST + 1, source

    @property
    def number(self) -> int:
        """The number that ranks compare at the next log point; 0 for none."""
        return 0 if self._compared else self._mine

    def check(self, point: LogPoint, *, is_root: bool) -> None:
        """Warns if all ranks have had the same first batch; those of one tensor group should have it."""
        if self._compared or not self._mine:
            return
        self._compared = True
        count = len(point.first_batches)
        if is_root and count == point.data_ranks > 1 and len({*point.first_batches}) == 1:
            logger.warning(
                f"all {count} ranks have the same first batch, so {self._source} may give all of its samples to each "
                "rank: split them by hw.rank() and hw.world_size(), or use hw.data.DataLoader with a dataset that has "
                "__getitem__"
            )


def _unsplit(loader: Iterable[Any]) -> str:
    """Returns the class that has to split the samples of a loader over ranks; empty if headway splits them."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(loader, ShardLoader | FirstBatch):
        return ""
    if isinstance(loader, DataLoader) and not isinstance(dataset, IterableDataset):
        return ""
    return type(dataset if isinstance(dataset, IterableDataset) else loader).__name__
