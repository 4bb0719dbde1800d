"""`LabelOrder`: whether neighbors in shards have the same label more often than by chance.

Samples are shuffled within a window of each lane, not over the whole dataset, so shards must be written in random
order. With one class directory packed after the other, a batch of 256 had 98 of 1,000 classes, where 228 are expected.
"""

from __future__ import annotations

from typing import final

import numpy as np

LABEL = "cls"
_MIN_LABELS = 64
_PERMUTATIONS = 20
_DEVIATIONS = 8.0  # standard deviations from the mean over permutations: never by chance
_EXCESS = 0.1  # share of the way from independent neighbors to equal ones: less does no harm


@final
class LabelOrder:
    """Labels of a dataset and where they are stored: a shard, and a number in it."""

    def __init__(self) -> None:
        self._labels: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._labels)

    def add(self, shard: int, sample: int, label: int) -> None:
        """Adds a label, given its shard and its sample within the shard by number; in any order, once per sample."""
        self._labels[shard, sample] = label

    def dependence(self) -> str:
        """Describes how often neighbors have the same label, if that is not chance; else returns an empty string."""
        if len(self) < _MIN_LABELS:
            return ""
        shard, sample, label = np.array([(*at, label) for at, label in self._labels.items()], np.int64).T
        stored = np.lexsort((sample, shard))
        together = np.diff(shard[stored]) == 0
        if not together.any():
            return ""

        def share_alike(labels: np.ndarray) -> float:
            return float((np.diff(labels) == 0)[together].mean())

        random = np.random.default_rng(0)
        alike = share_alike(label[stored])
        chance = [share_alike(random.permutation(label)) for _ in range(_PERMUTATIONS)]
        expected, spread = float(np.mean(chance)), max(float(np.std(chance)), 1 / together.sum())
        if alike - expected < max(_DEVIATIONS * spread, _EXCESS * (1 - expected)):
            return ""
        return (
            f"neighbors in its shards have the same {LABEL} in {alike:.0%} of cases instead of {expected:.1%}"
        )
