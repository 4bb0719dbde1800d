"""Estimates one layout: whether it fits, how long a step takes, and how much the run costs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import Any

from headway.errors import DOES_NOT_FIT, DONE, UsageError, unknown_name
from headway.plan import checks
from headway.plan.cost import compute, memory
from headway.plan.cost.activations import kept_share
from headway.plan.cost.economy import Workload
from headway.plan.cost.schedule import weights_owed
from headway.plan.cost.steptime import stage_passes, step_time
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.efficiency import scoped_calibration
from headway.plan.machine.hardware import GIB, Node
from headway.plan.model.layout import Layout
from headway.plan.model.transformer import Transformer
from headway.plan.report import answers, run_answers
from headway.plan.report.bounds import bound_notes, time_bounds
from headway.plan.report.quantity import Quantity, exact
from headway.plan.searcher.remedies import Remedy, find_remedies


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of a run. `answers` has every number; `verdict` is the sentence to read first.

    plan = hw.plan.estimate(model, layout, node)
    print(plan.verdict)                                     # fits: needs 53.0 GiB of 139.8
    print(plan.answers["time.step"], plan.fits)
    """

    title: str
    node: str
    answers: dict[str, Quantity]
    fits: bool
    """Whether it may fit: it needs no more than the GPU has at the lower end of its interval."""
    verdict: str
    tight: bool = False
    """Whether it may fit, and may also run out of memory."""
    ranks: list[dict[str, object]] = field(default_factory=list)
    """Bytes by part on the first, middle and last pipeline rank, and on each rank with other layers."""
    stages: list[dict[str, float]] = field(default_factory=list)
    """Seconds of one microbatch on each pipeline rank: `forward_s` and `backward_s`; in a zero-bubble schedule also
    `weights_owed`, the number of microbatches whose weight gradients it may delay."""
    remedies: list[Remedy] = field(default_factory=list)
    products: list[dict[str, Any]] = field(default_factory=list)
    """The matrix products of a layer with their rooflines."""
    scaling: list[dict[str, float]] = field(default_factory=list)
    """Step time and efficiency with more data-parallel replicas."""
    sensitivity: list[tuple[str, float]] = field(default_factory=list)
    """How much longer a step takes if a constant is 20 % worse, the most important first."""
    notes: list[str] = field(default_factory=list)
    inputs: dict[str, object] = field(default_factory=dict)
    """The model, the layout and the node that the plan is for, as plain values."""

    @property
    def exit_code(self) -> int:
        """Exit code of `headway plan`: 0 if the plan fits or is tight, 3 if it does not fit."""
        return DONE if self.fits else DOES_NOT_FIT

    def explain(self, key: str) -> str:
        """Returns one answer, or all answers of a group, with formula and source."""
        keys = [name for name in self.answers if name == key or name.startswith(f"{key}.")]
        if not keys:
            raise unknown_name("answer", key, self.answers)
        return "\n".join(
            f"{name} = {found}\n  formula: {found.formula}\n  source:  {found.source}"
            for name, found in self.answers.items()
            if name in keys
        )

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON: the content of plan.json in a run directory."""
        return {
            "headway_plan": 1,
            "title": self.title,
            "node": self.node,
            "fits": self.fits,
            "tight": self.tight,
            "verdict": self.verdict,
            "answers": {key: quantity.to_dict() for key, quantity in self.answers.items()},
            "ranks": self.ranks,
            "stages": self.stages,
            "remedies": [{k: v for k, v in asdict(r).items() if k != "layout"} for r in self.remedies],
            "products": self.products,
            "scaling": self.scaling,
            "sensitivity": [list(row) for row in self.sensitivity],
            "notes": self.notes,
            **self.inputs,
        }

    def at_rate(self, samples_per_s: float) -> dict[str, float]:
        """Returns utilization and token rates of a run that reaches this many samples per second."""
        planned = self.answers.get("rate.samples")
        if planned is None:
            raise UsageError(
                "the plan has no samples per second to compare with; trace the module with a batch size: --batch-size 8"
            )
        ratio = checks.require_number("sps", samples_per_s) / planned.value
        keys = ("mfu.full", "mfu.causal", "hfu", "rate.tokens", "rate.tokens_per_gpu", "rate.tokens_per_day")
        return {key: ratio * self.answers[key].value for key in keys if key in self.answers}

    def submit_line(self, saved: Path | None = None) -> str:
        """Returns the `headway submit` line that asks for the nodes of this plan.

        >>> from headway.plan.model.presets import preset
        >>> layout = Layout(dp=16, global_batch=16)
        >>> estimate(preset("gpt2"), layout, Node("dgx-h100")).submit_line()
        'headway submit --nodes 2 --gpus-per-node 8 train.py'
        """
        layout, node = self.inputs.get("layout"), self.inputs.get("hardware")
        if not isinstance(layout, dict) or not isinstance(node, dict):
            raise UsageError(
                "the plan of a traced module has no layout; plan a file or a preset to emit a job"
            )
        gpus = layout["dp"] * layout["tp"] * layout["pp"] * layout["cp"]
        each = _gpus_per_node(gpus, layout["tp"], node["gpus"])
        script = "train.py" if saved is None else f"train.py  # with pipe.enable_plan({str(saved)!r})"
        return f"headway submit --nodes {gpus // each} --gpus-per-node {each} {script}"

    def save(self, path: str | Path) -> None:
        """Writes plan.json."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def _gpus_per_node(gpus: int, tp: int, most: int) -> int:
    """The most GPUs of a node that give exactly `gpus` on equal nodes, with whole tensor-parallel groups."""
    if gpus <= most:
        return gpus
    whole = tp if tp <= most else 1
    equal = [each for each in range(whole, most + 1, whole) if gpus % each == 0 and (each > 1 or most == 1)]
    if not equal:
        raise UsageError(
            f"{gpus} GPUs in groups of tp {tp} cannot be spread evenly over nodes of {most} GPUs; "
            f"plan a multiple of {most}, such as {-(-gpus // most) * most}"
        )
    return equal[-1]


def estimate(
    model: Transformer,
    layout: Layout,
    node: Node,
    *,
    workload: Workload | None = None,
    calibration: Calibration | None = None,
) -> Estimate:
    """Estimates memory, time and cost of one layout on one type of node.

    >>> from headway.plan.model.presets import preset
    >>> plan = estimate(preset("gpt2"), Layout(microbatch=8, global_batch=8, precision="amp"), Node("h200-sxm1"))
    >>> plan.fits, str(plan.answers["parameters"])
    (True, '124.44 M')
    """
    workload = workload or Workload()
    constants, notes = scoped_calibration(calibration, node.device)
    layout.check_model(model)
    node.device.check_precision(layout.precision)
    stages = memory.representative_stages(model, layout)
    ranks = [memory.rank_memory(model, layout, stage) for stage in stages]
    step = step_time(model, layout, node, constants)
    bounds = time_bounds(model, layout, node, constants, step)
    found = answers.model_answers(model)
    found |= answers.memory_answers(model, layout, node.device, ranks)
    found |= answers.time_answers(model, layout, node, bounds, step)
    found |= run_answers.economy_answers(model, layout, node, bounds, step, workload)
    needed, capacity = found["memory.needed"], node.device.memory_bytes
    source = f"{node.device.name}: {node.device.source}"
    found["device.memory"] = exact(capacity, "bytes", formula=source, source="datasheet")
    # also for a plan that fits: a run that exhausts memory nevertheless reports them
    ways = find_remedies(model, layout, node, constants)
    return Estimate(
        title=f"{model.name}, {layout.describe()}",
        node=f"{node.count_for(layout.gpus)} x {node.name} ({layout.gpus} GPU{'s' if layout.gpus > 1 else ''})",
        answers=found,
        fits=needed.low <= capacity,
        tight=is_tight(needed, capacity),
        verdict=verdict(needed, capacity, ways),
        ranks=[{"rank": _rank_name(rank.stage, layout), **rank.parts} for rank in ranks],
        stages=_stages(model, layout, node, constants),
        remedies=ways,
        products=product_table(model, layout, node, constants),
        scaling=scaling_table(model, layout, node, constants),
        sensitivity=sensitivity(model, layout, node, constants),
        inputs={"model": asdict(model), "layout": asdict(layout), "hardware": node.to_dict()},
        notes=notes + bound_notes(bounds, step) + _notes(layout, node, found),
    )


def _stages(model: Transformer, layout: Layout, node: Node, constants: Calibration) -> list[dict[str, float]]:
    passes = stage_passes(model, layout, node, constants)
    stages: list[dict[str, float]] = [{"forward_s": seconds, "backward_s": back} for seconds, back in passes]
    if layout.schedule == "zero-bubble":
        kept = kept_share(model, layout)
        for rank, stage in enumerate(stages):
            stage["weights_owed"] = weights_owed(layout.pp, layout.microbatches, rank, kept)
    return stages


def _rank_name(stage: int, layout: Layout) -> str:
    if layout.pp == 1:
        return "every GPU"
    return {0: "first", layout.pp - 1: "last"}.get(stage, f"stage {stage}")


def is_tight(needed: Quantity, capacity: float) -> bool:
    """Returns whether the capacity lies within the interval of what a plan needs."""
    return needed.low <= capacity < needed.high


def verdict(needed: Quantity, capacity: float, ways: list[Remedy]) -> str:
    """Returns the sentence to read first: whether the plan fits, and what would make it fit."""
    have = capacity / GIB
    if needed.high <= capacity:
        return f"fits: needs {needed.value / GIB:.1f} GiB of {have:.1f}"
    fitting = "; or ".join(
        f"{way.change} -> {way.needed / GIB:.0f}" for way in [way for way in ways if way.fits][:3]
    )
    if is_tight(needed, capacity):
        between = f"between {needed.low / GIB:.1f} and {needed.high / GIB:.1f}"
        text = (
            f"tight: needs {needed.value / GIB:.1f} GiB of {have:.1f}, {between}, and may run out of memory"
        )
        return f"{text}: {fitting}" if fitting else text
    text = f"does not fit: needs {needed.value / GIB:.0f} GiB of {have:.0f}"
    if fitting:
        return f"{text}: {fitting}"
    if ways:
        return (
            f"{text}; no two changes are enough, the best is {ways[0].change} -> {ways[0].needed / GIB:.0f}"
        )
    return f"{text}; no known change lowers it: use more GPUs or a smaller model"


def product_table(
    model: Transformer, layout: Layout, node: Node, constants: Calibration
) -> list[dict[str, Any]]:
    """Returns each matrix product of a layer with size, roofline and time."""
    moe = model.moe_layers > 0
    gemms = [*compute.layer_gemms(model, layout, moe=moe), compute.head_gemm(model, layout)]
    if not layout.flash:  # fused attention is one kernel without a score matrix: see time.part.attention
        gemms += compute.attention_gemms(model, layout)
    rate = node.device.matrix_flops(layout.precision)
    rows: list[dict[str, Any]] = []
    for gemm in gemms:
        traffic = gemm.bytes(layout.element_bytes.activation)
        rows.append(
            {
                "name": gemm.name,
                "m": round(gemm.m),
                "k": round(gemm.k),
                "n": round(gemm.n),
                # a fraction, if only some layers have the product
                "batch": round(gemm.batch, 3),
                "flops": gemm.flops,
                "flops_per_byte": gemm.flops / traffic,
                "bound": "arithmetic"
                if gemm.flops / rate >= traffic / node.device.copy_bytes_per_s
                else "memory",
                "seconds": compute.gemm_seconds(gemm, layout, node.device, constants),
            }
        )
    return rows


def scaling_table(
    model: Transformer, layout: Layout, node: Node, constants: Calibration
) -> list[dict[str, float]]:
    """Returns weak scaling (the batch grows with the replicas) and strong scaling (the batch is constant).

    Efficiency is relative to the fewest replicas that fit; if none fit, to the layout's own number.
    """
    rows: list[dict[str, float]] = []
    experts = layout.ep * layout.expert_ways
    # the fewest replicas whose ranks are whole groups of experts
    replicas, first = experts // gcd(experts, layout.cp * layout.tp), None
    while replicas <= max(64, 4 * layout.dp):
        try:
            weak = replace(
                layout, dp=replicas, shard=None, global_batch=layout.global_batch // layout.dp * replicas
            )
        except UsageError:  # more GPUs or samples than a plan may have
            break
        seconds = step_time(model, weak, node, constants).total
        fits = memory.needed_bytes(model, weak, node.device) <= node.device.memory_bytes
        if first is None and (fits or replicas >= layout.dp):
            first = seconds
        if first is None:
            replicas *= 2
            continue
        row = {"gpus": float(weak.gpus), "weak_step_s": seconds, "weak_efficiency": first / seconds}
        microbatches = layout.global_batch // layout.microbatch
        if microbatches % replicas == 0 and not (layout.vpp > 1 and microbatches // replicas % layout.pp):
            strong = replace(layout, dp=replicas, shard=None)
            row["strong_step_s"] = step_time(model, strong, node, constants).total
        rows.append(row)
        replicas *= 2
    return rows


def sensitivity(
    model: Transformer, layout: Layout, node: Node, constants: Calibration
) -> list[tuple[str, float]]:
    """Returns how much longer a step takes if each constant is 20 % worse."""
    base = step_time(model, layout, node, constants).total
    found = []
    for name in ("matrix", "attention", "memory", "kernel_s", "peer", "network", "network_latency_s"):
        worse = 1.2 if name.endswith("_s") else 1 / 1.2
        other = replace(constants, **{name: getattr(constants, name) * worse})
        found.append((name, step_time(model, layout, node, other).total / base - 1))
    return sorted(found, key=lambda row: -row[1])


def _notes(layout: Layout, node: Node, found: dict[str, Quantity]) -> list[str]:
    notes = []
    if layout.gpus % node.gpus and layout.gpus > node.gpus:
        notes.append(f"{layout.gpus} GPUs do not fill whole nodes of {node.gpus}")
    if layout.tp > node.gpus:
        notes.append(f"tp {layout.tp} spans nodes of {node.gpus}: every layer waits for the network")
    have = found.get("loader.available_per_node")
    if have is not None and have.value < found["loader.needed_per_node"].value:
        notes.append(
            f"the loader delivers {have} per node, a step needs {found['loader.needed_per_node']}: "
            "training will wait for data"
        )
    waited = found["time.part.launches"].value if "time.part.launches" in found else 0.0
    if waited > 0.05 * found["time.step"].value:
        more = "step" if layout.graphs == "layers" else "layers"
        notes.append(
            f"for {100 * waited / found['time.step'].value:.0f} % of the step, the device waits for the host to launch "
            f"the kernels of experts; CUDA graphs save most of it: layout.graphs: {more}"
        )
    return notes
