"""A search as an HTML page: every layout that fits by time and memory, and the Pareto front."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from headway.plan.machine.hardware import GIB
from headway.plan.report.html import STYLE
from headway.plan.report.quantity import format_value
from headway.plan.searcher.layouts import Candidate, SearchResult

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 760, 400, 62, 44, 20
_TICKS = 4
_SLOWEST = 2.0
"""Layouts that take more than this many times as long as the fastest are not drawn."""
_SPACING_PX = 3
_ORANGE = "#e08a3c"


def render_search(title: str, found: SearchResult) -> str:
    """Renders the result of a search as a complete page without scripts or external resources."""
    rows = "".join(
        f"<tr><td>{escape(row.layout.describe())}</td><td class=number>{format_value(row.seconds, 's')}</td>"
        f"<td class=number>{format_value(row.needed, 'bytes')}</td>"
        f"<td class=number>{format_value(row.most, 'bytes')}</td>"
        f"<td>{'yes' if row.layout.trainable else ''}</td></tr>"
        for row in found.ranked
    )
    body = (
        f"<h1>{escape(title)}: {found.tried} layouts, {found.fitting} fit in {found.capacity / GIB:.0f} GiB</h1>"
        f"<h2>Time against memory</h2>{_scatter(found)}"
        "<h2>The fastest</h2><table><tr><th>layout<th>step<th>memory<th>at most<th>runs in train</tr>"
        f"{rows}</table>{''.join(f'<p class=where>{escape(reason)}</p>' for reason in found.reasons)}"
    )
    head = f"<meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"


def _scatter(found: SearchResult) -> str:
    """Draws a dot per layout that fits, the Pareto front as a line, and the fastest with its name."""
    if found.best is None:
        return f"<p>None fits: the smallest needs {found.smallest / GIB:.0f} GiB.</p>"
    least = min(row.seconds for row in found.every)
    most = max(_SLOWEST * least, *(row.seconds for row in found.pareto))
    axes = _Axes(
        seconds=(least - 0.05 * (most - least), most + 0.05 * (most - least)), capacity=found.capacity
    )
    front = {id(row) for row in found.pareto}
    dots: dict[tuple[int, int], str] = {}
    # the fastest is drawn last; only one of several in the same place is kept
    for row in reversed(found.every):
        if row.seconds <= most and id(row) not in front:
            x, y = axes.place(row)
            fill = "#3b6fb6" if row.safe else "#b9c4d3"
            dots[round(x / _SPACING_PX), round(y / _SPACING_PX)] = _dot(row, x, y, 2.5, fill)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(axes.place, found.pareto))
    marks = [_dot(row, *axes.place(row), 4.5, _ORANGE) for row in found.pareto]
    x, y = axes.place(found.best)
    best = f"<circle cx={x:.1f} cy={y:.1f} r=8 fill=none stroke='#b5534f' stroke-width=2 />"
    name = f"<text class=name x={x + 14:.1f} y={y + 4:.1f}>{escape(found.best.layout.describe())}</text>"
    slower = sum(row.seconds > most for row in found.every)
    beyond = f" {slower} slower ones are not drawn." if slower else ""
    return (
        f"<figure><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='Time against memory'>{axes.draw()}"
        f"{''.join(dots.values())}<polyline points='{line}' fill=none stroke='{_ORANGE}' stroke-width=1.5 />"
        f"{''.join(marks)}{best}{name}</svg><figcaption>Each dot is a layout that fits; pale: perhaps not, at the "
        "upper end of its interval. Orange: nothing is both faster and smaller. Red: the first row of the table."
        f"{beyond}</figcaption></figure>"
    )


def _dot(row: Candidate, x: float, y: float, size: float, fill: str) -> str:
    title = f"{row.layout.describe()}: {row.seconds:.3g} s, {row.needed / GIB:.1f} GiB"
    return f"<circle cx={x:.1f} cy={y:.1f} r={size} fill='{fill}'><title>{escape(title)}</title></circle>"


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """Seconds from left to right, and bytes from zero to the capacity of the device."""

    seconds: tuple[float, float]
    capacity: float

    def place(self, row: Candidate) -> tuple[float, float]:
        return self._x(row.seconds), self._y(row.needed)

    def _x(self, seconds: float) -> float:
        first, last = self.seconds
        return _LEFT + (_WIDTH - _LEFT - _TOP) * (seconds - first) / (last - first)

    def _y(self, size: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * size / self.capacity

    def draw(self) -> str:
        """Draws both axes with their ticks, and the capacity as a dashed line."""
        floor, (first, last) = _HEIGHT - _BOTTOM, self.seconds
        rows = [f"<path d='M{_LEFT} {_TOP}V{floor}H{_WIDTH - _TOP}' fill=none stroke='#667'/>"]
        rows.append(
            f"<line x1={_LEFT} x2={_WIDTH - _TOP} y1={_TOP} y2={_TOP} stroke='#b5534f' stroke-dasharray='4 3'/>"
        )
        for step in range(_TICKS + 1):
            size, at = self.capacity * step / _TICKS, first + (last - first) * step / _TICKS
            y, x = self._y(size) + 4, self._x(at)
            rows.append(f"<text x={_LEFT - 8} y={y:.1f} text-anchor=end>{size / GIB:.0f} GiB</text>")
            rows.append(f"<text x={x:.1f} y={floor + 18} text-anchor=middle>{at:.3g} s</text>")
        rows.append(
            f"<text x={(_LEFT + _WIDTH) / 2} y={_HEIGHT - 4} text-anchor=middle>time of a step</text>"
        )
        return "".join(rows)
