"""Peak memory of each pipeline rank, by part. Bytes; parts add up to the total."""

from __future__ import annotations

from dataclasses import dataclass

from headway.plan import activations, pipeline
from headway.plan.hardware import GIB
from headway.plan.layout import Layout
from headway.plan.states import RankParameters, States, on_rank, states
from headway.plan.transformer import Transformer

# Bytes alive per logit while the loss is differentiated: fp32 log-probabilities, their gradient, the gradient
# of the fp32 logits. Megatron's vocabulary-parallel loss works in place on one fp32 copy.
LOGIT_BYTES_TORCH = 12
LOGIT_BYTES_MEGATRON = 6
# Reserved over allocated, seen on 12 H200 runs: 1.02 to 1.17, and 767 MiB that belong to the context.
RESERVE, RESERVE_LOW, RESERVE_HIGH = 1.07, 1.02, 1.17
CONTEXT_BYTES = 767 * 2**20
COLLECTIVE_BYTES = 0.5 * GIB
"""Communicator buffers, per process that talks to others (from memory; low 0, high 1 GiB)."""
COMPILED_ACTIVATIONS = 0.88
"""torch.compile recomputes cheap steps: torchtitan's Llama 3 8B went from 66 to 61 GiB beside its states."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Peak of one pipeline rank."""

    stage: int
    parts: dict[str, float]

    @property
    def allocated(self) -> float:
        return sum(self.parts.values())


def ranks_to_look_at(layout: Layout) -> tuple[int, ...]:
    """First, middle and last stage: memory falls along the pipeline, except for what the ends hold."""
    return tuple(sorted({0, layout.pp // 2, layout.pp - 1}))


def peak(model: Transformer, layout: Layout) -> RankMemory:
    """The fullest rank."""
    even = model.layers % (layout.pp * layout.vpp) == 0
    stages = {0, layout.pp - 1} if even else ranks_to_look_at(layout)
    return max((rank_memory(model, layout, stage) for stage in stages), key=lambda rank: rank.allocated)


def rank_memory(model: Transformer, layout: Layout, stage: int) -> RankMemory:
    """Peak of a rank: the loss or the first backward on one hand, the optimizer step on the other."""
    parameters = on_rank(model, layout, stage)
    kept = states(parameters, layout)
    whole = parameters.shared + parameters.experts
    always = {"weights": kept.weights, "optimizer": kept.optimizer}
    gradients = {"gradients": kept.gradients}
    if layout.zero == 3 and not layout.reshard and layout.microbatches > 1:
        # whole gradients pile up over the microbatches and are scattered once, after the last
        gradients = {"gradients": layout.numbers.gradient * whole}
    training = _training_parts(model, layout, stage, parameters) | (
        gradients if gradients_stay(layout) else {}
    )
    stepping = gradients | {"optimizer temporaries": _step_temporaries(kept, layout)}
    fuller = max(training, stepping, key=lambda parts: sum(parts.values()))
    return RankMemory(stage=stage, parts=always | {name: size for name, size in fuller.items() if size})


def gradients_stay(layout: Layout) -> bool:
    """Whether gradients exist while the loss is computed.

    torch drops them after a step, unless they accumulate, are sharded (their blocks stay reserved), or are
    in Megatron's own buffer.
    """
    return layout.zero > 0 or layout.microbatches > 1 or layout.precision in ("bf16", "zero16", "fp8")


def reserved(allocated: float, layout: Layout, *, factor: float = RESERVE) -> float:
    """What the process takes from the device: allocator slack, CUDA context, communicator buffers."""
    return allocated * factor + CONTEXT_BYTES + (COLLECTIVE_BYTES if layout.gpus > 1 else 0.0)


def _training_parts(
    model: Transformer, layout: Layout, stage: int, parameters: RankParameters
) -> dict[str, float]:
    layers = pipeline.layers_in_flight(model.layers, layout.pp, layout.vpp, stage, layout.microbatches)
    share = model.moe_layers / model.layers
    per_layer = (1 - share) * activations.layer_bytes(model, layout)
    working = 0.0 if share == 1 else activations.working_set(model, layout)
    if share:
        per_layer += share * activations.layer_bytes(model, layout, moe=True)
        working = max(working, activations.working_set(model, layout, moe=True))
    compiled = COMPILED_ACTIVATIONS if layout.compiled else 1.0
    logits = _logits(model, layout) if stage == layout.pp - 1 else 0.0
    # the logits are gone when the first layer is rebuilt
    late = {"logits and loss": logits} if logits > working else {"recomputed layer": working * compiled}
    return {
        "activations": layers * per_layer * compiled,
        "embedding": _embedding(model, layout, stage),
        **late,
        "16-bit weight copies": _casts(layout, parameters),
        "gathered weights": _gathered(layout, parameters),
        "buckets": _buckets(layout, parameters),
    }


def _embedding(model: Transformer, layout: Layout, stage: int) -> float:
    """Embedding dropout keeps a mask per microbatch in flight (Korthikanti, section 4.3: sbhp/t)."""
    if stage or not model.dropout:
        return 0.0
    tokens = layout.microbatch * layout.tokens(model) / layout.cp
    flying = pipeline.in_flight(layout.pp, layout.microbatches, 0)
    return tokens * model.hidden * flying / (layout.tp if layout.sequence_parallel else 1)


def _logits(model: Transformer, layout: Layout) -> float:
    """Final norm and head inputs, and the logits through the loss."""
    tokens = layout.microbatch * layout.tokens(model) / layout.cp
    inputs = tokens * 2 * layout.numbers.activation * model.hidden
    inputs /= layout.tp if layout.sequence_parallel else 1
    if model.image:
        return inputs + layout.microbatch * model.image.classes * LOGIT_BYTES_TORCH
    megatron = layout.precision in ("bf16", "zero16") and layout.tp > 1
    each = LOGIT_BYTES_MEGATRON if megatron else LOGIT_BYTES_TORCH
    return inputs + tokens * model.vocab * each / (layout.tp * layout.loss_chunks)


def _casts(layout: Layout, parameters: RankParameters) -> float:
    """Autocast keeps 16-bit copies of the weights until the backward pass has used them."""
    if layout.precision != "amp" or layout.zero == 3 or layout.recompute == "full":
        return 0.0
    return 2 * (parameters.shared + parameters.experts)


def _gathered(layout: Layout, parameters: RankParameters) -> float:
    """FSDP: two layers of whole weights (one in use, one on its way), the largest unit, and its gradient."""
    if layout.zero < 3 or layout.shards == 1:
        return 0.0
    width = layout.numbers.activation
    gradient = parameters.largest_unit * (width + layout.numbers.gradient)
    if not layout.reshard:
        return width * (parameters.shared + parameters.experts) + gradient
    return width * (2 * parameters.layer + parameters.largest_unit) + gradient


def _buckets(layout: Layout, parameters: RankParameters) -> float:
    """DDP reduces through a second copy of the gradients; sharded optimizers through two buckets."""
    if layout.dp == 1 or layout.zero == 3:
        return 0.0
    copy = layout.numbers.gradient * (parameters.shared + parameters.experts)
    if layout.zero == 0 and layout.precision in ("amp", "fp32", "pure-bf16"):
        return copy
    return min(copy, 2 * layout.bucket_MB * 1e6)


def _step_temporaries(kept: States, layout: Layout) -> float:
    """A for-each optimizer works on one more copy of the weights it updates."""
    numbers = layout.numbers
    per_parameter = kept.optimizer or kept.weights
    width = numbers.master or numbers.weight
    whole = numbers.master + 2 * numbers.moment if kept.optimizer else numbers.weight
    return per_parameter * width / whole
