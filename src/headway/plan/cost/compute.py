"""Time on the device: the roofline of each matrix product, and the elementwise kernels between them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from headway.plan.machine.calibration import Calibration
from headway.plan.machine.hardware import FP8, Device
from headway.plan.model.layout import Layout
from headway.plan.model.transformer import Transformer

FORWARD_KERNELS = 14
"""Kernels of one layer: two norms, four products, attention, activation, adds and dropout, casts."""
BACKWARD_TRAFFIC_RATIO = 1.5
"""Elementwise traffic of the backward over the forward pass: gradients and saved values."""
EAGER_TRAFFIC = {"layernorm": 1.45, "rmsnorm": 3.0}
"""Elementwise traffic of eager torch over that of fused kernels, counted in bytes: copies and bias gradients of a GPT
block; an RMS norm and rotations that are written as a dozen fp32 operations."""
COMPILED_TRAFFIC = 1.0
"""The same under torch.compile, which fuses as much as hand-written kernels."""
CAST_BYTES = {"megatron": 4, "torch": 16 / 3}
"""Bytes per element of an fp8 product's input for its cast. Megatron reads 16 bits for the maximum, then again, and
writes 8 twice (also transposed): 12 over three products. torch casts for each order of the elements: 16."""
SAC_RECOMPUTED = 0.4
"""Fraction of the products that torch's selective checkpointing recomputes: every other one, the smaller ones."""
FUSED_LOSS_BYTES = 20
"""Bytes per logit of the loss, forward and backward: five passes over fp32 logits."""
EAGER_LOSS_BYTES = 36
"""The same in eager torch: cast (6 bytes), log-softmax (8), its gradient (4 filled, 12), cast back (6)."""
PERMUTE_PASSES = {"fused": 4, "all-to-all": 6}
"""Reads and writes of the routed tokens in a forward pass: into the order of the experts, and back. With an
all-to-all, they are copied for their experts, sorted by expert where they arrive, sorted back, and added up."""
EXPERT_ROWS = 1000
"""Tokens of an expert at which its products reach half of their rate: loading its weights and filling its first tiles
take the same time for any number of tokens. Chosen among 250, 500, 1000 and more with the published steps of H100 in
view, where experts have 1,024 to 4,096 tokens, and Mixtral's 8,192; it replaced a constant for each family."""
EXPERT_BIAS_BYTES = 68
"""Bytes per element of the output of experts with biases, forward and backward, for the weighted bias of the second
product: Megatron adds it by eager fp32 operations. Forward 28: product 4, sum 10, concatenation 8, cast 6. Backward 40:
cast 6, gradients of the output 10, of the bias 12, of the router's weights 12."""
ROUTER_LAUNCHES = 200
"""Kernels of a layer with experts besides the experts' own, forward and backward: router, sort, sends, norms. The host
reads the numbers of tokens in between, so it cannot launch ahead, and the device waits. An estimate: 200 agrees better
with the published steps than 100 or 0."""
GRAPHED_LAUNCHES = 40
"""The same if attention and router are CUDA graphs: the exchange of tokens, and the kernels between it and the experts.
An estimate, not fitted."""
EXPERT_LAUNCHES = 6
"""Kernels of one expert, forward and backward: three for each of two products. The host launches them ahead."""
CAST_LAUNCHES = 8
"""Additional kernels in fp8, for each of those: maximum, cast, transposition and scales of both inputs."""


class Gemm(NamedTuple):
    """`batch` products of (m x k) by (k x n) in one forward pass on one rank."""

    name: str
    m: float
    k: float
    n: float
    batch: float = 1
    causal: bool = False
    """Fused attention skips the masked half of the scores."""

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.k * self.n * self.batch

    @property
    def unmasked(self) -> float:
        """Fraction of the scores that is computed."""
        return 0.5 if self.causal else 1.0

    def bytes(self, width: int) -> float:
        return width * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


MLA_UP = ("query up", "key-value up")
"""The products of MLA that recompute `modules` repeats."""
MODULES_SHARE = 0.7
"""Norms and activation over all elementwise traffic of a layer's forward pass: 0.25 to 0.71 in the presets."""


class LayerTime(NamedTuple):
    """Seconds of one layer and microbatch on one rank, without communication."""

    products: float
    attention: float
    elementwise: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.elementwise


@lru_cache(maxsize=8192)
def layer_gemms(model: Transformer, layout: Layout, *, moe: bool = False) -> tuple[Gemm, ...]:
    """Returns the products with weights in one layer, forward, on one rank."""
    tokens = layout.rank_tokens(model)
    gemms = _projections(model, layout, tokens) + _feedforward_gemms(model, layout, tokens, moe=moe)
    return tuple(gemms + _state_space_gemms(model, layout, tokens) + _cross_gemms(model, layout, tokens))


def _projections(model: Transformer, layout: Layout, tokens: float) -> list[Gemm]:
    """Products before and after attention; the mean over layers, if only some have attention."""
    h, a, t, share = model.hidden, model.heads, layout.tp, model.attention_share
    if not share:
        return []
    if model.mla:
        m = model.mla
        low_rank = [Gemm("query down", tokens, h, m.q_rank)] if m.q_rank else []
        return [
            *low_rank,
            Gemm("query up", tokens, m.q_rank or h, a * model.dim / t),
            Gemm("key-value down", tokens, h, m.kv_rank + m.rope_dim),
            Gemm("key-value up", tokens, m.kv_rank, a * (m.nope_dim + m.v_dim) / t),
            Gemm("attention out", tokens, a * m.v_dim / t, h),
        ]
    keys = 2 * model.kv * model.dim / min(t, model.kv)
    queries = (2 if model.attention_gate else 1) * a * model.dim / t
    return [
        Gemm("qkv", tokens, h, queries + keys, share),
        Gemm("attention out", tokens, a * model.dim / t, h, share),
    ]


SCAN_FLOPS = 7
"""FLOPs of a scan per token, inner channel and state element, forward (as Megatron-LM counts them)."""


def _state_space_gemms(model: Transformer, layout: Layout, tokens: float) -> list[Gemm]:
    """Projections and scan of state-space layers; the mean over layers, if others have attention."""
    if model.state_space is None:
        return []
    state, h, t, share = model.state_space, model.hidden, layout.tp, 1 - model.attention_share
    return [
        Gemm("state in", tokens, h, state.projected / t, share),
        *([Gemm("state steps", tokens, state.inner / t, state.steps, share)] if state.steps else []),
        Gemm("state scan", tokens, SCAN_FLOPS / 2 * state.state, state.inner / t, share),
        Gemm("state out", tokens, state.inner / t, h, share),
    ]


def _cross_gemms(model: Transformer, layout: Layout, tokens: float) -> list[Gemm]:
    """Products of a decoder's cross-attention."""
    if model.encoder is None:
        return []
    h, t = model.hidden, layout.tp
    encoded = layout.microbatch * model.encoded_tokens(layout.tokens(model)) / layout.cp
    return [
        Gemm("cross queries", tokens, h, model.heads * model.dim / t),
        Gemm("cross keys, values", encoded, h, 2 * model.kv * model.dim / min(t, model.kv)),
        Gemm("cross out", tokens, model.heads * model.dim / t, h),
    ]


def _feedforward_gemms(model: Transformer, layout: Layout, tokens: float, *, moe: bool) -> list[Gemm]:
    h, t, gates = model.hidden, layout.tp, 2 if model.gated else 1
    if not moe or model.moe is None:
        if not model.width:
            return []
        return [Gemm("up", tokens, h, gates * model.width / t), Gemm("down", tokens, model.width / t, h)]
    mix = model.moe
    here = mix.experts / layout.ep
    ways = layout.expert_ways
    # an expert receives tokens of ep ranks; each rank of a tensor-parallel group has its own share of them
    each = tokens * ways / t * mix.top_k * mix.capacity * layout.ep / mix.experts
    gemms = [
        Gemm("router", tokens, h, mix.experts),
        Gemm("expert up", each, h, gates * mix.ffn / ways, here),
        Gemm("expert down", each, mix.ffn / ways, h, here),
    ]
    if mix.shared_ffn:
        gemms.append(Gemm("shared up", tokens, h, gates * mix.shared_ffn / t))
        gemms.append(Gemm("shared down", tokens, mix.shared_ffn / t, h))
    return gemms


@lru_cache(maxsize=8192)
def attention_gemms(model: Transformer, layout: Layout) -> tuple[Gemm, ...]:
    """Returns scores and weighted values of one layer, forward, on one rank."""
    s, keys = layout.tokens(model), model.mean_keys(layout.tokens(model))
    rows, heads = s / layout.cp, layout.microbatch * model.heads / layout.tp
    batch = heads * model.attention_share
    value = model.mla.v_dim if model.mla else model.dim
    causal = model.causal and layout.flash
    gemms = [
        Gemm("scores", rows, model.dim, keys, batch, causal),
        Gemm("weighted values", rows, keys, value, batch, causal),
    ]
    encoded = model.encoded_tokens(s)
    if encoded:
        gemms.append(Gemm("cross scores", rows, model.dim, encoded, heads))
        gemms.append(Gemm("cross weighted values", rows, encoded, value, heads))
    return tuple(gemms) if batch else ()


def head_gemm(model: Transformer, layout: Layout) -> Gemm:
    """Returns the product of the output layer, forward, on one rank."""
    if model.image:
        return Gemm("head", layout.microbatch, model.hidden, max(1, model.image.classes))
    tokens = layout.rank_tokens(model)
    return Gemm("head", tokens, model.hidden, model.vocab / layout.tp)


def gemm_seconds(gemm: Gemm, layout: Layout, device: Device, constants: Calibration) -> float:
    """Seconds of one product: arithmetic and memory traffic, which overlap in part, plus a fixed overhead."""
    fp8 = layout.precision in FP8 and device.fp8 is not None and gemm.name not in ("head", "router")
    precision = layout.precision if fp8 or layout.precision not in FP8 else "bf16"
    reached = constants.matrix_fp8 if fp8 else constants.matrix
    if gemm.name.startswith("expert"):
        reached *= constants.experts / constants.matrix * gemm.m / (gemm.m + EXPERT_ROWS)
    arithmetic = gemm.flops / (device.matrix_flops(precision) * reached)
    traffic = gemm.bytes(layout.element_bytes.activation) / stream_bytes_per_s(device, constants)
    overlapped = max(arithmetic, traffic) + constants.serial * min(arithmetic, traffic)
    cast = 0.0
    if fp8:
        weights = gemm.k * gemm.n / layout.microbatches  # cast once per step
        width = CAST_BYTES["megatron" if layout.megatron else "torch"]
        cast = width * gemm.batch * (gemm.m * gemm.k + weights) / stream_bytes_per_s(device, constants)
    return overlapped + cast + constants.kernel_s


def attention_seconds(model: Transformer, layout: Layout, device: Device, constants: Calibration) -> float:
    """Seconds of the attention core, forward: fused, or two batched products that stream the score matrix."""
    kernel = constants.fused_attention if layout.megatron else constants.attention
    products_rate = device.matrix_flops("bf16" if layout.precision in FP8 else layout.precision)
    rate = products_rate * constants.matrix
    if layout.flash:
        rate = device.attention_flops * kernel * (products_rate / device.matrix_flops("bf16"))
    products = attention_gemms(model, layout)
    if not products:
        return 0.0
    if layout.flash:
        flops = sum(gemm.flops * gemm.unmasked for gemm in products)
        scores = sum(g.m * g.n * g.batch * g.unmasked for g in products if g.name.endswith("scores"))
        return flops / rate + _exponential_seconds(scores, device) + constants.kernel_s
    stream = stream_bytes_per_s(device, constants)
    width = layout.element_bytes.activation
    matrix = sum(max(gemm.flops / rate, gemm.bytes(width) / stream) for gemm in products)
    scores = sum(gemm.m * gemm.n * gemm.batch for gemm in products if gemm.name.endswith("scores"))
    passes = 2 * width + (2 * width + 1 if model.dropout else 0)  # softmax, dropout
    return matrix + scores * passes / stream + 4 * constants.kernel_s


def elementwise_seconds(
    model: Transformer, layout: Layout, device: Device, constants: Calibration, *, moe: bool = False
) -> float:
    """Seconds of norms, residual adds, dropout, activation functions and rotations of one layer, forward."""
    act, res = layout.element_bytes.activation, layout.residual_bytes
    tokens = layout.rank_tokens(model)
    h = model.hidden
    replicated = float((2 * (res + act) + 2 * 3 * res + (2 if model.dropout else 0)) * h)
    width, permuted = float(model.width), 0.0
    if moe and model.moe:
        routed, width = model.moe.routed, model.moe.active_ffn
        permuted = PERMUTE_PASSES[layout.dispatcher] * act * routed * h
        if model.bias == "all" and not (layout.compiled or layout.graphs == "step"):
            permuted += EXPERT_BIAS_BYTES / (1 + BACKWARD_TRAFFIC_RATIO) * routed * h
    split = (3 if model.gated else 2) * act * width + permuted
    if model.position == "rope":
        split += 2 * act * (model.heads + model.kv) * model.dim * model.attention_share
    if model.qk_norm:
        split += 2 * act * (model.heads + model.kv) * model.dim * model.attention_share
    if model.state_space:
        # the convolution, and the gate with its norm
        state, share = model.state_space, 1 - model.attention_share
        split += share * act * (2 * state.channels + 3 * state.inner)
    traffic = tokens * (replicated / layout.sequence_ways + split / layout.tp)
    kernels = FORWARD_KERNELS * (0.5 if layout.compiled or layout.graphs == "step" else 1.0)
    stack = 1.0 if layout.megatron else COMPILED_TRAFFIC if layout.compiled else EAGER_TRAFFIC[model.norm]
    return stack * traffic / stream_bytes_per_s(device, constants) + kernels * constants.kernel_s


@lru_cache(maxsize=16384)
def layer_forward(
    model: Transformer, layout: Layout, device: Device, constants: Calibration, *, moe: bool = False
) -> LayerTime:
    """Times of one layer in the forward pass."""
    gemms = layer_gemms(model, layout, moe=moe)
    return LayerTime(
        products=sum(gemm_seconds(gemm, layout, device, constants) for gemm in gemms),
        attention=attention_seconds(model, layout, device, constants),
        elementwise=elementwise_seconds(model, layout, device, constants, moe=moe),
    )


def layer_backward(forward: LayerTime, layout: Layout, constants: Calibration) -> LayerTime:
    """Times of one layer in the backward pass: each product twice, elementwise kernels 1.5 times."""
    factor = constants.attention_backward if layout.flash else 2.0
    return LayerTime(
        products=2 * forward.products,
        attention=factor * forward.attention,
        elementwise=BACKWARD_TRAFFIC_RATIO * forward.elementwise,
    )


def layer_recompute(
    forward: LayerTime, model: Transformer, layout: Layout, device: Device, constants: Calibration
) -> LayerTime:
    """Times of the recomputation in the backward pass."""
    if layout.recompute == "full":
        return forward
    if layout.recompute == "modules":
        ups = [gemm for gemm in layer_gemms(model, layout) if gemm.name in MLA_UP]
        products = sum(gemm_seconds(gemm, layout, device, constants) for gemm in ups)
        return LayerTime(products=products, attention=0.0, elementwise=MODULES_SHARE * forward.elementwise)
    if layout.recompute == "selective" and not layout.flash:
        return LayerTime(products=0.0, attention=forward.attention, elementwise=0.0)
    if layout.recompute == "sac":
        return LayerTime(
            products=SAC_RECOMPUTED * forward.products, attention=0.0, elementwise=forward.elementwise
        )
    return LayerTime(products=0.0, attention=0.0, elementwise=0.0)


def launch_seconds(model: Transformer, layout: Layout, constants: Calibration, busy: float) -> float:
    """Seconds that the device, `busy` for that long, waits for the host in a layer with experts, in both passes."""
    if model.moe is None or layout.compiled or layout.graphs == "step":
        return 0.0
    each = EXPERT_LAUNCHES * (1 + CAST_LAUNCHES) if layout.precision in FP8 else EXPERT_LAUNCHES
    ahead = constants.kernel_s * each * model.moe.experts / layout.ep
    others = GRAPHED_LAUNCHES if layout.graphs == "layers" else ROUTER_LAUNCHES
    return constants.kernel_s * others + max(0.0, ahead - busy)


@lru_cache(maxsize=8192)
def head_seconds(model: Transformer, layout: Layout, device: Device, constants: Calibration) -> float:
    """Seconds of head and loss, forward and backward."""
    gemm = head_gemm(model, layout)
    passes = FUSED_LOSS_BYTES if layout.megatron or layout.compiled else EAGER_LOSS_BYTES
    loss = gemm.m * gemm.n * passes / stream_bytes_per_s(device, constants)
    return 3 * gemm_seconds(gemm, layout, device, constants) + loss


def _exponential_seconds(scores: float, device: Device) -> float:
    """Seconds of a softmax's exponentials. Products hardly hide them: the tensor cores wait.

    From Hopper to Blackwell the tensor cores became 2.25 times as fast, the units for exponentials no faster; with
    heads of 128 both take the same time. cuDNN reaches 1235 TFLOP/s on a B200 (FlashAttention-4, 2026), this sum 1197.
    """
    return scores / (device.exponentials_T * 1e12) if device.exponentials_T else 0.0


def stream_bytes_per_s(device: Device, constants: Calibration) -> float:
    """Bytes that an elementwise kernel reads and writes in a second."""
    return device.copy_bytes_per_s * constants.memory
