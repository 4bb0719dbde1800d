"""A transformer as a handful of numbers, and its exact parameter count.

Counts are exact for common models (the tests compare about 30 published ones). They are sums of weight shapes: each
term below corresponds to a weight in the model's own source.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, get_args

from headway.errors import UsageError
from headway.plan import checks

Bias = Literal["all", "qkv", "none"]
Norm = Literal["layernorm", "rmsnorm"]
PositionEncoding = Literal["learned", "rope", "none"]
MOST_LAYERS = 10_000
"""The deepest published transformer has 1,000 (DeepNet); stages are planned one by one."""


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Mixture-of-experts feed-forward: in every `every`-th of the layers after the first `dense_layers`.

    hw.plan.preset("mixtral-8x7b").moe                      # Moe(experts=8, top_k=2, ...)
    """

    experts: int
    top_k: int
    ffn: int
    """Width of one expert."""
    shared_ffn: int = 0
    """Total width of the experts that process every token."""
    shared_gate: bool = False
    """Whether a gate weights the shared experts for each token."""
    dense_layers: int = 0
    every: int = 1
    """2: every other layer is dense."""
    capacity: float = 1.0
    """Tokens that an expert has room for, relative to its fair share. Padding is also sent and computed."""

    def __post_init__(self) -> None:
        checks.require_bools("model.moe", self)
        checks.require_number("model.moe.capacity", self.capacity)
        for name in ("experts", "top_k", "ffn", "every"):
            checks.require_int(f"model.moe.{name}", getattr(self, name))
        for name in ("shared_ffn", "dense_layers"):
            checks.require_int(f"model.moe.{name}", getattr(self, name), at_least=0)
        if self.top_k > self.experts:
            raise UsageError(
                f"model.moe.top_k is {self.top_k}; valid: 1 to model.moe.experts ({self.experts})"
            )

    @property
    def routed(self) -> float:
        """Experts that a token is sent to, padding included."""
        return self.top_k * self.capacity

    @property
    def active_ffn(self) -> float:
        """Width of all experts that process a token, padding included."""
        return self.routed * self.ffn + self.shared_ffn


@dataclass(frozen=True, kw_only=True)
class Mla:
    """Multi-head latent attention (DeepSeek): low-rank queries, keys and values.

    hw.plan.preset("deepseek-v3").mla                        # Mla(q_rank=1536, kv_rank=512, ...)
    """

    q_rank: int
    """0: queries are projected directly."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    def __post_init__(self) -> None:
        checks.require_int("model.mla.q_rank", self.q_rank, at_least=0)
        for name in ("kv_rank", "nope_dim", "rope_dim", "v_dim"):
            checks.require_int(f"model.mla.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """Layers with a recurrent state in place of attention: Mamba, Mamba 2, gated delta nets.

    They alternate with attention layers so regularly that every stage is assumed to have the same mixture.

        hw.plan.from_hf_config("mamba/config.json").state_space      # StateSpace(layers=..., ...)
    """

    layers: int
    """Number of layers of the model that have a state in place of attention."""
    projected: int
    """Width of all input projections together."""
    inner: int
    """Width of the output projection's input."""
    channels: int
    """Channels of the short convolution."""
    state: int
    """State elements per inner channel."""
    steps: int = 0
    """Width of the products that compute steps, inputs and outputs of the state after the convolution (Mamba 1)."""
    extra: int = 0
    """Other weights: convolution, decays, norms, biases."""

    def __post_init__(self) -> None:
        for name in ("layers", "projected", "inner", "channels", "state"):
            checks.require_int(f"model.state_space.{name}", getattr(self, name))
        for name in ("steps", "extra"):
            checks.require_int(f"model.state_space.{name}", getattr(self, name), at_least=0)


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The encoder of an encoder-decoder. Its layers are those of the decoder without attention to the encoder.

    t5 = hw.plan.Transformer(..., encoder=hw.plan.Encoder(layers=12, tokens=512))
    """

    layers: int
    tokens: int | None = None
    """Tokens that it reads per sample; as many as the decoder if not given."""
    ffn: int | None = None
    """Width of its feed-forward layers; the decoder's width if not given."""
    extra_parameters: int = 0
    """Weights outside its layers and its norm: convolutions, positions."""

    def __post_init__(self) -> None:
        checks.require_int("model.encoder.layers", self.layers, at_most=MOST_LAYERS)
        checks.require_int("model.encoder.extra_parameters", self.extra_parameters, at_least=0)
        for name in ("tokens", "ffn"):
            if getattr(self, name) is not None:
                checks.require_int(f"model.encoder.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Image:
    """The image side of a vision transformer: patches as input, classes as output.

    hw.plan.preset("vit-b-16").image                        # Image(size=224, patch=16, ...)
    """

    size: int = 224
    patch: int = 16
    classes: int = 1000
    """Classes of the head; 0 for a backbone without a head."""
    channels: int = 3
    mask_token: bool = False
    layer_scale: bool = False

    def __post_init__(self) -> None:
        checks.require_bools("model.image", self)
        for name in ("size", "patch", "channels"):
            checks.require_int(f"model.image.{name}", getattr(self, name))
        checks.require_int("model.image.classes", self.classes, at_least=0)
        checks.require_divisor("model.image.patch", self.patch, "model.image.size", self.size)

    @property
    def tokens(self) -> int:
        return (self.size // self.patch) ** 2 + 1


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder, encoder or vision transformer.

    >>> Transformer(layers=12, hidden=768, heads=12, vocab=50257).parameters
    124439808
    """

    layers: int
    hidden: int
    heads: int
    vocab: int = 0
    kv_heads: int | None = None
    """Fewer than `heads` means grouped-query attention."""
    head_dim: int | None = None
    ffn: int | None = None
    """Width of the feed-forward layer; 4 x hidden if not given, 0 for layers without one."""
    gated: bool = False
    """SwiGLU and similar: three matrices instead of two."""
    tied: bool = True
    position: PositionEncoding = "learned"
    norm: Norm = "layernorm"
    bias: Bias = "all"
    key_bias: bool = True
    """Whether keys have a bias if queries and values do; they have none in Whisper."""
    qk_norm: bool = False
    attention_gate: bool = False
    """Queries have a gate of their own size, which multiplies the output of attention (Qwen3-Next)."""
    context: int = 1024
    """Sequence length of a sample, and size of the learned position table."""
    dropout: bool = False
    causal: bool = True
    moe: Moe | None = None
    mla: Mla | None = None
    image: Image | None = None
    state_space: StateSpace | None = None
    encoder: Encoder | None = None
    window: int | None = None
    """Tokens that a layer with a sliding window attends to."""
    window_layers: int = 0
    """Number of layers with the window."""
    layer_extra: int = 0
    """Weights of a layer outside this pattern, on every rank: norms, sinks, gates; negative if it lacks a norm."""
    extra_parameters: int = 0
    """Weights outside this pattern, such as BERT's pooler and segment embedding."""
    name: str = field(default="transformer", compare=False)

    def __post_init__(self) -> None:
        checks.require_bools("model", self)
        checks.require_int("model.layers", self.layers, at_most=MOST_LAYERS)
        for key in ("hidden", "heads", "context"):
            checks.require_int(f"model.{key}", getattr(self, key))
        for key, least in (("kv_heads", 1), ("head_dim", 1), ("ffn", 0)):
            if getattr(self, key) is not None:
                checks.require_int(f"model.{key}", getattr(self, key), at_least=least)
        checks.require_int("model.vocab", self.vocab, at_least=1 if self.image is None else 0)
        checks.require_int("model.extra_parameters", self.extra_parameters, at_least=0)
        checks.require_int("model.layer_extra", self.layer_extra, at_least=-4 * self.hidden)
        checks.require_int("model.window_layers", self.window_layers, at_least=0)
        if self.window is not None:
            checks.require_int("model.window", self.window)
        if self.window_layers > (self.layers if self.window else 0):
            raise UsageError(
                f"model.window_layers is {self.window_layers}; valid: 0 to {self.layers}, the number of layers"
                + ("" if self.window else ", together with model.window")
            )
        checks.require_choice("model.position", self.position, get_args(PositionEncoding))
        checks.require_choice("model.norm", self.norm, get_args(Norm))
        checks.require_choice("model.bias", self.bias, get_args(Bias))
        if self.head_dim is None and self.mla is None:
            checks.require_divisor("model.heads", self.heads, "model.hidden", self.hidden)
        checks.require_divisor("model.kv_heads", self.kv, "model.heads", self.heads)
        if self.moe and self.moe.dense_layers > self.layers:
            raise UsageError(f"model.moe.dense_layers is {self.moe.dense_layers}; valid: 0 to {self.layers}")
        if self.state_space and self.state_space.layers > self.layers:
            raise UsageError(
                f"model.state_space.layers is {self.state_space.layers}; valid: 1 to {self.layers}"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # a search looks the same model up in caches a hundred thousand times
        return hash(tuple(getattr(self, field.name) for field in fields(self) if field.compare))

    @property
    def kv(self) -> int:
        """Number of key-value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def dim(self) -> int:
        """Width of one head; with MLA, of a query."""
        if self.mla:
            return self.mla.nope_dim + self.mla.rope_dim
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def width(self) -> int:
        """Width of the dense feed-forward layer."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def tokens_per_sample(self) -> int:
        return self.image.tokens if self.image else self.context

    def mean_keys(self, sequence: int) -> float:
        """Keys per query without a mask, averaged over the layers; a causal window of w tokens counts as 2 w."""
        if self.window is None:
            return float(sequence)
        inside = min(sequence, 2 * self.window if self.causal else self.window)
        return sequence + (inside - sequence) * self.window_layers / self.layers

    @property
    def attention_share(self) -> float:
        """Fraction of the layers that have attention; the others have a recurrent state."""
        return 1 - self.state_space.layers / self.layers if self.state_space else 1.0

    @property
    def attentions(self) -> int:
        """Attentions of a layer: a decoder with an encoder also has cross-attention."""
        return 2 if self.encoder else 1

    def encoded_tokens(self, sequence: int) -> int:
        """Tokens that the encoder reads for a sample whose decoder has `sequence`."""
        return self.encoder.tokens or sequence if self.encoder else 0

    @cached_property
    def encoder_stack(self) -> Transformer | None:
        """The encoder as a model of its own, whose embedding and head belong to the decoder."""
        if self.encoder is None:
            return None
        return replace(
            self, encoder=None, layers=self.encoder.layers, ffn=self.encoder.ffn or self.ffn, causal=False,
            context=self.encoded_tokens(self.context), window=None, window_layers=0, moe=None,
        )  # fmt: skip

    @cached_property
    def attention_parameters(self) -> int:
        """Parameters of one attention of a layer."""
        h = self.hidden
        if self.mla:
            m, a = self.mla, self.heads
            low_rank = h * m.q_rank + m.q_rank
            query = (m.q_rank or h) * a * (m.nope_dim + m.rope_dim) + low_rank
            key_value = h * (m.kv_rank + m.rope_dim) + m.kv_rank + m.kv_rank * a * (m.nope_dim + m.v_dim)
            return query + key_value + a * m.v_dim * h
        queries, keys = self.heads * self.dim, self.kv * self.dim
        weights = h * (queries + 2 * keys) + queries * h + (h * queries if self.attention_gate else 0)
        qkv_bias = (queries + (1 + self.key_bias) * keys) if self.bias != "none" else 0
        out_bias = h if self.bias == "all" else 0
        return weights + qkv_bias + out_bias + (2 * self.dim if self.qk_norm else 0)

    @cached_property
    def state_space_parameters(self) -> int:
        """Parameters of one state-space layer, without norm and feed-forward layer."""
        s = self.state_space
        return self.hidden * (s.projected + s.inner) + s.inner * s.steps + s.extra if s else 0

    @cached_property
    def mixing_parameters(self) -> int:
        """Parameters of attention and of state spaces in all layers."""
        recurrent = self.state_space.layers if self.state_space else 0
        attention = (self.layers - recurrent) * self.attentions * self.attention_parameters
        return attention + recurrent * self.state_space_parameters

    def feedforward_parameters(self, width: int) -> int:
        """Parameters of a feed-forward layer of this width."""
        if not width:
            return 0
        matrices = 3 if self.gated else 2
        biases = (matrices - 1) * width + self.hidden if self.bias == "all" else 0
        return matrices * self.hidden * width + biases

    @cached_property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return (2 if self.norm == "layernorm" else 1) * self.hidden

    @cached_property
    def layer_parameters(self) -> float:
        """Parameters of a dense layer; the mean, if only some have attention."""
        return self.mixing_parameters / self.layers + self._dense_parameters

    @cached_property
    def _dense_parameters(self) -> int:
        scale = 2 * self.hidden if self.image and self.image.layer_scale else 0
        return self.feedforward_parameters(self.width) + self.layer_norm_parameters + scale + self.layer_extra

    @cached_property
    def layer_norm_parameters(self) -> int:
        """Parameters of the norms of one layer: one before the feed-forward layer, and one before each attention."""
        return (1 + self.attentions) * self.norm_parameters

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of one layer, which expert parallelism splits."""
        return self.moe.experts * self.feedforward_parameters(self.moe.ffn) if self.moe else 0

    @cached_property
    def moe_layer_shared_parameters(self) -> float:
        """Parameters of a mixture-of-experts layer without its routed experts."""
        return self.mixing_parameters / self.layers + self._moe_shared_parameters

    @cached_property
    def _moe_shared_parameters(self) -> int:
        if not self.moe:
            return 0
        shared = self.feedforward_parameters(self.moe.shared_ffn)
        gates = self.hidden * (self.moe.experts + self.moe.shared_gate)
        return shared + gates + self.layer_norm_parameters + self.layer_extra

    @property
    def moe_layers(self) -> int:
        return self.moe_layers_before(self.layers)

    def moe_layers_before(self, layer: int) -> int:
        """Number of mixture-of-experts layers among the first `layer`."""
        if self.moe is None:
            return 0
        return max(0, layer - self.moe.dense_layers) // self.moe.every

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters of the token or patch embedding, positions included."""
        h = self.hidden
        if self.image:
            patches = self.image.channels * self.image.patch**2 * h + h
            return patches + h + self.image.tokens * h + (h if self.image.mask_token else 0)
        return self.vocab * h + (self.context * h if self.position == "learned" else 0)

    @cached_property
    def head_parameters(self) -> int:
        """Parameters of the output layer; none if it is tied to the embedding."""
        if self.image:
            return (self.hidden + 1) * self.image.classes if self.image.classes else 0
        return 0 if self.tied else self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Number of all trainable parameters, exact."""
        dense = (self.layers - self.moe_layers) * self._dense_parameters
        mixture = self.moe_layers * (self._moe_shared_parameters + self.expert_parameters)
        outside = self.embedding_parameters + self.norm_parameters + self.head_parameters
        layers = self.mixing_parameters + dense + mixture
        return layers + outside + self.extra_parameters + self.encoder_parameters

    @cached_property
    def encoder_parameters(self) -> int:
        """Parameters of the encoder: its layers, its norm, and its extra parameters."""
        stack = self.encoder_stack
        if self.encoder is None or stack is None:
            return 0
        layers = stack.mixing_parameters + stack.layers * stack._dense_parameters
        return layers + stack.norm_parameters + self.encoder.extra_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that process one token: only `top_k` experts of a layer count."""
        if not self.moe:
            return self.parameters
        idle = self.moe.experts - self.moe.top_k
        return self.parameters - self.moe_layers * idle * self.feedforward_parameters(self.moe.ffn)
