"""Answers about the run around the steps: checkpoints, failures, data loading, and totals."""

from __future__ import annotations

from headway.plan.cost import economy, states
from headway.plan.cost.economy import Workload
from headway.plan.cost.steptime import StepTime
from headway.plan.machine.hardware import Node
from headway.plan.model.layout import Layout
from headway.plan.model.transformer import Transformer
from headway.plan.report.answers import Answers
from headway.plan.report.bounds import TimeBounds
from headway.plan.report.quantity import Quantity, approximate, exact

IMAGE_BYTES = 110e3
"""Mean size of a JPEG in ImageNet-1k."""


def economy_answers(
    model: Transformer, layout: Layout, node: Node, time: TimeBounds, step: StepTime, workload: Workload
) -> Answers:
    """Answers about the run: checkpoints, failures, data loading, and totals."""
    bounds = time.low, time.high
    found = _checkpoint_answers(model, layout, node, workload)
    found |= _loader_answers(model, layout, node, step, workload, bounds)
    good = found["goodput"].value
    return found | _totals(model, layout, node, step, workload, good, bounds)


def _checkpoint_answers(model: Transformer, layout: Layout, node: Node, workload: Workload) -> Answers:
    per_parameter = states.bytes_per_parameter(layout)
    size = economy.checkpoint_bytes(model.parameters, per_parameter, layout.element_bytes.gradient)
    written = economy.write_seconds(size, node.count_for(layout.gpus), workload)
    copied = size / layout.gpus / (node.device.pcie_GBps * 1e9)
    mtbf = workload.mtbf_gpu_hours * 3600 / layout.gpus
    restart = workload.restart_s + written
    found = {
        "checkpoint.bytes": exact(size, "bytes", formula="parameters x (weights + optimizer state)"),
        "checkpoint.write": approximate(
            written, 0.5, 2.0, "s", formula="bytes / min(nodes x job.writer_GBps, job.storage_GBps)", source="given"
        ),
        "checkpoint.blocking": approximate(
            copied if workload.async_checkpoint else written, 0.5, 2.0, "s",
            formula="bytes / GPUs / PCIe if asynchronous, else checkpoint.write",
        ),
        "failure.mtbf": approximate(
            mtbf, 0.3, 3.0, "s", formula="job.mtbf_gpu_hours / GPUs (Llama 3: 50,700 GPU-hours)", source="given"
        ),
        "failure.restart": approximate(
            restart, 0.5, 2.0, "s", formula="job.restart_s + reading the checkpoint, as long as writing it"
        ),
    }  # fmt: skip
    chosen = "async" if workload.async_checkpoint else "sync"
    for kind, blocking, behind in (("async", copied, written), ("sync", written, 0.0)):
        best = economy.young_daly(blocking, mtbf)
        interval = max(best, behind)
        good = economy.goodput(blocking, interval, restart + behind, mtbf)
        keys = ("", f".{kind}") if kind == chosen else (f".{kind}",)
        for key in keys:
            found[f"checkpoint.interval{key}"] = approximate(
                interval, 0.5, 2.0, "s", formula=_INTERVAL[interval > best]
            )
            found[f"goodput{key}"] = Quantity(
                value=good, low=max(0.0, 1 - 3 * (1 - good)), high=1 - (1 - good) / 3, unit="share",
                formula=_GOODPUT[kind],
            )  # fmt: skip
    return found


_INTERVAL = {
    False: "Daly 2006: sqrt(2 d M)(1 + ...) - d, with d = checkpoint.blocking",
    True: "checkpoint.write: Daly's optimum is shorter, but a save begins only when the previous one is written",
}
_GOODPUT = {
    "sync": "t / (M exp(R/M) (exp((t + d)/M) - 1)), d = checkpoint.write, R = failure.restart; "
    "stragglers are in time.step",
    "async": "as for sync, d the copy to the host; a failure also loses what was not yet written: R + checkpoint.write",
}


def _loader_answers(
    model: Transformer,
    layout: Layout,
    node: Node,
    step: StepTime,
    workload: Workload,
    bounds: tuple[float, float],
) -> Answers:
    low, high = bounds
    nodes = node.count_for(layout.gpus)
    usual = IMAGE_BYTES if model.image else 2.0 * layout.tokens(model)
    sample_bytes = workload.sample_bytes or usual
    found = {
        "loader.needed_per_node": approximate(
            layout.global_batch / step.total * sample_bytes / nodes, 1 / high, 1 / low, "bytes/s",
            formula="rate.samples x job.sample_bytes (if not given, 2 per token or 110 kB per image) / nodes",
        ),
    }  # fmt: skip
    if workload.loader_MBps is not None:
        found["loader.available_per_node"] = exact(
            workload.loader_MBps * 1e6, "bytes/s", formula="job.loader_MBps", source="given"
        )
    return found


def _totals(
    model: Transformer,
    layout: Layout,
    node: Node,
    step: StepTime,
    workload: Workload,
    good: float,
    bounds: tuple[float, float],
) -> Answers:
    """Answers about the complete run, if its length is given."""
    samples = workload.samples or (workload.tokens / layout.tokens(model) if workload.tokens else None)
    if samples is None or good <= 0:
        return {}
    low, high = bounds
    steps = samples / layout.global_batch
    hours = steps * step.total / good / 3600
    watts = node.device.watts * workload.power_share
    energy = economy.energy_kwh(layout.gpus, watts, hours)
    found = {
        "run.steps": exact(steps, formula="samples / global batch"),
        "run.wall_clock": approximate(hours, low, high, "hours", formula="run.steps x time.step / goodput"),
        "run.gpu_hours": approximate(
            hours * layout.gpus, low, high, "hours", formula="run.wall_clock x GPUs"
        ),
        "run.energy": approximate(
            energy,
            low * 0.8,
            high * 1.1,
            "kWh",
            formula=f"GPUs x {watts:g} W x run.wall_clock; accelerators only",
        ),
        "run.energy_facility": approximate(
            energy * workload.pue, low * 0.8, high * 1.1, "kWh", formula=f"run.energy x PUE {workload.pue:g}"
        ),
    }
    if node.price_per_hour is not None:
        cost = hours * node.count_for(layout.gpus) * node.price_per_hour
        tokens = samples * layout.tokens(model)
        found["run.cost_per_million_tokens"] = approximate(
            cost / tokens * 1e6, low, high, formula="run.cost / tokens x 1e6", source="given"
        )
        found["run.cost"] = approximate(
            cost, low, high, "money", formula="node-hours x node.price_per_hour", source="given"
        )
    return found
