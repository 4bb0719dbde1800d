"""Configs of models that are more than a stack of attention and feed-forward layers.

Some have layers with a recurrent state in place of attention (Mamba, Mamba 2, gated delta nets), others an encoder.
"""

from __future__ import annotations

from dataclasses import replace

from headway.errors import UsageError
from headway.plan.model.hub_config import HubConfig, read_decoder
from headway.plan.model.transformer import Encoder, Moe, StateSpace, Transformer


def gated_experts(c: HubConfig) -> Moe:
    """Experts of Qwen2-MoE and Qwen3-Next: a gate weights the shared expert for each token."""
    c.refuse_list("mlp_only_layers")
    return Moe(
        experts=c.number("num_experts"),
        top_k=c.number("num_experts_per_tok"),
        ffn=c.number("moe_intermediate_size"),
        shared_ffn=c.number("shared_expert_intermediate_size", at_least=0),
        shared_gate=True,
        every=c.number("decoder_sparse_step", 1),
    )


def read_qwen3_next(c: HubConfig) -> Transformer:
    """Gated delta nets, and gated attention in every fourth layer."""
    layers, every = c.number("num_hidden_layers"), c.number("full_attention_interval", 4)
    key_heads, heads = c.number("linear_num_key_heads", 16), c.number("linear_num_value_heads", 32)
    key, value = c.number("linear_key_head_dim", 128), c.number("linear_value_head_dim", 128)
    inner, channels = heads * value, 2 * key_heads * key + heads * value
    net = StateSpace(
        layers=c.count("layer_types", "linear_attention") or layers - layers // every,
        projected=channels + inner + 2 * heads,
        inner=inner,
        channels=channels,
        state=key,
        extra=channels * c.number("linear_conv_kernel_dim", 4) + 2 * heads + value,
    )
    head_dim = c.number("head_dim", 256)
    return replace(
        read_decoder(c),
        moe=gated_experts(c),
        state_space=net,
        head_dim=head_dim,
        qk_norm=True,
        attention_gate=True,
    )


def _mamba_1(c: HubConfig, layers: int, prefix: str, *, norms: bool) -> StateSpace:
    """A Mamba layer: steps, inputs and outputs of the state are projected from the convolved input."""
    inner = c.number(f"{prefix}expand", 2) * c.number("hidden_size")
    state = c.number(f"{prefix}d_state" if prefix else "state_size", 16)
    rank = c.number(f"{prefix}dt_rank" if prefix else "time_step_rank", -(-c.number("hidden_size") // 16))
    kernel = c.number(f"{prefix}d_conv" if prefix else "conv_kernel", 4)
    decays = inner * (state + 1)
    return StateSpace(
        layers=layers,
        projected=2 * inner,
        inner=inner,
        channels=inner,
        state=state,
        steps=2
        * (rank + state),  # to low-rank steps, inputs and outputs; and from the low rank to all channels
        extra=inner + decays + inner * (kernel + 1) + (rank + 2 * state if norms else 0),
    )


def _mamba_2(c: HubConfig, layers: int, inner: int, heads: int, groups: int, state: int) -> StateSpace:
    """A Mamba 2 layer: gate, input, state inputs and outputs, and steps in one projection."""
    kernel = c.number("conv_kernel", c.number("mamba_d_conv", 4))
    channels = inner + 2 * groups * state
    return StateSpace(
        layers=layers,
        projected=inner + channels + heads,
        inner=inner,
        channels=channels,
        state=state,
        extra=channels * (kernel + 1) + 3 * heads + inner,
    )


def _only_states(c: HubConfig, net: StateSpace, heads: int, *, tied: bool) -> Transformer:
    """A model of state-space layers alone: no attention, no feed-forward layers, one norm per layer."""
    hidden = c.number("hidden_size")
    return Transformer(
        layers=net.layers,
        hidden=hidden,
        heads=heads,
        head_dim=hidden // heads or 1,
        vocab=c.number("vocab_size"),
        ffn=0,
        state_space=net,
        position="none",
        norm="rmsnorm",
        bias="none",
        tied=c.flag("tie_word_embeddings", tied),
        layer_extra=-hidden,
    )


def read_mamba(c: HubConfig) -> Transformer:
    net = _mamba_1(c, c.number("num_hidden_layers"), "", norms=False)
    return _only_states(c, net, 1, tied=True)


def read_mamba2(c: HubConfig) -> Transformer:
    inner, heads = c.number("expand", 2) * c.number("hidden_size"), c.number("num_heads")
    net = _mamba_2(
        c, c.number("num_hidden_layers"), inner, heads, c.number("n_groups", 8), c.number("state_size", 128)
    )
    return _only_states(c, net, heads, tied=False)


def read_bamba(c: HubConfig) -> Transformer:
    """Mamba 2, and attention in the layers that the config lists."""
    base, inner = read_decoder(c), c.number("mamba_expand", 2) * c.number("hidden_size")
    net = _mamba_2(
        c, base.layers - c.length("attn_layer_indices"), inner, c.number("mamba_n_heads", 128),
        c.number("mamba_n_groups", 1), c.number("mamba_d_state", 256),
    )  # fmt: skip
    return replace(base, state_space=net)


def read_jamba(c: HubConfig) -> Transformer:
    """Mamba, attention in every eighth layer, experts in every other one."""
    base = replace(read_decoder(c), position="none")
    period, offset = c.number("attn_layer_period", 8), c.number("attn_layer_offset", 4, at_least=0)
    attention = len(range(offset, base.layers, period))
    every, first = c.number("expert_layer_period", 2), c.number("expert_layer_offset", 1, at_least=0)
    experts = c.number("num_experts", 16)
    moe = Moe(experts=experts, top_k=c.number("num_experts_per_tok", 2), ffn=base.width, every=every)
    found = replace(base, moe=moe if experts > 1 else None)
    if experts > 1 and found.moe_layers != len(range(first, base.layers, every)):
        raise UsageError(
            f"expert_layer_offset is {first}; expected a number of layers ({base.layers}) that is a multiple of "
            f"expert_layer_period ({every})"
        )
    return replace(found, state_space=_mamba_1(c, base.layers - attention, "mamba_", norms=True))


def read_t5(c: HubConfig) -> Transformer:
    """Both stacks have one table of relative positions; the head is tied, whatever the config says (transformers 5)."""
    layers, heads = c.number("num_layers"), c.number("num_heads")
    positions = c.number("relative_attention_num_buckets", 32) * heads
    return Transformer(
        layers=c.number("num_decoder_layers", layers),
        hidden=c.number("d_model"),
        heads=heads,
        head_dim=c.number("d_kv"),
        vocab=c.number("vocab_size"),
        ffn=c.number("d_ff"),
        gated=c.text("feed_forward_proj", "relu").startswith("gated-"),
        position="none",
        norm="rmsnorm",
        bias="none",
        dropout=True,
        context=c.number("n_positions", 512),
        extra_parameters=positions,
        encoder=Encoder(layers=layers, extra_parameters=positions),
    )


def read_whisper(c: HubConfig) -> Transformer:
    """Two convolutions over the spectrogram; keys have no bias."""
    hidden, bins = c.number("d_model"), c.number("num_mel_bins", 80)
    tokens, layers = c.number("max_source_positions", 1500), c.number("decoder_layers")
    convolutions = 3 * hidden * (bins + hidden) + 2 * hidden
    encoder = Encoder(
        layers=c.number("encoder_layers"),
        tokens=tokens,
        ffn=c.number("encoder_ffn_dim"),
        extra_parameters=convolutions + tokens * hidden,
    )
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=c.number("decoder_attention_heads"),
        vocab=c.number("vocab_size"),
        ffn=c.number("decoder_ffn_dim"),
        context=c.number("max_target_positions", 448),
        key_bias=False,
        encoder=encoder,
    )
