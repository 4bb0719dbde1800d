"""Closed forms from the papers come out of the tables of tensors and products, to 1e-6."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional
from truth import KORTHIKANTI, VOCAB, gpt, korthikanti_model

from headway.plan.cost.activations import layer_bytes, saved_tensors
from headway.plan.cost.compute import attention_gemms, head_gemm, layer_gemms
from headway.plan.cost.flops import hardware_flops_per_token, model_flops_per_token, utilization
from headway.plan.cost.memory import rank_memory
from headway.plan.cost.schedule import layers_in_flight
from headway.plan.cost.states import bytes_per_parameter
from headway.plan.model.layout import Layout
from headway.plan.model.presets import preset
from headway.plan.model.transformer import Encoder, Transformer

GIB = 2**30


@given(
    t=st.sampled_from([1, 2, 4, 8]),
    b=st.integers(1, 8),
    h=st.sampled_from([1024, 2048, 6144]),
    a=st.sampled_from([8, 16, 64]),
)
def test_korthikanti_table_2(t: int, b: int, h: int, a: int) -> None:
    """Activation bytes per layer: equations 1 to 6."""
    model, s = gpt(4, h, a), 2048
    sbh, core = s * b * h, 5 * a * s / h

    def layer(recompute: str, sequence_parallel: bool) -> float:
        keys = {"recompute": recompute, "sequence_parallel": sequence_parallel}
        return layer_bytes(model, Layout(tp=t, microbatch=b, global_batch=b, flash=False, **keys))  # type: ignore[arg-type]

    assert layer("none", False) == pytest.approx(
        sbh * (10 + 24 / t + core / t), rel=1e-6
    )  # eq. 2 (eq. 1 at t=1)
    assert layer("none", True) == pytest.approx(sbh / t * (34 + core), rel=1e-6)  # eq. 4
    assert layer("selective", False) == pytest.approx(sbh * (10 + 24 / t), rel=1e-6)
    assert layer("selective", True) == pytest.approx(34 * sbh / t, rel=1e-6)  # eq. 6
    assert layer("full", False) == pytest.approx(2 * sbh, rel=1e-6)


def test_korthikanti_figures_1_and_7() -> None:
    """GiB of the first stage; their plots equal their formulas to the last digit."""
    none = {"22B": 59.25, "175B": 66.84375, "530B": 114.0234375, "1T": 131.25}
    both = {"22B": 9.5625, "175B": 12.3515625, "530B": 23.076171875, "1T": 26.5625}
    states = {"22B": 45.5625, "175B": 45.5625, "530B": 31.640625, "1T": 32.958984375}
    for name, *_ in KORTHIKANTI:
        model, keys = korthikanti_model(name)
        layout = Layout(flash=False, recompute="selective", sequence_parallel=True, **keys)  # type: ignore[arg-type]
        held = layers_in_flight(model.layers, layout.pp, layout.vpp, 0, layout.microbatches)
        assert held * _layer(model, layout) / GIB == pytest.approx(both[name], rel=1e-6)
        plain = Layout(flash=False, **keys)  # type: ignore[arg-type]
        assert held * _layer(model, plain) / GIB == pytest.approx(none[name], rel=1e-6)
        weights = 12 * model.layers * model.hidden**2 / (layout.tp * layout.pp)
        assert weights * bytes_per_parameter(layout) / GIB == pytest.approx(states[name], rel=1e-6)


def _layer(model: Transformer, layout: Layout) -> float:
    return layer_bytes(model, layout)


@pytest.mark.parametrize(("name", "percent"), [
    ("22B", (66.84, 49.42, 16.18, 7.64)), ("175B", (62.04, 56.53, 18.49, 8.71)),
    ("530B", (58.31, 62.04, 20.27, 9.42)), ("1T", (58.31, 62.04, 20.27, 9.42)),
])  # fmt: skip
def test_korthikanti_figure_7_percentages(name: str, percent: tuple[float, ...]) -> None:
    model, keys = korthikanti_model(name)

    def layer(recompute: str, sequence: bool) -> float:
        layout = Layout(flash=False, recompute=recompute, sequence_parallel=sequence, **keys)  # type: ignore[arg-type]
        return layer_bytes(model, layout)

    base = layer("none", False)
    seen = [
        layer(*way) / base
        for way in (("none", True), ("selective", False), ("selective", True), ("full", False))
    ]
    assert [100 * share for share in seen] == pytest.approx(list(percent), abs=0.15)


def _rank_flops(model: Transformer, layout: Layout) -> tuple[float, float, float]:
    weights = sum(gemm.flops for gemm in layer_gemms(model, layout))
    scores = sum(gemm.flops for gemm in attention_gemms(model, layout))
    return model.layers * weights, model.layers * scores, head_gemm(model, layout).flops


@pytest.mark.parametrize("name", [row[0] for row in KORTHIKANTI])
def test_korthikanti_equations_7_and_8_and_sc21_equation_3(name: str) -> None:
    model, keys = korthikanti_model(name)
    big_b, h, layers, s = keys["global_batch"], model.hidden, model.layers, 2048
    head, unit, tokens = VOCAB / (12 * h * layers), 72 * big_b * layers * s * h * h, big_b * s
    assert model_flops_per_token(model, s, "full") * tokens == pytest.approx(
        unit * (1 + s / (6 * h) + head), rel=1e-6
    )
    selective = Layout(recompute="selective", flash=False)
    hardware = hardware_flops_per_token(model, s, selective, "full") * tokens
    assert hardware == pytest.approx(unit * (1 + s / (3 * h) + head), rel=1e-6)
    sc21 = 96 * big_b * s * layers * h * h * (1 + s / (6 * h) + VOCAB / (16 * layers * h))
    full = hardware_flops_per_token(model, s, Layout(recompute="full", flash=False), "full") * tokens
    assert full == pytest.approx(sc21, rel=1e-6)


def test_flops_are_shared_out_by_tensor_parallelism() -> None:
    model = gpt(4, 2048, 16)
    one = _rank_flops(model, Layout(microbatch=2, global_batch=2, flash=False))
    four = _rank_flops(model, Layout(tp=4, microbatch=2, global_batch=2, flash=False))
    assert [4 * part for part in four] == pytest.approx(list(one))


def test_mfu_conventions() -> None:
    """torchtitan counts attention whole: 33.7, 39.0 %. Megatron-Bridge half: 51.48 GFLOP a token."""
    model = preset("llama-3.1-8b")
    full = model_flops_per_token(model, 8192, "full")
    assert [round(100 * utilization(full, rate, 989e12), 1) for rate in (5762, 6667)] == [33.7, 39.0]
    assert model_flops_per_token(model, 8192, "causal") / 1e9 == pytest.approx(744e3 / 14451, rel=5e-4)
    big = preset("llama-3.1-405b")
    assert model_flops_per_token(big, 8192, "causal") / 1e9 == pytest.approx(737e3 / 292, rel=1e-4)


# Megatron-Bridge's tables: TFLOP/s and tokens/s per GPU, each printed with three or four digits
@pytest.mark.parametrize(
    ("name", "sequence", "tflops", "tokens"),
    [
        ("llama-3.1-8b", 8192, 744, 14451),
        ("llama-3.1-70b", 8192, 719, 1602),
        ("llama-3.1-405b", 8192, 737, 292),
        ("deepseek-v3", 4096, 782, 3139),
        ("qwen3-30b-a3b", 4096, 121, 5275),
    ],
)
def test_megatron_bridge_flops_per_token(name: str, sequence: int, tflops: int, tokens: int) -> None:
    counted = model_flops_per_token(preset(name), sequence, "causal")
    assert counted == pytest.approx(tflops * 1e12 / tokens, rel=0.01)


def test_korthikanti_table_5_mfu() -> None:
    """Their MFU from their own seconds, with our count of FLOPs."""
    for (name, *_, seconds), published in zip(KORTHIKANTI, (41.5, 51.4, 56.0, 56.3), strict=True):
        model, keys = korthikanti_model(name)
        flops = model_flops_per_token(model, 2048, "full") * keys["global_batch"] * 2048
        mfu = flops / (seconds * keys["tp"] * keys["pp"] * 312e12)
        assert 100 * mfu == pytest.approx(published, abs=0.2)


def test_output_head_sits_on_the_last_stage_only() -> None:
    model, keys = korthikanti_model("175B")
    layout = Layout(flash=False, recompute="selective", sequence_parallel=True, **keys)  # type: ignore[arg-type]
    assert "logits and loss" not in rank_memory(model, layout, 0).parts
    no_recompute = Layout(**{**vars(layout), "recompute": "none"})
    assert rank_memory(model, no_recompute, 7).parts["logits and loss"] > 2048 * VOCAB * 4 / 8


class FusedSwiglu(torch.autograd.Function):
    """As Megatron-LM's: it saves gate and up, and computes the activation again."""

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("precision", ["bf16", "pure-bf16"])
def test_what_torch_saves_between_the_projections_is_what_the_table_has(precision: str) -> None:
    """Rotated queries and keys, but not what was rotated; a fused SwiGLU saves three tensors, torch's own four."""
    tokens, hidden, heads, width = 32, 64, 4, 160
    model = Transformer(
        layers=1, hidden=hidden, heads=heads, ffn=width, vocab=8, context=tokens, gated=True, position="rope"
    )
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    angles = torch.randn(tokens, hidden // heads, dtype=torch.bfloat16)
    weight = torch.randn(hidden, width, dtype=torch.bfloat16, requires_grad=True)
    projected = [
        torch.randn(1, heads, tokens, hidden // heads, dtype=torch.bfloat16).requires_grad_() * 1
        for _ in range(3)
    ]
    inner = [torch.randn(tokens, width, dtype=torch.bfloat16).requires_grad_() * 1 for _ in range(2)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        q, k = (x * angles + x.roll(8, -1) * angles for x in projected[:2])
        functional.scaled_dot_product_attention(q, k, projected[2], is_causal=True)
        if precision == "bf16":
            product = FusedSwiglu.apply(torch.cat(inner, -1))
        else:
            product = functional.silu(inner[0]) * inner[1]
        functional.linear(product, weight)
    theirs = (angles.untyped_storage().data_ptr(), weight.untyped_storage().data_ptr())
    saved = sum(each.untyped_storage().nbytes() for pointer, each in kept.items() if pointer not in theirs)
    table = saved_tensors(model, Layout(precision=precision))  # type: ignore[arg-type]
    names = ("queries, keys", "values", "attention output", "log-sum-exp", "feed-forward", "activated")
    assert saved == tokens * sum(entry.bytes for entry in table if entry.name in names)


def test_cheap_modules_are_computed_again() -> None:
    """DeepSeek-V3 saves neither outputs of norms nor those of up-projections and activations; inputs are in 8 bits."""
    model, tokens = preset("deepseek-v3"), 4096
    none = Layout(sequence=tokens, precision="fp8")
    some = replace(none, recompute="modules")
    heads, h, width = 128, 7168, 9 * 2048
    dropped = h + 2 * h + 2 * heads * (2 * 192 + 128) + width
    kept = 2 * 2 * h + 2 * (1536 + 512 + 64) + 2 * heads * 128 + 4 * heads + 4 * width + 8 * h + 4 * 256
    assert layer_bytes(model, some, moe=True) == tokens * kept
    assert layer_bytes(model, none, moe=True) == tokens * (kept + dropped)
    before, after = (hardware_flops_per_token(model, tokens, layout, "full") for layout in (none, some))
    assert after - before == 61 * 2 * heads * (1536 * 192 + 512 * (128 + 128))


def test_torch_keeps_inputs_that_it_gathered_along_the_sequence() -> None:
    """Megatron keeps its piece of the inputs of both blocks, and gathers again in the backward pass."""
    model = gpt(4, 1024, 16)
    megatron = Layout(tp=8, sequence_parallel=True, precision="bf16")
    torchs = replace(megatron, precision="pure-bf16")
    more = layer_bytes(model, torchs) - layer_bytes(model, megatron)
    assert more == pytest.approx(2 * 2 * 2048 * 1024 * (1 - 1 / 8))
    apart = [replace(layout, sequence_parallel=False) for layout in (megatron, torchs)]
    assert layer_bytes(model, apart[0]) == layer_bytes(model, apart[1])


def test_an_encoder_is_computed_again_as_the_decoder_is() -> None:
    """A full recomputation repeats one forward pass of all layers of both stacks: everything but the head."""
    model = Transformer(
        layers=4,
        hidden=256,
        heads=4,
        vocab=1000,
        context=128,
        position="none",
        encoder=Encoder(layers=6, tokens=192),
    )
    forward = model_flops_per_token(model, 128, "full") / 3
    layout = Layout(sequence=128, recompute="full")
    again = hardware_flops_per_token(model, 128, layout, "full") - 3 * forward
    assert again == pytest.approx(forward - 2 * 256 * 1000)
    some = replace(layout, recompute_layers=2)
    alone = Transformer(layers=4, hidden=256, heads=4, vocab=1000, context=128, position="none")
    for plan in (layout, some, replace(layout, recompute="sac")):
        of_decoder = hardware_flops_per_token(alone, 128, plan, "full") - model_flops_per_token(
            alone, 128, "full"
        )
        of_both = hardware_flops_per_token(model, 128, plan, "full") - model_flops_per_token(
            model, 128, "full"
        )
        assert of_both > 1.5 * of_decoder
