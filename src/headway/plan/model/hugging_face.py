"""Reads a Hugging Face `config.json` as a Transformer. Nothing is downloaded, no code of the model runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from headway.errors import UsageError
from headway.plan import checks
from headway.plan.model.transformer import Image, Mla, Moe, Transformer

_MAX_BYTES = 1 << 20


class _Config:
    """Typed access to the keys of one config.json; a missing key is a usage error."""

    def __init__(self, data: Mapping[str, object], where: str) -> None:
        self._data, self._where = data, where

    def number(self, key: str, default: int | None = None) -> int:
        value = self._data.get(key)
        if value is None:
            if default is None:
                raise UsageError(
                    f"{self._where} has no {key!r}, which a {self._data['model_type']} config needs"
                )
            return default
        return checks.require_int(f"{self._where}: {key}", value, at_least=0)

    def count(self, key: str, value: str) -> int:
        """How many entries of a list are `value`; none if there is no such list."""
        found = self._data.get(key)
        return found.count(value) if isinstance(found, list) else 0

    def flag(self, key: str, default: bool) -> bool:
        value = self._data.get(key, default)
        if not isinstance(value, bool):
            raise UsageError(f"{self._where}: {key} is {value!r}; expected true or false")
        return value


def from_hf_config(path: str | Path) -> Transformer:
    """Reads the config.json of a model, given the file or its directory.

    >>> from_hf_config("config.json")    # doctest: +SKIP
    Transformer(layers=32, hidden=4096, ...)
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{file} is larger than 1 MiB; a config.json is a few kilobytes")
        data = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{file} is not valid JSON: {error}") from error
    data = dict(checks.require_mapping_in(str(file), data))
    kind = data.get("model_type")
    checks.require_choice(f"{file}: model_type", kind, tuple(_READERS))
    return replace(_READERS[str(kind)](_Config(data, str(file))), name=file.parent.name or str(kind))


def _gpt2(c: _Config) -> Transformer:
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


def _llama(c: _Config, *, tied: bool = False) -> Transformer:
    heads, hidden = c.number("num_attention_heads"), c.number("hidden_size")
    return Transformer(
        layers=c.number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        vocab=c.number("vocab_size"),
        kv_heads=c.number("num_key_value_heads", heads),
        head_dim=c.number("head_dim", hidden // heads),
        ffn=c.number("intermediate_size"),
        gated=True,
        tied=c.flag("tie_word_embeddings", tied),
        position="rope",
        norm="rmsnorm",
        bias="none",
        context=c.number("max_position_embeddings", 4096),
    )


def _qwen2(c: _Config) -> Transformer:
    return replace(_llama(c), bias="qkv")


def _qwen3(c: _Config) -> Transformer:
    return replace(_llama(c), qk_norm=True, head_dim=c.number("head_dim", 128))


def _mixtral(c: _Config) -> Transformer:
    experts = c.number("num_local_experts")
    moe = Moe(experts=experts, top_k=c.number("num_experts_per_tok"), ffn=c.number("intermediate_size"))
    return replace(_llama(c), moe=moe)


def _qwen3_moe(c: _Config) -> Transformer:
    moe = Moe(
        experts=c.number("num_experts", c.number("num_local_experts", 0) or None),
        top_k=c.number("num_experts_per_tok"),
        ffn=c.number("moe_intermediate_size"),
    )
    return replace(_qwen3(c), moe=moe)


def _deepseek(c: _Config) -> Transformer:
    expert = c.number("moe_intermediate_size")
    mla = Mla(
        q_rank=c.number("q_lora_rank"),
        kv_rank=c.number("kv_lora_rank"),
        nope_dim=c.number("qk_nope_head_dim"),
        rope_dim=c.number("qk_rope_head_dim"),
        v_dim=c.number("v_head_dim"),
    )
    moe = Moe(
        experts=c.number("n_routed_experts"),
        top_k=c.number("num_experts_per_tok"),
        ffn=expert,
        shared_ffn=expert * c.number("n_shared_experts", 0),
        dense_layers=c.number("first_k_dense_replace", 0),
    )
    return replace(_llama(c), head_dim=None, mla=mla, moe=moe)


def _gemma(c: _Config, *, qk_norm: bool) -> Transformer:
    """Gemma 2 and 3: two more norms in a layer, and layers with a sliding window."""
    base = _windowed(c, _llama(c, tied=True), "sliding_window", "sliding_attention")
    return replace(base, layer_extra=2 * base.hidden, qk_norm=qk_norm)


def _windowed(c: _Config, base: Transformer, key: str, kind: str) -> Transformer:
    """Adds the window of the layers that the config lists by kind; a config of an earlier version lists none."""
    layers = c.count("layer_types", kind)
    return replace(base, window=c.number(key), window_layers=layers) if layers else base


def _gpt_oss(c: _Config) -> Transformer:
    base = _windowed(c, _llama(c), "sliding_window", "sliding_attention")
    moe = Moe(
        experts=c.number("num_local_experts"),
        top_k=c.number("num_experts_per_tok"),
        ffn=c.number("intermediate_size"),
    )
    return replace(
        base, bias="all", moe=moe, layer_extra=base.heads + moe.experts
    )  # sinks, the router's bias


def _llama4(c: _Config) -> Transformer:
    base = _windowed(c, _llama(c), "attention_chunk_size", "chunked_attention")
    expert = c.number("intermediate_size")
    moe = Moe(
        experts=c.number("num_local_experts"),
        top_k=c.number("num_experts_per_tok"),
        ffn=expert,
        shared_ffn=expert,
        every=c.number("interleave_moe_layer_step", 1),
    )
    return replace(base, ffn=c.number("intermediate_size_mlp"), moe=moe)


def _qwen2_moe(c: _Config) -> Transformer:
    moe = Moe(
        experts=c.number("num_experts"),
        top_k=c.number("num_experts_per_tok"),
        ffn=c.number("moe_intermediate_size"),
        shared_ffn=c.number("shared_expert_intermediate_size"),
        every=c.number("decoder_sparse_step", 1),
    )
    return replace(_qwen2(c), moe=moe, layer_extra=c.number("hidden_size"))  # the gate of the shared expert


def _olmo2(c: _Config) -> Transformer:
    base = _llama(c)
    return replace(
        base, layer_extra=(base.heads + base.kv) * base.dim
    )  # queries and keys are normed as a whole


def _opt(c: _Config) -> Transformer:
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


def _gpt_neox(c: _Config) -> Transformer:
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


def _falcon(c: _Config) -> Transformer:
    hidden, heads, new = (
        c.number("hidden_size"),
        c.number("num_attention_heads"),
        c.flag("new_decoder_architecture", False),
    )
    keys = c.number("num_kv_heads", heads) if new else 1 if c.flag("multi_query", True) else heads
    one_norm = not new and c.flag("parallel_attn", True)
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


def _bert(c: _Config) -> Transformer:
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
        extra_parameters=h * h + h + c.number("type_vocab_size", 2) * h,
    )


def _vision(c: _Config, *, dino: bool) -> Transformer:
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


_READERS: dict[str, Callable[[_Config], Transformer]] = {
    "bert": _bert,
    "deepseek_v3": _deepseek,
    "dinov2": lambda c: _vision(c, dino=True),
    "falcon": _falcon,
    "gemma2": lambda c: _gemma(c, qk_norm=False),
    "gemma3_text": lambda c: _gemma(c, qk_norm=True),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "llama4_text": _llama4,
    "mistral": _llama,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "opt": _opt,
    "phi3": _llama,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "vit": lambda c: _vision(c, dino=False),
}
