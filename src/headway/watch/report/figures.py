"""Figures as SVG: curves and stacked bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle

from headway.watch.view.series import Series, is_noisy, smoothed

COLORS = ("#3b6fb6", "#e08a3c", "#4a9d6f", "#b5534f", "#8067ad", "#8a6d5a", "#d07fb3", "#7f7f7f")
_WIDTH, _HEIGHT = 420, 210
_LEFT, _BOTTOM, _TOP, _RIGHT = 64, 24, 8, 8
_MANY_POINTS = 40


def curves(named: Mapping[str, Series]) -> str:
    """Draws curves over the same steps. A noisy curve of many points is thin, with its moving average in bold.

    Values that are not finite cannot be drawn: the caption counts them.
    """
    known = {name: series for name, series in named.items() if series.steps or series.non_finite}
    colors = dict(zip(known, cycle(COLORS), strict=False))
    keys = "".join(_key(name, series, colors[name]) for name, series in known.items())
    drawn = {name: series for name, series in known.items() if series.steps}
    if not drawn:
        return f"<figure><figcaption>{keys}</figcaption></figure>" if keys else ""
    steps = [step for series in drawn.values() for step in (series.steps[0], series.steps[-1])]
    low, high = _range(list(drawn.values()))
    first, last = min(steps), max(steps)

    def x(step: float) -> float:
        return _LEFT + (step - first) / max(1, last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        inside = min(high, max(low, value))
        return _TOP + (high - inside) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts, has_averages = [_axes(low, high, first, last)], False
    for name, series in drawn.items():
        color = colors[name]
        points = list(zip(series.steps, series.means, strict=True))
        title = f"<title>{escape(name)}: last {_last(series):.5g}</title>"
        if len(points) == 1:
            parts.append(
                f"<circle cx={x(points[0][0]):.1f} cy={y(points[0][1]):.1f} r=3 fill={color}>{title}</circle>"
            )
            continue
        averaged = len(points) > _MANY_POINTS and is_noisy(series.means)
        has_averages |= averaged
        raw = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        weight = "stroke-width=1 stroke-opacity=.35" if averaged else "stroke-width=2"
        parts.append(f"<polyline points='{raw}' fill=none stroke={color} {weight}>{title}</polyline>")
        if averaged:
            smooth = " ".join(
                f"{x(step):.1f},{y(value):.1f}"
                for step, value in zip(series.steps, smoothed(series.steps, series.means), strict=True)
            )
            parts.append(
                f"<polyline points='{smooth}' fill=none stroke={color} stroke-width=2>{title}</polyline>"
            )
    drawing = f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}'>{''.join(parts)}</svg>"
    note = "<span class=item>bold: moving average</span>" if has_averages else ""
    return f"<figure><figcaption>{keys}{note}</figcaption>{drawing}</figure>"


def _key(name: str, series: Series, color: str) -> str:
    bad = f" <b class=bad>{series.non_finite:,} not finite</b>" if series.non_finite else ""
    key = f"<i class=key style='background:{color}'></i>{escape(name)}"
    return f"<span class=item>{key} <b>{_last(series):.4g}</b>{bad}</span>"


def _last(series: Series) -> float:
    return series.means[-1] if series.last is None else series.last


def _range(series: Sequence[Series]) -> tuple[float, float]:
    """Returns the range to draw, without 1% of the values at each end, so that a spike does not flatten the rest."""
    values = sorted(value for each in series for value in each.means)
    cut = len(values) // 100
    low, high = values[cut], values[-1 - cut]
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - pad, high + pad


def _axes(low: float, high: float, first: int, last: int) -> str:
    inner, bottom = _HEIGHT - _TOP - _BOTTOM, _HEIGHT - _BOTTOM
    lines = []
    for part in range(4):
        at = _TOP + inner * part / 3
        value = high - (high - low) * part / 3
        lines.append(f"<line x1={_LEFT} x2={_WIDTH - _RIGHT} y1={at:.1f} y2={at:.1f} class=grid />")
        lines.append(f"<text x={_LEFT - 6} y={at + 4:.1f} text-anchor=end>{_tick(value)}</text>")
    lines.append(f"<text x={_LEFT} y={bottom + 17}>{first:,}</text>")
    lines.append(f"<text x={_WIDTH - _RIGHT} y={bottom + 17} text-anchor=end>step {last:,}</text>")
    return "".join(lines)


def _tick(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return "0"
    return f"{value:.3g}"


def stacked(parts: Mapping[str, float], titles: Mapping[str, str]) -> str:
    """Draws the parts of a whole as one bar, with a legend below."""
    whole = sum(parts.values())
    if whole <= 0:
        return ""
    shown = {name: value for name, value in parts.items() if value > 0}
    color = {name: COLORS[(2 + number) % len(COLORS)] for number, name in enumerate(parts)}
    bars = "".join(
        f"<i style='flex:{value / whole:.6f};background:{color[name]}' "
        f"title='{escape(titles[name])}: {value / whole:.1%}'></i>"
        for name, value in shown.items()
    )
    return f"<div class=stack>{bars}</div>" + "".join(
        f"<span class=item title='{escape(titles[name])}'><i class=key style='background:{color[name]}'></i>"
        f"{escape(name)} <b>{value / whole:.1%}</b></span>"
        for name, value in shown.items()
    )
