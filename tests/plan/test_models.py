"""Parameter counts: exact, against what the authors' own classes count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from headway.errors import UsageError
from headway.plan import Layout, Node, estimate
from headway.plan.cost import memory
from headway.plan.cost.flops import forward_flops, model_flops_per_token
from headway.plan.cost.states import on_rank
from headway.plan.model.hugging_face import from_hf_config
from headway.plan.model.presets import preset, preset_names
from headway.plan.model.transformer import Transformer

# transformers 5.22 / torchvision classes on the meta device, and published weight metadata
EXACT = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,
    "bert-base-uncased": 109_482_240,
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
    "vit-h-14": 632_045_800,
    "dinov2-small": 22_056_576,
    "dinov2-base": 86_580_480,
    "dinov2-large": 304_368_640,
    "dinov2-giant": 1_136_480_768,
}


@pytest.mark.parametrize(("name", "count"), EXACT.items(), ids=EXACT.keys())
def test_presets_are_exact(name: str, count: int) -> None:
    assert preset(name).parameters == count


def test_sc21_equation_2_is_the_same_count() -> None:
    """Narayanan et al. 2021, eq. 2, for every row of their table 1 (vocabulary 51200, sequence 2048)."""
    rows = [
        (2304, 24, 1.7),
        (3072, 30, 3.6),
        (4096, 36, 7.5),
        (6144, 40, 18.4),
        (8192, 48, 39.1),
        (10240, 60, 76.1),
        (12288, 80, 145.6),
        (16384, 96, 310.1),
        (20480, 105, 529.6),
        (25600, 128, 1008.0),
    ]
    for h, layers, billions in rows:
        model = Transformer(layers=layers, hidden=h, heads=h // 128, vocab=51200, context=2048)
        paper = 12 * layers * h * h * (1 + 13 / (12 * h) + (51200 + 2048) / (12 * layers * h))
        assert model.parameters - model.norm_parameters == pytest.approx(
            paper, rel=1e-9
        )  # no final norm in eq. 2
        assert round(model.parameters / 1e9, 1) == billions


def test_active_parameters_of_mixtures() -> None:
    assert preset("mixtral-8x7b").active_parameters == 12_879_925_248
    assert 3.3e9 < preset("qwen3-30b-a3b").active_parameters < 3.4e9
    assert 37e9 < preset("deepseek-v3").active_parameters < 38e9
    assert preset("gpt2").active_parameters == EXACT["gpt2"]


_HF = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_inner": None,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
    },
    "bert-base-uncased": {
        "model_type": "bert",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
    "dinov2-giant": {
        "model_type": "dinov2",
        "hidden_size": 1536,
        "num_hidden_layers": 40,
        "num_attention_heads": 24,
        "image_size": 518,
        "patch_size": 14,
        "use_swiglu_ffn": True,
        "mlp_ratio": 4,
    },
}


@pytest.mark.parametrize("name", _HF)
def test_hf_configs_are_exact(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_HF[name]))
    assert from_hf_config(tmp_path).parameters == EXACT[name]


def test_hf_config_mistakes_are_sentences(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(UsageError, match="cannot read"):
        from_hf_config(file)
    file.write_text("{")
    with pytest.raises(UsageError, match="is not valid JSON"):
        from_hf_config(file)
    file.write_text('{"model_type": "lama"}')
    with pytest.raises(UsageError, match="did you mean 'llama'"):
        from_hf_config(file)
    file.write_text('{"model_type": "llama", "num_attention_heads": 8}')
    with pytest.raises(UsageError, match="has no 'hidden_size'"):
        from_hf_config(file)


def test_unknown_preset_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'llama-3.1-7b' is not a valid preset \(did you mean 'llama-3.1-"):
        preset("llama-3.1-7b")
    assert "gpt2" in preset_names()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"layers": 0}, "model.layers is 0; expected an integer of at least 1"),
        ({"hidden": -8}, "model.hidden is -8"),
        ({"heads": 5}, r"model.heads is 5, which does not divide model.hidden \(64\); valid: 1, 2, 4"),
        ({"kv_heads": 3}, r"model.kv_heads is 3, which does not divide model.heads \(4\)"),
        ({"norm": "rms"}, "'rms' is not a valid value of model.norm.*valid: layernorm, rmsnorm"),
        ({"vocab": 0}, "model.vocab is 0"),
        ({"layers": True}, "model.layers is True"),
    ],
)
def test_bad_models_name_the_key(keys: dict[str, object], sentence: str) -> None:
    good: dict[str, object] = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100}
    with pytest.raises(UsageError, match=sentence):
        Transformer(**{**good, **keys})  # type: ignore[arg-type]


@given(
    layers=st.integers(1, 64), heads=st.integers(1, 32), dim=st.integers(1, 64), vocab=st.integers(1, 10_000)
)
def test_parts_add_up(layers: int, heads: int, dim: int, vocab: int) -> None:
    model = Transformer(layers=layers, hidden=heads * dim, heads=heads, vocab=vocab, tied=False)
    parts = (
        model.embedding_parameters
        + layers * model.layer_parameters
        + model.norm_parameters
        + model.head_parameters
    )
    assert model.parameters == parts


HF = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "hf_configs.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize(
    "row", HF, ids=lambda row: f"{row['config']['model_type']}-{row['parameters'] // 10**6}M"
)
def test_parameter_counts_of_transformers_classes(row: dict[str, Any], tmp_path: Path) -> None:
    """Counted by building transformers 5.22.2's own classes on the meta device; the configs are what they wrote."""
    (tmp_path / "config.json").write_text(json.dumps(row["config"]))
    model = from_hf_config(tmp_path)
    assert model.parameters == row["parameters"]
    stages = 1 if model.encoder else 4
    ranks = [on_rank(model, Layout(pp=stages, global_batch=4), stage) for stage in range(stages)]
    copy = model.vocab * model.hidden if model.tied and stages > 1 else 0
    assert sum(rank.shared + rank.experts for rank in ranks) == pytest.approx(
        row["parameters"] + copy, rel=1e-9
    )


def _read(config: dict[str, Any], directory: Path) -> Transformer:
    (directory / "config.json").write_text(json.dumps(config))
    return from_hf_config(directory)


def _row(kind: str, parameters: int) -> dict[str, Any]:
    return next(row for row in HF if (row["config"]["model_type"], row["parameters"]) == (kind, parameters))


COUNTED = {
    ("t5", 222_903_552, 512): 257_194_721_280,
    ("whisper", 241_734_912, 448): 543_275_778_048,
    ("mamba2", 7_285_403_648, 512): 586_263_035_904,
    ("mamba", 129_135_360, 512): 54_842_621_952,
}
"""torch's FlopCounterMode over transformers' classes, forward, one sample: all of T5 and Whisper, and the matrix
products of the first four layers of Mamba and Mamba 2 with their heads."""


@pytest.mark.parametrize(("kind", "parameters", "sequence"), COUNTED, ids=lambda value: str(value))
def test_flops_of_hybrids_are_those_torch_counts(
    kind: str, parameters: int, sequence: int, tmp_path: Path
) -> None:
    config = _row(kind, parameters)["config"]
    few = {"num_hidden_layers": 4} if kind.startswith("mamba") else {}
    model = _read({**config, **few}, tmp_path)
    found = sum(forward_flops(model, sequence))
    if model.state_space:  # the scan is not a product: as Megatron-LM counts it
        found -= 7 * sequence * model.state_space.inner * model.state_space.state * model.layers
    if kind == "whisper":  # convolutions over the spectrogram, which the plan leaves out
        found += 2 * 3 * 768 * (80 * 3000 + 768 * 1500)
    assert found == COUNTED[kind, parameters, sequence]


@pytest.mark.parametrize(
    ("kind", "keys", "window", "layers"),
    [
        ("gemma2", {"sliding_window": 4096}, 4096, 3),
        ("gemma3_text", {"sliding_window": 512}, 512, 5),
        ("gemma3_text", {"sliding_window": 512, "sliding_window_pattern": 2}, 512, 3),
        ("gpt_oss", {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2}, 128, 3),
        ("llama4_text", {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}, 4096, 5),
        ("mistral", {"sliding_window": 4096}, 4096, 6),
        ("mistral", {"sliding_window": None}, None, 0),
        ("phi3", {"sliding_window": 2047}, 2047, 6),
        ("qwen2", {"sliding_window": 32768, "use_sliding_window": False}, None, 0),
        ("qwen2", {"sliding_window": 32768, "use_sliding_window": True, "max_window_layers": 4}, 32768, 2),
        ("olmo2", {}, None, 0),
    ],
)  # fmt: skip
def test_windows_of_configs_that_do_not_list_their_layers(
    kind: str, keys: dict[str, object], window: int | None, layers: int, tmp_path: Path
) -> None:
    """The layers are those that transformers lists itself; a chunk of 8192 has 4096 keys per query on the mean."""
    base = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 128, "model_type": kind}  # fmt: skip
    model = _read({**base, **keys}, tmp_path)
    assert (model.window, model.window_layers) == (window, layers)


@pytest.mark.parametrize("kind", ["t5", "whisper", "mamba", "mamba2", "bamba", "jamba", "qwen3_next"])
def test_hybrids_are_planned(kind: str, tmp_path: Path) -> None:
    row = next(row for row in HF if row["config"]["model_type"] == kind)
    model = _read(row["config"], tmp_path)
    layout, node = Layout(dp=8, zero=3, global_batch=8, precision="amp"), Node("dgx-h100")
    plan = estimate(model, layout, node)
    assert plan.answers["parameters"].value == row["parameters"]
    parts = [quantity.value for key, quantity in plan.answers.items() if key.startswith("time.part.")]
    assert plan.answers["time.step"].value == pytest.approx(sum(parts)) and min(parts) > 0
    assert json.loads(json.dumps(plan.to_dict()))["model"]["name"] == model.name
    assert 0.02 < plan.answers["mfu.full"].value < 0.7
    if model.encoder:
        with pytest.raises(UsageError, match=r"layout.pp is 2 .* has an encoder"):
            estimate(model, Layout(pp=2, global_batch=8), node)
        longer = replace(model, encoder=replace(model.encoder, tokens=4 * model.context))
        assert memory.peak(longer, layout).allocated > memory.peak(model, layout).allocated
        assert estimate(longer, layout, node).answers["time.step"].value > plan.answers["time.step"].value
    if model.state_space:
        # twice the sequence costs attention four times as much, and a state twice
        once, twice = (sum(forward_flops(model, n)[:2]) for n in (32768, 65536))
        scores = forward_flops(model, 32768)[1]
        assert twice == pytest.approx(2 * once + 2 * scores)
        assert (scores == 0) == (model.state_space.layers == model.layers)


def test_layers_that_differ_one_by_one_are_refused(tmp_path: Path) -> None:
    config = next(row["config"] for row in HF if row["config"]["model_type"] == "qwen3_next")
    with pytest.raises(UsageError, match=r"mlp_only_layers is \[3\]; expected an empty list or none"):
        _read({**config, "mlp_only_layers": [3]}, tmp_path)
    jamba = next(row["config"] for row in HF if row["config"]["model_type"] == "jamba")
    with pytest.raises(UsageError, match=r"expert_layer_offset is 0"):
        _read({**jamba, "num_hidden_layers": 31, "expert_layer_offset": 0}, tmp_path)
    with pytest.raises(UsageError, match=r"state_space.layers is 49; valid: 1 to 48"):
        model = _read(config, tmp_path)
        assert model.state_space is not None
        replace(model, state_space=replace(model.state_space, layers=49))


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("qwen3_moe", "num_attention_heads"),
        ("gemma2", "sliding_window_pattern"),
        ("qwen3_next", "full_attention_interval"),
        ("jamba", "attn_layer_period"),
        ("jamba", "expert_layer_period"),
        ("mamba2", "num_heads"),
    ],
)
def test_a_zero_in_a_config_is_a_sentence(kind: str, key: str, tmp_path: Path) -> None:
    config = next(row["config"] for row in HF if row["config"]["model_type"] == kind)
    with pytest.raises(UsageError, match=rf"config.json: {key} is 0; expected an integer of at least 1"):
        _read({**config, key: 0}, tmp_path)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2", "mistral"])
def test_a_window_that_cannot_be_is_a_sentence_in_every_family(kind: str, tmp_path: Path) -> None:
    """Also in those that do not use it: qwen2 without `use_sliding_window`."""
    config = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
              "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 128, "model_type": kind}  # fmt: skip
    with pytest.raises(UsageError, match=r"sliding_window is -4; expected an integer of at least 0"):
        _read({**config, "sliding_window": -4}, tmp_path)


def test_dense_layers_between_those_with_experts_are_counted(tmp_path: Path) -> None:
    """Qwen3-MoE with experts in every other layer: as transformers 5.22.2 counts it."""
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
              "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
              "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
              "decoder_sparse_step": 2}  # fmt: skip
    assert _read(config, tmp_path).parameters == 16_936_286_208


def test_the_norms_of_falcon_are_counted(tmp_path: Path) -> None:
    """Falcon 2 11B has one norm for both branches: as transformers 5.22.2 counts it."""
    config = {"model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 4096, "num_attention_heads": 32,
              "num_kv_heads": 8, "vocab_size": 65024, "new_decoder_architecture": True, "parallel_attn": True,
              "bias": False, "alibi": False, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 16384,
              "tie_word_embeddings": False}  # fmt: skip
    assert _read(config, tmp_path).parameters == 11_102_822_400


@pytest.mark.parametrize(
    ("kind", "keys", "each"),
    [
        ("llama", {"attention_bias": True}, 64 + 2 * 32 + 64),
        ("llama", {"attention_bias": True, "mlp_bias": True}, 64 + 2 * 32 + 64 + 2 * 128 + 64),
        ("qwen3", {"attention_bias": True}, 64 + 2 * 32 + 64),
        ("olmo2", {"attention_bias": True}, 64 + 2 * 32 + 64),
        ("gpt_neox", {"attention_bias": False}, -(3 * 64 + 64)),
        ("mistral", {"attention_bias": True}, 0),  # its class does not look at the key
    ],
)
def test_biases_that_a_config_switches_are_counted(
    kind: str, keys: dict[str, bool], each: int, tmp_path: Path
) -> None:
    """Linear layers of transformers: queries, keys, values and output; gate, up and down."""
    config = {
        "model_type": kind, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
    }  # fmt: skip
    counts = []
    for extra in ({}, keys):
        (tmp_path / "config.json").write_text(json.dumps({**config, **extra}))
        counts.append(from_hf_config(tmp_path).parameters)
    assert counts[1] - counts[0] == 3 * each


def test_a_sliding_window_saves_scores() -> None:
    model = preset("gpt-oss-20b")
    assert model.parameters == next(
        row["parameters"] for row in HF if row["config"]["model_type"] == "gpt_oss"
    )
    whole = replace(model, window=None, window_layers=0)
    causal = [model_flops_per_token(one, 32768, "causal") for one in (model, whole)]
    scores = (
        3 * 2 * 2 * model.heads * model.dim * model.layers / 2
    )  # per key and token, forward and backward, half
    assert causal[1] - causal[0] == pytest.approx(scores * (32768 - 256) / 2)
    with pytest.raises(UsageError, match=r"window_layers is 3; valid: 0 to 24.*with model.window"):
        replace(whole, window_layers=3)
