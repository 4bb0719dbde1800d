"""Peak memory of each pipeline rank, by part, in bytes. The parts add up to the total."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from headway.plan.cost import activations, schedule
from headway.plan.cost.states import RankParameters, expert_shards, model_states, on_rank, updated
from headway.plan.machine.hardware import GIB, Device
from headway.plan.model.layout import Layout
from headway.plan.model.transformer import Transformer

# Live bytes per logit in the backward pass of the loss: fp32 log-probabilities, their gradient, and the gradient of the
# fp32 logits. If the vocabulary is split, torch's loss needs one more fp32 copy (traced); Megatron's works in place.
LOGIT_BYTES_TORCH = 12
LOGIT_BYTES_TORCH_SPLIT = 16
LOGIT_BYTES_MEGATRON = 6
COLLECTIVE_BYTES = 0.5 * GIB
"""Buffers of the communicators of a process (unverified; between 0 and 1 GiB)."""
COMPILED_RATIO = 0.88
"""torch.compile recomputes cheap operations: in torchtitan's Llama 3 8B, 66 GiB besides the states become 61."""


class ReserveFactor(NamedTuple):
    """Reserved over allocated bytes: memory that the caching allocator holds but cannot use."""

    low: float
    value: float
    high: float


RESERVE = ReserveFactor(1.02, 1.07, 1.17)
"""Measured in 12 runs on an H200."""
RESERVE_FSDP = ReserveFactor(1.1, 1.14, 1.23)
"""Mixed-precision FSDP uses streams whose blocks are not shared. Measured in torchtitan's two eager runs."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Peak memory of one pipeline rank, by part."""

    stage: int
    parts: dict[str, float]

    @property
    def allocated(self) -> float:
        return sum(self.parts.values())


def representative_stages(model: Transformer, layout: Layout) -> tuple[int, ...]:
    """First, middle and last stage, and one of each other kind: the fullest is among them."""
    return tuple(sorted({layout.pp // 2, *schedule.distinct_stages(model, layout.pp, layout.vpp)}))


def peak(model: Transformer, layout: Layout) -> RankMemory:
    """Peak memory of the fullest rank."""
    stages = schedule.distinct_stages(model, layout.pp, layout.vpp)
    return max((rank_memory(model, layout, stage) for stage in stages), key=lambda rank: rank.allocated)


def rank_memory(model: Transformer, layout: Layout, stage: int) -> RankMemory:
    """Peak memory of a rank: at the loss, in the backward pass of a layer, or in the optimizer step."""
    parameters = on_rank(model, layout, stage)
    states = model_states(parameters, layout)
    always = {"weights": states.weights, "optimizer": states.optimizer}
    full = _accumulated_gradients(model, layout, stage, parameters)
    gradients = {"gradients": full + (states.gradients if not full or layout.zero < 3 else 0.0)}
    training = _training_parts(model, layout, stage, parameters) | (
        gradients if gradients_persist(layout) else {}
    )
    moments = [
        training | {"logits and loss": _logits(model, layout) if stage == layout.pp - 1 else 0.0},
        training | _backward_parts(model, layout, stage, parameters),
        gradients | {"optimizer temporaries": _step_temporaries(parameters, layout)},
    ]
    fullest = max(moments, key=lambda parts: sum(parts.values()))
    return RankMemory(stage=stage, parts=always | {name: size for name, size in fullest.items() if size})


def gradients_persist(layout: Layout) -> bool:
    """Whether gradients are allocated while the loss is computed.

    torch frees them after a step, unless they accumulate or are sharded (their blocks stay reserved). Megatron keeps
    them in a buffer.
    """
    sharded = layout.zero > 0 and layout.shards > 1
    return sharded or layout.microbatches > 1 or layout.megatron


def reserve_factor(layout: Layout) -> ReserveFactor:
    """Reserved over allocated bytes of a process."""
    return RESERVE_FSDP if layout.zero == 3 and layout.shards > 1 and layout.autocast else RESERVE


def reserved_bytes(allocated: float, layout: Layout, device: Device, *, factor: float | None = None) -> float:
    """Bytes that a process takes from the device: allocator, CUDA context and communicator buffers included."""
    slack = reserve_factor(layout).value if factor is None else factor
    return allocated * slack + device.context_bytes + (COLLECTIVE_BYTES if layout.gpus > 1 else 0.0)


CLOSED_FORM_ERROR = (0.95, 1.07)
"""Allocated bytes over their closed form: 0.97 to 1.06 on six single-GPU peaks; published steps show that two plans
took at most 0.95."""
RECOMPUTED_FORM_ERROR = (0.93, 1.11)
"""The same where whole layers are recomputed: published peaks lie up to 2.6 % below the other interval, and measured
ones 3.3 % above it."""


def closed_form_error(layout: Layout) -> tuple[float, float]:
    """The least and the most allocated bytes, over their closed form."""
    return RECOMPUTED_FORM_ERROR if layout.recompute == "full" else CLOSED_FORM_ERROR


def reserved_range(allocated: float, layout: Layout, device: Device) -> tuple[float, float]:
    """The least and the most bytes that a process may take from the device."""
    reserve, (low, high) = reserve_factor(layout), closed_form_error(layout)
    least = reserved_bytes(allocated * low, layout, device, factor=reserve.low)
    return least, reserved_bytes(allocated * high, layout, device, factor=reserve.high)


def needed_bytes(model: Transformer, layout: Layout, device: Device) -> float:
    """Bytes that the fullest rank most likely takes from its device."""
    return reserved_bytes(peak(model, layout).allocated, layout, device)


def _accumulated_gradients(
    model: Transformer, layout: Layout, stage: int, parameters: RankParameters
) -> float:
    """Full gradients that accumulate until they are scattered.

    FSDP without resharding scatters them after the last microbatch, ZeRO 2 with several chunks after each run of one
    chunk's backward passes. In a step with one such run, and always with ZeRO 2, only one chunk has full gradients.
    """
    in_turn = layout.vpp > 1 and (
        layout.zero == 2 or schedule.chunk_runs(layout.pp, layout.microbatches, layout.vpp) == 1
    )
    late = layout.zero == 3 and not layout.reshard
    if layout.microbatches == 1 or not (late or (layout.zero == 2 and in_turn)):
        return 0.0
    if layout.shards == 1:
        return 0.0  # gradients are never sharded
    outer, share = parameters.outer, 1.0
    if in_turn:
        share = schedule.largest_chunk(model.layers, layout.pp, layout.vpp, stage)
    layers = share * (parameters.shared - outer)
    if expert_shards(layout) > 1:
        layers += share * parameters.experts
    elif layout.zero == 3:
        # those that nothing shards; with ZeRO 2 they are among the sharded gradients
        layers += parameters.experts
    if stage == 0 and not layout.megatron:
        # until then each of torch's tensor-parallel ranks has a sum for the full vocabulary (traced)
        outer += model.vocab * model.hidden * (1 - 1 / layout.tp)
    return layout.element_bytes.gradient * (layers + outer)


def _training_parts(
    model: Transformer, layout: Layout, stage: int, parameters: RankParameters
) -> dict[str, float]:
    """Memory that is in use from the first forward to the last backward pass."""
    layers = schedule.layers_in_flight(
        model.layers, layout.pp, layout.vpp, stage, layout.microbatches, layout.schedule
    )
    share = _moe_share(model, layout, stage)
    again = layout.recomputed_share(schedule.stage_layers(model, layout.pp, layout.vpp)[stage].total)
    per_layer = (1 - share) * activations.layer_bytes(model, layout, recomputed=again)
    if share:
        per_layer += share * activations.layer_bytes(model, layout, moe=True, recomputed=again)
    # compiled code, too, saves the input of a fully recomputed layer
    whole = layout.recompute == "full" and again == 1
    compiled = COMPILED_RATIO if layout.compiled and not whole else 1.0
    return {
        "activations": layers * per_layer * compiled,
        "encoder": _encoder(model, layout) * compiled,
        "embedding": _embedding(model, layout, stage),
        "between stages": _between_stages(model, layout, stage),
        "exchanged keys and values": _exchanged(model, layout),
        "16-bit weight copies": _casts(layout, parameters),
        "gathered weights": _gathered(layout, parameters),
        "buckets": _buckets(layout, parameters),
    }


def _encoder(model: Transformer, layout: Layout) -> float:
    """Activations of the encoder's layers, and its output, which all layers of the decoder read."""
    stack = model.encoder_stack
    if stack is None:
        return 0.0
    inside = replace(layout, sequence=model.encoded_tokens(layout.tokens(model)))
    output = layout.microbatch * inside.tokens(stack) * model.hidden * layout.residual_bytes
    again = layout.recomputed_share(stack.layers)
    return stack.layers * activations.layer_bytes(stack, inside, recomputed=again) + output


def _moe_share(model: Transformer, layout: Layout, stage: int) -> float:
    """Fraction of the stage's layers that have a mixture of experts."""
    layers = schedule.stage_layers(model, layout.pp, layout.vpp)[stage]
    return layers.mixture / layers.total if layers.total else 0.0


def _backward_parts(
    model: Transformer, layout: Layout, stage: int, parameters: RankParameters
) -> dict[str, float]:
    """Additional memory of one layer's backward pass: recomputed tensors, and its gradient until it is scattered."""
    share = _moe_share(model, layout, stage)
    dense = 0.0 if share == 1 else activations.working_set(model, layout)
    working = max(dense, activations.working_set(model, layout, moe=True)) if share else dense
    whole = layout.megatron and layout.zero == 2 and layout.vpp > 1  # scattered from the accumulation buffer
    copied = layout.zero > 1 and layout.shards > 1 and not whole
    scattered = layout.element_bytes.gradient * _sharded_layer(layout, parameters) if copied else 0.0
    return {
        "recomputed layer": working * (COMPILED_RATIO if layout.compiled else 1.0),
        "gradients on their way": scattered,
    }


def _between_stages(model: Transformer, layout: Layout, stage: int) -> float:
    """torch's pipeline keeps the outputs in flight, and a gradient buffer for each microbatch."""
    if layout.megatron or stage == layout.pp - 1:
        return 0.0
    tokens = layout.rank_tokens(model) / layout.sequence_ways
    in_flight = schedule.in_flight(layout.pp, layout.microbatches, stage, layout.vpp, layout.schedule)
    return tokens * model.hidden * layout.residual_bytes * (in_flight + layout.microbatches * layout.vpp)


def _exchanged(model: Transformer, layout: Layout) -> float:
    """Context parallelism: a block of keys and values to send, one to receive, and the same for their gradients."""
    if layout.cp == 1:
        return 0.0
    tokens = layout.rank_tokens(model)
    block = 2 * tokens * model.kv * model.dim * layout.element_bytes.activation / min(layout.tp, model.kv)
    return 4 * block


def _embedding(model: Transformer, layout: Layout, stage: int) -> float:
    """Embedding dropout saves a mask per microbatch in flight (Korthikanti, section 4.3: sbhp/t)."""
    if stage or not model.dropout:
        return 0.0
    tokens = layout.rank_tokens(model)
    in_flight = schedule.in_flight(layout.pp, layout.microbatches, 0)
    return tokens * model.hidden * in_flight / layout.sequence_ways


def _logits(model: Transformer, layout: Layout) -> float:
    """Inputs of the final norm and of the head, and the logits in the loss."""
    tokens = layout.rank_tokens(model)
    each = tokens * layout.element_bytes.activation * model.hidden
    piece = each / layout.sequence_ways
    inputs = piece + (piece if layout.megatron else each)  # torch saves the gathered input of the head
    if model.image:
        return inputs + layout.microbatch * model.image.classes * LOGIT_BYTES_TORCH
    if layout.tp == 1:
        per_logit = LOGIT_BYTES_TORCH
    else:
        per_logit = LOGIT_BYTES_MEGATRON if layout.megatron else LOGIT_BYTES_TORCH_SPLIT
    return inputs + tokens * model.vocab * per_logit / (layout.tp * layout.loss_chunks)


def _casts(layout: Layout, parameters: RankParameters) -> float:
    """Autocast caches 16-bit copies of the weights until the backward pass has used them."""
    whole = layout.recompute == "full" and layout.recompute_layers is None
    if not layout.autocast or layout.zero == 3 or whole:
        return 0.0
    return 2 * (parameters.shared + parameters.experts)


def _gathered(layout: Layout, parameters: RankParameters) -> float:
    """FSDP gathers embedding and head, the layer in use and the next one; at most all weights."""
    if layout.zero < 3 or layout.shards == 1:
        return 0.0
    total = parameters.shared + (parameters.experts if expert_shards(layout) > 1 else 0.0)
    units = parameters.outer + 2 * _sharded_layer(layout, parameters)
    return layout.element_bytes.activation * (min(total, units) if layout.reshard else total)


def _sharded_layer(layout: Layout, parameters: RankParameters) -> float:
    """Parameters of a layer that ZeRO shards; without experts that are on only one of the ranks."""
    return parameters.layer - (parameters.layer_experts if expert_shards(layout) == 1 else 0.0)


def _buckets(layout: Layout, parameters: RankParameters) -> float:
    """DDP reduces in a second copy of the gradients; sharded optimizers use two buckets."""
    if layout.dp * layout.cp == 1 or layout.zero == 3:
        return 0.0
    copy = layout.element_bytes.gradient * (parameters.shared + parameters.experts)
    if layout.zero == 0 and not layout.megatron:
        return copy
    return min(copy, 2 * layout.bucket_MB * 1e6)


def _step_temporaries(parameters: RankParameters, layout: Layout) -> float:
    """A foreach optimizer needs a temporary copy of the weights that it updates; one that updates in place does not."""
    if layout.optimizer in ("adamw-fused", "adamw8bit", "adamw-bf16"):
        return 0.0
    numbers = layout.element_bytes
    return updated(parameters, layout) * (numbers.master or numbers.weight)
