"""The pipeline schedule of one step, drawn as text and as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from headway.errors import UsageError
from headway.plan.cost.timeline import Direction, StagePass, play_schedule
from headway.plan.report.estimates import Estimate
from headway.plan.report.quantity import format_value

_SIGNS: dict[Direction, str] = {"forward": "0123456789", "backward": "abcdefghij", "weights": "ABCDEFGHIJ"}
_NAMES: dict[Direction, str] = {
    "forward": "forward",
    "backward": "backward",
    "weights": "weight gradients",
}
_MAX_PASSES = 2000
_MAX_CHUNKS = 128
_ROW_PX, _LABEL_PX, _READABLE_PX = 20, 70, 14


def schedule_passes(plan: Estimate) -> tuple[list[StagePass], int]:
    """Returns the passes of one step, and the number of microbatches shown: only the first of very many."""
    layout = plan.inputs.get("layout")
    if not isinstance(layout, Mapping) or len(plan.stages) < 2:
        raise UsageError(
            "the plan has one pipeline stage, so there is no schedule to draw; expected pp of 2 or more"
        )
    pp, vpp = len(plan.stages), layout["vpp"]
    if pp * vpp > _MAX_CHUNKS:
        raise UsageError(
            f"the plan has {pp * vpp:,} pipeline chunks; expected at most {_MAX_CHUNKS} to draw a schedule"
        )
    # whole groups of pp, as the interleaved schedule needs
    most = max(2, _MAX_PASSES // (2 * pp * pp * vpp)) * pp
    shown = min(round(plan.answers["time.microbatches"].value), most)
    stages = [(s["forward_s"], s["backward_s"]) for s in plan.stages]
    owed = [int(s["weights_owed"]) for s in plan.stages if "weights_owed" in s]
    return play_schedule(stages, shown, vpp, layout["schedule"], owed), shown


def schedule_text(plan: Estimate, width: int = 100) -> str:
    """Draws a line per pipeline rank.

    >>> from headway.plan import Layout, Node, estimate, preset
    >>> plan = estimate(preset("gpt2"), Layout(pp=2, global_batch=3), Node("dgx-h100"))
    >>> print(schedule_text(plan, width=38).splitlines()[0])    # doctest: +SKIP
    rank 0  0011aaaa22bbbb..cccc
    """
    passes, shown = schedule_passes(plan)
    end = max(each.end_s for each in passes)
    columns = max(20, width - 9)
    lines = [["."] * columns for _ in plan.stages]
    for each in passes:
        sign = _SIGNS[each.direction][each.microbatch % 10]
        first, last = (round(columns * at / end) for at in (each.start_s, each.end_s))
        lines[each.rank][first:last] = sign * (last - first)
    drawn = [f"rank {rank:<3} {''.join(line)}" for rank, line in enumerate(lines)]
    idle = 1 - sum(each.end_s - each.start_s for each in passes) / (end * len(plan.stages))
    weights = ", of weights A-J," if any(each.direction == "weights" for each in passes) else ""
    legend = (
        f"forward 0-9, backward a-j{weights} by microbatch, idle . ({idle:.0%} of {format_value(end, 's')})"
    )
    return "\n".join([*drawn, f"{legend}{_left_out(plan, shown)}"])


def schedule_figure(plan: Estimate, width: int, colors: Sequence[str]) -> str:
    """Draws a row per pipeline rank as SVG: passes with their microbatch in three `colors`; empty without stages."""
    try:
        passes, shown = schedule_passes(plan)
    except UsageError:  # nothing to draw: a page shows the rest
        return ""
    used = [direction for direction in _NAMES if any(each.direction == direction for each in passes)]
    fills = dict(zip(_NAMES, colors, strict=False))
    end = max(each.end_s for each in passes)
    scale = (width - _LABEL_PX) / end
    rows = [f"<text x=0 y={rank * _ROW_PX + 14}>rank {rank}</text>" for rank in range(len(plan.stages))]
    for each in passes:
        x, wide = _LABEL_PX + each.start_s * scale, (each.end_s - each.start_s) * scale
        y = each.rank * _ROW_PX
        title = f"{_NAMES[each.direction]} of microbatch {each.microbatch}, chunk {each.chunk}"
        rows.append(
            f"<rect x={x:.1f} y={y} width={max(0.2, wide - 0.6):.1f} height={_ROW_PX - 3} "
            f"fill={fills[each.direction]}><title>{title}</title></rect>"
        )
        if wide >= _READABLE_PX:
            middle = x + wide / 2
            rows.append(f"<text x={middle:.1f} y={y + 13} text-anchor=middle>{each.microbatch}</text>")
    picture = f"<svg viewBox='0 0 {width} {len(plan.stages) * _ROW_PX}' role=img>{''.join(rows)}</svg>"
    keys = "".join(
        f"<span class=item><span class=key style='background:{fills[name]}'></span>{_NAMES[name]}</span> "
        for name in used
    )
    legend = keys + escape(f"{format_value(end, 's')}{_left_out(plan, shown)}")
    return f"<h2>Pipeline schedule</h2><figure>{picture}<figcaption>{legend}</figcaption></figure>"


def _left_out(plan: Estimate, shown: int) -> str:
    microbatches = plan.answers["time.microbatches"].value
    return f"; {shown} of {microbatches:.0f} microbatches" if shown < microbatches else ""
