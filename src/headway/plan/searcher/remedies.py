"""What to change when a plan does not fit: each change alone, what it would need, what it would cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

from headway.errors import UsageError
from headway.plan.cost import memory
from headway.plan.cost.steptime import step_time
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.hardware import Node
from headway.plan.model.layout import Layout
from headway.plan.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change: what it is called, what the fullest GPU would need, how the step time would change."""

    change: str
    layout: Layout
    needed: float
    slowdown: float
    fits: bool


Change = tuple[str, dict[str, object]]


def find_remedies(model: Transformer, layout: Layout, node: Node, constants: Calibration) -> list[Remedy]:
    """Changes that lower the peak: one alone, or two when one is not enough; the cheapest that fit come first."""
    ideas = _ideas(model, layout, node)
    found = _tried(model, layout, node, constants, ideas)
    if not any(remedy.fits for remedy in found):
        pairs = [
            (f"{a} and {b}", x | y) for (a, x), (b, y) in combinations(ideas, 2) if not x.keys() & y.keys()
        ]
        found += [pair for pair in _tried(model, layout, node, constants, pairs) if pair.fits]
    return sorted(
        found, key=lambda remedy: (not remedy.fits, remedy.slowdown if remedy.fits else remedy.needed)
    )


def _tried(
    model: Transformer, layout: Layout, node: Node, constants: Calibration, ideas: list[Change]
) -> list[Remedy]:
    before = memory.reserved_bytes(memory.peak(model, layout).allocated, layout)
    seconds = step_time(model, layout, node, constants).total * layout.gpus
    found = []
    for change, keys in ideas:
        other = _valid(model, layout, keys)
        if other is None:
            continue
        needed = memory.reserved_bytes(memory.peak(model, other).allocated, other)
        if needed < 0.99 * before:
            slowdown = step_time(model, other, node, constants).total * other.gpus / seconds
            fits = needed <= node.device.memory_bytes
            found.append(Remedy(change=change, layout=other, needed=needed, slowdown=slowdown, fits=fits))
    return found


def _ideas(model: Transformer, layout: Layout, node: Node) -> list[Change]:
    ideas: list[Change] = []
    if layout.recompute != "full":
        ideas.append(("checkpoint blocks", {"recompute": "full"}))
    if layout.recompute == "none":
        ideas.append(("checkpoint every other product", {"recompute": "sac"}))
        if not layout.flash:
            ideas.append(("recompute attention", {"recompute": "selective"}))
    if not layout.flash:
        ideas.append(("fused attention", {"flash": True}))
    if layout.dp > 1:
        ideas += [(name, {"zero": stage}) for stage, name in _ZERO.items() if stage > layout.zero]
    if layout.microbatch > 1:
        ideas += [(f"microbatch {n}", {"microbatch": n}) for n in sorted({1, layout.microbatch // 2})]
    if layout.loss_chunks == 1 and not model.image:
        ideas.append(("chunk the loss by 8", {"loss_chunks": 8}))
    if layout.optimizer == "adamw":
        ideas.append(("8-bit optimizer", {"optimizer": "adamw8bit"}))
    if not layout.offload:
        ideas.append(("optimizer in host memory", {"offload": True}))
    if layout.tp > 1 and not layout.sequence_parallel:
        ideas.append(("sequence parallelism", {"sequence_parallel": True}))
    if layout.tp * 2 <= node.gpus:
        twice = {"tp": layout.tp * 2, "sequence_parallel": True}
        ideas.append((f"tp {layout.tp * 2} (twice the GPUs)", dict(twice)))
    return ideas


_ZERO = {1: "shard the optimizer (ZeRO 1)", 2: "ZeRO 2", 3: "FSDP"}


def _valid(model: Transformer, layout: Layout, keys: dict[str, object]) -> Layout | None:
    try:
        other = replace(layout, **keys)  # type: ignore[arg-type]
        other.check_model(model)
    except UsageError:
        return None  # a change that the model cannot take is no remedy
    return other
