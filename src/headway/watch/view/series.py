"""Curves with a bounded number of points: neighbors are merged when there are too many, and extremes are kept."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

CAPACITY = 2048
"""points of a curve, more than a screen has columns"""
LARGEST_VALUE = 1e290
"""sums of larger values would not be finite"""
_DECAY = 0.9
_SMOOTHED_PARTS = 500
"""parts of a curve: over each, a moving average decays by a tenth"""


@final
@dataclass(kw_only=True)
class Series:
    """A curve: steps and times, and the mean, smallest and largest value of each point.

    >>> series = Series()
    >>> series.add(10, 1.5, 0.7)
    >>> series.steps, series.means
    ([10], [0.7])
    """

    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    bad_steps: list[int] = field(default_factory=list)
    """steps of values that were not numbers, the first 2048 of them"""
    of_epochs: bool = False
    """whether only epochs have such values, and log points do not"""
    last: float | None = None
    """the newest value, finite or not"""
    non_finite: int = 0
    """values that were not numbers"""
    stride: int = 1
    """values in each point but the last, the same for the whole run"""

    def add(self, step: int, time: float, value: float) -> None:
        """Appends a value. A step that is not above the last was repeated by a restart: it replaces all later ones."""
        self.cut(step)
        self.last = value
        if not math.isfinite(value):
            if self.non_finite == len(self.bad_steps) < CAPACITY:
                self.bad_steps.append(step)
            self.non_finite += 1
            return
        if len(self.steps) >= CAPACITY and self.counts[-1] >= self.stride:
            self._merge()
        if self.counts and self.counts[-1] < self.stride:
            self._extend(step, time, value)
        else:
            self.steps.append(step)
            self.times.append(time)
            self.means.append(value)
            self.lows.append(value)
            self.highs.append(value)
            self.counts.append(1)

    def cut(self, step: int) -> None:
        """Removes `step` and all later ones."""
        kept = bisect_left(self.bad_steps, step)
        if kept < len(self.bad_steps):
            self.non_finite = kept
            del self.bad_steps[kept:]
        elif not self.steps or self.steps[-1] < step:
            return
        while self.steps and self.steps[-1] >= step:
            for column in self._columns():
                column.pop()
        ends_bad = self.bad_steps[-1:] > self.steps[-1:]
        self.last = math.nan if ends_bad else self.means[-1] if self.means else None

    def _extend(self, step: int, time: float, value: float) -> None:
        """Adds a value to the last point."""
        self.steps[-1], self.times[-1] = step, time
        self.lows[-1], self.highs[-1] = min(self.lows[-1], value), max(self.highs[-1], value)
        self.counts[-1] += 1
        self.means[-1] += (value - self.means[-1]) / self.counts[-1]

    def _columns(self) -> tuple[list[int] | list[float], ...]:
        return self.steps, self.times, self.means, self.lows, self.highs, self.counts

    def _merge(self) -> None:
        """Merges pairs of neighbors into one point each."""
        points = list(zip(*self._columns(), strict=True))
        even = len(points) // 2 * 2
        merged = [
            (
                b[0],
                b[1],
                (a[2] * a[5] + b[2] * b[5]) / (a[5] + b[5]),
                min(a[3], b[3]),
                max(a[4], b[4]),
                a[5] + b[5],
            )
            for a, b in zip(points[:even:2], points[1:even:2], strict=True)
        ]
        for column, values in zip(self._columns(), zip(*merged, *points[even:], strict=True), strict=True):
            column[:] = values
        self.stride *= 2


def resample(series: Series, width: int) -> list[float | None]:
    """Returns the means of `width` equal parts of a curve, by step; None where a part has no value.

    >>> resample(Series(steps=[0, 1, 2, 3], means=[1.0, 3.0, 5.0, 7.0]), 2)
    [2.0, 6.0]
    """
    if not series.steps or width < 1:
        return [None] * max(0, width)
    first, span = series.steps[0], max(1, series.steps[-1] - series.steps[0])
    sums, counts = [0.0] * width, [0] * width
    for step, mean in zip(series.steps, series.means, strict=True):
        place = min(width - 1, (step - first) * width // (span + 1))
        sums[place] += mean
        counts[place] += 1
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def smoothed(steps: Sequence[int], values: Sequence[float]) -> list[float]:
    """Returns an exponential moving average without initial bias, which lags by 2 percent of the curve.

    It decays by distance and not by point, so that a curve with few points does not lag more.

    >>> smoothed([10, 20, 30], [1.0, 1.0, 1.0])
    [1.0, 1.0, 1.0]
    """
    found: list[float] = []
    total = weight = 0.0
    unit = (steps[-1] - steps[0]) / _SMOOTHED_PARTS if len(steps) > 1 else 1.0
    for value, distance in zip(values, (unit, *(b - a for a, b in pairwise(steps))), strict=True):
        decay: float = _DECAY ** (distance / unit) if unit else 0.0
        total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
        found.append(total / weight)
    return found


def is_noisy(values: Sequence[float]) -> bool:
    """Returns whether a curve goes up and down so often that its average is more useful; a learning rate does not.

    >>> is_noisy([1.0, 3.0, 2.0, 4.0, 3.0]), is_noisy([3.0, 3.0, 2.0, 2.0, 1.0])
    (True, False)
    """
    rises = [b > a for a, b in pairwise(values) if a != b]
    return sum(a != b for a, b in pairwise(rises)) * 5 > len(values)


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(series: Series, width: int) -> str:
    """Draws a curve in one line of text.

    >>> sparkline(Series(steps=[0, 1, 2, 3], means=[4.0, 3.0, 2.0, 1.0]), 4)
    '█▆▃▁'
    """
    values = _filled(resample(series, min(width, max(1, len(series.steps)))))
    if not values:
        return ""
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in values)


def _filled(values: Sequence[float | None]) -> list[float]:
    """Fills gaps with the value before them."""
    found: list[float] = []
    for value in values:
        if value is not None:
            found.append(value)
        elif found:
            found.append(found[-1])
    return found
