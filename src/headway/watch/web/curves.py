"""Curves for the page, reduced to as many points as it can draw; extremes are kept."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from headway.watch.view.metric_rows import MetricRows
from headway.watch.view.series import Series

MAX_POINTS = 2000


def curve(
    metrics: MetricRows, name: str, points: int, first_step: int | None = None, last_step: int | None = None
) -> dict[str, Any] | None:
    """Returns a curve of at most `points` points, optionally of a range of steps; None if there is no such curve."""
    series = metrics.curves.get(name)
    if series is None:
        return None
    if first_step is not None or last_step is not None:
        first, last = first_step or 0, last_step if last_step is not None else 1 << 53
        series = metrics.within(name, first, last) or _part(series, first, last)
    found = columns(decimated(series, points))
    found["samples"] = _samples(metrics.samples, found["step"])
    return {"name": name, "count": sum(series.counts), "last": series.last, **found}


def phases(metrics: MetricRows, points: int) -> dict[str, dict[str, Any]]:
    """Returns the seconds per step in each phase, as curves."""
    return {name: columns(decimated(series, points)) for name, series in list(metrics.phases.items())}


def columns(series: Series) -> dict[str, Any]:
    """Returns the points of a curve, column by column."""
    return {
        "step": series.steps,
        "time": series.times,
        "mean": series.means,
        "low": series.lows,
        "high": series.highs,
    }


def decimated(series: Series, points: int) -> Series:
    """Returns a curve of at most `points` points: mean and extremes of equal parts.

    >>> decimated(Series(steps=[1, 2, 3], times=[0.0] * 3, means=[5.0, 9.0, 1.0], lows=[5.0, 9.0, 1.0],
    ...                  highs=[5.0, 9.0, 1.0], counts=[1, 1, 1]), 2).highs
    [9.0, 1.0]
    """
    count, width = len(series.steps), -(-len(series.steps) // max(1, points))
    found = Series(of_epochs=series.of_epochs, last=series.last, non_finite=series.non_finite)
    for begin in range(0, count, max(1, width)):
        part = slice(begin, min(count, begin + width))
        weights = series.counts[part]
        found.steps.append(series.steps[part][-1])
        found.times.append(series.times[part][-1])
        found.means.append(
            sum(m * w for m, w in zip(series.means[part], weights, strict=True)) / sum(weights)
        )
        found.lows.append(min(series.lows[part]))
        found.highs.append(max(series.highs[part]))
        found.counts.append(sum(weights))
    return found


def _part(series: Series, first: int, last: int) -> Series:
    """Returns the points in a range of steps, and one more on each side, so that lines reach the edges."""
    begin = max(0, bisect_left(series.steps, first) - 1)
    part = slice(begin, bisect_left(series.steps, last) + 1)
    return Series(
        steps=series.steps[part],
        times=series.times[part],
        means=series.means[part],
        lows=series.lows[part],
        highs=series.highs[part],
        counts=series.counts[part],
        last=series.last,
    )


def _samples(samples: Series, steps: list[int]) -> list[float] | None:
    """Returns the number of samples at these steps, interpolated between log points."""
    if not samples.steps:
        return None
    known, totals = [0, *samples.steps], [0.0, *samples.highs]
    found = []
    for step in steps:
        at = min(len(known) - 1, max(1, bisect_left(known, step)))
        share = (step - known[at - 1]) / max(1, known[at] - known[at - 1])
        found.append(totals[at - 1] + share * (totals[at] - totals[at - 1]))
    return found
