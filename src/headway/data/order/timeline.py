"""The timeline of a mix: which dataset each position of the stream belongs to, in exact proportions.

How many samples each dataset has contributed after k samples is a formula, not a series of draws: the k samples are
split between two halves of the datasets, and so on within each half, rounding to nearest. The error stays below one
sample per level of that tree, whatever k is; i.i.d. draws are off by hundreds after a million. A change of weights
begins a new segment, and the list of segments is all that must be saved. A segment may have other datasets than the
one before.

Datasets are identified by name: a segment splits them in the order of their names, whatever the order of its keys.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, final

import numpy as np

from headway.data.order.permutation import Ints, distinct_values
from headway.errors import UsageError, unknown_name

_HALF_BITS, _HALF_MASK = 31, 2**31 - 1  # numbers below 2**62 are multiplied in two halves


def apply_weights(weights: Mapping[str, float], changes: Mapping[str, float]) -> dict[str, float]:
    """Returns the weights after a change of some of them; refuses unknown names."""
    given: object = changes  # dino_loader takes a list in the order of the datasets
    if not isinstance(given, Mapping):
        example = ", ".join(f"{name!r}: {weight:g}" for name, weight in weights.items())
        raise UsageError(f"weights need the names of their datasets: give {{{example}}}, not {changes!r}")
    check_names(changes, weights)
    new = {**weights, **{name: float(weight) for name, weight in changes.items()}}
    to_whole_numbers(new)
    return new


def check_names(names: Iterable[str], known: Mapping[str, object]) -> None:
    """Refuses names that are not datasets of the mix."""
    for name in names:
        if name not in known:
            raise unknown_name("dataset of the mix", name, known)


def to_whole_numbers(weights: Mapping[str, float]) -> list[int]:
    """Converts weights to whole numbers in exactly the same proportions.

    >>> to_whole_numbers({"a": 0.75, "b": 0.5})
    [3, 2]
    """
    values = list(weights.values())
    if not all(math.isfinite(value) and value >= 0 for value in values) or not any(values):
        raise UsageError(f"weights must be finite and at least 0, one of them above 0, not {dict(weights)}")
    ratios = [value.as_integer_ratio() for value in values]
    largest = max(denominator for _, denominator in ratios)  # all of them are powers of two
    return [numerator * (largest // denominator) for numerator, denominator in ratios]


def split_exactly(k: Ints, left: int, total: int) -> Ints:
    """Returns k * left / total, rounded; the ratio is exact to 62 bits. The result is the same on all machines."""
    share = (2 * (left << 2 * _HALF_BITS) + total) // (2 * total)
    high, low = np.uint64(share >> _HALF_BITS), np.uint64(share & _HALF_MASK)
    k_high, k_low = (k >> _HALF_BITS).astype(np.uint64), (k & _HALF_MASK).astype(np.uint64)
    bits, half = np.uint64(_HALF_BITS), np.uint64(2 ** (2 * _HALF_BITS - 1))
    middle = k_high * low + k_low * high + ((k_low * low + half) >> bits)
    result: Ints = (k_high * high + (middle >> bits)).astype(np.int64)
    return result


def count_by_dataset(k: Ints, weights: Sequence[int]) -> Ints:
    """Returns how many of the first k samples come from each dataset: an array of datasets x len(k).

    >>> count_by_dataset(np.array([1, 10]), [3, 1, 1]).tolist()
    [[1, 6], [0, 2], [0, 2]]
    """
    if len(weights) == 1:
        return k[None]
    middle = len(weights) // 2
    left, total = sum(weights[:middle]), sum(weights)
    first = split_exactly(k, left, total) if total else k
    return np.concatenate(
        [count_by_dataset(first, weights[:middle]), count_by_dataset(k - first, weights[middle:])]
    )


class WeightSegment(NamedTuple):
    """Weights that apply from a position of the stream on."""

    start: int
    weights: dict[str, float]


class _Split(NamedTuple):
    """How a segment splits samples between its datasets."""

    numbers: Ints
    """the numbers of its datasets, in the order of the tree"""
    weights: list[int]
    before: Ints
    """samples of every dataset before the segment"""


@final
class Timeline:
    """The stream of a mix: which dataset a position belongs to, and how many samples of that dataset precede it.

    `names` are the datasets by number; by default, those of the last segment. Earlier segments may have datasets that
    were removed later: they are counted, but their samples cannot be drawn.
    """

    def __init__(self, segments: Sequence[WeightSegment], names: Sequence[str] | None = None) -> None:
        if not segments or segments[0].start != 0:
            raise UsageError("a timeline begins at position 0")
        starts = [segment.start for segment in segments]
        if starts != sorted(set(starts)):
            raise UsageError(f"segments must begin at increasing positions, not {starts}")
        self.segments = list(segments)
        self.names = sorted(segments[-1].weights) if names is None else list(names)
        ever = dict.fromkeys(name for segment in segments for name in segment.weights)
        self._known = [*self.names, *(name for name in ever if name not in set(self.names))]
        self._splits: list[_Split] = []
        before = np.zeros(len(self._known), np.int64)
        for segment, end in zip(segments, [*starts[1:], starts[-1]], strict=True):
            self._splits.append(self._splitting(segment.weights, before))
            before = self._counts(self._splits[-1], end - segment.start)

    def _splitting(self, weights: Mapping[str, float], before: Ints) -> _Split:
        names = sorted(weights)
        numbers = np.array([self._known.index(name) for name in names])
        return _Split(numbers, to_whole_numbers({name: weights[name] for name in names}), before)

    def _counts(self, split: _Split, samples: int) -> Ints:
        """Returns the number of samples of every dataset after this many samples of a segment."""
        counts = split.before.copy()
        counts[split.numbers] += count_by_dataset(np.array([samples]), split.weights)[:, 0]
        return counts

    @cached_property
    def checksum(self) -> int:
        """A checksum of all weights and where they apply: ranks with the same one draw from the same datasets."""
        return zlib.crc32(
            repr([(start, sorted(weights.items())) for start, weights in self.segments]).encode()
        )

    def with_weights(self, position: int, weights: Mapping[str, float]) -> Timeline:
        """Returns the timeline with other weights from a position on, until the next scheduled change."""
        changed = WeightSegment(position, apply_weights(self.weights_at(position), weights))
        after = [segment for segment in self.segments if segment.start > position]
        return self.until(position, [changed, *after], self.names)

    def until(self, position: int, then: Sequence[WeightSegment], names: Sequence[str]) -> Timeline:
        """Returns the timeline up to a position, followed by other segments, which may have other datasets."""
        before = [segment for segment in self.segments if segment.start < position]
        return Timeline([*before, *then], names)

    def weights_at(self, position: int) -> dict[str, float]:
        """Returns the weights at a position."""
        return next(segment.weights for segment in reversed(self.segments) if segment.start <= position)

    def first_drawable(self) -> int:
        """Returns the position from which on no sample belongs to a removed dataset."""
        gone = [segment.start for segment in self.segments if not segment.weights.keys() <= {*self.names}]
        return next((segment.start for segment in self.segments if not gone or segment.start > gone[-1]), 0)

    def counts_at(self, position: int) -> dict[str, int]:
        """Returns the number of samples of each dataset before a position, including removed datasets."""
        number = self._segment_of(np.array([position]))[0]
        counts = self._counts(self._splits[number], position - self.segments[number].start)
        return dict(zip(self._known, counts.tolist(), strict=True))

    def shares_at(self, position: int) -> dict[str, tuple[float, float]]:
        """Returns, for each dataset, its share of the samples since weights last changed, and its target share."""
        number = self._segment_of(np.array([position]))[0]
        since, split = position - self.segments[number].start, self._splits[number]
        counts = count_by_dataset(np.array([since]), split.weights)[:, 0].tolist()
        return {
            self._known[dataset]: (count / max(since, 1), weight / sum(split.weights))
            for dataset, count, weight in zip(split.numbers.tolist(), counts, split.weights, strict=True)
        }

    def draw(self, positions: Ints) -> tuple[Ints, Ints]:
        """Returns, for each position, the number of its dataset and the position in that dataset's own order."""
        dataset, own_position = np.empty_like(positions), np.empty_like(positions)
        segment_of = self._segment_of(positions)
        for number in distinct_values(segment_of):
            here = np.flatnonzero(segment_of == number)
            k, split = positions[here] - self.segments[number].start, self._splits[number]
            before = count_by_dataset(k, split.weights)
            after = count_by_dataset(k + 1, split.weights)
            place = np.argmax(after - before, axis=0)
            dataset[here] = chosen = split.numbers[place]
            own_position[here] = split.before[chosen] + before[place, np.arange(len(here))]
        if dataset.size and int(dataset.max()) >= len(self.names):
            raise UsageError(
                f"position {int(positions[np.argmax(dataset)])} has a sample of "
                f"{self._known[int(dataset.max())]!r}, which was removed from the mix"
            )
        return dataset, own_position

    def _segment_of(self, positions: Ints) -> Ints:
        starts = np.array([segment.start for segment in self.segments])
        return np.searchsorted(starts, positions, side="right") - 1
