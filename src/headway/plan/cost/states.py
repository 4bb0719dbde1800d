"""Model states (weights, gradients, optimizer): the parameters of a rank, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from headway.plan.cost.schedule import stage_layers
from headway.plan.model.layout import Layout
from headway.plan.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Parameters on one rank before ZeRO: the shared ones, which every data-parallel rank has, and routed experts."""

    shared: float
    experts: float
    layer: float
    layer_experts: float
    """Parameters of `layer` that are routed experts."""
    outer: float
    """Parameters of embedding and head: FSDP's outermost unit."""

    @property
    def largest_unit(self) -> float:
        """Parameters of the largest unit whose gradient is reduced at once."""
        return max(self.layer, self.outer)


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes of the model states on one rank."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def layer_on_rank(model: Transformer, tp: int, *, moe: bool) -> float:
    """Parameters of one layer on one tensor-parallel rank, without routed experts.

    Norms and output biases are replicated; keys and values are split at most `kv_heads` ways.
    """
    biases = (1 + model.attentions) * model.hidden if model.bias == "all" else 0
    replicated = model.layer_norm_parameters + biases + model.layer_extra
    keys = 0.0
    if model.mla is None:
        biases_per_key = (1 + model.key_bias) / 2 if model.bias != "none" else 0.0
        keys = 2 * model.kv * model.dim * (model.hidden + biases_per_key)
        keys *= model.attentions * model.attention_share
    total = model.moe_layer_shared_parameters if moe else model.layer_parameters
    split = total - replicated - keys
    return split / tp + keys / min(tp, model.kv) + replicated


def on_rank(model: Transformer, layout: Layout, stage: int) -> RankParameters:
    """Parameters on a rank of this pipeline stage."""
    experts_over = layout.ep * layout.expert_ways
    return _on_rank(model, layout.tp, layout.pp, layout.vpp, experts_over, stage)


@lru_cache(maxsize=4096)
def _on_rank(model: Transformer, tp: int, pp: int, vpp: int, experts_over: int, stage: int) -> RankParameters:
    layers = stage_layers(model, pp, vpp)[stage]
    dense = layer_on_rank(model, tp, moe=False) if layers.dense else 0.0
    mixture = layer_on_rank(model, tp, moe=True) if layers.mixture else 0.0
    experts = model.expert_parameters / experts_over
    embedding = _embedding_on_rank(model, tp) if stage == 0 else 0.0
    head = _head_on_rank(model, tp, pp) if stage == pp - 1 else 0.0
    shared = dense * layers.dense + mixture * layers.mixture + embedding + head + _encoder_on_rank(model, tp)
    routed = experts if layers.mixture and mixture + experts > dense else 0.0
    return RankParameters(
        shared=shared,
        experts=experts * layers.mixture,
        layer=max(dense, mixture + routed),
        layer_experts=routed,
        outer=embedding + head,
    )


def _encoder_on_rank(model: Transformer, tp: int) -> float:
    """Parameters of the encoder, which is on the decoder's only stage."""
    stack = model.encoder_stack
    if stack is None:
        return 0.0
    layers = stack.layers * stack.layer_parameters
    return stack.layers * layer_on_rank(stack, tp, moe=False) + model.encoder_parameters - layers


def _embedding_on_rank(model: Transformer, tp: int) -> float:
    if model.image:
        return float(model.embedding_parameters)
    table = model.vocab * model.hidden
    return table / tp + (model.embedding_parameters - table) + model.extra_parameters


def _head_on_rank(model: Transformer, tp: int, pp: int) -> float:
    if model.image:
        return float(model.norm_parameters + model.head_parameters)
    # a tied head needs its own copy if the embedding is on another rank
    copy = model.vocab * model.hidden if model.tied and pp > 1 else model.head_parameters
    return copy / tp + model.norm_parameters


def expert_shards(layout: Layout) -> float:
    """Ranks over which ZeRO shards an expert: fewer than for other weights, as expert parallelism splits it already."""
    return max(1.0, layout.shards * layout.tp / (layout.ep * layout.expert_ways))


def updated(parameters: RankParameters, layout: Layout) -> float:
    """Parameters that the optimizer of a rank updates: its shard in ZeRO 1 to 3, else all."""
    if not layout.zero:
        return parameters.shared + parameters.experts
    return parameters.shared / layout.shards + parameters.experts / expert_shards(layout)


def model_states(parameters: RankParameters, layout: Layout) -> ModelStates:
    """Bytes of model states on a rank. ZeRO 1 shards the optimizer, 2 also the gradients, 3 also the weights."""
    numbers, shards, apart = layout.element_bytes, layout.shards, expert_shards(layout)

    def over(per_parameter: float, stage: int) -> float:
        if layout.zero < stage:
            return per_parameter * (parameters.shared + parameters.experts)
        return per_parameter * (parameters.shared / shards + parameters.experts / apart)

    optimizer = over(numbers.master + layout.moment_bytes, 1)
    return ModelStates(
        weights=over(numbers.weight, 3),
        gradients=over(numbers.gradient, 2),
        optimizer=0.0 if layout.offload else optimizer,
    )


def bytes_per_parameter(layout: Layout) -> float:
    """Bytes of unsharded states per parameter: 18 with Megatron's bf16 Adam, 16 with ZeRO's or fp32."""
    numbers = layout.element_bytes
    return numbers.weight + numbers.gradient + numbers.master + layout.moment_bytes
