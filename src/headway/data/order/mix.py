"""`Mix`: several datasets in one stream, in exact proportions that may change on the way.

How many samples each dataset has given after k samples is a formula, not a series of draws: the k samples are split
between two halves of the datasets, each part again, rounding to nearest. The error stays below a sample per level of
that tree, whatever k is; i.i.d. draws are off by hundreds after a million. A change of weights begins a new segment,
and the list of segments is all that must be remembered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from headway.data.catalog.catalog import Catalog
from headway.data.order.order import Ints, distinct
from headway.errors import UsageError

_ONE = 2**26
"""the sum of weights, about; 37 bits are left for the samples of a segment in 64-bit arithmetic"""
_LONG = 2**36

Shards = str | Path | Sequence[str | Path]


@final
class Mix:
    """Datasets and their weights; `ShardLoader` reads them in these proportions.

        mix = hw.data.Mix({"laion": 0.5, "datacomp": 0.3}, shards={"laion": "/data/laion/*.tar", "datacomp": paths})
        mix = hw.data.Mix({"/data/laion": 1, "/data/datacomp": 2}, schedule=[(1000, {"/data/laion": 3})])

    Weights need not add up to one. `shards` gives a folder, a pattern or a list of files for each name; without it, the
    names themselves are folders, patterns, or names of the `catalog` (by default, `Catalog()`). `schedule` changes
    weights at given steps; names left out keep theirs.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        shards: Mapping[str, Shards] | None = None,
        catalog: Catalog | None = None,
        schedule: Sequence[tuple[int, Mapping[str, float]]] = (),
    ) -> None:
        if not isinstance(weights, Mapping):
            raise UsageError(
                f'a Mix has a weight for each name, as in Mix({{"laion": 0.5}}), not {weights!r}'
            )
        self.weights = {str(name): float(weight) for name, weight in weights.items()}
        fixed_point(self.weights)
        self.shards: dict[str, Shards] = {name: (shards or {}).get(name, name) for name in self.weights}
        _check_names(shards or {}, self.weights)
        self.catalog = catalog
        steps = [step for step, _ in schedule]
        if any(step < 1 for step in steps) or steps != sorted(set(steps)):
            raise UsageError(f"a schedule's steps are rising numbers from 1 on, not {steps}")
        self.schedule: list[tuple[int, dict[str, float]]] = []
        current = self.weights
        for step, changed in schedule:
            current = merged(current, changed)
            self.schedule.append((step, current))


def merged(weights: Mapping[str, float], changed: Mapping[str, float]) -> dict[str, float]:
    """Weights after a change of some of them; names must be known."""
    _check_names(changed, weights)
    new = {**weights, **{name: float(weight) for name, weight in changed.items()}}
    fixed_point(new)
    return new


def _check_names(given: Mapping[str, object], known: Mapping[str, object]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UsageError(
            f"{', '.join(map(repr, unknown))} is not in the mix: its datasets are {', '.join(known)}"
        )


def fixed_point(weights: Mapping[str, float]) -> list[int]:
    """Weights as whole numbers with a sum near 2**26, so that all machines count alike."""
    values = list(weights.values())
    if not all(math.isfinite(value) and value >= 0 for value in values) or not any(values):
        raise UsageError(f"weights are numbers from 0 on, and one at least is above 0, not {dict(weights)}")
    total = math.fsum(values)
    return [max(round(value / total * _ONE), 1 if value else 0) for value in values]


def counts(k: Ints, weights: Sequence[int]) -> Ints:
    """How many of the first k samples come from each dataset: an array of datasets x len(k).

    >>> counts(np.array([1, 10]), [3, 1, 1]).tolist()
    [[1, 6], [0, 2], [0, 2]]
    """
    if k.dtype != object and k.size and int(k.max()) >= _LONG:
        return counts(k.astype(object), weights).astype(np.int64)
    if len(weights) == 1:
        return k[None]
    middle = len(weights) // 2
    left, total = sum(weights[:middle]), sum(weights)
    first = (k * left + total // 2) // total if total else k
    return np.concatenate([counts(first, weights[:middle]), counts(k - first, weights[middle:])])


class Segment(NamedTuple):
    """Weights that hold from a position of the stream on."""

    start: int
    weights: dict[str, float]


@final
class Timeline:
    """The stream of a mix: which dataset a position belongs to, and the how-many-th sample of that dataset it is."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        if not segments or segments[0].start != 0:
            raise UsageError("a timeline begins at position 0")
        starts = [segment.start for segment in segments]
        if starts != sorted(set(starts)):
            raise UsageError(f"segments begin at rising positions, not {starts}")
        self.segments = list(segments)
        self.names = list(segments[0].weights)
        self._weights = [fixed_point(segment.weights) for segment in segments]
        self._bases = [np.zeros(len(self.names), np.int64)]
        for weights, start, end in zip(self._weights, starts, starts[1:], strict=False):
            self._bases.append(self._bases[-1] + counts(np.array([end - start]), weights)[:, 0])

    def changed(self, position: int, weights: Mapping[str, float]) -> Timeline:
        """The timeline with other weights from a position on, until the next change that is already planned."""
        before = [segment for segment in self.segments if segment.start < position]
        after = [segment for segment in self.segments if segment.start > position]
        held = [segment for segment in self.segments if segment.start <= position][-1].weights
        return Timeline([*before, Segment(position, merged(held, weights)), *after])

    def weights_at(self, position: int) -> dict[str, float]:
        return next(segment.weights for segment in reversed(self.segments) if segment.start <= position)

    def counts_at(self, position: int) -> dict[str, int]:
        """Samples of each dataset before a position."""
        number = self._segment_of(np.array([position]))[0]
        within = counts(np.array([position - self.segments[number].start]), self._weights[number])[:, 0]
        return dict(zip(self.names, (self._bases[number] + within).tolist(), strict=True))

    def shares_at(self, position: int) -> dict[str, tuple[float, float]]:
        """Of each dataset, its part of the samples since weights last changed, and the part it should have."""
        number = self._segment_of(np.array([position]))[0]
        since, weights = position - self.segments[number].start, self._weights[number]
        given = counts(np.array([since]), weights)[:, 0].tolist()
        return {
            name: (count / max(since, 1), weight / sum(weights))
            for name, count, weight in zip(self.names, given, weights, strict=True)
        }

    def draw(self, positions: Ints) -> tuple[Ints, Ints]:
        """For each position, the number of its dataset and the cursor within that dataset's own endless order."""
        dataset, cursor = np.empty_like(positions), np.empty_like(positions)
        segment_of = self._segment_of(positions)
        for number in distinct(segment_of):
            here = np.flatnonzero(segment_of == number)
            k = positions[here] - self.segments[number].start
            before, after = counts(k, self._weights[number]), counts(k + 1, self._weights[number])
            dataset[here] = chosen = np.argmax(after - before, axis=0)
            cursor[here] = self._bases[number][chosen] + before[chosen, np.arange(len(here))]
        return dataset, cursor

    def _segment_of(self, positions: Ints) -> Ints:
        starts = np.array([segment.start for segment in self.segments])
        return np.searchsorted(starts, positions, side="right") - 1
