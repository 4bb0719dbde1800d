"""An estimate as an HTML page, to attach to a request for compute: one file without scripts or external resources."""

from __future__ import annotations

from html import escape

from headway.plan.machine.hardware import GIB
from headway.plan.report.estimates import Estimate
from headway.plan.report.quantity import Unit, format_value
from headway.plan.report.schedule_picture import schedule_figure

_COLORS = (
    "#3b6fb6",
    "#e08a3c",
    "#4a9d6f",
    "#b5534f",
    "#8067ad",
    "#8a6d5a",
    "#d07fb3",
    "#7f7f7f",
    "#b5b23f",
    "#3fa9b5",
)
_WIDTH_PX = 760
STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #667; --line: #d5dae2; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa3b2; --line: #3a4250; --paper: #161b22; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 800px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.where, figcaption, .interval { color: var(--soft); } .verdict { font-size: 1.1rem; padding: .6rem .8rem;
  border-left: 5px solid; } .yes { border-color: #4a9d6f; } .no { border-color: #b5534f; }
  .tight { border-color: #c9973a; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .2rem .6rem .2rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
td.number { text-align: right; white-space: nowrap; }
figure { margin: 0; } svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .3em; }
.item { white-space: nowrap; margin-right: 1em; } .answers { font-size: .85rem; } .answers td { min-width: 5.5em; }
.answers td:first-child { min-width: 14em; }
svg .name { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
"""


def render_page(plan: Estimate) -> str:
    """Renders an estimate as a complete page.

    >>> from headway.plan import Layout, Node, estimate, preset
    >>> render_page(estimate(preset("gpt2"), Layout(), Node("h200-sxm1"))).startswith("<!doctype html>")
    True
    """
    body = [
        f"<h1>{escape(plan.title)}</h1><p class=where>{escape(plan.node)}</p>",
        f"<p class='verdict {'tight' if plan.tight else 'yes' if plan.fits else 'no'}'>{escape(plan.verdict)}</p>",
        _memory(plan),
        _timeline(plan),
        schedule_figure(plan, _WIDTH_PX, _COLORS),
        _scaling(plan),
        _remedies(plan),
        _answers(plan),
        "".join(f"<p class=where>{escape(note)}</p>" for note in plan.notes),
    ]
    head = f"<meta charset=utf-8><title>{escape(plan.title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _memory(plan: Estimate) -> str:
    """Draws one stacked bar per pipeline rank, and the device's memory as a line."""
    ranks = plan.ranks or [{"rank": "peak", **_parts(plan, "memory.part.")}]
    capacity = plan.answers["device.memory"].value if "device.memory" in plan.answers else 0.0
    widest = max([capacity, *(sum(_numbers(rank).values()) for rank in ranks)]) * 1.05 or 1.0
    names = list(dict.fromkeys(name for rank in ranks for name in _numbers(rank)))
    rows = []
    for index, rank in enumerate(ranks):
        rows.append(f"<text x=0 y={index * 34 + 21}>{escape(str(rank['rank']))}</text>")
        rows.append(_stack(_numbers(rank), names, index * 34 + 4, widest, "bytes"))
        total = sum(_numbers(rank).values())
        end = _LEFT_PX + (_WIDTH_PX - _LEFT_PX) * total / widest
        inside = end > _WIDTH_PX - 80
        place = f"x={end - 6 if inside else end + 6:.1f} y={index * 34 + 21}{' text-anchor=end' if inside else ''}"
        rows.append(f"<text {place}>{escape(format_value(total, 'bytes'))}</text>")
    height = len(ranks) * 34 + 22
    if capacity:
        x = _LEFT_PX + (_WIDTH_PX - _LEFT_PX) * capacity / widest
        rows.append(
            f"<line x1={x:.1f} x2={x:.1f} y1=0 y2={height - 20} stroke=#b5534f stroke-dasharray='4 3'/>"
        )
        rows.append(f"<text x={x:.1f} y={height - 5} text-anchor=end>device: {capacity / GIB:.1f} GiB</text>")
    return _figure("Memory at the peak", rows, height, names)


def _timeline(plan: Estimate) -> str:
    parts = _parts(plan, "time.part.")
    if not parts:
        return ""
    total = sum(parts.values())
    rows = [
        _stack(parts, list(parts), 4, total * 1.02, "s"),
        f"<text x=0 y=21>{escape(format_value(total, 's'))}</text>",
    ]
    return _figure("One step", rows, 34, list(parts))


def _scaling(plan: Estimate) -> str:
    """Draws efficiency over the number of GPUs, with a dot per doubling."""
    points = [(row["gpus"], row["weak_efficiency"]) for row in plan.scaling]
    if len(points) < 2:
        return ""
    top = max(1.05, max(y for _, y in points) * 1.05)
    step = (_WIDTH_PX - _LEFT_PX - 40) / (len(points) - 1)
    placed = [
        (_LEFT_PX + 20 + index * step, 10 + 150 * (1 - y / top), x, y) for index, (x, y) in enumerate(points)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in placed)
    rows = [
        f"<line x1={_LEFT_PX} x2={_WIDTH_PX} y1=160 y2=160 stroke=#8888 /><text x={_LEFT_PX - 30} y=164>0 %</text>"
    ]
    rows += [f"<polyline points='{line}' fill=none stroke={_COLORS[0]} stroke-width=2 />"]
    for x, y, gpus, efficiency in placed:
        rows.append(
            f"<circle cx={x:.1f} cy={y:.1f} r=4 fill={_COLORS[0]}><title>{efficiency:.1%}</title></circle>"
        )
        rows.append(f"<text x={x:.1f} y=182 text-anchor=middle>{gpus:.0f}</text>")
        rows.append(f"<text x={x:.1f} y={y - 8:.1f} text-anchor=middle>{efficiency:.0%}</text>")
    return _figure("Weak scaling: efficiency over the number of GPUs", rows, 190, [])


_LEFT_PX = 70


def _stack(parts: dict[str, float], names: list[str], y: int, widest: float, unit: Unit) -> str:
    x, drawn = float(_LEFT_PX), []
    for index, name in enumerate(names):
        width = (_WIDTH_PX - _LEFT_PX) * parts.get(name, 0.0) / widest
        if width <= 0:
            continue
        label = escape(f"{name}: {format_value(parts[name], unit)}")
        place = f"x={x:.1f} y={y} width={width:.1f} height=26"
        drawn.append(f"<rect {place} fill={_color(index)}><title>{label}</title></rect>")
        x += width
    return "".join(drawn)


def _figure(title: str, rows: list[str], height: int, names: list[str]) -> str:
    legend = "".join(
        f"<span class=item><span class=key style='background:{_color(i)}'></span>{escape(n)}</span> "
        for i, n in enumerate(names)
    )
    picture = (
        f"<svg viewBox='0 0 {_WIDTH_PX} {height}' role=img aria-label='{escape(title)}'>{''.join(rows)}</svg>"
    )
    return f"<h2>{escape(title)}</h2><figure>{picture}<figcaption>{legend}</figcaption></figure>"


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]


def _remedies(plan: Estimate) -> str:
    if (plan.fits and not plan.tight) or not plan.remedies:
        return ""
    rows = "".join(
        f"<tr><td>{escape(way.change)}</td><td class=number>{format_value(way.needed, 'bytes')}</td>"
        f"<td class=number>{way.slowdown - 1:+.0%}</td><td>{'fits' if way.fits else 'does not fit'}</td></tr>"
        for way in plan.remedies
    )
    return f"<h2>Changes that reduce memory</h2><table><tr><th>change<th>needs<th>GPU time<th></tr>{rows}</table>"


def _answers(plan: Estimate) -> str:
    rows = []
    for key, answer in plan.answers.items():
        value, _, interval = str(answer).partition(" (")
        rows.append(
            f"<tr><td>{escape(key)}</td><td class=number>{escape(value)}</td>"
            f"<td class=interval>{escape(interval.rstrip(')'))}</td><td>{escape(answer.formula)}</td>"
            f"<td>{escape(answer.source)}</td></tr>"
        )
    head = "<tr><th>answer<th>value<th>interval<th>formula<th>source</tr>"
    return f"<h2>All answers</h2><table class=answers>{head}{''.join(rows)}</table>"


def _parts(plan: Estimate, prefix: str) -> dict[str, float]:
    return {key.removeprefix(prefix): q.value for key, q in plan.answers.items() if key.startswith(prefix)}


def _numbers(rank: dict[str, object]) -> dict[str, float]:
    return {name: float(size) for name, size in rank.items() if isinstance(size, int | float)}
