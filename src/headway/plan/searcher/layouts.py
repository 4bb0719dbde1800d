"""Searches the fastest layouts for a number of GPUs: tries every valid one and ranks those that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from headway.errors import UsageError
from headway.plan import checks
from headway.plan.cost import memory
from headway.plan.cost.steptime import StepTime, step_time
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.efficiency import scoped_calibration
from headway.plan.machine.hardware import GIB, Node
from headway.plan.model.layout import Layout, Recompute
from headway.plan.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that fits, with the bytes it needs, at most and most likely, and its step time."""

    layout: Layout
    needed: float
    most: float
    step: StepTime
    safe: bool
    """Whether it fits even if it needs `most`."""

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return self.step.total

    def to_dict(self) -> dict[str, object]:
        return {
            "layout": asdict(self.layout),
            "describe": self.layout.describe(),
            "needed_bytes": self.needed,
            "most_bytes": self.most,
            "safe": self.safe,
            "step_s": self.seconds,
        }


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search: how many layouts were tried, how many fit, and which are best."""

    tried: int
    fitting: int
    ranked: list[Candidate]
    """The fastest first; those that fit only without the upper end of their interval come last."""
    pareto: list[Candidate]
    """Layouts for which no other one is both faster and smaller."""
    smallest: float
    """Bytes that the smallest layout needs."""
    capacity: float
    reasons: list[str]

    @property
    def best(self) -> Candidate | None:
        return self.ranked[0] if self.ranked else None

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        return {
            "tried": self.tried,
            "fitting": self.fitting,
            "capacity_bytes": self.capacity,
            "smallest_bytes": self.smallest,
            "ranked": [found.to_dict() for found in self.ranked],
            "pareto": [found.to_dict() for found in self.pareto],
            "reasons": self.reasons,
        }


def search(
    model: Transformer,
    node: Node,
    *,
    gpus: int,
    global_batch: int,
    base: Layout | None = None,
    calibration: Calibration | None = None,
    keep: int = 20,
) -> SearchResult:
    """Ranks all layouts of a model on `gpus` GPUs. `base` has what does not vary: precision, sequence, optimizer.

    >>> from headway.plan.model.presets import preset
    >>> found = search(preset("gpt2"), Node("h200-sxm8"), gpus=8, global_batch=64)
    >>> found.best.layout.gpus
    8
    """
    checks.require_int("gpus", gpus)
    checks.require_int("global_batch", global_batch)
    base, (constants, _) = base or Layout(), scoped_calibration(calibration, node.device)
    capacity = node.device.memory_bytes
    tried, smallest, fitting = 0, float("inf"), []
    for layout in layouts(model, node, gpus, global_batch, base):
        tried += 1
        allocated = memory.peak(model, layout).allocated
        needed = memory.reserved_bytes(allocated, layout)
        smallest = min(smallest, needed)
        if needed <= capacity:
            step, most = (
                step_time(model, layout, node, constants),
                memory.reserved_range(allocated, layout)[1],
            )
            fitting.append(
                Candidate(layout=layout, needed=needed, most=most, step=step, safe=most <= capacity)
            )
    if not tried:
        raise UsageError(
            f"no layout of {gpus} GPUs suits global_batch {global_batch}, the model's heads ({model.heads}) and layers "
            f"({model.layers}); choose a global_batch that is a multiple of a divisor of {gpus}"
        )
    fitting.sort(key=lambda found: (not found.safe, found.seconds, found.needed))
    return SearchResult(
        tried=tried,
        fitting=len(fitting),
        ranked=fitting[:keep],
        pareto=_pareto(sorted(fitting, key=lambda found: (found.seconds, found.needed))),
        smallest=smallest,
        capacity=capacity,
        reasons=_reasons(model, node, gpus, global_batch, base, constants, fitting),
    )


def layouts(model: Transformer, node: Node, gpus: int, global_batch: int, base: Layout) -> Iterator[Layout]:
    """Yields every sensible layout: tensor parallelism inside a node, pipeline stages of equal size."""
    ways: tuple[Recompute, ...] = ("none", "sac", "full") if base.flash else ("none", "selective", "full")
    sequence = base.tokens(model)
    for tp, pp, cp, dp in _degrees(model, node, gpus, sequence):
        if global_batch % dp:
            continue
        for vpp in _virtual(model, pp):
            for zero in (0,) if dp * cp == 1 else (0, 1, 2, 3) if pp == 1 else (0, 1):
                for ep in _experts(model, dp, node, tp):
                    for microbatch in _microbatches(global_batch // dp):
                        if vpp > 1 and global_batch // (dp * microbatch) % pp:
                            continue
                        for recompute in ways:
                            yield replace(
                                base, dp=dp, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, zero=zero, shard=None,
                                microbatch=microbatch, global_batch=global_batch, recompute=recompute,
                                sequence_parallel=tp > 1 and sequence // cp % tp == 0,
                            )  # fmt: skip


def _degrees(model: Transformer, node: Node, gpus: int, sequence: int) -> Iterator[tuple[int, int, int, int]]:
    for tp in _divisors(gpus):
        if tp > node.gpus or model.heads % tp or (tp > model.kv and tp % model.kv):
            continue
        for pp in _divisors(gpus // tp):
            if model.layers % pp:
                continue
            for cp in _divisors(gpus // tp // pp):
                # with fewer than a few thousand tokens per rank, context parallelism is only overhead
                if cp > 1 and (model.image or cp & (cp - 1) or sequence % cp or sequence // cp < 4096):
                    continue
                yield tp, pp, cp, gpus // tp // pp // cp


def _virtual(model: Transformer, pp: int) -> list[int]:
    return [v for v in (1, 2, 3, 4, 6, 8) if v == 1 or (pp > 1 and model.layers % (pp * v) == 0)]


def _experts(model: Transformer, dp: int, node: Node, tp: int) -> list[int]:
    if model.moe is None:
        return [1]
    experts = model.moe.experts
    return [ep for ep in _divisors(dp) if experts % ep == 0 and (ep == 1 or ep * tp <= 8 * node.gpus)]


def _microbatches(samples: int) -> list[int]:
    return [mb for mb in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256) if samples % mb == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _pareto(fitting: list[Candidate]) -> list[Candidate]:
    """Selects layouts that need less memory than every faster one, the fastest first."""
    pareto: list[Candidate] = []
    for found in fitting:
        if not pareto or found.needed < 0.98 * pareto[-1].needed:
            pareto.append(found)
    return pareto


def _reasons(
    model: Transformer,
    node: Node,
    gpus: int,
    global_batch: int,
    base: Layout,
    constants: Calibration,
    fitting: list[Candidate],
) -> list[str]:
    """Explains why the fastest layout is faster than the next, and than the common choices."""
    if not fitting:
        return []
    best = fitting[0]
    reasons = [_why_fastest(best, fitting)]
    for name, keys in _common_layouts(node, gpus):
        try:
            layout = replace(base, global_batch=global_batch, shard=None, **keys)  # type: ignore[arg-type]
            layout.check_model(model)
        except UsageError as error:
            reasons.append(f"{name}: not possible: {error}")
            continue
        needed = memory.reserved_bytes(memory.peak(model, layout).allocated, layout)
        if needed > node.device.memory_bytes:
            reasons.append(f"{name}: needs {needed / GIB:.0f} GiB of {node.device.memory_bytes / GIB:.0f}")
        else:
            ratio = step_time(model, layout, node, constants).total / best.seconds
            reasons.append(
                f"{name}: fits, {ratio - 1:+.0%} step time" if ratio > 1.005 else f"{name}: as fast"
            )
    return reasons


def _why_fastest(best: Candidate, fitting: list[Candidate]) -> str:
    text = (
        f"{best.layout.describe()} is the fastest of {len(fitting)} that fit: {best.seconds:.3g} s per step"
    )
    rival = next((found for found in fitting if _shape(found.layout) != _shape(best.layout)), None)
    if rival is None:
        return text
    if rival.seconds < 1.0005 * best.seconds:
        return f"{text}; {rival.layout.describe()} is as fast"
    changes = {
        part: rival.step.parts.get(part, 0.0) - best.step.parts.get(part, 0.0)
        for part in {**rival.step.parts, **best.step.parts}
    }
    part = max(changes, key=lambda name: changes[name])
    return (
        f"{text}; the next shape, {rival.layout.describe()}, takes {rival.seconds / best.seconds - 1:.1%} longer, "
        f"most of it {part} ({changes[part]:+.3g} s)"
    )


def _shape(layout: Layout) -> tuple[int, ...]:
    return layout.tp, layout.pp, layout.cp, layout.ep


def _common_layouts(node: Node, gpus: int) -> list[tuple[str, dict[str, object]]]:
    inside = min(node.gpus, gpus)
    common: list[tuple[str, dict[str, object]]] = [
        ("plain data parallel (DDP)", {"dp": gpus, "zero": 0}),
        ("fully sharded (FSDP)", {"dp": gpus, "zero": 3}),
        ("fully sharded, blocks checkpointed", {"dp": gpus, "zero": 3, "recompute": "full"}),
    ]
    if gpus > 1:
        split: dict[str, object] = {
            "tp": inside,
            "dp": gpus // inside,
            "zero": 1,
            "sequence_parallel": inside > 1,
        }
        common.append((f"tensor parallel {inside} in the node, ZeRO 1 across", split))
    return common
