"""Computes every answer of an estimate, by the key that `--explain` takes."""

from __future__ import annotations

from headway.plan.cost import flops, memory, schedule, states
from headway.plan.cost.activations import kept_share, layer_bytes
from headway.plan.cost.memory import RankMemory
from headway.plan.cost.steptime import StepTime
from headway.plan.machine.hardware import Device, Node
from headway.plan.model.layout import Layout
from headway.plan.model.transformer import Transformer
from headway.plan.report.bounds import TimeBounds
from headway.plan.report.quantity import Quantity, Unit, ValueSource, approximate, exact

Answers = dict[str, Quantity]


def model_answers(model: Transformer) -> Answers:
    """Answers about the model: its parameters."""
    found = {
        "parameters": exact(model.parameters, formula="sum of all weight shapes"),
        "parameters.layer": exact(
            model.layer_parameters, formula="attention + feed-forward + norms of a dense layer"
        ),
        "parameters.embedding": exact(
            model.embedding_parameters, formula="vocab x hidden + learned positions"
        ),
        "parameters.head": exact(model.head_parameters, formula="vocab x hidden unless tied"),
    }
    if model.moe:
        found["parameters.active"] = exact(
            model.active_parameters, formula="parameters with top_k of the routed experts"
        )
    return found


def memory_answers(model: Transformer, layout: Layout, device: Device, ranks: list[RankMemory]) -> Answers:
    """Answers about memory: by part, by rank, and the total of the fullest rank."""
    full = max(ranks, key=lambda rank: rank.allocated)
    in_flight = schedule.in_flight(layout.pp, layout.microbatches, full.stage, layout.vpp, layout.schedule)
    allocated, (low, high) = full.allocated, memory.closed_form_error(layout)
    found = {
        "memory.state_bytes_per_parameter": exact(
            states.bytes_per_parameter(layout), formula=f"weight + gradient + optimizer; {layout.element_bytes.source}"
        ),
        "memory.activations_per_layer": approximate(
            layer_bytes(model, layout), 0.9, 1.15, "bytes",
            formula="sum of the tensors that a layer saves per microbatch (Korthikanti 2022, eqs 1-6 where they apply)",
        ),
        "memory.in_flight": exact(
            in_flight, formula="1F1B: min(m, p - stage), zero-bubble: min(m, p); interleaved: 2(p-stage-1) + (v-1)p + 1"
        ),
    }  # fmt: skip
    for name, size in full.parts.items():
        found[f"memory.part.{name}"] = approximate(size, low, high, "bytes", formula=_PART_FORMULAS[name])
    for rank in ranks:
        found[f"memory.rank.{rank.stage}"] = approximate(
            rank.allocated, low, high, "bytes", formula=f"sum of the parts on pipeline rank {rank.stage}"
        )
    reserve = memory.reserve_factor(layout)
    least, most = memory.reserved_range(allocated, layout, device)
    found["memory.allocated"] = approximate(
        allocated, low, high, "bytes", formula="sum of memory.part.* on the fullest rank"
    )
    found["memory.needed"] = Quantity(
        value=memory.reserved_bytes(allocated, layout, device), low=least, high=most, unit="bytes",
        formula=f"allocated x {reserve.value} (caching allocator){device.context_text}"
        + (" + 0.5 GiB (communicators)" if layout.gpus > 1 else ""),
    )  # fmt: skip
    return found


_PART_FORMULAS = {
    "weights": "parameters on the rank x bytes, / shards with ZeRO 3",
    "gradients": "parameters on the rank x bytes, / shards with ZeRO 2 or 3; full while a chunk accumulates",
    "optimizer": "(master + moments) x parameters on the rank, / shards with ZeRO 1 to 3",
    "activations": "layers in flight x memory.activations_per_layer",
    "recomputed layer": "what the backward pass of one layer recomputes",
    "encoder": "its layers x their activations, and its output",
    "embedding": "dropout mask: tokens x hidden x microbatches in flight",
    "logits and loss": "tokens x vocab x 12 bytes (with tp: 16, Megatron 6) / tp / loss_chunks, and the head's input",
    "16-bit weight copies": "2 bytes x parameters: autocast caches them until the backward pass",
    "gathered weights": "embedding, head and two layers in the precision of products, at most all weights",
    "gradients on their way": "the full gradient of a layer before ZeRO 2 or 3 scatters it",
    "between stages": "torch's pipeline: outputs in flight, and a gradient buffer for each microbatch",
    "exchanged keys and values": "context parallelism: blocks to send and to receive, and their gradients",
    "buckets": "DDP: a second copy of the gradients; sharded optimizers: two buckets",
    "optimizer temporaries": "a foreach optimizer's copy of the weights that it updates",
}

_TIME_FORMULAS = {
    "matrix products": "sum over products of max(FLOPs / rate, bytes / HBM), forward and twice backward",
    "attention": "products of scores; fused attention skips the masked half, its backward takes 2.5 to 2.9 forwards",
    "elementwise": "bytes of norms, adds, activations / HBM, and 1.5 times as much backward",
    "recompute": "the repeated part of the forward pass",
    "head and loss": "three output products, and five passes over fp32 logits (nine in eager torch)",
    "tensor parallel": "4 all-reduces per layer (6 with full recompute): 2(n-1)(latency + bytes/n / bandwidth)",
    "context parallel": "exchange of keys and values that scores do not hide, merging of outputs, causal imbalance",
    "expert parallel": "4 all-to-alls per mixture-of-experts layer",
    "launches": "layers with experts: 200 kernels that the device waits for, and expert launches that outlast its work",
    "pipeline sends": "boundary activations, forward and backward, for each microbatch and chunk",
    "pipeline bubble": "(p - 1)/v stage times, and the wait for the slowest stage",
    "data parallel": "reduce (with ZeRO 2 for each microbatch) and gather, except for what the backward pass overlaps",
    "stragglers": "jitter x sqrt(2 ln GPUs) of the rest: every rank waits for the slowest",
    "optimizer": "bytes of the state, read and written once / HBM",
}


def _bubble(model: Transformer, layout: Layout) -> Quantity:
    formula = "(p - 1)/(v m), idle over ideal time"
    if layout.schedule == "zero-bubble":
        formula += (
            ", of which zero-bubble leaves a third; more if m < p, or if layers recompute: then fewer weight gradients "
            "can be delayed in the same memory"
        )
    kept = kept_share(model, layout)
    idle = schedule.bubble_fraction(layout.pp, layout.microbatches, layout.vpp, layout.schedule, kept)
    return exact(idle, "share", formula=formula)


def time_answers(
    model: Transformer, layout: Layout, node: Node, bounds: TimeBounds, step: StepTime
) -> Answers:
    """Answers about the step: time by part, throughput and utilization."""
    low, high = bounds.low, bounds.high
    seconds, sequence = step.total, layout.tokens(model)
    found = {}
    for name, value in step.parts.items():
        part = bounds.parts[name]
        formula = f"{_TIME_FORMULAS[name]}; {part.source}"
        source: ValueSource = "measured" if part.measured else "formula"
        found[f"time.part.{name}"] = approximate(
            value, part.low, part.high, "s", formula=formula, source=source
        )
    found["time.step"] = approximate(seconds, low, high, "s", formula="sum of time.part.*")
    found["time.microbatches"] = exact(
        layout.microbatches, formula="global batch / (dp x microbatch), per pipeline and step"
    )
    found["time.bubble"] = _bubble(model, layout)
    samples = layout.global_batch / seconds
    per_gpu = samples * sequence / layout.gpus

    def rate(value: float, unit: Unit, formula: str) -> Quantity:
        return approximate(value, 1 / high, 1 / low, unit, formula=formula)

    found["rate.samples"] = rate(samples, "samples/s", "global batch / time.step")
    found["rate.tokens"] = rate(samples * sequence, "tokens/s", "rate.samples x sequence")
    found["rate.tokens_per_day"] = rate(samples * sequence * 86400, "", "rate.tokens x 86,400 s")
    found["rate.tokens_per_gpu"] = rate(per_gpu, "tokens/s", "rate.tokens / GPUs")
    peak = node.device.precision_peak(layout.precision)
    of = f"{peak / 1e12:g} TFLOP/s ({'fp8' if peak != node.device.peak_flops else '16-bit'}, dense)"
    full = flops.model_flops_per_token(model, sequence, "full")
    causal = flops.model_flops_per_token(model, sequence, "causal")
    hardware = flops.hardware_flops_per_token(model, sequence, layout, "full")
    for key, count, text in (
        ("full", full, "6 x weights + 12 L a d s per token: PaLM, torchtitan"),
        ("causal", causal, "attention counts half: Megatron-LM, Megatron-Bridge"),
        ("hardware", hardware, "flops.full plus what is recomputed"),
    ):
        found[f"flops.{key}"] = exact(count, "FLOP/token", formula=text)
        use = flops.utilization(count, per_gpu, peak)
        name = "hfu" if key == "hardware" else f"mfu.{key}"
        found[name] = rate(use, "share", f"flops.{key} x rate.tokens_per_gpu / {of}")
    return found
