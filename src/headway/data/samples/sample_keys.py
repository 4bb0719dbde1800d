"""`SampleKeys`: keys from which the random numbers of a sample are derived, the same on any rank and thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from headway.data.order.permutation import Ints, UInts, as_uints, derive_key, derive_keys
from headway.data.sources.chunk import SampleLocation

_TRANSFORM, _SUBSTITUTE = 1, 2  # the purpose of a key: part of what is hashed


@final
class SampleKeys:
    """Derives keys from the seed, the keys of the datasets, and the location of a sample."""

    def __init__(self, seed: int, datasets: Sequence[int]) -> None:
        self._seed, self._datasets = seed, datasets

    def of_transform(self, location: SampleLocation) -> int:
        dataset, *where = location
        return derive_key(self._seed, _TRANSFORM, self._datasets[dataset], *where)

    def of_transforms(self, rows: Ints) -> UInts:
        """Returns the same for many samples, given rows of dataset, epoch, shard, sample."""
        columns = [as_uints(rows[:, number]) for number in (1, 2, 3)]
        datasets = np.array(self._datasets, np.uint64)[rows[:, 0]]
        return derive_keys(self._seed, np.full(1, _TRANSFORM, np.uint64), datasets, *columns)

    def of_substitute(self, location: SampleLocation, number: int) -> int:
        _, *where = location
        return derive_key(self._seed, _SUBSTITUTE, *where, number)
