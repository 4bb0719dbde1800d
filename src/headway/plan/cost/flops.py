"""Floating-point operations, in the conventions of publications.

- model FLOPs, "full" (PaLM, torchtitan): 6 per active weight and token, plus 12 L a d s for attention.
- model FLOPs, "causal" (recent Megatron-LM, Megatron-Bridge): attention counts half, as the causal mask leaves half.
- hardware FLOPs: model FLOPs plus recomputation. Fused attention's own recomputation counts in neither.

All are sums over the products in `compute`; they equal Korthikanti's equation 7 and SC21's equation 3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Literal

from headway.plan.cost.compute import MLA_UP, SAC_RECOMPUTED, attention_gemms, head_gemm, layer_gemms
from headway.plan.cost.schedule import stage_layers
from headway.plan.model.layout import Layout
from headway.plan.model.transformer import Transformer

Convention = Literal["full", "causal"]


@lru_cache(maxsize=256)
def forward_flops(model: Transformer, sequence: int) -> tuple[float, float, float]:
    """FLOPs of one sample: weights of the layers, attention (counted in full), and everything outside the layers."""
    layout = Layout(sequence=sequence, flash=False)
    if model.moe:
        model = replace(model, moe=replace(model.moe, capacity=1.0))  # padding is not useful work
    dense = sum(gemm.flops for gemm in layer_gemms(model, layout)) * (model.layers - model.moe_layers)
    mixed = sum(gemm.flops for gemm in layer_gemms(model, layout, moe=True)) * model.moe_layers
    own = [gemm for gemm in attention_gemms(model, layout) if not gemm.name.startswith("cross")]
    scores = sum(gemm.flops for gemm in own) * model.layers
    outside = head_gemm(model, layout).flops + _cross_flops(model, sequence)
    if model.encoder_stack is not None:
        encoded = forward_flops(model.encoder_stack, model.encoded_tokens(sequence))
        outside += encoded[0] + encoded[1]  # an encoder masks nothing
    if model.image:
        outside += 2.0 * (model.image.tokens - 1) * model.image.channels * model.image.patch**2 * model.hidden
    return dense + (mixed if model.moe_layers else 0.0), scores, outside


def _cross_flops(model: Transformer, sequence: int) -> float:
    """FLOPs of one sample in the scores of a decoder over the tokens of its encoder."""
    gemms = attention_gemms(model, Layout(sequence=sequence, flash=False))
    return model.layers * sum(gemm.flops for gemm in gemms if gemm.name.startswith("cross"))


def attention_share(model: Transformer, convention: Convention) -> float:
    """Fraction of the score matrix that a convention counts."""
    return 0.5 if convention == "causal" and model.causal else 1.0


def model_flops_per_token(model: Transformer, sequence: int, convention: Convention) -> float:
    """FLOPs of one token, forward and backward.

    >>> from headway.plan.model.presets import preset
    >>> round(model_flops_per_token(preset("llama-3.1-8b"), 8192, "causal") / 1e9, 2)
    51.47
    """
    layers, scores, outside = forward_flops(model, sequence)
    tokens = model.image.tokens if model.image else sequence
    return 3 * (layers + scores * attention_share(model, convention) + outside) / tokens


def hardware_flops_per_token(
    model: Transformer, sequence: int, layout: Layout, convention: Convention
) -> float:
    """Model FLOPs plus the recomputation of the layout.

    Selective recomputation is counted as in Korthikanti's equation 8, three more products for the scores, although
    only one pass is repeated: otherwise the result could not be compared with published HFUs.
    """
    base = model_flops_per_token(model, sequence, convention)
    tokens = model.image.tokens if model.image else sequence
    stages = stage_layers(model, layout.pp, layout.vpp)
    share = sum(stage.total * layout.recomputed_share(stage.total) for stage in stages) / model.layers
    again = share * _recomputed_flops(model, sequence, layout, convention)
    stack = model.encoder_stack
    if stack is not None:
        encoded = model.encoded_tokens(sequence)
        again += layout.recomputed_share(stack.layers) * _recomputed_flops(stack, encoded, layout, convention)
    return base + again / tokens


def _recomputed_flops(model: Transformer, sequence: int, layout: Layout, convention: Convention) -> float:
    """FLOPs of one sample that the backward pass repeats if all layers recompute."""
    layers, scores, _ = forward_flops(model, sequence)
    attention = scores * attention_share(model, convention) + _cross_flops(model, sequence)
    if layout.recompute == "full":
        return layers + attention
    if layout.recompute == "selective" and not layout.flash:
        return 3 * attention
    if layout.recompute == "modules":
        ups = sum(gemm.flops for gemm in layer_gemms(model, Layout(sequence=sequence)) if gemm.name in MLA_UP)
        return model.layers * ups
    if layout.recompute == "sac":
        return layers * SAC_RECOMPUTED
    return 0.0


def utilization(flops_per_token: float, tokens_per_s_per_gpu: float, peak_flops: float) -> float:
    """MFU from model FLOPs, HFU from hardware FLOPs."""
    return flops_per_token * tokens_per_s_per_gpu / peak_flops
