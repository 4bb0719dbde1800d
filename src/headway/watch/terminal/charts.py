"""Bars and curves made of characters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from rich.text import Text

from headway.watch.view.series import Series, is_noisy, resample, smoothed

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character, by column and row
_LEAST_SHARE = 0.005  # in a legend: less would be 0%
_FILLS = {
    "data": ("█", "yellow"),
    "compute": ("▓", "green"),
    "optimizer": ("▒", "cyan"),
    "wait": ("░", "magenta"),
    "validation": ("▞", "blue"),
    "checkpoint": ("▚", "white"),
    "other": ("·", ""),
}
PHASES = {
    "data": "data wait",
    "compute": "forward+backward",
    "optimizer": "optimizer",
    "wait": "rank wait",
    "validation": "validation",
    "checkpoint": "save",
    "other": "other",
}
"""the phases of a step in the order in which they are shown, and their labels"""


def progress_bar(fraction: float, width: int) -> Text:
    """Draws a fraction as a bar.

    >>> progress_bar(0.5, 8).plain
    '━━━━────'
    """
    done = round(min(1.0, max(0.0, fraction)) * width)
    return Text().append("━" * done, "green").append("─" * (width - done), "dim")


def stacked_bar(shares: Mapping[str, float], width: int) -> Text:
    """Draws shares that add up to 1 as one bar. Each phase has its own character, for terminals without color.

    >>> stacked_bar({"data": 0.25, "compute": 0.75}, 8).plain
    '██▓▓▓▓▓▓'
    """
    bar, end, so_far = Text(), 0, 0.0
    for phase in PHASES:
        so_far += shares.get(phase, 0.0)
        begin, end = end, min(width, round(so_far * width))
        bar.append(_FILLS[phase][0] * (end - begin), _FILLS[phase][1])
    return bar


def legend(shares: Mapping[str, float]) -> Text:
    """Returns the legend of `stacked_bar`, the largest share first."""
    listed = sorted(
        (share, phase) for phase, share in shares.items() if phase in PHASES and share >= _LEAST_SHARE
    )
    found = Text()
    for share, phase in reversed(listed):
        found.append(_FILLS[phase][0], _FILLS[phase][1])
        found.append(f" {PHASES[phase]} {share:.0%}  ")
    return found


_LABEL_WIDTH = 7


def curve(series: Series, width: int, height: int) -> list[str]:
    """Draws a curve with braille dots, two by four per character. A long noisy curve is drawn as its moving average.

    >>> curve(Series(steps=[0, 1], means=[0.0, 1.0]), 12, 1)
    ['      1 ┤⡠⠊⠁']
    """
    inner = width - _LABEL_WIDTH - 2
    is_averaged = len(series.steps) > inner and is_noisy(series.means)
    shown = replace(series, means=smoothed(series.steps, series.means)) if is_averaged else series
    values = resample(shown, 2 * inner) if inner > 0 and height > 0 else []
    finite = [value for value in values if value is not None]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    grid = [[0] * inner for _ in range(height)]
    rows = 4 * height
    points = [
        (x, round((high - value) / (high - low) * (rows - 1)) if high > low else rows // 2)
        for x, value in enumerate(values)
        if value is not None
    ]
    for (x, y), (next_x, next_y) in pairwise([*points, points[-1]]):
        count = max(next_x - x, abs(next_y - y), 1)
        for part in range(count + 1):
            column, row = x + (next_x - x) * part // count, y + round((next_y - y) * part / count)
            grid[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    return [
        f"{_label(number, height, low, high):>{_LABEL_WIDTH}} ┤"
        + "".join(chr(0x2800 + dots) if dots else " " for dots in line)
        for number, line in enumerate(grid)
    ]


def _label(number: int, height: int, low: float, high: float) -> str:
    if number == 0:
        return _short(high)
    return _short(low) if number == height - 1 else ""


def _short(value: float) -> str:
    """Formats a number with as many digits as fit the margin, at most four.

    >>> _short(0.00070532), _short(-1.234e-05), _short(2.345)
    ('0.00071', '-1e-05', '2.345')
    """
    texts = [f"{value:.{digits}g}" for digits in (4, 3, 2, 1)]
    return next((text for text in texts if len(text) <= _LABEL_WIDTH), texts[-1])
