"""Well-known models by name. The tests compare each parameter count with the authors' own class."""

from __future__ import annotations

from dataclasses import replace

from headway.errors import unknown_name
from headway.plan.model.transformer import Image, Mla, Moe, Transformer


def _gpt(layers: int, hidden: int, heads: int, context: int = 1024) -> Transformer:
    return Transformer(layers=layers, hidden=hidden, heads=heads, vocab=50257, context=context, dropout=True)


def _llama(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int = 128256) -> Transformer:
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        ffn=ffn,
        vocab=vocab,
        tied=False,
        gated=True,
        position="rope",
        norm="rmsnorm",
        bias="none",
        context=8192 if vocab == 128256 else 4096,
    )


def _qwen(layers: int, hidden: int, heads: int, kv: int, ffn: int, *, vocab: int, tied: bool) -> Transformer:
    base = _llama(layers, hidden, heads, kv, ffn, vocab)
    return replace(base, bias="qkv", tied=tied, context=32768)


def _qwen3(layers: int, hidden: int, heads: int, kv: int, ffn: int, *, tied: bool) -> Transformer:
    base = _llama(layers, hidden, heads, kv, ffn, 151936)
    return replace(base, head_dim=128, qk_norm=True, tied=tied, context=32768)


def _vit(layers: int, hidden: int, heads: int, *, patch: int) -> Transformer:
    return Transformer(layers=layers, hidden=hidden, heads=heads, causal=False, image=Image(patch=patch))


def _dino(layers: int, hidden: int, heads: int, **other: object) -> Transformer:
    image = Image(size=518, patch=14, classes=0, mask_token=True, layer_scale=True)
    base = Transformer(layers=layers, hidden=hidden, heads=heads, causal=False, image=image)
    return replace(base, **other)  # type: ignore[arg-type]


def _gpt_oss(layers: int, experts: int) -> Transformer:
    base = _llama(layers, 2880, 64, 8, 2880, 201088)
    # a sink for each head, and a bias of the router; every other layer attends to 128 tokens
    moe = Moe(experts=experts, top_k=4, ffn=2880)
    return replace(
        base, head_dim=64, bias="all", moe=moe, context=131072, layer_extra=64 + experts, window=128,
        window_layers=layers // 2,
    )  # fmt: skip


_PRESETS = {
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-175b": _gpt(96, 12288, 96, context=2048),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _llama(126, 16384, 128, 8, 53248),
    "llama-3.2-1b": replace(_llama(16, 2048, 32, 8, 8192), tied=True),
    "llama-3.2-3b": replace(_llama(28, 3072, 24, 8, 8192), tied=True),
    "mistral-7b-v0.1": replace(_llama(32, 4096, 32, 8, 14336, 32000), context=8192),
    "mixtral-8x7b": replace(_llama(32, 4096, 32, 8, 14336, 32000), moe=Moe(experts=8, top_k=2, ffn=14336)),
    "qwen2.5-0.5b": _qwen(24, 896, 14, 2, 4864, vocab=151936, tied=True),
    "qwen2.5-7b": _qwen(28, 3584, 28, 4, 18944, vocab=152064, tied=False),
    "qwen2.5-72b": _qwen(80, 8192, 64, 8, 29568, vocab=152064, tied=False),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288, tied=False),
    "qwen3-30b-a3b": replace(
        _qwen3(48, 2048, 32, 4, 6144, tied=False), moe=Moe(experts=128, top_k=8, ffn=768)
    ),
    "qwen3-235b-a22b": replace(
        _qwen3(94, 4096, 64, 4, 12288, tied=False), moe=Moe(experts=128, top_k=8, ffn=1536)
    ),
    "deepseek-v3": replace(
        _llama(61, 7168, 128, 128, 18432, 129280),
        mla=Mla(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        moe=Moe(experts=256, top_k=8, ffn=2048, shared_ffn=2048, dense_layers=3),
    ),
    # the pooler (h² + h), two segment vectors, and a norm after the embedding; no norm at the end
    "bert-base-uncased": Transformer(
        layers=12,
        hidden=768,
        heads=12,
        vocab=30522,
        context=512,
        causal=False,
        dropout=True,
        extra_parameters=768 * 768 + 768 + 2 * 768,
    ),
    "vit-b-16": _vit(12, 768, 12, patch=16),
    "vit-l-16": _vit(24, 1024, 16, patch=16),
    "vit-h-14": _vit(32, 1280, 16, patch=14),
    "dinov2-small": _dino(12, 384, 6),
    "dinov2-base": _dino(12, 768, 12),
    "dinov2-large": _dino(24, 1024, 16),
    "dinov2-giant": _dino(40, 1536, 24, ffn=4096, gated=True),
}

_ALIASES = {
    "mistral-7b": "mistral-7b-v0.1",
    "mixtral": "mixtral-8x7b",
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.1-70b",
}


def preset_names() -> list[str]:
    """Returns the names of all presets."""
    return sorted(_PRESETS)


def preset(name: str) -> Transformer:
    """Returns a well-known model.

    >>> preset("llama-3.1-8b").parameters
    8030261248
    """
    if not isinstance(name, str) or _ALIASES.get(name, name) not in _PRESETS:
        raise unknown_name("preset", name, preset_names())
    return replace(_PRESETS[_ALIASES.get(name, name)], name=name)
