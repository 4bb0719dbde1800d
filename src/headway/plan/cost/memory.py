"""Peak memory of each pipeline rank, by part. Bytes; parts add up to the total."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headway.plan.cost import activations, schedule
from headway.plan.cost.states import ModelStates, RankParameters, model_states, on_rank
from headway.plan.machine.hardware import GIB
from headway.plan.model.layout import Layout
from headway.plan.model.transformer import Transformer

# Bytes alive per logit while the loss is differentiated: fp32 log-probabilities, their gradient, the gradient
# of the fp32 logits. Where the vocabulary is split, torch's loss needs one more fp32 copy (traced); Megatron's works in
# place on one.
LOGIT_BYTES_TORCH = 12
LOGIT_BYTES_TORCH_SPLIT = 16
LOGIT_BYTES_MEGATRON = 6
CONTEXT_BYTES = 767 * 2**20
COLLECTIVE_BYTES = 0.5 * GIB
"""Communicator buffers, per process that talks to others (from memory; low 0, high 1 GiB)."""
COMPILED_ACTIVATIONS = 0.88
"""torch.compile recomputes cheap steps: torchtitan's Llama 3 8B went from 66 to 61 GiB beside its states."""


class ReserveFactor(NamedTuple):
    """Reserved over allocated bytes: what the caching allocator cannot use."""

    low: float
    value: float
    high: float


RESERVE = ReserveFactor(1.02, 1.07, 1.17)
"""Seen on 12 H200 runs."""
RESERVE_FSDP = ReserveFactor(1.1, 1.14, 1.23)
"""FSDP in mixed precision gathers and scatters on streams with blocks of their own: torchtitan's two eager runs."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Peak of one pipeline rank."""

    stage: int
    parts: dict[str, float]

    @property
    def allocated(self) -> float:
        return sum(self.parts.values())


def representative_stages(layout: Layout) -> tuple[int, ...]:
    """First, middle and last stage: memory falls along the pipeline, except for what the ends hold."""
    return tuple(sorted({0, layout.pp // 2, layout.pp - 1}))


def peak(model: Transformer, layout: Layout) -> RankMemory:
    """The fullest rank."""
    even = model.layers % (layout.pp * layout.vpp) == 0
    stages = {0, layout.pp - 1} if even else representative_stages(layout)
    return max((rank_memory(model, layout, stage) for stage in stages), key=lambda rank: rank.allocated)


def rank_memory(model: Transformer, layout: Layout, stage: int) -> RankMemory:
    """Peak of a rank: at the loss, in the backward pass of a layer, or in the optimizer step."""
    parameters = on_rank(model, layout, stage)
    kept = model_states(parameters, layout)
    always = {"weights": kept.weights, "optimizer": kept.optimizer}
    gradients = {"gradients": _accumulated_gradients(model, layout, stage, parameters) or kept.gradients}
    training = _training_parts(model, layout, stage, parameters) | (
        gradients if gradients_stay(layout) else {}
    )
    moments = [
        training | {"logits and loss": _logits(model, layout) if stage == layout.pp - 1 else 0.0},
        training | _backward_parts(model, layout, parameters),
        gradients | {"optimizer temporaries": _step_temporaries(kept, layout)},
    ]
    fullest = max(moments, key=lambda parts: sum(parts.values()))
    return RankMemory(stage=stage, parts=always | {name: size for name, size in fullest.items() if size})


def gradients_stay(layout: Layout) -> bool:
    """Whether gradients exist while the loss is computed.

    torch drops them after a step, unless they accumulate, are sharded (their blocks stay reserved), or are
    in Megatron's own buffer.
    """
    sharded = layout.zero > 0 and layout.shards > 1
    return sharded or layout.microbatches > 1 or layout.megatron


def reserve_factor(layout: Layout) -> ReserveFactor:
    """How much more than it allocates a process takes."""
    return RESERVE_FSDP if layout.zero == 3 and layout.shards > 1 and layout.precision == "amp" else RESERVE


def reserved_bytes(allocated: float, layout: Layout, *, factor: float | None = None) -> float:
    """What the process takes from the device: allocator slack, CUDA context, communicator buffers."""
    slack = reserve_factor(layout).value if factor is None else factor
    return allocated * slack + CONTEXT_BYTES + (COLLECTIVE_BYTES if layout.gpus > 1 else 0.0)


def _accumulated_gradients(
    model: Transformer, layout: Layout, stage: int, parameters: RankParameters
) -> float:
    """FSDP that keeps its weights gathered adds up whole gradients, and scatters them after the last microbatch."""
    if layout.zero < 3 or layout.reshard or layout.microbatches == 1:
        return 0.0
    whole = parameters.shared + parameters.experts
    if stage == 0 and not layout.megatron:
        # every tensor-parallel rank of torch has a sum for the whole vocabulary until then (traced)
        whole += model.vocab * model.hidden * (1 - 1 / layout.tp)
    return layout.element_bytes.gradient * whole


def _training_parts(
    model: Transformer, layout: Layout, stage: int, parameters: RankParameters
) -> dict[str, float]:
    """What is there from the first forward to the last backward."""
    layers = schedule.layers_in_flight(model.layers, layout.pp, layout.vpp, stage, layout.microbatches)
    share = model.moe_layers / model.layers
    per_layer = (1 - share) * activations.layer_bytes(model, layout)
    if share:
        per_layer += share * activations.layer_bytes(model, layout, moe=True)
    # the input of a layer that is recomputed as a whole is kept by compiled code, too
    compiled = COMPILED_ACTIVATIONS if layout.compiled and layout.recompute != "full" else 1.0
    return {
        "activations": layers * per_layer * compiled,
        "embedding": _embedding(model, layout, stage),
        "between stages": _between_stages(model, layout, stage),
        "16-bit weight copies": _casts(layout, parameters),
        "gathered weights": _gathered(layout, parameters),
        "buckets": _buckets(layout, parameters),
    }


def _backward_parts(model: Transformer, layout: Layout, parameters: RankParameters) -> dict[str, float]:
    """What one layer needs on top, the logits being gone: what it rebuilds, and its gradient until that is spread."""
    share = model.moe_layers / model.layers
    dense = 0.0 if share == 1 else activations.working_set(model, layout)
    working = max(dense, activations.working_set(model, layout, moe=True)) if share else dense
    scattered = (
        layout.element_bytes.gradient * parameters.layer if layout.zero > 1 and layout.shards > 1 else 0.0
    )
    return {
        "recomputed layer": working * (COMPILED_ACTIVATIONS if layout.compiled else 1.0),
        "gradients on their way": scattered,
    }


def _between_stages(model: Transformer, layout: Layout, stage: int) -> float:
    """torch's pipeline keeps the outputs in flight, and has a buffer for the gradient of each microbatch."""
    if layout.megatron or stage == layout.pp - 1:
        return 0.0
    tokens = (
        layout.microbatch * layout.tokens(model) / layout.cp / (layout.tp if layout.sequence_parallel else 1)
    )
    flying = schedule.in_flight(layout.pp, layout.microbatches, stage, layout.vpp)
    return tokens * model.hidden * layout.residual_bytes * (flying + layout.microbatches * layout.vpp)


def _embedding(model: Transformer, layout: Layout, stage: int) -> float:
    """Embedding dropout keeps a mask per microbatch in flight (Korthikanti, section 4.3: sbhp/t)."""
    if stage or not model.dropout:
        return 0.0
    tokens = layout.microbatch * layout.tokens(model) / layout.cp
    flying = schedule.in_flight(layout.pp, layout.microbatches, 0)
    return tokens * model.hidden * flying / (layout.tp if layout.sequence_parallel else 1)


def _logits(model: Transformer, layout: Layout) -> float:
    """Final norm and head inputs, and the logits through the loss."""
    tokens = layout.microbatch * layout.tokens(model) / layout.cp
    each = tokens * layout.element_bytes.activation * model.hidden
    piece = each / (layout.tp if layout.sequence_parallel else 1)
    inputs = piece + (piece if layout.megatron else each)  # torch keeps what it gathered for the head
    if model.image:
        return inputs + layout.microbatch * model.image.classes * LOGIT_BYTES_TORCH
    if layout.tp == 1:
        per_logit = LOGIT_BYTES_TORCH
    else:
        per_logit = LOGIT_BYTES_MEGATRON if layout.megatron else LOGIT_BYTES_TORCH_SPLIT
    return inputs + tokens * model.vocab * per_logit / (layout.tp * layout.loss_chunks)


def _casts(layout: Layout, parameters: RankParameters) -> float:
    """Autocast keeps 16-bit copies of the weights until the backward pass has used them."""
    if layout.precision != "amp" or layout.zero == 3 or layout.recompute == "full":
        return 0.0
    return 2 * (parameters.shared + parameters.experts)


def _gathered(layout: Layout, parameters: RankParameters) -> float:
    """FSDP: embedding and head, which stay gathered, a layer in use and one on its way; at most all there is."""
    if layout.zero < 3 or layout.shards == 1:
        return 0.0
    whole = parameters.shared + parameters.experts
    units = parameters.outer + 2 * parameters.layer
    return layout.element_bytes.activation * (min(whole, units) if layout.reshard else whole)


def _buckets(layout: Layout, parameters: RankParameters) -> float:
    """DDP reduces through a second copy of the gradients; sharded optimizers through two buckets."""
    if layout.dp == 1 or layout.zero == 3:
        return 0.0
    copy = layout.element_bytes.gradient * (parameters.shared + parameters.experts)
    if layout.zero == 0 and not layout.megatron:
        return copy
    return min(copy, 2 * layout.bucket_MB * 1e6)


def _step_temporaries(kept: ModelStates, layout: Layout) -> float:
    """A for-each optimizer works on one more copy of the weights it updates."""
    numbers = layout.element_bytes
    per_parameter = kept.optimizer or kept.weights
    width = numbers.master or numbers.weight
    whole = numbers.master + 2 * numbers.moment if kept.optimizer else numbers.weight
    return per_parameter * width / whole
