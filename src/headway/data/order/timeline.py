"""The timeline of a mix: which dataset each position of the stream belongs to, in exact proportions.

How many samples each dataset has contributed after k samples is a formula, not a series of draws: the k samples are
split between two halves of the datasets, each part again, rounding to nearest. The error stays below one sample per
level of that tree, whatever k is; i.i.d. draws are off by hundreds after a million. A change of weights begins a new
segment, and the list of segments is all that must be saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import numpy as np

from headway.data.order.permutation import Ints, distinct_values
from headway.errors import UsageError, unknown_name

_ONE = (
    2**26
)  # the sum of all weights, about; 37 bits are left for the samples of a segment in 64-bit arithmetic
_MAX_INT64_SAMPLES = 2**36


def apply_weights(weights: Mapping[str, float], changes: Mapping[str, float]) -> dict[str, float]:
    """Returns the weights after a change of some of them, whose names must be known."""
    check_names(changes, weights)
    new = {**weights, **{name: float(weight) for name, weight in changes.items()}}
    to_fixed_point(new)
    return new


def check_names(names: Mapping[str, object], known: Mapping[str, object]) -> None:
    """Refuses names that are not datasets of the mix."""
    for name in names:
        if name not in known:
            raise unknown_name("dataset of the mix", name, known)


def to_fixed_point(weights: Mapping[str, float]) -> list[int]:
    """Converts weights to integers with a sum near 2**26, so that all machines count alike."""
    values = list(weights.values())
    if not all(math.isfinite(value) and value >= 0 for value in values) or not any(values):
        raise UsageError(f"weights must be finite and at least 0, one of them above 0, not {dict(weights)}")
    total = math.fsum(values)
    return [max(round(value / total * _ONE), 1 if value else 0) for value in values]


def count_by_dataset(k: Ints, weights: Sequence[int]) -> Ints:
    """Returns how many of the first k samples come from each dataset: an array of datasets x len(k).

    >>> count_by_dataset(np.array([1, 10]), [3, 1, 1]).tolist()
    [[1, 6], [0, 2], [0, 2]]
    """
    if k.dtype != object and k.size and int(k.max()) >= _MAX_INT64_SAMPLES:
        return count_by_dataset(k.astype(object), weights).astype(np.int64)
    if len(weights) == 1:
        return k[None]
    middle = len(weights) // 2
    left, total = sum(weights[:middle]), sum(weights)
    first = (k * left + total // 2) // total if total else k
    return np.concatenate(
        [count_by_dataset(first, weights[:middle]), count_by_dataset(k - first, weights[middle:])]
    )


class WeightSegment(NamedTuple):
    """Weights that apply from a position of the stream on."""

    start: int
    weights: dict[str, float]


@final
class Timeline:
    """The stream of a mix: which dataset a position belongs to, and how many samples of that dataset precede it."""

    def __init__(self, segments: Sequence[WeightSegment]) -> None:
        if not segments or segments[0].start != 0:
            raise UsageError("a timeline begins at position 0")
        starts = [segment.start for segment in segments]
        if starts != sorted(set(starts)):
            raise UsageError(f"segments must begin at increasing positions, not {starts}")
        self.segments = list(segments)
        self.names = list(segments[0].weights)
        self._weights = [to_fixed_point(segment.weights) for segment in segments]
        self._bases = [np.zeros(len(self.names), np.int64)]
        for weights, start, end in zip(self._weights, starts, starts[1:], strict=False):
            self._bases.append(self._bases[-1] + count_by_dataset(np.array([end - start]), weights)[:, 0])

    def with_weights(self, position: int, weights: Mapping[str, float]) -> Timeline:
        """Returns the timeline with other weights from a position on, until the next change that is scheduled."""
        before = [segment for segment in self.segments if segment.start < position]
        after = [segment for segment in self.segments if segment.start > position]
        current = [segment for segment in self.segments if segment.start <= position][-1].weights
        return Timeline([*before, WeightSegment(position, apply_weights(current, weights)), *after])

    def weights_at(self, position: int) -> dict[str, float]:
        """Returns the weights at a position."""
        return next(segment.weights for segment in reversed(self.segments) if segment.start <= position)

    def counts_at(self, position: int) -> dict[str, int]:
        """Returns the samples of each dataset before a position."""
        number = self._segment_of(np.array([position]))[0]
        within = count_by_dataset(np.array([position - self.segments[number].start]), self._weights[number])
        return dict(zip(self.names, (self._bases[number] + within[:, 0]).tolist(), strict=True))

    def shares_at(self, position: int) -> dict[str, tuple[float, float]]:
        """Returns, for each dataset, its share of the samples since weights last changed, and its target share."""
        number = self._segment_of(np.array([position]))[0]
        since, weights = position - self.segments[number].start, self._weights[number]
        counts = count_by_dataset(np.array([since]), weights)[:, 0].tolist()
        return {
            name: (count / max(since, 1), weight / sum(weights))
            for name, count, weight in zip(self.names, counts, weights, strict=True)
        }

    def draw(self, positions: Ints) -> tuple[Ints, Ints]:
        """Returns, for each position, the number of its dataset and the position in that dataset's own order."""
        dataset, cursor = np.empty_like(positions), np.empty_like(positions)
        segment_of = self._segment_of(positions)
        for number in distinct_values(segment_of):
            here = np.flatnonzero(segment_of == number)
            k, weights = positions[here] - self.segments[number].start, self._weights[number]
            before, after = count_by_dataset(k, weights), count_by_dataset(k + 1, weights)
            dataset[here] = chosen = np.argmax(after - before, axis=0)
            cursor[here] = self._bases[number][chosen] + before[chosen, np.arange(len(here))]
        return dataset, cursor

    def _segment_of(self, positions: Ints) -> Ints:
        starts = np.array([segment.start for segment in self.segments])
        return np.searchsorted(starts, positions, side="right") - 1
