"""The tensors that a layer saves for its backward pass.

Each entry has its bytes per token, and whether tensor parallelism splits it. The closed forms of Korthikanti et al.
2022 (equations 1 to 6) are sums over this table; the tests compare them to 1e-6.
"""

from __future__ import annotations

from typing import NamedTuple

from headway.plan.cost.schedule import stage_layers
from headway.plan.model.layout import Layout
from headway.plan.model.transformer import Transformer


class SavedTensor(NamedTuple):
    """One saved tensor: its bytes per token, and how they are split."""

    name: str
    bytes: float
    replicated: bool
    """Replicated on every tensor-parallel rank, unless sequence parallelism splits it."""
    core: bool = False
    """Part of the attention core, which selective recomputation does not save."""
    cheap: bool = False
    """Recomputed with recompute `modules`: the output of a norm, of an activation, or of MLA's up-projections."""
    gathered: bool = False
    """Gathered along the sequence: Megatron saves its shard and gathers it again, torch saves the full tensor."""

    def scaled(self, share: float) -> SavedTensor:
        """Returns the mean over layers of which only this fraction has the tensor."""
        return self._replace(bytes=share * self.bytes)


def saved_tensors(model: Transformer, layout: Layout, *, moe: bool = False) -> tuple[SavedTensor, ...]:
    """Returns the tensors that one layer saves, in the order of the forward pass."""
    act, res, h = layout.element_bytes.activation, layout.residual_bytes, model.hidden
    mask = 1 if model.dropout else 0
    norms = model.attentions + (1 if moe or model.width else 0)
    saved = [
        SavedTensor("norm inputs", norms * res * h, True),
        SavedTensor(
            "qkv input", model.attentions * _input_bytes(layout) * h, True, cheap=True, gathered=True
        ),
    ]
    saved += [entry.scaled(model.attention_share) for entry in _attention(model, layout)]
    saved += [entry.scaled(1 - model.attention_share) for entry in _state_space(model, act)]
    saved += _cross_attention(model, layout)
    saved.append(SavedTensor("attention dropout mask", model.attentions * mask * h, True))
    if moe or model.width:
        width = act if moe else _input_bytes(layout)  # a router needs its input in 16 bits
        saved.append(SavedTensor("feed-forward input", width * h, True, cheap=True, gathered=True))
        saved += _feedforward(model, layout, moe=moe)
        saved.append(SavedTensor("feed-forward dropout mask", mask * h, True))
    return tuple(entry for entry in saved if entry.bytes)


def _input_bytes(layout: Layout) -> int:
    """Bytes per element of an input that only a product needs: Transformer Engine saves it in fp8, as multiplied."""
    return 1 if layout.precision == "fp8" else layout.element_bytes.activation


def _state_space(model: Transformer, act: int) -> list[SavedTensor]:
    """Tensors that a fused scan saves: projected and convolved input, and the output before and after the gate."""
    if model.state_space is None:
        return []
    state = model.state_space
    return [
        SavedTensor("projected", act * state.projected, False),
        SavedTensor("convolved", act * state.channels, False),
        SavedTensor("scan output", 2 * act * state.inner, False),
    ]


def _cross_attention(model: Transformer, layout: Layout) -> list[SavedTensor]:
    """Tensors of cross-attention: keys and values of the encoder's tokens, per token of the decoder."""
    if model.encoder is None:
        return []
    act, a, s = layout.element_bytes.activation, model.heads, layout.tokens(model)
    encoded = model.encoded_tokens(s)
    queries = SavedTensor("cross queries and output", 2 * act * a * model.dim, False)
    keys = SavedTensor("cross keys, values", 2 * act * model.kv * model.dim * encoded / s, False)
    return [queries, keys, _scores(model, layout, encoded)]


def _attention(model: Transformer, layout: Layout) -> list[SavedTensor]:
    act, a, s = layout.element_bytes.activation, model.heads, layout.tokens(model)
    if model.mla:
        m = model.mla
        low_rank = act * (m.q_rank + m.kv_rank + m.rope_dim)
        saved = [
            SavedTensor("low-rank queries and keys", low_rank, True),
            SavedTensor("queries, keys", act * 2 * a * model.dim, False, cheap=True),
            SavedTensor("values", act * a * m.v_dim, False, cheap=True),
            SavedTensor("attention output", act * a * m.v_dim, False),
        ]
    else:
        q, k = a * model.dim, float(model.kv * model.dim)
        # keys and values are replicated if there are fewer heads than tensor-parallel ranks
        k = k * max(1.0, layout.tp / model.kv)
        # only the rotated ones: the gradient of a rotation needs its angles, not its input
        saved = [SavedTensor("queries, keys", act * (q + k), False), SavedTensor("values", act * k, False)]
        gates = 2 if model.attention_gate else 0  # the gate, and the output that it multiplies
        saved.append(SavedTensor("attention output", (1 + gates) * act * q, False))
    return [*saved, _scores(model, layout, s)]


def _scores(model: Transformer, layout: Layout, keys: int) -> SavedTensor:
    """The scores that attention to `keys` tokens saves: one number per head if it is fused, else all of them."""
    if layout.flash:
        return SavedTensor("log-sum-exp", 4 * model.heads, False)
    act = layout.element_bytes.activation
    per_score = act + (1 + act if model.dropout else 0)  # probabilities; mask, probabilities after dropout
    return SavedTensor("attention scores", per_score * model.heads * keys, False, core=True)


def _feedforward(model: Transformer, layout: Layout, *, moe: bool) -> list[SavedTensor]:
    act = layout.element_bytes.activation
    before, after = (2 if model.gated else 1) * act, _input_bytes(layout)  # gate and up, and their product
    if model.gated and not layout.megatron:
        # Megatron's fused SwiGLU computes the activation of the gate again (fused_bias_swiglu.py)
        after += act
    if not moe or model.moe is None:
        return [
            SavedTensor("feed-forward", before * model.width, False),
            SavedTensor("activated", after * model.width, False, cheap=True),
        ]
    width = model.moe.active_ffn
    # tokens sent to the experts and back; Megatron's experts weight their outputs before they leave (weighted_swiglu)
    copies = _input_bytes(layout) if layout.megatron else 2 * act
    if layout.sequence_parallel and layout.megatron:
        copies *= layout.expert_ways  # ranks that split an expert have gathered each other's tokens
    return [
        SavedTensor("experts", before * width, False),
        SavedTensor("activated", after * width, False, cheap=True),
        SavedTensor("routed tokens", copies * model.moe.routed * model.hidden, True),
        SavedTensor("router", 4 * model.moe.experts, True),
    ]


def layer_bytes(model: Transformer, layout: Layout, *, moe: bool = False, recomputed: float = 1.0) -> float:
    """Bytes that one layer saves for one microbatch on one rank, under the layout's recomputation.

    The mean, if only the fraction `recomputed` of the layers recomputes.
    """
    own = _layer_bytes(model, layout, layout.recompute, moe)
    if recomputed == 1:
        return own
    return recomputed * own + (1 - recomputed) * _layer_bytes(model, layout, "none", moe)


def kept_share(model: Transformer, layout: Layout) -> float:
    """Bytes that a microbatch in flight keeps on the last stage, relative to a layout that recomputes nothing.

    It matters in zero-bubble schedules, whose last stage delays the most weight gradients; in others it is 1.
    """
    if layout.recompute == "none" or layout.schedule == "1f1b":
        return 1.0
    layers = stage_layers(model, layout.pp, layout.vpp)[-1]
    again = layout.recomputed_share(layers.total)
    kept = whole = 0.0
    for count, moe in ((layers.dense, False), (layers.mixture, True)):
        if count:
            kept += count * layer_bytes(model, layout, moe=moe, recomputed=again)
            whole += count * _layer_bytes(model, layout, "none", moe)
    return kept / whole if whole else 1.0


def working_set(model: Transformer, layout: Layout, *, moe: bool = False) -> float:
    """Bytes that the backward pass of one layer recomputes before it starts."""
    if layout.recompute == "none":
        return 0.0
    return _layer_bytes(model, layout, "none", moe) - layer_bytes(model, layout, moe=moe)


_PerToken = tuple[float, float, float]
"""Bytes per token: unsplit, split by sequence parallelism, and split by tensor parallelism."""
_per_token: dict[tuple[object, ...], _PerToken] = {}
"""A cache: its keys are few even if a search tries very many layouts."""


def _layer_bytes(model: Transformer, layout: Layout, recompute: str, moe: bool) -> float:
    sequence = layout.tokens(model)
    key = (model, recompute, moe, layout.tp > model.kv and layout.tp, sequence, layout.precision, layout.flash,
           layout.zero == 3, moe and layout.sequence_parallel and layout.expert_ways)  # fmt: skip
    if key not in _per_token:
        _per_token[key] = _saved_per_token(model, layout, recompute, moe)
    always, replicated, split = _per_token[key]
    per_token = always + replicated / layout.sequence_ways + split / layout.tp
    return layout.rank_tokens(model) * per_token


def _saved_per_token(model: Transformer, layout: Layout, recompute: str, moe: bool) -> _PerToken:
    if recompute == "full":
        return 0.0, float(layout.residual_bytes * model.hidden), 0.0
    if recompute == "sac":
        return 0.0, *_sac(model, layout, moe=moe)
    saved = [
        e
        for e in saved_tensors(model, layout, moe=moe)
        if not (e.core and recompute == "selective") and not (e.cheap and recompute == "modules")
    ]
    always = sum(e.bytes for e in saved if e.gathered and not layout.megatron)
    replicated = sum(e.bytes for e in saved if e.replicated)
    return always, replicated - always, sum(e.bytes for e in saved if not e.replicated)


def _sac(model: Transformer, layout: Layout, *, moe: bool) -> tuple[float, float]:
    """torch's selective activation checkpointing saves layer input, attention output, every other product.

    In a layer with experts, it saves one product of each of a token's experts, and the tokens sent to them and back:
    the exchange is not repeated.
    """
    act, h, q, k = (
        layout.element_bytes.activation,
        model.hidden,
        model.heads * model.dim,
        model.kv * model.dim,
    )
    replicated = float(layout.residual_bytes * h)
    width = float(model.width)
    if moe and model.moe:
        width = model.moe.active_ffn
        replicated += 2 * act * model.moe.routed * h
    if model.gated and (model.moe.shared_ffn if moe and model.moe else model.width):
        replicated += act * h
    attention = act * (2 * q + k) + 4 * model.heads
    split = attention * model.attention_share + act * width
    if model.state_space:
        split += act * model.state_space.projected * (1 - model.attention_share)
    if model.encoder:
        split += 2 * act * q + 4 * model.heads
    return replicated, split
