"""A search as an HTML page: every layout that was kept by time and memory, and the Pareto front."""

from __future__ import annotations

from html import escape

from headway.plan.machine.hardware import GIB
from headway.plan.report.html import STYLE
from headway.plan.report.quantity import format_value
from headway.plan.searcher.layouts import Candidate, SearchResult

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 760, 380, 60, 40


def render_search(title: str, found: SearchResult) -> str:
    """Renders the result of a search as a complete page without scripts or external resources."""
    rows = "".join(
        f"<tr><td>{escape(row.layout.describe())}</td><td class=number>{format_value(row.seconds, 's')}</td>"
        f"<td class=number>{format_value(row.needed, 'bytes')}</td>"
        f"<td>{'yes' if row.layout.trainable else ''}</td></tr>"
        for row in found.ranked
    )
    body = (
        f"<h1>{escape(title)}: {found.tried} layouts, {found.fitting} fit in {found.capacity / GIB:.0f} GiB</h1>"
        f"<h2>Time against memory</h2>{_scatter(found)}"
        "<h2>The fastest</h2><table><tr><th>layout<th>step<th>memory<th>runs in headway.train</tr>"
        f"{rows}</table>{''.join(f'<p class=where>{escape(reason)}</p>' for reason in found.reasons)}"
    )
    head = f"<meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"


def _scatter(found: SearchResult) -> str:
    shown = {id(row): row for row in (*found.ranked, *found.pareto)}
    if not shown:
        return f"<p>None fits: the smallest needs {found.smallest / GIB:.0f} GiB.</p>"
    slowest = max(row.seconds for row in shown.values())
    front = {id(row) for row in found.pareto}

    def place(row: Candidate) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - 20) * row.seconds / slowest
        return x, _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - 20) * row.needed / found.capacity

    dots = []
    for key, row in shown.items():
        x, y = place(row)
        color, size = ("#e08a3c", 5) if key in front else ("#3b6fb6", 3)
        told = f"{row.layout.describe()}: {row.seconds:.3g} s, {row.needed / GIB:.1f} GiB"
        dots.append(
            f"<circle cx={x:.1f} cy={y:.1f} r={size} fill='{color}'><title>{escape(told)}</title></circle>"
        )
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, found.pareto))
    floor = _HEIGHT - _BOTTOM
    return (
        f"<figure><svg viewBox='0 0 {_WIDTH} {_HEIGHT}'>"
        f"<polyline points='{line}' fill=none stroke='#e08a3c'/>{''.join(dots)}"
        f"<path d='M{_LEFT} 10V{floor}H{_WIDTH - 10}' fill=none stroke='#667'/>"
        f"<text x={_LEFT} y={floor + 25}>0 s</text><text x={_WIDTH - 90} y={floor + 25}>{slowest:.3g} s</text>"
        f"<text x=4 y=24>{found.capacity / GIB:.0f} GiB</text></svg>"
        "<figcaption>Orange: nothing is both faster and smaller.</figcaption></figure>"
    )
