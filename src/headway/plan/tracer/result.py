"""What a trace found, as answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headway.errors import UsageError
from headway.plan.cost.memory import CONTEXT_BYTES, RESERVE
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.hardware import Node
from headway.plan.model.layout import Layout
from headway.plan.report.estimates import Estimate, verdict
from headway.plan.report.quantity import UNBOUNDED, Quantity, about, exact, show
from headway.plan.searcher.suggestions import Remedy

if TYPE_CHECKING:
    from headway.plan.tracer.request import Trace

# against eight models on one H200: allocated -0.3 to +0.7 %, reserved -1.3 to +0.5 %
ALLOCATED_LOW, ALLOCATED_HIGH = 0.99, 1.02
RESERVED_LOW, RESERVED_HIGH = 0.98, 1.04
# two torchtitan runs with FSDP: reserved -6.9 and -2.3 %
SHARDED_HIGH = 1.12
# ten other networks of convolutions: reserved -3 to -20 %, as cuDNN tries out workspaces; allocated -1.4 to +0.2 %
CONVOLUTION_HIGH = 1.3
KERNEL_GAP_S = 2e-6  # a kernel starts and drains, whatever it does
# the eight steps measured there took 0.92 to 1.9 x their rooflines, that of a network of convolutions 3.1 x
TIME_LOW, TIME_HIGH, TIME_HIGH_CONVOLUTION = 0.9, 2.2, 3.3

Work = tuple[str, float, int]


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The numbers of one traced step."""

    error: str | None = None
    parameters: int = 0
    trainable: int = 0
    allocated: float = 0.0
    reserved: float = 0.0
    by_label: dict[str, float] = field(default_factory=dict)
    by_module: dict[str, float] = field(default_factory=dict)
    work: dict[Work, float] = field(default_factory=dict)
    queue: list[tuple[str, Work]] = field(default_factory=list)
    """Phase and kernel in the order of launching; empty for a trace that was extended from others."""
    state_bytes: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, result: dict[str, Any]) -> Traced:
        keys = (
            "error",
            "parameters",
            "trainable",
            "allocated",
            "reserved",
            "by_label",
            "by_module",
            "state_bytes",
            "notes",
        )
        rows = result.get("work", [])
        kernels: list[Work] = [(str(name), float(flops), int(size)) for name, flops, size, _ in rows]
        return cls(
            work={kernel: float(row[3]) for kernel, row in zip(kernels, rows, strict=True)},
            queue=[(str(phase), kernels[number]) for phase, number in result.get("queue", [])],
            **{key: result[key] for key in keys if key in result},
        )

    @property
    def flops(self) -> float:
        return sum(flops * count for (_, flops, _), count in self.work.items())

    def seconds(self, node: Node, constants: Calibration) -> tuple[float, float, float]:
        """Matrix products and other kernels on the device, and the host's launches, which run beside both."""
        products = others = 0.0
        for kernel, count in self.work.items():
            if kernel[1]:
                products += count * _kernel_s(kernel, node, constants)
            else:
                others += count * _kernel_s(kernel, node, constants)
        every: list[tuple[str, float]] = [(phase, 1.0) for phase, _ in self.queue]
        launches = sum(_launch_s(phase, constants) * count for phase, count in every or [("", self.kernels)])
        return products * constants.scale, others * constants.scale, launches

    @property
    def convolves(self) -> bool:
        return any(name.startswith("convolution") for name, _, _ in self.work)

    @property
    def kernels(self) -> float:
        return sum(self.work.values())

    def step_s(self, node: Node, constants: Calibration) -> float:
        """Seconds of a step: the host launches one kernel after another, the device runs each when it was launched and
        the one before it is done."""
        if not self.queue:
            products, others, launches = self.seconds(node, constants)
            return max(products + others, launches)
        took = {kernel: _kernel_s(kernel, node, constants) * constants.scale for kernel in self.work}
        needs = {phase: _launch_s(phase, constants) for phase in {phase for phase, _ in self.queue}}
        host = device = 0.0
        for phase, kernel in self.queue:
            host += needs[phase]
            device = max(device, host) + took[kernel]
        return device


def _kernel_s(kernel: Work, node: Node, constants: Calibration) -> float:
    """Seconds of one kernel on the device, by its roofline."""
    name, flops, size = kernel
    stream = node.device.hbm_GBps * 1e9 * node.device.hbm_achievable * constants.memory
    done = flops / 2 if name.endswith("(causal)") else flops
    return max(done / (node.device.matrix_flops("bf16") * constants.matrix), size / stream) + KERNEL_GAP_S


def _launch_s(phase: str, constants: Calibration) -> float:
    """Seconds of the host for one kernel."""
    part = {
        "forward": constants.host_forward,
        "backward": constants.host_backward,
        "optimizer": constants.host_optimizer,
    }
    return constants.kernel_s * part.get(phase, 1.0)


def extend(two: Traced, four: Traced, depth: int) -> Traced:
    """A stack of like layers grows linearly: from 2 and 4 of them to any number."""
    if two.error or four.error:
        return two if two.error else four

    def at(low: float, high: float) -> float:
        return high + (high - low) / 2 * (depth - 4)

    def each(low: dict[Any, float], high: dict[Any, float]) -> dict[Any, float]:
        return {key: max(0.0, at(low.get(key, 0.0), high.get(key, 0.0))) for key in {**low, **high}}

    allocated = at(two.allocated, four.allocated)
    return Traced(
        parameters=round(at(two.parameters, four.parameters)),
        trainable=round(at(two.trainable, four.trainable)),
        allocated=allocated,
        # segments of a shallow model are no guide to those of a deep one
        reserved=max(at(two.reserved, four.reserved), allocated * RESERVE.low),
        by_label=each(two.by_label, four.by_label),
        by_module=each(two.by_module, four.by_module),
        work=each(two.work, four.work),
        notes=[*four.notes, f"traced with 2 and 4 layers and extended to {depth}"],
    )


def estimate_of(
    title: str,
    found: Traced,
    settings: Trace,
    node: Node,
    constants: Calibration,
    tried: list[tuple[str, Traced]] | None = None,
) -> Estimate:
    """A trace as an estimate: the same answers, verdict and exit code as a planned layout."""
    if found.error is not None:
        if not found.state_bytes:
            raise UsageError(f"{title} could not be traced, and nothing is known of it: {found.error}")
        return _states_only(title, found, settings, node)
    capacity = node.device.memory_bytes
    high = CONVOLUTION_HIGH if found.convolves else RESERVED_HIGH if settings.fsdp == 1 else SHARDED_HIGH
    answers = _memory(found, high) | _time(found, settings, node, constants)
    answers["device.memory"] = exact(capacity, "bytes", formula=node.device.source, source="datasheet")
    needed = answers["memory.needed"]
    fits = needed.value <= capacity
    ways = [
        _remedy(name, other, found, node, constants) for name, other in tried or [] if other.error is None
    ]
    ways = sorted(
        (way for way in ways if way.needed < needed.value), key=lambda way: (not way.fits, way.slowdown)
    )
    return Estimate(
        title=title,
        node=f"{settings.fsdp} of {node.name}",
        answers=answers,
        fits=fits,
        verdict=verdict(needed, capacity, ways),
        remedies=ways,
        notes=[*found.notes, *_biggest(found)],
    )


def needed_bytes(found: Traced) -> float:
    return found.reserved + CONTEXT_BYTES


def _memory(found: Traced, high: float) -> dict[str, Quantity]:
    answers = {
        "parameters": exact(found.parameters, formula="counted on the module", source="trace"),
        "parameters.trainable": exact(
            found.trainable, formula="those that require gradients", source="trace"
        ),
    }
    total = sum(found.by_label.values())
    for name, size in sorted(found.by_label.items(), key=lambda item: -item[1]):
        answers[f"memory.part.{name}"] = about(
            size,
            ALLOCATED_LOW,
            ALLOCATED_HIGH,
            "bytes",
            formula="alive at the peak of the step",
            source="trace",
        )
    slack = found.allocated - total
    if slack > 0:
        answers["memory.part.unsplit blocks"] = exact(
            slack,
            "bytes",
            formula="rest of cached blocks too small to split, by the allocator's rules",
            source="trace",
        )
    answers["memory.allocated"] = about(
        found.allocated,
        ALLOCATED_LOW,
        ALLOCATED_HIGH,
        "bytes",
        formula="peak of all storages in the second step",
        source="trace",
    )
    answers["memory.reserved"] = about(
        found.reserved, RESERVED_LOW, high, "bytes",
        formula="the caching allocator played on the log of the steps", source="trace",
    )  # fmt: skip
    answers["memory.needed"] = about(
        needed_bytes(found),
        RESERVED_LOW,
        high,
        "bytes",
        formula="memory.reserved + 767 MiB of context",
        source="trace",
    )
    return answers


def _time(found: Traced, settings: Trace, node: Node, constants: Calibration) -> dict[str, Quantity]:
    products, others, launches = found.seconds(node, constants)
    total = found.step_s(node, constants)
    low, high = TIME_LOW, TIME_HIGH_CONVOLUTION if found.convolves else TIME_HIGH
    if constants.source.startswith("measured with"):  # this module, not only this machine
        low, high = 0.9, 1.1
    answers = {
        "flops.step": exact(found.flops, "FLOP", formula="over kernels; attention counted whole", source="trace"),
        "time.products": about(
            products, low, high, "s", formula="sum of max(FLOP/rate, bytes/HBM) + 2 us", source="trace"
        ),
        "time.other_kernels": about(others, low, high, "s", formula="sum of bytes/HBM + 2 us", source="trace"),
        "time.launches": about(
            launches, low, high, "s", formula=f"{found.kernels:.0f} kernels x calibration.kernel_s", source="trace"
        ),
        "time.step": about(
            total, low, high, "s",
            formula="a queue: a kernel runs when it was launched and the one before is done", source="trace",
        ),
        "mfu.full": about(
            found.flops / total / node.device.peak_flops, 1 / high, 1 / low, "share",
            formula="flops.step / time.step / peak; recomputation counts, so it is an HFU when blocks are checkpointed",
            source="trace",
        ),
    }  # fmt: skip
    if settings.batch_size is not None:
        answers["rate.samples"] = about(
            settings.batch_size * settings.accumulate * settings.fsdp / total, 1 / high, 1 / low, "samples/s",
            formula="batch x accumulate x ranks / time.step", source="trace",
        )  # fmt: skip
    return answers


def _remedy(name: str, other: Traced, before: Traced, node: Node, constants: Calibration) -> Remedy:
    old, new = (sum(found.seconds(node, constants)[:2]) for found in (before, other))
    fewer = before.flops / other.flops if other.flops and other.flops < 0.99 * before.flops else 1.0
    needed = needed_bytes(other)
    return Remedy(
        change=name,
        layout=Layout(),
        needed=needed,
        slowdown=new * fewer / old,
        fits=needed <= node.device.memory_bytes,
    )


def _states_only(title: str, found: Traced, settings: Trace, node: Node) -> Estimate:
    """The module could not be run without data: what its states need is a lower bound."""
    weights, gradients = (found.state_bytes.get(key, 0.0) for key in ("parameters", "gradients"))
    moments = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1}.get(settings.optimizer, 2)
    total = (weights + gradients * (1 + moments)) / settings.fsdp + CONTEXT_BYTES
    answers = {"parameters": exact(found.parameters, formula="counted on the module", source="trace")}
    answers["memory.needed"] = Quantity(
        value=total, low=total, high=total * UNBOUNDED, unit="bytes", source="formula",
        formula="weights + gradients + optimizer + context: a lower bound without activations",
    )  # fmt: skip
    fits = total <= node.device.memory_bytes
    least = f"needs at least {total / 2**30:.1f} GiB of {node.device.memory_bytes / 2**30:.1f} for its states"
    text = (
        f"could not be traced, {least}: {found.error}" if fits else f"does not fit: {least} ({found.error})"
    )
    return Estimate(title=title, node=node.name, answers=answers, fits=fits, verdict=text, notes=found.notes)


def _biggest(found: Traced) -> list[str]:
    top = sorted(found.by_module.items(), key=lambda item: -item[1])[:5]
    shown = ", ".join(f"{name} {show(size, 'bytes')}" for name, size in top if size > 0.01 * found.allocated)
    return [f"most of the peak is kept by {shown}"] if shown else []
