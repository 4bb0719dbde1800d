"""Reads a Hugging Face `config.json` as a Transformer, without downloading anything or running the model's code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headway.plan import checks
from headway.plan.model import hybrids
from headway.plan.model.hub_config import HubConfig, read_decoder
from headway.plan.model.transformer import Image, Mla, Moe, Transformer
from headway.plan.user_files import read_json


def from_hf_config(path: str | Path) -> Transformer:
    """Reads the config.json of a model, given the file or its directory.

    >>> from_hf_config("config.json")    # doctest: +SKIP
    Transformer(layers=32, hidden=4096, ...)
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    data = dict(checks.require_mapping_in(str(file), read_json(file, what="a config.json")))
    kind = data.get("model_type")
    checks.require_choice(f"{file}: model_type", kind, tuple(_READERS))
    config = HubConfig(data, str(file))
    # configs of families that do not use a window may have one, but its value must be valid
    config.number("sliding_window", 0, at_least=0)
    model = _READERS[str(kind)](config)
    extra = model.layer_extra + _switched_biases(config, str(kind), model)
    return replace(model, layer_extra=extra, name=file.parent.name or str(kind))


_WITH_SWITCH = ("gemma2", "gemma3_text", "llama", "llama4_text", "olmo2", "qwen3", "qwen3_moe")
"""Families whose attention has biases only if `attention_bias` is true."""


def _switched_biases(c: HubConfig, kind: str, model: Transformer) -> int:
    """Returns the bias weights per layer that a config adds to those of its family, or removes from them."""
    attention = (model.heads + 2 * model.kv) * model.dim + model.hidden
    if kind == "gpt_neox":
        return 0 if c.flag("attention_bias", True) else -attention
    found = attention if kind in _WITH_SWITCH and c.flag("attention_bias", False) else 0
    if kind == "llama" and c.flag("mlp_bias", False):
        found += 2 * model.width + model.hidden
    return found


def _gpt2(c: HubConfig) -> Transformer:
    return Transformer(
        layers=c.number("n_layer"),
        hidden=c.number("n_embd"),
        heads=c.number("n_head"),
        vocab=c.number("vocab_size"),
        ffn=c.number("n_inner", 4 * c.number("n_embd")),
        context=c.number("n_positions", 1024),
        dropout=True,
        tied=c.flag("tie_word_embeddings", True),
    )


def _qwen2(c: HubConfig) -> Transformer:
    base = replace(read_decoder(c), bias="qkv")
    if not c.flag("use_sliding_window", False):
        return base
    return _windowed(
        c, base, "sliding_attention", base.layers - c.number("max_window_layers", base.layers, at_least=0)
    )


def _qwen3(c: HubConfig) -> Transformer:
    return replace(read_decoder(c), qk_norm=True, head_dim=c.number("head_dim", 128))


def _mixtral(c: HubConfig) -> Transformer:
    return replace(read_decoder(c), moe=_local_experts(c))


def _local_experts(c: HubConfig) -> Moe:
    """Experts of Mixtral and gpt-oss: in every layer, each as wide as a dense feed-forward layer."""
    return Moe(
        experts=c.number("num_local_experts"),
        top_k=c.number("num_experts_per_tok"),
        ffn=c.number("intermediate_size"),
    )


def _qwen3_moe(c: HubConfig) -> Transformer:
    c.refuse_list("mlp_only_layers")
    moe = Moe(
        experts=c.number("num_experts", c.number("num_local_experts", 0, at_least=0) or None),
        top_k=c.number("num_experts_per_tok"),
        ffn=c.number("moe_intermediate_size"),
        every=c.number("decoder_sparse_step", 1),
    )
    return replace(_qwen3(c), moe=moe)


def _deepseek(c: HubConfig) -> Transformer:
    expert = c.number("moe_intermediate_size")
    mla = Mla(
        q_rank=c.number("q_lora_rank", 0, at_least=0),
        kv_rank=c.number("kv_lora_rank"),
        nope_dim=c.number("qk_nope_head_dim"),
        rope_dim=c.number("qk_rope_head_dim"),
        v_dim=c.number("v_head_dim"),
    )
    moe = Moe(
        experts=c.number("n_routed_experts"),
        top_k=c.number("num_experts_per_tok"),
        ffn=expert,
        shared_ffn=expert * c.number("n_shared_experts", 0, at_least=0),
        dense_layers=c.number("first_k_dense_replace", 0, at_least=0),
    )
    return replace(read_decoder(c), head_dim=None, mla=mla, moe=moe)


def _gemma(c: HubConfig, *, qk_norm: bool, pattern: int) -> Transformer:
    """Gemma 2 and 3: two more norms in a layer, and a sliding window in all layers but every `pattern`-th."""
    base = read_decoder(c, tied=True)
    every = c.number("sliding_window_pattern", pattern)
    base = _windowed(c, base, "sliding_attention", base.layers - base.layers // every)
    return replace(base, layer_extra=2 * base.hidden, qk_norm=qk_norm)


def _windowed(c: HubConfig, base: Transformer, kind: str, otherwise: int) -> Transformer:
    """Adds a window to the layers of this kind that the config lists, or to `otherwise` layers if it has no list."""
    chunk = kind == "chunked_attention"
    # on average, half of its chunk precedes a query; in a sliding window, the complete window does
    window = (
        c.number("attention_chunk_size", 8192) // 2 if chunk else c.number("sliding_window", 0, at_least=0)
    )
    layers = c.count("layer_types", kind) if c.length("layer_types") else otherwise
    return replace(base, window=window, window_layers=layers) if window and layers else base


def _mistral(c: HubConfig) -> Transformer:
    """Mistral and Phi-3: if there is a window, all layers have it."""
    base = read_decoder(c)
    return _windowed(c, base, "sliding_attention", base.layers)


def _gpt_oss(c: HubConfig) -> Transformer:
    base = read_decoder(c)
    base = _windowed(c, base, "sliding_attention", base.layers - base.layers // 2)
    moe = _local_experts(c)
    # sinks, the router's bias
    return replace(base, bias="all", moe=moe, layer_extra=base.heads + moe.experts)


def _llama4(c: HubConfig) -> Transformer:
    base = read_decoder(c)
    base = _windowed(c, base, "chunked_attention", base.layers - base.layers // 4)
    expert = c.number("intermediate_size")
    moe = Moe(
        experts=c.number("num_local_experts"),
        top_k=c.number("num_experts_per_tok"),
        ffn=expert,
        shared_ffn=expert,
        every=c.number("interleave_moe_layer_step", 1),
    )
    return replace(base, ffn=c.number("intermediate_size_mlp"), moe=moe)


def _qwen2_moe(c: HubConfig) -> Transformer:
    return replace(_qwen2(c), moe=hybrids.gated_experts(c))


def _olmo2(c: HubConfig) -> Transformer:
    base = read_decoder(c)
    # queries and keys are normalized as a whole
    return replace(base, layer_extra=(base.heads + base.kv) * base.dim)


def _opt(c: HubConfig) -> Transformer:
    hidden = c.number("hidden_size")
    checks.require_choice("word_embed_proj_dim", c.number("word_embed_proj_dim", hidden), (hidden,))
    return Transformer(
        layers=c.number("num_hidden_layers"),
        hidden=hidden,
        heads=c.number("num_attention_heads"),
        vocab=c.number("vocab_size"),
        ffn=c.number("ffn_dim"),
        context=c.number("max_position_embeddings", 2048),
        dropout=True,
        tied=c.flag("tie_word_embeddings", True),
        extra_parameters=2 * hidden,  # two more positions
    )


def _gpt_neox(c: HubConfig) -> Transformer:
    return Transformer(
        layers=c.number("num_hidden_layers"),
        hidden=c.number("hidden_size"),
        heads=c.number("num_attention_heads"),
        vocab=c.number("vocab_size"),
        ffn=c.number("intermediate_size"),
        context=c.number("max_position_embeddings", 2048),
        position="rope",
        tied=c.flag("tie_word_embeddings", False),
    )


def _falcon(c: HubConfig) -> Transformer:
    hidden, heads, new = (
        c.number("hidden_size"),
        c.number("num_attention_heads"),
        c.flag("new_decoder_architecture", False),
    )
    keys = c.number("num_kv_heads", heads) if new else 1 if c.flag("multi_query", True) else heads
    norms = c.number("num_ln_in_parallel_attn", 2 if new else 1)
    one_norm = norms != 2 and c.flag("parallel_attn", True)
    return Transformer(
        layers=c.number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=keys,
        vocab=c.number("vocab_size"),
        ffn=c.number("ffn_hidden_size", 4 * hidden),
        position="none" if c.flag("alibi", False) else "rope",
        bias="all" if c.flag("bias", False) else "none",
        tied=c.flag("tie_word_embeddings", True),
        context=c.number("max_position_embeddings", 2048),
        layer_extra=-2 * hidden if one_norm else 0,
    )


def _bert(c: HubConfig) -> Transformer:
    h = c.number("hidden_size")
    return Transformer(
        layers=c.number("num_hidden_layers"),
        hidden=h,
        heads=c.number("num_attention_heads"),
        causal=False,
        vocab=c.number("vocab_size"),
        ffn=c.number("intermediate_size"),
        dropout=True,
        context=c.number("max_position_embeddings", 512),
        extra_parameters=h * h + h + c.number("type_vocab_size", 2, at_least=0) * h,
    )


def _vision(c: HubConfig, *, dino: bool) -> Transformer:
    image = Image(
        size=c.number("image_size", 224),
        patch=c.number("patch_size", 16),
        channels=c.number("num_channels", 3),
        classes=0,
        mask_token=dino,
        layer_scale=dino,
    )
    hidden, gated = c.number("hidden_size"), c.flag("use_swiglu_ffn", False)
    ffn = hidden * c.number("mlp_ratio", 4) if dino else c.number("intermediate_size", 4 * hidden)
    return Transformer(
        layers=c.number("num_hidden_layers"),
        hidden=hidden,
        heads=c.number("num_attention_heads"),
        image=image,
        ffn=(int(ffn * 2 / 3) + 7) // 8 * 8 if gated else ffn,
        gated=gated,
        causal=False,
    )


_READERS: dict[str, Callable[[HubConfig], Transformer]] = {
    "bamba": hybrids.read_bamba,
    "bert": _bert,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "dinov2": lambda c: _vision(c, dino=True),
    "falcon": _falcon,
    "gemma2": lambda c: _gemma(c, qk_norm=False, pattern=2),
    "gemma3_text": lambda c: _gemma(c, qk_norm=True, pattern=6),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "jamba": hybrids.read_jamba,
    "llama": read_decoder,
    "llama4_text": _llama4,
    "mamba": hybrids.read_mamba,
    "mamba2": hybrids.read_mamba2,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "opt": _opt,
    "phi3": _mistral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": hybrids.read_qwen3_next,
    "t5": hybrids.read_t5,
    "vit": lambda c: _vision(c, dino=False),
    "whisper": hybrids.read_whisper,
}
