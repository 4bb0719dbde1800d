"""The time of one step, by part: seconds on the critical path. The parts add up to the total."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import log, sqrt

from headway.plan.cost import collectives, compute
from headway.plan.cost.activations import kept_share
from headway.plan.cost.schedule import bubble_share, chunk_runs, stage_layers
from headway.plan.cost.states import RankParameters, expert_shards, on_rank, updated
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.hardware import Device, Node
from headway.plan.model.layout import Layout
from headway.plan.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step, by part."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Seconds of one layer and microbatch on one rank: compute, and communication that does not overlap it."""

    products: float
    attention: float
    elementwise: float
    recompute: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    launches: float = 0.0

    @property
    def total(self) -> float:
        compute_s = self.products + self.attention + self.elementwise + self.recompute
        sent = self.tensor_parallel + self.context_parallel + self.expert_parallel
        return compute_s + sent + self.launches

    def mixed(self, other: LayerCost, share: float) -> LayerCost:
        """Returns the mean over layers of which the fraction `share` costs `self`, and the rest `other`."""
        pairs = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        return LayerCost(**{name: share * own + (1 - share) * rest for name, (own, rest) in pairs.items()})


_Work = list[tuple[int, LayerCost]]
"""The layers of a stage by kind: their number, and the time of one."""


def step_time(model: Transformer, layout: Layout, node: Node, constants: Calibration) -> StepTime:
    """Seconds of one step: m microbatches on the slowest stage, the bubble, and what follows the last backward pass."""
    work = _stage_work(model, layout, node, constants)
    stages = _stage_seconds(model, layout, node, constants, work)
    slowest, m, v = max(stages), layout.microbatches, layout.vpp
    parts = _busy_parts(model, layout, node, constants, work, stages.index(slowest))
    idle = bubble_share(layout.schedule, layout.pp, m, kept_share(model, layout))
    parts["pipeline bubble"] = idle * (sum(stages) - slowest) / v
    parts["data parallel"] = _data_parallel(model, layout, node, constants, busy=m * slowest)
    parts["optimizer"] = _optimizer(model, layout, node.device, constants)
    parts["stragglers"] = sum(parts.values()) * straggling(layout.gpus, constants)
    return StepTime(parts={name: seconds * constants.scale for name, seconds in parts.items() if seconds > 0})


def straggling(gpus: int, constants: Calibration) -> float:
    """How much longer than the mean the slowest of `gpus` normally distributed steps takes: jitter sqrt(2 ln n)."""
    return constants.jitter * sqrt(2 * log(gpus))


def _busy_parts(
    model: Transformer,
    layout: Layout,
    node: Node,
    constants: Calibration,
    work: list[_Work],
    stage: int,
) -> dict[str, float]:
    """Seconds of the slowest stage for all microbatches, by part."""
    microbatches = layout.microbatches

    def total(part: str) -> float:
        once: float = sum(count * getattr(cost, part) for count, cost in work[stage])
        return microbatches * once

    head = (
        microbatches * compute.head_seconds(model, layout, node.device, constants)
        if stage == layout.pp - 1
        else 0.0
    )
    return {
        "matrix products": total("products"),
        "attention": total("attention"),
        "elementwise": total("elementwise"),
        "recompute": total("recompute"),
        "head and loss": head,
        "tensor parallel": total("tensor_parallel"),
        "context parallel": total("context_parallel"),
        "expert parallel": total("expert_parallel"),
        "launches": total("launches"),
        "pipeline sends": microbatches * _sends(model, layout, node, constants),
    }


def _stage_seconds(
    model: Transformer, layout: Layout, node: Node, constants: Calibration, work: list[_Work]
) -> list[float]:
    """Seconds of one microbatch on each stage, forward and backward."""
    fixed = _sends(model, layout, node, constants)
    seconds = [sum(count * cost.total for count, cost in stage) + fixed for stage in work]
    seconds[-1] += compute.head_seconds(model, layout, node.device, constants)
    return seconds


def _stage_work(model: Transformer, layout: Layout, node: Node, constants: Calibration) -> list[_Work]:
    """The work of each stage for one microbatch; an encoder is on the only stage."""
    own = plain = _layer_costs(model, layout, node, constants)
    if layout.recompute_layers is not None:
        saving = replace(layout, recompute="none", recompute_layers=None)
        plain = _layer_costs(model, saving, node, constants)
    work: list[_Work] = []
    for stage in stage_layers(model, layout.pp, layout.vpp):
        share = layout.recomputed_share(stage.total)
        costs = (
            own if share == 1 else [cost.mixed(rest, share) for cost, rest in zip(own, plain, strict=True)]
        )
        work.append(list(zip((stage.dense, stage.mixture), costs, strict=True)))
    if model.encoder_stack is not None:
        work[0] += _encoder_work(model.encoder_stack, model, layout, node, constants)
    return work


def _encoder_work(
    stack: Transformer, model: Transformer, layout: Layout, node: Node, constants: Calibration
) -> _Work:
    inside = replace(layout, sequence=model.encoded_tokens(layout.tokens(model)))
    cost = _layer_cost(stack, inside, node, constants, moe=False)
    share = layout.recomputed_share(stack.layers)
    if share < 1:
        saving = replace(inside, recompute="none", recompute_layers=None)
        plain = _layer_cost(stack, saving, node, constants, moe=False)
        cost = cost.mixed(plain, share)
    return [(stack.layers, cost)]


def stage_passes(
    model: Transformer, layout: Layout, node: Node, constants: Calibration
) -> list[tuple[float, float]]:
    """Seconds of the forward and of the backward pass of one microbatch on each stage, recomputation included."""
    forward = compute.layer_forward(model, layout, node.device, constants, moe=model.moe is not None)
    backward = compute.layer_backward(forward, layout, constants).total
    again = compute.layer_recompute(forward, model, layout, node.device, constants).total
    share = forward.total / (forward.total + backward + again)
    work = _stage_work(model, layout, node, constants)
    seconds = _stage_seconds(model, layout, node, constants, work)
    return [(share * each, (1 - share) * each) for each in seconds]


def _layer_costs(
    model: Transformer, layout: Layout, node: Node, constants: Calibration
) -> tuple[LayerCost, LayerCost]:
    """Times of a dense and of a mixture-of-experts layer."""
    dense = _layer_cost(model, layout, node, constants, moe=False)
    mixture = _layer_cost(model, layout, node, constants, moe=True) if model.moe else dense
    return dense, mixture


def _layer_cost(
    model: Transformer, layout: Layout, node: Node, constants: Calibration, *, moe: bool
) -> LayerCost:
    forward = compute.layer_forward(model, layout, node.device, constants, moe=moe)
    backward = compute.layer_backward(forward, layout, constants)
    recomputed = compute.layer_recompute(forward, model, layout, node.device, constants)
    computed = forward.total + backward.total + recomputed.total
    cost = LayerCost(
        products=forward.products + backward.products,
        attention=forward.attention + backward.attention,
        elementwise=forward.elementwise + backward.elementwise,
        recompute=recomputed.total,
        tensor_parallel=_tensor_parallel(model, layout, node, constants, moe=moe),
        context_parallel=_context_parallel(
            model, layout, node, constants, forward.attention, recomputed.attention
        ),
        expert_parallel=_expert_parallel(model, layout, node, constants, computed) if moe else 0.0,
    )
    return replace(
        cost, launches=compute.launch_seconds(model, layout, constants, cost.total) if moe else 0.0
    )


def _tensor_parallel(
    model: Transformer, layout: Layout, node: Node, constants: Calibration, *, moe: bool
) -> float:
    """Two all-reduces forward, two backward, two more when the forward is repeated (SC21, section 3.2).

    Of each two, one belongs to attention, the other to the feed-forward layer or its experts.
    """
    if layout.tp == 1:
        return 0.0
    ranks = collectives.axis_group("tp", layout, node, constants)
    size = layout.rank_tokens(model) * model.hidden * layout.element_bytes.activation
    # a reduce-scatter and an all-gather move what an all-reduce moves (Korthikanti, section 4.2.2)
    once = collectives.all_reduce(ranks, size)
    wide = _over_experts(model, layout, node, constants, size) if moe else once
    passes = 3 if layout.recompute == "full" else 2
    exposed = 1 - TP_HIDDEN if layout.tp_overlap else 1.0
    return exposed * passes * (once + wide)


def _over_experts(
    model: Transformer, layout: Layout, node: Node, constants: Calibration, size: float
) -> float:
    """Seconds of one pass to gather the tokens of experts that are split, and to reduce their results.

    Megatron's dispatcher gathers each token once for each of its experts, torch once. Shared experts are split by tp;
    whole experts are not.
    """
    assert model.moe is not None
    ranks = collectives.axis_group("tp", layout, node, constants)
    shared = collectives.all_reduce(ranks, size) if model.moe.shared_ffn else 0.0
    ways = layout.expert_ways
    if ways == 1:
        return shared
    if not layout.megatron:
        return collectives.all_reduce(ranks, size)
    split = collectives.strided_group(ways, 1, node, constants)
    copies = model.moe.top_k * model.moe.capacity * ways / layout.tp
    return shared + collectives.all_reduce(split, copies * size)


TP_HIDDEN = 0.45
"""Fraction of tensor-parallel communication that products hide if it is split into pieces: torchtitan's Llama 3 70B
takes 27.4 s without and 25.1 s with asynchronous tensor parallelism, and communicates for about 5 s."""


def _context_parallel(
    model: Transformer, layout: Layout, node: Node, constants: Calibration, attention: float, repeated: float
) -> float:
    """Seconds that context parallelism adds: exposed exchange, merging of partial results, and causal imbalance.

    Keys and values are sent around the ring while scores are computed. After each hop the fp32 output is corrected.
    Megatron gives each rank an early and a late part of the sequence; in torch the last rank has the most scores.
    """
    if layout.cp == 1:
        return 0.0
    ranks = collectives.axis_group("cp", layout, node, constants)
    tokens = layout.rank_tokens(model)
    block = 2 * tokens * model.kv * model.dim * layout.element_bytes.activation / min(layout.tp, model.kv)
    hops = (layout.cp - 1) * collectives.send(ranks, block)
    forward, backward = attention + repeated, constants.attention_backward * attention
    passes = 2 if repeated else 1
    exposed = max(0.0, passes * hops - forward) + max(0.0, 2 * hops - backward)
    stream = compute.stream_bytes_per_s(node.device, constants)
    merged = tokens * model.heads * model.dim / layout.tp * MERGE_BYTES * (layout.cp - 1) / stream
    uneven = (
        0.0 if layout.megatron or not model.causal else (layout.cp - 1) / layout.cp * (forward + backward)
    )
    return exposed + (passes + 2) * merged + uneven


MERGE_BYTES = 12
"""Bytes per element to correct an fp32 output by a partial one: two are read, one is written."""


def _expert_parallel(
    model: Transformer, layout: Layout, node: Node, constants: Calibration, computed: float
) -> float:
    """Tokens are sent to their experts and back, forward and backward, and again when the forward is recomputed.

    With `ep_overlap`, a layer of another microbatch is computed meanwhile, in `computed` seconds, and slowed by the
    exchange that it hides. The forward of the first microbatch and the backward of the last overlap nothing.
    """
    if layout.ep == 1 or model.moe is None:
        return 0.0
    ranks = collectives.axis_group("ep", layout, node, constants)
    tokens = layout.rank_tokens(model) / layout.tp
    size = tokens * model.hidden * layout.element_bytes.activation * model.moe.capacity
    inside = outside = 1.0
    if layout.dispatcher == "fused":
        # a token for several experts of one rank, or of one node, is sent there once
        inside, outside = (_distinct(model.moe.top_k, places) for places in (ranks.size, ranks.nodes))
        inside *= FUSED_COST
    passes = 6 if layout.recompute == "full" else 4
    total = passes * collectives.all_to_all(ranks, size * model.moe.top_k, inside=inside, outside=outside)
    beside = (layout.microbatches - 1) / layout.microbatches if layout.ep_overlap else 0.0
    hidden = beside * min(total, computed)
    return total - hidden + OVERLAP_COST * hidden


FUSED_COST = 1.4
"""Time of tokens that a fused dispatcher sends inside a node over that of a collective's bytes. Of 900 GB/s, HybridEP
reaches 536 and 531 (there and back) on eight B200, 484 and 465 on 32 GB200 (its README); all-reduces reach 0.78."""


def _distinct(top_k: int, places: int) -> float:
    """Expected number of distinct places (ranks or nodes) of a token's `top_k` experts, over top_k."""
    return float(places * (1 - (1 - 1 / places) ** top_k) / top_k)


def _sends(model: Transformer, layout: Layout, node: Node, constants: Calibration) -> float:
    """Sends of one microbatch's boundary activations, forward and backward, for each chunk (SC21, section 4.1).

    With several chunks and `overlap`, a chunk is sent while the next one is computed.
    """
    if layout.pp == 1 or (layout.vpp > 1 and layout.overlap):
        return 0.0
    ranks = collectives.axis_group("pp", layout, node, constants)
    tokens = layout.rank_tokens(model)
    size = tokens * model.hidden * layout.element_bytes.activation / layout.tp
    return 2 * layout.vpp * collectives.send(ranks, size)


def _data_parallel(
    model: Transformer, layout: Layout, node: Node, constants: Calibration, *, busy: float
) -> float:
    """Gradients are reduced and weights gathered; at least the communication of one unit is exposed.

    ZeRO 2 keeps no full gradient between two microbatches: it reduces the gradients of each, ZeRO 1 only their sum.
    With several chunks it reduces the sum over a run of one chunk's backward passes (Lamy-Poirier 2022, breadth-first).
    """
    if layout.dp * layout.cp == 1:
        return 0.0
    parameters = on_rank(model, layout, 0)
    count = parameters.shared + parameters.experts
    width, m = layout.element_bytes.activation, layout.microbatches
    gradient = layout.element_bytes.gradient
    units = stage_layers(model, layout.pp, layout.vpp)[0].total + 1 if layout.zero == 3 else 1
    reduce = _over_shards(parameters, gradient, layout, node, constants, units)
    gather = _over_shards(parameters, width, layout, node, constants, units)
    besides = _replica_reduce(parameters, layout, node, constants)
    besides += _unit_copies(count, layout, node.device, constants)
    if layout.zero == 3:
        times = m if layout.reshard else 1
        gathers, reduces = (2 if layout.reshard else 1) * times * gather, times * reduce
        share = (times * busy / m) / 3  # a third of the time is the forward pass
        exposed = max(0.0, gathers / 2 - share) + max(0.0, gathers / 2 + reduces - 2 * share)
    else:
        gathers = gather if layout.zero else reduce  # without ZeRO, gradients are gathered, too
        times = chunk_runs(layout.pp, m, layout.vpp) if layout.zero == 2 else 1
        reduces = times * reduce
        # the backward of its microbatch hides a reduction
        exposed = times * max(0.0, reduce - busy / m * 2 / 3)
        # the weights of a sharded optimizer are gathered during the next forward, gradients are not
        hidden = busy / m / 3 if layout.zero else busy / m * 2 / 3
        exposed += max(0.0, gathers - hidden)
    if not layout.overlap:
        return gathers + reduces + besides
    total = gathers + reduces
    exposed = max(exposed, total / m * parameters.largest_unit / count)
    return exposed + OVERLAP_COST * max(0.0, total - exposed) + besides


OVERLAP_COST = 0.2
"""A hidden collective slows concurrent products: its kernels take 16 to 32 of 108 to 132 multiprocessors."""


def _over_shards(
    parameters: RankParameters, width: int, layout: Layout, node: Node, constants: Calibration, units: int
) -> float:
    """Seconds to reduce and scatter, or to gather, all parameters of a rank, `width` bytes each.

    Experts are replicated on fewer ranks, which are on different nodes, each with its own share of the network.
    """
    ranks = collectives.shard_group(layout, node, constants)
    shared = collectives.reduce_scatter(ranks, parameters.shared * width, pieces=units)
    if not parameters.experts:
        return shared
    ranks = collectives.expert_shard_group(layout, node, constants)
    return shared + collectives.reduce_scatter(ranks, parameters.experts * width, pieces=units)


def _unit_copies(count: float, layout: Layout, device: Device, constants: Calibration) -> float:
    """Seconds that torch's FSDP takes to copy gathered weights out of the buffers of a unit, and gradients into them.

    Weights are read and written after each gather, gradients read and written in the precision they are reduced in.
    """
    if layout.zero < 3 or layout.megatron:
        return 0.0
    times, passes = (layout.microbatches, 2) if layout.reshard else (1, 1)
    width = layout.element_bytes.activation
    moved = times * count * (passes * 2 * width + width + layout.element_bytes.gradient)
    return moved / compute.stream_bytes_per_s(device, constants)


def _replica_reduce(parameters: RankParameters, layout: Layout, node: Node, constants: Calibration) -> float:
    """Seconds to reduce gradient shards between the replicas of hybrid sharding. Experts have fewer shards."""
    if layout.shard in (None, layout.dp):
        return 0.0
    ranks, gradient = layout.dp * layout.cp * layout.tp, layout.element_bytes.gradient

    def between(count: float, shards: int, ways: int) -> float:
        group = collectives.strided_group(ranks // (shards * ways), shards * ways, node, constants)
        return collectives.all_reduce(group, count * gradient / shards)

    ways = layout.ep * layout.expert_ways
    return between(parameters.shared, layout.shards, layout.tp) + between(
        parameters.experts, int(expert_shards(layout)), ways
    )


def _optimizer(model: Transformer, layout: Layout, device: Device, constants: Calibration) -> float:
    """Weights, gradients and moments are read and written once."""
    count = updated(on_rank(model, layout, 0), layout)
    numbers = layout.element_bytes
    state = numbers.master + layout.moment_bytes
    traffic = count * (2 * state + 2 * numbers.weight + numbers.gradient)
    if layout.offload:
        return traffic / (device.pcie_GBps * 1e9)
    return traffic / compute.stream_bytes_per_s(device, constants)
