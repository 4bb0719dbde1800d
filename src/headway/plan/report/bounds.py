"""The interval of a step time: each part has the interval of its kernel class or link."""

from __future__ import annotations

from typing import NamedTuple

from headway.plan.cost.collectives import axis_group, shard_group
from headway.plan.cost.steptime import StepTime
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.efficiency import TimeInterval, intervals
from headway.plan.machine.hardware import Node
from headway.plan.model.layout import Layout
from headway.plan.model.transformer import Transformer

_LINKS = {"tensor parallel": "tp", "pipeline sends": "pp", "data parallel": "dp"}
_KINDS = {"attention": "attention", "context parallel": "attention", "elementwise": "memory", "optimizer": "memory",
          "expert parallel": "experts", "stragglers": "jitter"}  # fmt: skip

_RECURRENT = TimeInterval(0.7, 2.0, "no published step of a model with recurrent layers is known")


class TimeBounds(NamedTuple):
    """The interval of each part of a step, and of the step: relative to the estimate."""

    parts: dict[str, TimeInterval]
    low: float
    high: float


def time_bounds(
    model: Transformer, layout: Layout, node: Node, constants: Calibration, step: StepTime
) -> TimeBounds:
    """Returns the interval of a step: the sum of its parts' intervals, as if all erred in the same direction."""
    known = dict(intervals(node.device, constants, layout.precision))
    if model.state_space and not known["products"].measured:
        known["products"] = _RECURRENT
    parts = {name: known[_kind(name, model, layout, node, constants)] for name in step.parts}
    total = step.total
    low = sum(step.parts[name] * interval.low for name, interval in parts.items()) / total
    high = sum(step.parts[name] * interval.high for name, interval in parts.items()) / total
    return TimeBounds(parts, low, high)


def _kind(part: str, model: Transformer, layout: Layout, node: Node, constants: Calibration) -> str:
    if part in _LINKS:
        axis = _LINKS[part]
        group = (
            shard_group(layout, node, constants)
            if axis == "dp"
            else axis_group(axis, layout, node, constants)
        )
        return "peer" if group.nodes == 1 else "network"
    if part in _KINDS:
        return _KINDS[part]
    return "experts" if model.moe else "products"


def bound_notes(bounds: TimeBounds, step: StepTime) -> list[str]:
    """Returns notes on times that were not measured on this machine, the largest first, without parts below 5 %."""
    unknown: dict[tuple[str, str], float] = {}
    for name, interval in bounds.parts.items():
        if not interval.measured:
            reason = interval.source, interval.remedy
            unknown[reason] = unknown.get(reason, 0.0) + step.parts[name]
    ranked = sorted(unknown.items(), key=lambda item: -item[1])
    return [
        f"{100 * seconds / step.total:.0f} % of the step time is uncalibrated: {source}; run: {remedy}"
        for (source, remedy), seconds in ranked
        if seconds > 0.05 * step.total
    ]
