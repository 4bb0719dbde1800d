"""Finds changes that make a plan fit, with the memory that each needs and its effect on the step time."""

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
    """One change: its name, the bytes that the fullest GPU would need, and the relative GPU time of a step."""

    change: str
    layout: Layout
    needed: float
    slowdown: float
    fits: bool


Change = tuple[str, dict[str, object]]
"""A name, and the keys of the layout that it sets."""


def find_remedies(model: Transformer, layout: Layout, node: Node, constants: Calibration) -> list[Remedy]:
    """Finds changes that lower the peak: one, or two if one is not enough. The cheapest that fit come first."""
    changes = _changes(model, layout, node)
    found = _try_changes(model, layout, node, constants, changes)
    if not any(remedy.fits for remedy in found):
        pairs = [
            (f"{a} and {b}", x | y) for (a, x), (b, y) in combinations(changes, 2) if not x.keys() & y.keys()
        ]
        found += [pair for pair in _try_changes(model, layout, node, constants, pairs) if pair.fits]
    return sorted(
        found, key=lambda remedy: (not remedy.fits, remedy.slowdown if remedy.fits else remedy.needed)
    )


def _try_changes(
    model: Transformer, layout: Layout, node: Node, constants: Calibration, changes: list[Change]
) -> list[Remedy]:
    before = memory.needed_bytes(model, layout, node.device)
    seconds = step_time(model, layout, node, constants).total * layout.gpus
    found = []
    for change, keys in changes:
        other = _valid(model, layout, keys)
        if other is None:
            continue
        needed = memory.needed_bytes(model, other, node.device)
        if needed < 0.99 * before:
            slowdown = step_time(model, other, node, constants).total * other.gpus / seconds
            fits = needed <= node.device.memory_bytes
            found.append(Remedy(change=change, layout=other, needed=needed, slowdown=slowdown, fits=fits))
    return found


def _changes(model: Transformer, layout: Layout, node: Node) -> list[Change]:
    changes: list[Change] = []
    if layout.recompute != "full":
        changes.append(("checkpoint blocks", {"recompute": "full"}))
    if layout.recompute == "none":
        if layout.megatron:
            changes.append(("recompute norms and activations", {"recompute": "modules"}))
        changes.append(("checkpoint every other product", {"recompute": "sac"}))
        if not layout.flash:
            changes.append(("recompute attention", {"recompute": "selective"}))
    if not layout.flash:
        changes.append(("fused attention", {"flash": True}))
    if layout.shards > 1:
        changes += [(name, {"zero": stage}) for stage, name in _ZERO.items() if stage > layout.zero]
    if layout.microbatch > 1:
        changes += [(f"microbatch {n}", {"microbatch": n}) for n in sorted({1, layout.microbatch // 2})]
    if layout.loss_chunks == 1 and not model.image:
        changes.append(("chunk the loss by 8", {"loss_chunks": 8}))
    if layout.optimizer in ("adamw", "adamw-foreach"):
        changes.append(("fused optimizer", {"optimizer": "adamw-fused"}))
    if layout.optimizer.startswith("adamw") and layout.optimizer != "adamw8bit":
        changes.append(("8-bit optimizer", {"optimizer": "adamw8bit"}))
    if not layout.offload:
        changes.append(("optimizer in host memory", {"offload": True}))
    if layout.tp > 1 and not layout.sequence_parallel:
        changes.append(("sequence parallelism", {"sequence_parallel": True}))
    if layout.tp * 2 <= node.gpus:
        twice = layout.tp * 2
        changes.append((f"tp {twice} (twice the GPUs)", {"tp": twice, "sequence_parallel": True}))
    return changes


_ZERO = {1: "shard the optimizer (ZeRO 1)", 2: "ZeRO 2", 3: "FSDP"}


def _valid(model: Transformer, layout: Layout, keys: dict[str, object]) -> Layout | None:
    try:
        other = replace(layout, **keys)  # type: ignore[arg-type]
        other.check_model(model)
    except UsageError:
        return None  # the model cannot be split in this way
    return other
