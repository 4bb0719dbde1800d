"""Searches the fastest layouts for a number of GPUs: tries every valid one and ranks those that fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from math import gcd, isqrt
from types import MappingProxyType
from typing import Any

from headway.errors import UsageError
from headway.plan import checks
from headway.plan.cost import memory
from headway.plan.cost.schedule import stage_layers
from headway.plan.cost.steptime import StepTime, step_time
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.efficiency import scoped_calibration
from headway.plan.machine.hardware import GIB, Device, Node
from headway.plan.model.layout import MOST_GPUS, Layout, PipelineSchedule, Recompute, most_chunks
from headway.plan.model.transformer import Transformer

RESTRICTIONS = ("schedule", "recompute", "zero")
"""settings of layouts that a search varies, unless it is restricted to one value"""


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
            "trainable": self.layout.trainable,
            "step_s": self.seconds,
        }


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search: how many layouts were tried, how many fit, and which are best.

    found = hw.plan.search(model, node, gpus=64, global_batch=512)
    print(found.tried, found.fitting, found.best.layout)
    """

    tried: int
    fitting: int
    ranked: list[Candidate]
    """The fastest first; those that may not fit at the upper end of their interval come last."""
    pareto: list[Candidate]
    """Layouts for which no other one is both faster and smaller."""
    smallest: float
    """Bytes that the smallest layout needs."""
    capacity: float
    reasons: list[str]
    every: list[Candidate]
    """All that fit, in the order of `ranked`."""

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
    against: Layout | None = None,
    trainable: bool = False,
    only: Mapping[str, object] | None = None,
) -> SearchResult:
    """Ranks all layouts of a model on `gpus` GPUs. `base` has the settings that do not vary: precision, sequence, ...

    `reasons` compares the fastest with common layouts, and with `against`, such as a published one. With `trainable`,
    only layouts that `headway.train` can run are tried; with `only`, those that have the given `schedule`, `recompute`
    or `zero`.

    >>> from headway.plan.model.presets import preset
    >>> found = search(preset("gpt2"), Node("h200-sxm8"), gpus=8, global_batch=64)
    >>> found.best.layout.gpus
    8
    """
    checks.require_int("gpus", gpus, at_most=MOST_GPUS)
    checks.require_int("global_batch", global_batch)
    base, (constants, _) = _without_degrees(base or Layout()), scoped_calibration(calibration, node.device)
    base.check_model(model)
    node.device.check_precision(base.precision)
    _check_size(model, node, gpus, global_batch, base)
    only = {name: value for name, value in (only or {}).items() if name in RESTRICTIONS}
    capacity = node.device.memory_bytes
    tried, smallest, fitting, recomputing = 0, float("inf"), list[Candidate](), list[Candidate]()
    for full, less in _variants(model, node, gpus, global_batch, base, trainable=trainable, only=only):
        found, least = _fitting_variants(model, node, constants, full, less)
        tried, smallest = tried + 1 + len(less), min(smallest, least)
        fitting += found
        saves_all = found and found[-1].safe and found[-1].layout.recompute == "none"
        if (
            not saves_all and not trainable and "recompute" not in only
        ):  # headway.train recomputes in all blocks or in none
            recomputing += [candidate for candidate in found if candidate.safe]
    fitting += _recomputing_less(model, node, constants, fitting, recomputing)
    if not tried:
        given = "".join(f" with {name} {value}" for name, value in only.items())
        raise UsageError(
            f"no layout of {gpus} GPUs{given} suits global_batch {global_batch}, the model's heads ({model.heads}) and "
            f"layers ({model.layers}); choose a global_batch that is a multiple of a divisor of {gpus}"
        )
    fitting.sort(key=lambda found: (not found.safe, found.seconds, found.needed))
    return SearchResult(
        tried=tried,
        fitting=len(fitting),
        ranked=fitting[:keep],
        pareto=_pareto(sorted(fitting, key=lambda found: (found.seconds, found.needed))),
        smallest=smallest,
        capacity=capacity,
        reasons=_reasons(model, node, gpus, global_batch, base, constants, fitting, against),
        every=fitting,
    )


def _without_degrees(base: Layout) -> Layout:
    """Resets all settings that a search varies; sequence, precision, optimizer and overlaps stay."""
    return replace(
        base, dp=1, tp=1, pp=1, vpp=1, cp=1, ep=1, expert_tp=None, schedule="1f1b", sequence_parallel=False, zero=0,
        shard=None, reshard=True, microbatch=1, global_batch=1, recompute="none", recompute_layers=None,
    )  # fmt: skip


def _fitting_variants(
    model: Transformer, node: Node, constants: Calibration, full: Layout, less: tuple[Recompute, ...]
) -> tuple[list[Candidate], float]:
    """The variants of a layout that fit, and the bytes that the smallest of those tried needs."""
    found, smallest = [], float("inf")
    for layout in chain([full], (replace(full, recompute=way) for way in less)):
        needed, most = _needed_bytes(model, layout, node.device)
        smallest = min(smallest, needed)
        if needed <= node.device.memory_bytes:
            found.append(_candidate(model, layout, node, constants, needed, most))
        elif not layout.compiled:
            break  # a variant that recomputes less needs more
    return found, smallest


def _needed_bytes(model: Transformer, layout: Layout, device: Device) -> tuple[float, float]:
    """Bytes that the fullest rank takes from its device, most likely and at most."""
    allocated = memory.peak(model, layout).allocated
    most = memory.reserved_range(allocated, layout, device)[1]
    return memory.reserved_bytes(allocated, layout, device), most


def _candidate(
    model: Transformer, layout: Layout, node: Node, constants: Calibration, needed: float, most: float
) -> Candidate:
    step = step_time(model, layout, node, constants)
    safe = most <= node.device.memory_bytes
    return Candidate(layout=layout, needed=needed, most=most, step=step, safe=safe)


def _recomputing_less(
    model: Transformer,
    node: Node,
    constants: Calibration,
    fitting: list[Candidate],
    recomputing: list[Candidate],
) -> list[Candidate]:
    """Returns layouts with fewer recomputing layers, for those that may become the fastest this way."""
    fastest = min((found.seconds for found in fitting if found.safe), default=float("inf"))
    less = []
    for found in sorted(recomputing, key=_least_seconds):
        if _least_seconds(found) >= fastest:
            break
        layout = _fewest_recomputed(model, found.layout, node.device)
        if layout is not found.layout:
            better = _candidate(model, layout, node, constants, *_needed_bytes(model, layout, node.device))
            fastest = min(fastest, better.seconds)
            less.append(better)
    return less


_AFTER_COMPUTE = ("pipeline bubble", "data parallel", "optimizer", "stragglers")


def _least_seconds(found: Candidate) -> float:
    """A lower bound of the step time if nothing is recomputed, which also saves a third of the layers' communication.

    With `ep_overlap`, products may hide the complete exchange of tokens if there is a third less of it.
    """
    parts = found.step.parts
    sent = parts.get("expert parallel", 0.0) * (1 if found.layout.ep_overlap else 1 / 3)
    again = parts.get("recompute", 0.0) + parts.get("tensor parallel", 0.0) / 3 + sent
    busy = sum(seconds for name, seconds in parts.items() if name not in _AFTER_COMPUTE)
    return found.seconds * (1 - again / busy)


def _fewest_recomputed(model: Transformer, layout: Layout, device: Device) -> Layout:
    """Finds by bisection how many layers of a stage must recompute for the layout to fit at worst."""
    low, high = 0, max(stage.total for stage in stage_layers(model, layout.pp, layout.vpp))
    found = layout
    while high - low > 1:
        middle = (low + high) // 2
        some = replace(layout, recompute_layers=middle)
        if _needed_bytes(model, some, device)[1] <= device.memory_bytes:
            found, high = some, middle
        else:
            low = middle
    return found


_MOST_LAYOUTS = 150_000
"""A search of this many takes about half a minute: 117 to 203 us of CPU time each, the most with experts. Qwen3 235B
has 59,088 on 1,024 GPUs, DeepSeek-V3 61,800 on 2,048."""


def _check_size(model: Transformer, node: Node, gpus: int, global_batch: int, base: Layout) -> None:
    """Refuses a search that would take minutes, before it begins."""
    most = _MOST_LAYOUTS // _MOST_VARIANTS
    count = sum(1 for _ in islice(_choices(model, node, gpus, global_batch, base), most + 1))
    if count > most:
        raise UsageError(
            f"gpus is {gpus} and global_batch {global_batch}, which have more than {_MOST_LAYOUTS:,} layouts; "
            "choose numbers with fewer divisors, such as powers of two"
        )


def layouts(model: Transformer, node: Node, gpus: int, global_batch: int, base: Layout) -> Iterator[Layout]:
    """Yields every sensible layout: tensor parallelism inside a node, pipeline stages of about equal size."""
    for full, less in _variants(model, node, gpus, global_batch, base):
        yield full
        yield from (replace(full, recompute=way) for way in less)


_MOST_VARIANTS = 3
"""Variants of a layout that a search tries: nothing is recomputed, only cheap operations, or whole layers."""


def _variants(
    model: Transformer,
    node: Node,
    gpus: int,
    global_batch: int,
    base: Layout,
    *,
    trainable: bool = False,
    only: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[tuple[Layout, tuple[Recompute, ...]]]:
    """Yields every layout with whole layers recomputed, and the ways to recompute less, the least last."""
    cheap: Recompute = "modules" if base.megatron else "sac"  # what each stack offers
    less: tuple[Recompute, ...] = ("none",) if trainable else (cheap if base.flash else "selective", "none")
    most: Any = only.get("recompute", "full")
    for keys in _choices(model, node, gpus, global_batch, base):
        if any(keys[name] != value for name, value in only.items() if name in keys):
            continue
        full = replace(base, global_batch=global_batch, recompute=most, **keys)
        if full.trainable or not trainable:
            yield full, () if "recompute" in only else less


def _choices(
    model: Transformer, node: Node, gpus: int, global_batch: int, base: Layout
) -> Iterator[dict[str, Any]]:
    """Yields the settings that a search varies, except recomputation."""
    sequence = base.tokens(model)
    for tp, pp, cp, dp in _degrees(model, node, gpus, sequence):
        if global_batch % dp:
            continue
        sequence_parallel = tp > 1 and sequence // cp % tp == 0
        if model.moe and base.megatron and tp > 1 and not sequence_parallel:
            continue  # Layout.check_model refuses it
        for vpp, schedule in _schedules(model, pp):
            for zero in (0,) if dp * cp == 1 else (0, 1, 2, 3):
                for ep, expert_tp in _experts(model, dp * cp * tp, node, tp):
                    for microbatch in _microbatches(global_batch // dp):
                        if vpp > 1 and global_batch // (dp * microbatch) % pp:
                            continue
                        yield {
                            "dp": dp, "tp": tp, "pp": pp, "vpp": vpp, "schedule": schedule, "cp": cp, "ep": ep,
                            "expert_tp": expert_tp, "zero": zero, "reshard": pp == 1, "microbatch": microbatch,
                            "sequence_parallel": sequence_parallel,
                        }  # fmt: skip


def _degrees(model: Transformer, node: Node, gpus: int, sequence: int) -> Iterator[tuple[int, int, int, int]]:
    for tp in _divisors(gpus):
        if tp > node.gpus or model.heads % tp or (tp > model.kv and tp % model.kv):
            continue
        for pp in _divisors(gpus // tp):
            if not _balanced(model, pp) or (model.encoder and pp > 1):
                continue
            for cp in _divisors(gpus // tp // pp):
                # with fewer than a few thousand tokens per rank, context parallelism is only overhead
                if cp > 1 and (
                    model.image
                    or model.encoder
                    or cp & (cp - 1)
                    or sequence % (2 * cp)
                    or sequence // cp < 4096
                ):
                    continue
                yield tp, pp, cp, gpus // tp // pp // cp


_MOST_UNEVEN = 1.08
"""Layers of the longest chunk over the mean, with several chunks per rank: 1.02 for 126 layers in 16 x 8 chunks. Stages
of one chunk may be more uneven: sometimes no other layout suits the number of GPUs and samples."""
_MOST_CHUNKS = 256
"""Chunks of a pipeline that a search tries; published ones have up to 128 (Llama 3 405B: 16 stages of 7 or 8)."""


def _balanced(model: Transformer, pp: int, vpp: int = 1) -> bool:
    """Whether the layers fill the chunks about evenly."""
    chunks = pp * vpp
    if chunks > min(most_chunks(model, vpp), _MOST_CHUNKS):
        return False
    longest = -(-model.layers // chunks)
    return vpp == 1 or longest * chunks <= _MOST_UNEVEN * model.layers


def _schedules(model: Transformer, pp: int) -> list[tuple[int, PipelineSchedule]]:
    if pp == 1:
        return [(1, "1f1b")]
    chunks = [v for v in (2, 3, 4, 6, 8) if _balanced(model, pp, v)]
    return [(1, "1f1b"), (1, "zero-bubble"), *((v, "1f1b") for v in chunks)]


def _experts(model: Transformer, ranks: int, node: Node, tp: int) -> list[tuple[int, int | None]]:
    """Degrees of expert parallelism over the ranks of a stage, with experts split `tp` ways or not at all."""
    if model.moe is None:
        return [(1, None)]
    experts, found = model.moe.experts, []
    for ways in dict.fromkeys((tp, 1)):
        for ep in _divisors(ranks // ways):
            if experts % ep == 0 and (ep == 1 or ep * ways <= 8 * node.gpus):
                found.append((ep, None if ways == tp else ways))
    return found


def _microbatches(samples: int) -> list[int]:
    return [mb for mb in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256) if samples % mb == 0]


@lru_cache(maxsize=256)
def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n < number]


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
    against: Layout | None,
) -> list[str]:
    """Explains why the fastest layout is faster than the next, and than the common choices."""
    if not fitting:
        return []
    best = fitting[0]
    reasons = [_why_fastest(best, fitting)]
    if against is not None:
        reasons.append(_compared(model, node, constants, best, against))
    for name, keys in _common_layouts(node, gpus):
        try:
            layout = replace(base, global_batch=global_batch, **keys)  # type: ignore[arg-type]
            layout.check_model(model)
        except UsageError as error:
            reasons.append(f"{name}: not possible: {error}")
            continue
        capacity = node.device.memory_bytes
        needed, most = _needed_bytes(model, layout, node.device)
        if needed > capacity:
            reasons.append(f"{name}: needs {needed / GIB:.0f} GiB of {capacity / GIB:.0f}")
            continue
        change = step_time(model, layout, node, constants).total / best.seconds - 1
        speed = "as fast" if abs(change) <= 0.005 else f"{change:+.0%} step time"
        unsure = f"may not fit: needs {needed / GIB:.0f} to {most / GIB:.0f} GiB of {capacity / GIB:.0f}"
        reasons.append(f"{name}: {'fits' if most <= capacity else unsure}, {speed}")
    return reasons


def _compared(
    model: Transformer, node: Node, constants: Calibration, best: Candidate, against: Layout
) -> str:
    """Returns a sentence on the step time of the given layout, and on its largest difference from the best."""
    against.check_model(model)
    capacity = node.device.memory_bytes
    needed, most = _needed_bytes(model, against, node.device)
    step = step_time(model, against, node, constants)
    fits = ""
    if needed > capacity:
        fits = f" (it needs {needed / GIB:.0f} GiB of {capacity / GIB:.0f})"
    elif most > capacity:
        fits = (
            f" (it may not fit: it needs {needed / GIB:.0f} to {most / GIB:.0f} GiB of {capacity / GIB:.0f})"
        )
    ratio = step.total / best.seconds - 1
    if abs(ratio) < 0.0005:
        return f"{against.describe()}, which was given, is as fast: {step.total:.3g} s per step{fits}"
    part, seconds = _largest_change(best.step, step)
    return (
        f"{against.describe()}, which was given, takes {step.total:.3g} s per step, {ratio:+.1%}{fits}; "
        f"most of the difference is {part} ({seconds:+.3g} s)"
    )


def _largest_change(before: StepTime, after: StepTime) -> tuple[str, float]:
    """Returns the part of the step that changes most in the direction of the total, and by how much."""
    changes = {
        part: after.parts.get(part, 0.0) - before.parts.get(part, 0.0)
        for part in {**after.parts, **before.parts}
    }
    slower = after.total >= before.total
    part = (max if slower else min)(changes, key=lambda name: changes[name])
    return part, changes[part]


def _why_fastest(best: Candidate, fitting: list[Candidate]) -> str:
    peers = [found for found in fitting if found.safe == best.safe]
    at_worst = " even at worst" if len(peers) < len(fitting) else ""
    text = f"{best.layout.describe()} is the fastest of {len(peers)} that fit{at_worst}: {best.seconds:.3g} s per step"
    rival = next((found for found in peers if _shape(found.layout) != _shape(best.layout)), None)
    if rival is None:
        return text
    if rival.seconds < 1.0005 * best.seconds:
        return f"{text}; {rival.layout.describe()} is as fast"
    part, seconds = _largest_change(best.step, rival.step)
    return (
        f"{text}; the next shape, {rival.layout.describe()}, takes {rival.seconds / best.seconds - 1:.1%} longer, "
        f"most of it {part} ({seconds:+.3g} s)"
    )


def _shape(layout: Layout) -> tuple[int, ...]:
    return layout.tp, layout.pp, layout.cp, layout.ep


def _common_layouts(node: Node, gpus: int) -> list[tuple[str, dict[str, object]]]:
    inside = gcd(node.gpus, gpus)  # whole groups, and each inside a node
    common: list[tuple[str, dict[str, object]]] = [
        ("plain data parallel (DDP)", {"dp": gpus, "zero": 0}),
        ("fully sharded (FSDP)", {"dp": gpus, "zero": 3}),
        ("fully sharded, blocks checkpointed", {"dp": gpus, "zero": 3, "recompute": "full"}),
    ]
    if inside > 1:
        name = f"tensor parallel {inside} in the node, ZeRO 1 across"
        common.append((name, {"tp": inside, "dp": gpus // inside, "zero": 1, "sequence_parallel": True}))
    return common
