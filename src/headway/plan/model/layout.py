"""A layout: the degrees of parallelism, the batch, the recomputation, and the precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from headway.errors import UsageError
from headway.plan import checks
from headway.plan.model.transformer import Transformer

Recompute = Literal["none", "selective", "modules", "sac", "full"]
PipelineSchedule = Literal["1f1b", "zero-bubble"]
Dispatcher = Literal["fused", "all-to-all"]
Graphs = Literal["none", "layers", "step"]
MOST_GPUS = 10_000_000
"""The largest clusters have some 100,000."""
PrecisionName = Literal["bf16", "zero16", "amp", "fp32", "tf32", "pure-bf16", "fp8", "amp-fp8"]
OptimizerName = Literal[
    "adamw", "adamw-fused", "adamw-foreach", "adamw8bit", "adamw-bf16", "sgd", "sgd-momentum", "lion", "muon"
]


class PrecisionBytes(NamedTuple):
    """Bytes per parameter (weight, gradient, master copy, one optimizer moment) and per activation element."""

    weight: int
    gradient: int
    master: int
    moment: int
    activation: int
    residual: int
    source: str


PRECISIONS: dict[str, PrecisionBytes] = {
    "bf16": PrecisionBytes(2, 4, 4, 4, 2, 2, "Megatron-LM: fp32 gradients, master and moments: 18 with Adam"),
    "zero16": PrecisionBytes(
        2, 2, 4, 4, 2, 2, "ZeRO paper: 16-bit gradients, fp32 master and moments: 16 with Adam"
    ),
    "amp": PrecisionBytes(
        4, 4, 0, 4, 2, 4, "torch autocast or FSDP2 mixed precision: fp32 weights: 16 with Adam"
    ),
    "fp32": PrecisionBytes(4, 4, 0, 4, 4, 4, "everything in fp32: 16 with Adam"),
    "tf32": PrecisionBytes(4, 4, 0, 4, 4, 4, "everything in fp32, products in TF32: 16 with Adam"),
    "pure-bf16": PrecisionBytes(2, 2, 0, 2, 2, 2, "everything in bf16: 8 with Adam"),
    "fp8": PrecisionBytes(2, 4, 4, 4, 2, 2, "bf16 training with fp8 matrix products"),
    "amp-fp8": PrecisionBytes(4, 4, 0, 4, 2, 4, "as amp, with fp8 matrix products (torchao, torchtitan)"),
}
OPTIMIZER_MOMENTS = {
    "adamw": 2,
    "adamw-fused": 2,
    "adamw-foreach": 2,
    "adamw8bit": 2,
    "adamw-bf16": 2,
    "sgd": 0,
    "sgd-momentum": 1,
    "lion": 1,
    "muon": 1,
}
OPTIMIZER_MOMENT_BYTES = {"adamw8bit": 1, "adamw-bf16": 2}
"""Bytes of one moment, for optimizers whose moments do not follow the precision."""


def most_chunks(model: Transformer, vpp: int) -> int:
    """Chunks that a pipeline may have. With several per rank, the first may be the embedding alone and the last the
    head (Llama 3 405B: 126 layers in 16 x 8 chunks)."""
    return model.layers + (2 if vpp > 1 else 0)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to distribute a model over GPUs. Ranks are ordered tp, cp, dp, pp, the innermost first.

    >>> Layout(dp=4, tp=8, pp=2, microbatch=1, global_batch=64).gpus
    64
    """

    dp: int = 1
    """Data parallelism: replicas of the model, each with its share of the batch."""
    tp: int = 1
    """Tensor parallelism: ranks that split every layer."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Model chunks per pipeline rank (interleaved schedule)."""
    schedule: PipelineSchedule = "1f1b"
    """Pipeline schedule. zero-bubble: weight gradients are computed in time that would be idle."""
    cp: int = 1
    """Context parallelism: ranks that split a sequence."""
    ep: int = 1
    """Expert parallelism: ranks of one stage that hold different experts."""
    expert_tp: int | None = None
    """Ranks that split one expert; tp if not given. With 1, ep may span dp x cp x tp ranks (folding)."""
    sequence_parallel: bool = False
    """Split the activations that tensor parallelism replicates, along the sequence."""
    zero: int = 0
    """ZeRO stage. 0: replicated. 1: optimizer sharded over dp. 2: gradients, too. 3: parameters, too (FSDP)."""
    shard: int | None = None
    """Ranks that shard one replica, if fewer than dp (hybrid sharding)."""
    reshard: bool = True
    """With zero=3: free a layer's gathered weights after its forward."""
    microbatch: int = 1
    """Samples of one replica in one forward pass."""
    global_batch: int = 1
    """Samples of one optimizer step, over all replicas."""
    sequence: int | None = None
    """Tokens per sample; the model's own context if not given."""
    recompute: Recompute = "none"
    """selective: the attention core; modules: norms, activations and MLA's up-projections (Megatron, DeepSeek-V3);
    sac: every other matrix product (torch); full: the complete layer."""
    recompute_layers: int | None = None
    """Layers of each pipeline stage that recompute; all if not given."""
    precision: PrecisionName = "bf16"
    """Bytes per parameter with Adam: bf16 and fp8 18 (Megatron), zero16, amp, amp-fp8, fp32 and tf32 16,
    pure-bf16 8."""
    optimizer: OptimizerName = "adamw"
    """Moments: adamw 2, adamw8bit 2 in 8 bits, adamw-bf16 2 in 16 bits (DeepSeek-V3), lion, muon and sgd-momentum 1,
    sgd none. adamw means torch's default on a GPU, adamw-foreach, which needs a temporary copy of the weights;
    adamw-fused needs none."""
    flash: bool = True
    """Fused attention: no score matrix in memory."""
    loss_chunks: int = 1
    """Chunks in which the logits and the loss are computed; more chunks need less memory."""
    bucket_MB: float = 25
    """Size of a gradient bucket, in decimal megabytes."""
    overlap: bool = True
    """Data-parallel communication overlaps the backward pass."""
    tp_overlap: bool = False
    """Tensor-parallel communication overlaps the products it belongs to (async TP, user buffers)."""
    ep_overlap: bool = False
    """Tokens are sent to their experts while another microbatch is computed (Megatron's overlapped all-to-all)."""
    dispatcher: Dispatcher = "fused"
    """How tokens reach their experts. fused: once for each rank and node (DeepEP, HybridEP); all-to-all: a copy for
    each expert (NCCL), sorted by expert before and after."""
    graphs: Graphs = "none"
    """What a model with experts launches as CUDA graphs. layers: attention and router; step: everything."""
    offload: bool = False
    """Keep the optimizer state in host memory."""
    compiled: bool = False
    """The model runs under torch.compile: fewer kernels to launch and fewer saved activations."""

    def __post_init__(self) -> None:
        for key in ("dp", "tp", "pp", "vpp", "cp", "ep", "microbatch", "global_batch", "loss_chunks"):
            checks.require_int(f"layout.{key}", getattr(self, key))
        for key in ("shard", "sequence", "expert_tp", "recompute_layers"):
            if getattr(self, key) is not None:
                checks.require_int(f"layout.{key}", getattr(self, key))
        checks.require_bools("layout", self)
        checks.require_number("layout.bucket_MB", self.bucket_MB)
        checks.require_choice("layout.zero", self.zero, (0, 1, 2, 3))
        checks.require_choice("layout.recompute", self.recompute, get_args(Recompute))
        checks.require_choice("layout.schedule", self.schedule, get_args(PipelineSchedule))
        checks.require_choice("layout.dispatcher", self.dispatcher, get_args(Dispatcher))
        checks.require_choice("layout.graphs", self.graphs, get_args(Graphs))
        checks.require_choice("layout.precision", self.precision, tuple(PRECISIONS))
        checks.require_choice("layout.optimizer", self.optimizer, tuple(OPTIMIZER_MOMENTS))
        if self.recompute_layers is not None and self.recompute == "none":
            raise UsageError(
                f"layout.recompute_layers is {self.recompute_layers}, but layout.recompute is none; "
                "choose what these layers recompute: selective, modules, sac or full"
            )
        self._check_batch()

    def _check_batch(self) -> None:
        checks.require_int("layout.dp x tp x pp x cp", self.gpus, at_most=MOST_GPUS)
        if self.global_batch % (self.dp * self.microbatch):
            raise UsageError(
                f"layout.global_batch is {self.global_batch}, not a multiple of dp x microbatch "
                f"({self.dp} x {self.microbatch}); valid: multiples of {self.dp * self.microbatch}"
            )
        if self.shard is not None:
            checks.require_divisor("layout.shard", self.shard, "layout.dp", self.dp)
        whole = self.dp * self.cp * self.tp
        name = "layout.ep x expert_tp" if self.expert_tp else "layout.ep x tp"
        checks.require_divisor(name, self.ep * self.expert_ways, "dp x cp x tp", whole)
        if self.schedule == "zero-bubble" and self.vpp > 1:
            raise UsageError(
                f"layout.schedule is zero-bubble with vpp {self.vpp}; it has one chunk per rank: use vpp 1"
            )
        if self.vpp > 1 and (self.pp == 1 or self.microbatches % self.pp):
            raise UsageError(
                f"layout.vpp is {self.vpp}: the interleaved schedule needs pp above 1 (it is {self.pp}) and "
                f"microbatches ({self.microbatches}) in multiples of pp; use vpp 1, or another global_batch"
            )

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def microbatches(self) -> int:
        """Microbatches per pipeline and step."""
        return self.global_batch // (self.dp * self.microbatch)

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards one replica, context-parallel ranks included: they hold the same weights."""
        return (self.shard or self.dp) * self.cp

    @property
    def trainable(self) -> bool:
        """Whether `headway.train` can run it today: data, fully sharded and tensor parallelism, whole blocks
        recomputed or none. Replicas of tensor-parallel groups are fully sharded."""
        recomputes = self.recompute in ("none", "full") and self.recompute_layers is None
        sharded = self.zero == 3 or (self.zero == 0 and 1 in (self.dp, self.tp))
        return self.pp == self.cp == self.ep == 1 and sharded and recomputes

    def recomputed_share(self, layers: int) -> float:
        """Fraction of a stage's layers that recompute."""
        if self.recompute_layers is None or not layers:
            return 1.0
        return min(1.0, self.recompute_layers / layers)

    @property
    def sequence_ways(self) -> int:
        """Ranks that split the activations which tensor parallelism replicates."""
        return self.tp if self.sequence_parallel else 1

    @property
    def expert_ways(self) -> int:
        """Ranks that split one expert."""
        return self.expert_tp or self.tp

    @property
    def element_bytes(self) -> PrecisionBytes:
        """Bytes per weight, gradient, master copy, moment and activation."""
        return PRECISIONS[self.precision]

    @property
    def moment_bytes(self) -> int:
        """Bytes per parameter of all moments of the optimizer."""
        each = OPTIMIZER_MOMENT_BYTES.get(self.optimizer, self.element_bytes.moment)
        return OPTIMIZER_MOMENTS[self.optimizer] * each

    @property
    def megatron(self) -> bool:
        """Whether the precision is one of Megatron or DeepSpeed, which have their own buffers, and not of torch."""
        return self.precision in ("bf16", "zero16", "fp8")

    @property
    def autocast(self) -> bool:
        """Whether weights are fp32 and products in fewer bits, as under torch's autocast."""
        return self.precision in ("amp", "amp-fp8")

    @property
    def residual_bytes(self) -> int:
        """Bytes of one element of the residual stream: fp32 under autocast, 16 bits under FSDP."""
        return self.element_bytes.activation if self.zero == 3 else self.element_bytes.residual

    def check_model(self, model: Transformer) -> None:
        """Refuses a layout that the model cannot be split into."""
        checks.require_divisor("layout.tp", self.tp, "model.heads", model.heads)
        if self.tp > model.kv and self.tp % model.kv:
            raise UsageError(
                f"layout.tp is {self.tp}; valid: divisors or multiples of model.kv_heads ({model.kv})"
            )
        most = most_chunks(model, self.vpp)
        if self.pp * self.vpp > most:
            raise UsageError(
                f"layout.pp x vpp is {self.pp * self.vpp}, more than model.layers ({model.layers}"
                f"{', and two for embedding and head' if most > model.layers else ''}); valid: at most {most}"
            )
        if model.encoder and (self.pp > 1 or self.cp > 1):
            raise UsageError(
                f"layout.pp is {self.pp} and layout.cp {self.cp}, but the model has an encoder; valid: 1 and 1"
            )
        if self.ep > 1 and model.moe is None:
            raise UsageError(f"layout.ep is {self.ep}, but the model has no experts; valid: 1")
        if model.moe:
            checks.require_divisor("layout.ep", self.ep, "model.moe.experts", model.moe.experts)
            if self.tp > 1 and self.megatron and not self.sequence_parallel:
                raise UsageError(
                    f"layout.tp is {self.tp} without sequence_parallel, which Megatron refuses for models with "
                    "experts; set sequence_parallel, or tp 1"
                )
        self._check_sequence(model)

    def _check_sequence(self, model: Transformer) -> None:
        sequence = self.tokens(model)
        if model.image:
            if self.sequence is not None:
                raise UsageError(
                    f"layout.sequence is {self.sequence}, but the model reads images of {sequence} tokens; "
                    "leave it out, or set model.image.size"
                )
        elif model.position == "learned" and sequence > model.context:
            raise UsageError(
                f"layout.sequence is {sequence}, but the model has learned {model.context} positions; "
                f"valid: at most {model.context}, or set model.context"
            )
        if self.cp > 1:
            checks.require_divisor("layout.cp", self.cp, "layout.sequence", sequence)
        if self.cp > 1 and sequence % (2 * self.cp):
            raise UsageError(
                f"layout.sequence is {sequence}, which is not a multiple of 2 x cp ({2 * self.cp}): each rank has an "
                "early and a late part; choose another sequence or cp"
            )
        if self.sequence_parallel:
            checks.require_divisor(
                "layout.tp", self.tp, "layout.sequence / cp (sequence_parallel)", sequence // self.cp
            )

    def tokens(self, model: Transformer) -> int:
        """Tokens per sample."""
        return model.tokens_per_sample if self.sequence is None or model.image else self.sequence

    def rank_tokens(self, model: Transformer) -> float:
        """Tokens of one microbatch on one context-parallel rank."""
        return self.microbatch * self.tokens(model) / self.cp

    def describe(self) -> str:
        """Returns the layout as one short line.

        >>> Layout(dp=4, tp=2, zero=1, global_batch=8).describe()
        'dp4 tp2 zero1 mb1'
        """
        parts = [f"dp{self.dp}"]
        parts += [
            f"{key}{getattr(self, key)}" for key in ("tp", "pp", "vpp", "cp", "ep") if getattr(self, key) > 1
        ]
        parts += ["zb"] if self.schedule == "zero-bubble" else []
        parts += [f"etp{self.expert_tp}"] if self.expert_tp and self.expert_tp != self.tp else []
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += [f"shard{self.shard}"] if self.shard else []
        parts.append(f"mb{self.microbatch}")
        parts += ["sp"] if self.sequence_parallel else []
        some = f":{self.recompute_layers}" if self.recompute_layers else ""
        parts += [f"recompute={self.recompute}{some}"] if self.recompute != "none" else []
        return " ".join(parts)
