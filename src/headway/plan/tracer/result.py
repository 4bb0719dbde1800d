"""The result of a trace, and the estimate made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headway.errors import UsageError
from headway.plan.cost.memory import RESERVE, RESERVE_FSDP
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.hardware import FP32, Device, Node
from headway.plan.model.layout import OPTIMIZER_MOMENTS, Layout
from headway.plan.report.estimates import Estimate, is_tight, verdict
from headway.plan.report.quantity import UNBOUNDED, Quantity, approximate, exact, format_value
from headway.plan.searcher.remedies import Remedy
from headway.plan.tracer.kernels import Kernel, launch_seconds
from headway.plan.tracer.settings import TraceSettings

# error on eight models on one H200: allocated -0.3 to +0.7 %, reserved -1.3 to +0.5 %; but reserved +18 % on GPT-2 124M
# with a batch of 32, which was measured with workspaces of an earlier batch, and -13 % on nn.TransformerEncoderLayer
ALLOCATED_LOW, ALLOCATED_HIGH = 0.99, 1.02
RESERVED_LOW, RESERVED_HIGH = 0.84, 1.16
# error on two torchtitan runs with FSDP: reserved -6.9 and -2.3 %
SHARDED_HIGH = 1.16
# error on ten other convolutional networks: allocated -1.4 to +0.2 %, reserved -3 to -20 % (cuDNN tries workspaces)
CONVOLUTION_HIGH = 1.3
# measured over roofline of those eight steps: 0.92 to 1.9, and 3.1 for a convolutional network
TIME_LOW, TIME_HIGH, TIME_HIGH_CONVOLUTION = 0.9, 2.2, 3.3
# no step with products in fp32 was measured
TIME_LOW_FP32 = 0.6


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """One traced step: memory in bytes, and its kernels."""

    error: str | None = None
    parameters: int = 0
    trainable: int = 0
    allocated: float = 0.0
    reserved: float = 0.0
    by_label: dict[str, float] = field(default_factory=dict)
    by_module: dict[str, float] = field(default_factory=dict)
    kernel_counts: dict[Kernel, float] = field(default_factory=dict)
    queue: list[tuple[str, Kernel]] = field(default_factory=list)
    """Phase and kernel in launch order; empty if the trace was extrapolated."""
    state_bytes: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, result: dict[str, Any]) -> TraceResult:
        """Reads the result of the tracing process."""
        rows = result.get("kernels", [])
        kernels = [
            Kernel(str(name), float(flops), int(size), precision) for name, flops, size, precision, _ in rows
        ]
        return cls(
            kernel_counts={kernel: float(row[-1]) for kernel, row in zip(kernels, rows, strict=True)},
            queue=[(str(phase), kernels[number]) for phase, number in result.get("queue", [])],
            **{key: value for key, value in result.items() if key not in ("kernels", "queue", "kind")},
        )

    @property
    def flops(self) -> float:
        return sum(kernel.flops * count for kernel, count in self.kernel_counts.items())

    def seconds(self, node: Node, constants: Calibration) -> tuple[float, float, float]:
        """Seconds of matrix products and other kernels on the device, and of their launches on the host."""
        products = others = 0.0
        for kernel, count in self.kernel_counts.items():
            if kernel.flops:
                products += count * kernel.seconds(node, constants)
            else:
                others += count * kernel.seconds(node, constants)
        if self.queue:
            launches = sum(launch_seconds(phase, constants) for phase, _ in self.queue)
        else:
            launches = constants.kernel_s * self.launches
        return products * constants.scale, others * constants.scale, launches

    @property
    def has_convolutions(self) -> bool:
        return any(kernel.operation.startswith("convolution") for kernel in self.kernel_counts)

    @property
    def launches(self) -> float:
        """Number of kernels in the step."""
        return sum(self.kernel_counts.values())

    def step_s(self, node: Node, constants: Calibration) -> float:
        """Seconds of a step. The device runs a kernel once it is launched and the kernel before it is done."""
        if not self.queue:
            products, others, launches = self.seconds(node, constants)
            return max(products + others, launches)
        seconds = {kernel: kernel.seconds(node, constants) * constants.scale for kernel in self.kernel_counts}
        launch = {phase: launch_seconds(phase, constants) for phase in {phase for phase, _ in self.queue}}
        host = device = 0.0
        for phase, kernel in self.queue:
            host += launch[phase]
            device = max(device, host) + seconds[kernel]
        return device


def extrapolate_depth(
    two: TraceResult, four: TraceResult, depth: int, *, sharded: bool = False
) -> TraceResult:
    """Extrapolates from 2 and 4 layers to `depth`: a stack of equal layers grows linearly."""
    if two.error or four.error:
        return two if two.error else four

    def at(low: float, high: float) -> float:
        return high + (high - low) / 2 * (depth - 4)

    def each(low: dict[Any, float], high: dict[Any, float]) -> dict[Any, float]:
        return {key: max(0.0, at(low.get(key, 0.0), high.get(key, 0.0))) for key in {**low, **high}}

    allocated = at(two.allocated, four.allocated)
    slack = RESERVE_FSDP.value if sharded else RESERVE.low
    return TraceResult(
        parameters=round(at(two.parameters, four.parameters)),
        trainable=round(at(two.trainable, four.trainable)),
        allocated=allocated,
        # the allocator's segments do not grow linearly, but hold at least what is allocated; under FSDP, much more
        reserved=max(at(two.reserved, four.reserved), allocated * slack),
        by_label=each(two.by_label, four.by_label),
        by_module=each(two.by_module, four.by_module),
        kernel_counts=each(two.kernel_counts, four.kernel_counts),
        notes=[*four.notes, f"traced with 2 and 4 layers, extrapolated to {depth}"],
    )


def make_estimate(
    title: str,
    found: TraceResult,
    settings: TraceSettings,
    node: Node,
    constants: Calibration,
    tried: list[tuple[str, TraceResult]] | None = None,
) -> Estimate:
    """Turns a trace into an estimate, with the same answers, verdict and exit code as for a planned layout."""
    if found.error is not None:
        if not found.state_bytes:
            raise UsageError(f"{title} could not be traced or built: {found.error}")
        return _states_only(title, found, settings, node)
    capacity = node.device.memory_bytes
    high = (
        CONVOLUTION_HIGH if found.has_convolutions else RESERVED_HIGH if settings.fsdp == 1 else SHARDED_HIGH
    )
    answers = _memory(found, node.device, high) | _time(found, settings, node, constants)
    answers["device.memory"] = exact(capacity, "bytes", formula=node.device.source, source="datasheet")
    needed = answers["memory.needed"]
    ways = [
        _remedy(name, other, found, node, constants) for name, other in tried or [] if other.error is None
    ]
    ways = sorted(
        (way for way in ways if way.needed < needed.value), key=lambda way: (not way.fits, way.slowdown)
    )
    return Estimate(
        title=title,
        node=f"{node.name} ({settings.fsdp} GPU{'s' if settings.fsdp > 1 else ''})",
        answers=answers,
        fits=needed.low <= capacity,
        tight=is_tight(needed, capacity),
        verdict=verdict(needed, capacity, ways),
        remedies=ways,
        notes=[*found.notes, *_largest_modules(found)],
    )


def needed_bytes(found: TraceResult, device: Device) -> float:
    """Bytes that the process takes from the device."""
    return found.reserved + device.context_bytes


def _memory(found: TraceResult, device: Device, high: float) -> dict[str, Quantity]:
    answers = {
        "parameters": exact(found.parameters, formula="counted on the module", source="trace"),
        "parameters.trainable": exact(
            found.trainable, formula="parameters that require gradients", source="trace"
        ),
    }

    def add(key: str, size: float, low: float, high: float, formula: str) -> None:
        answers[f"memory.{key}"] = approximate(size, low, high, "bytes", formula=formula, source="trace")

    for name, size in sorted(found.by_label.items(), key=lambda item: -item[1]):
        add(f"part.{name}", size, ALLOCATED_LOW, ALLOCATED_HIGH, "alive at the peak of the step")
    slack = found.allocated - sum(found.by_label.values())
    if slack > 0:
        add(
            "part.unsplit blocks",
            slack,
            1,
            1,
            "remainders of cached blocks that the allocator does not split",
        )
    peak = "peak of all storages in the second step"
    add("allocated", found.allocated, ALLOCATED_LOW, ALLOCATED_HIGH, peak)
    replay = "the caching allocator, replayed on the log of the steps"
    add("reserved", found.reserved, RESERVED_LOW, high, replay)
    context = f"memory.reserved{device.context_text}"
    add("needed", needed_bytes(found, device), RESERVED_LOW, high, context)
    return answers


def _time(
    found: TraceResult, settings: TraceSettings, node: Node, constants: Calibration
) -> dict[str, Quantity]:
    products, others, launches = found.seconds(node, constants)
    total = found.step_s(node, constants)
    low = TIME_LOW - (TIME_LOW - TIME_LOW_FP32) * _fp32_share(found, node, constants)
    high = TIME_HIGH_CONVOLUTION if found.has_convolutions else TIME_HIGH
    if constants.source.startswith("measured with"):  # fitted on this module, not only on this machine
        low, high = 0.9, 1.1
    answers = {
        "flops.step": exact(
            found.flops, "FLOP", formula="sum over kernels; attention counted in full, causal or not", source="trace"
        ),
        "time.products": approximate(
            products, low, high, "s", formula="sum of max(FLOP/rate, bytes/HBM) + 2 us", source="trace"
        ),
        "time.other_kernels": approximate(others, low, high, "s", formula="sum of bytes/HBM + 2 us", source="trace"),
        "time.launches": approximate(
            launches, low, high, "s", formula=f"{found.launches:.0f} kernels x calibration.kernel_s", source="trace"
        ),
        "time.step": approximate(
            total, low, high, "s",
            formula="launch queue: a kernel runs once it is launched and the one before it is done", source="trace",
        ),
        "mfu.full": approximate(
            found.flops / total / node.device.peak_flops, 1 / high, 1 / low, "share",
            formula="flops.step / time.step / peak; includes recomputation, so it is an HFU with checkpointed blocks",
            source="trace",
        ),
    }  # fmt: skip
    if settings.batch_size is not None:
        answers["rate.samples"] = approximate(
            settings.batch_size * settings.accumulate * settings.fsdp / total, 1 / high, 1 / low, "samples/s",
            formula="batch x accumulate x ranks / time.step", source="trace",
        )  # fmt: skip
    return answers


def _fp32_share(found: TraceResult, node: Node, constants: Calibration) -> float:
    """Fraction of the device's time in products of fp32 or TF32; a CPU was measured in fp32."""
    if node.device.is_cpu:
        return 0.0
    seconds = {
        kernel: count * kernel.seconds(node, constants) for kernel, count in found.kernel_counts.items()
    }
    return sum(time for kernel, time in seconds.items() if kernel.precision in FP32) / sum(seconds.values())


def _remedy(name: str, other: TraceResult, before: TraceResult, node: Node, constants: Calibration) -> Remedy:
    old, new = (sum(found.seconds(node, constants)[:2]) for found in (before, other))
    fewer = before.flops / other.flops if other.flops and other.flops < 0.99 * before.flops else 1.0
    needed = needed_bytes(other, node.device)
    return Remedy(
        change=name,
        layout=Layout(),
        needed=needed,
        slowdown=new * fewer / old,
        fits=needed <= node.device.memory_bytes,
    )


def _states_only(title: str, found: TraceResult, settings: TraceSettings, node: Node) -> Estimate:
    """Estimates a lower bound from the model states alone, for a module that cannot run without data."""
    weights, gradients = (found.state_bytes.get(key, 0.0) for key in ("parameters", "gradients"))
    moments = OPTIMIZER_MOMENTS.get(settings.optimizer, 2)
    total = (weights + gradients * (1 + moments)) / settings.fsdp + node.device.context_bytes
    answers = {"parameters": exact(found.parameters, formula="counted on the module", source="trace")}
    answers["memory.needed"] = Quantity(
        value=total, low=total, high=total * UNBOUNDED, unit="bytes", source="formula",
        formula="weights + gradients + optimizer + context: a lower bound without activations",
    )  # fmt: skip
    fits = total <= node.device.memory_bytes
    least = f"needs at least {total / 2**30:.1f} GiB of {node.device.memory_bytes / 2**30:.1f} for its model states"
    text = (
        f"could not be traced, {least}: {found.error}" if fits else f"does not fit: {least} ({found.error})"
    )
    return Estimate(title=title, node=node.name, answers=answers, fits=fits, verdict=text, notes=found.notes)


def _largest_modules(found: TraceResult) -> list[str]:
    top = sorted(found.by_module.items(), key=lambda item: -item[1])[:5]
    shown = ", ".join(
        f"{name} {format_value(size, 'bytes')}" for name, size in top if size > 0.01 * found.allocated
    )
    return [f"largest shares of the peak: {shown}"] if shown else []
