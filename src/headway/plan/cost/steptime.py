"""The time of one step, by part: seconds on the critical path. The parts add up to the total."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from headway.plan.cost import collectives, compute
from headway.plan.cost.schedule import stage_layers
from headway.plan.cost.states import on_rank
from headway.plan.machine.calibration import Calibration
from headway.plan.machine.hardware import Device, Node
from headway.plan.model.layout import OPTIMIZER_MOMENTS, Layout
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

    @property
    def total(self) -> float:
        compute_s = self.products + self.attention + self.elementwise + self.recompute
        return compute_s + self.tensor_parallel + self.context_parallel + self.expert_parallel


def step_time(model: Transformer, layout: Layout, node: Node, constants: Calibration) -> StepTime:
    """Seconds of one step: m microbatches on the slowest stage, the bubble, and what follows the last backward."""
    layers = _layer_costs(model, layout, node, constants)
    stages = _stage_seconds(model, layout, node, constants, layers)
    slowest, m, v = max(stages), layout.microbatches, layout.vpp
    parts = _busy_parts(model, layout, node, constants, layers, stages.index(slowest))
    parts["pipeline bubble"] = (sum(stages) - slowest) / v
    parts["data parallel"] = _data_parallel(model, layout, node, constants, busy=m * slowest)
    parts["optimizer"] = _optimizer(model, layout, node.device, constants)
    return StepTime(parts={name: seconds * constants.scale for name, seconds in parts.items() if seconds > 0})


def _busy_parts(
    model: Transformer,
    layout: Layout,
    node: Node,
    constants: Calibration,
    layers: tuple[LayerCost, LayerCost],
    stage: int,
) -> dict[str, float]:
    """Seconds of the slowest stage for all microbatches, by part."""
    dense, mixture = layers
    count = stage_layers(model, layout.pp, layout.vpp)[stage]
    microbatches = layout.microbatches

    def both(part: str) -> float:
        each: float = count.dense * getattr(dense, part) + count.mixture * getattr(mixture, part)
        return microbatches * each

    head = microbatches * _head(model, layout, node.device, constants) if stage == layout.pp - 1 else 0.0
    return {
        "matrix products": both("products"),
        "attention": both("attention"),
        "elementwise": both("elementwise"),
        "recompute": both("recompute"),
        "head and loss": head,
        "tensor parallel": both("tensor_parallel"),
        "context parallel": both("context_parallel"),
        "expert parallel": both("expert_parallel"),
        "pipeline sends": microbatches * _sends(model, layout, node, constants),
    }


def _stage_seconds(
    model: Transformer,
    layout: Layout,
    node: Node,
    constants: Calibration,
    layers: tuple[LayerCost, LayerCost],
) -> list[float]:
    """Seconds of one microbatch on each stage, forward and backward."""
    dense, mixture = layers[0].total, layers[1].total
    fixed = _sends(model, layout, node, constants)
    counts = stage_layers(model, layout.pp, layout.vpp)
    seconds = [count.dense * dense + count.mixture * mixture + fixed for count in counts]
    seconds[-1] += _head(model, layout, node.device, constants)
    return seconds


@lru_cache(maxsize=8192)
def _head(model: Transformer, layout: Layout, device: Device, constants: Calibration) -> float:
    return compute.head_seconds(model, layout, device, constants)


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
    backward = compute.layer_backward(forward, layout)
    recomputed = compute.layer_recompute(forward, layout)
    return LayerCost(
        products=forward.products + backward.products,
        attention=forward.attention + backward.attention,
        elementwise=forward.elementwise + backward.elementwise,
        recompute=recomputed.total,
        tensor_parallel=_tensor_parallel(model, layout, node, constants),
        context_parallel=_context_parallel(model, layout, node, constants, forward.attention),
        expert_parallel=_expert_parallel(model, layout, node, constants) if moe else 0.0,
    )


def _tensor_parallel(model: Transformer, layout: Layout, node: Node, constants: Calibration) -> float:
    """Two all-reduces forward, two backward, two more when the forward is repeated (SC21, section 3.2)."""
    if layout.tp == 1:
        return 0.0
    ranks = collectives.axis_group("tp", layout, node, constants)
    size = (
        layout.microbatch * layout.tokens(model) / layout.cp * model.hidden * layout.element_bytes.activation
    )
    passes = 6 if layout.recompute == "full" else 4
    # a reduce-scatter and an all-gather move what an all-reduce moves (Korthikanti, section 4.2.2)
    return passes * collectives.all_reduce(ranks, size)


def _context_parallel(
    model: Transformer, layout: Layout, node: Node, constants: Calibration, attention: float
) -> float:
    """Keys and values are sent around the ring while scores are computed; what does not overlap is exposed."""
    if layout.cp == 1:
        return 0.0
    ranks = collectives.axis_group("cp", layout, node, constants)
    tokens = layout.microbatch * layout.tokens(model) / layout.cp
    block = 2 * tokens * model.kv * model.dim * layout.element_bytes.activation / min(layout.tp, model.kv)
    hops = (layout.cp - 1) * collectives.send(ranks, block)
    return max(0.0, hops - attention) + max(0.0, 2 * hops - compute.FLASH_BACKWARD_RATIO * attention)


def _expert_parallel(model: Transformer, layout: Layout, node: Node, constants: Calibration) -> float:
    """Tokens are sent to their experts and back, forward and backward: four all-to-alls."""
    if layout.ep == 1 or model.moe is None:
        return 0.0
    ranks = collectives.axis_group("ep", layout, node, constants)
    tokens = layout.microbatch * layout.tokens(model) / layout.cp
    routed = tokens * model.moe.top_k * model.moe.capacity
    size = routed * model.hidden * layout.element_bytes.activation / layout.tp
    return 4 * collectives.all_to_all(ranks, size)


def _sends(model: Transformer, layout: Layout, node: Node, constants: Calibration) -> float:
    """Sends of one microbatch's boundary activations, forward and backward, for each chunk (SC21, section 4.1)."""
    if layout.pp == 1:
        return 0.0
    ranks = collectives.axis_group("pp", layout, node, constants)
    tokens = layout.microbatch * layout.tokens(model) / layout.cp
    size = tokens * model.hidden * layout.element_bytes.activation / layout.tp
    return 2 * layout.vpp * collectives.send(ranks, size)


def _data_parallel(
    model: Transformer, layout: Layout, node: Node, constants: Calibration, *, busy: float
) -> float:
    """Gradients are reduced and weights gathered; exposed is what does not overlap, at least one unit."""
    if layout.dp * layout.cp == 1:
        return 0.0
    parameters = on_rank(model, layout, 0)
    count = parameters.shared + parameters.experts
    ranks = collectives.shard_group(layout, node, constants)
    width, microbatches = layout.element_bytes.activation, layout.microbatches
    gradients = count * layout.element_bytes.gradient
    if layout.zero == 3:
        total = (2 * microbatches if layout.reshard else 1) * collectives.all_gather(ranks, count * width)
        total += (microbatches if layout.reshard else 1) * collectives.reduce_scatter(ranks, gradients)
        hidden = busy  # gathers overlap the forward pass, too
    else:
        total = collectives.reduce_scatter(ranks, gradients)
        total += collectives.all_gather(ranks, count * width if layout.zero else gradients)
        hidden = busy / microbatches * 2 / 3  # the backward of the last microbatch
    replicas = _replica_reduce(layout, node, constants, gradients)
    if not layout.overlap:
        return total + replicas
    least = total / microbatches * parameters.largest_unit / count
    return max(least, total - hidden) + replicas


def _replica_reduce(layout: Layout, node: Node, constants: Calibration, gradients: float) -> float:
    """With hybrid sharding, gradient shards are also reduced between the replicas."""
    replicas = layout.dp // (layout.shard or layout.dp)
    if replicas == 1:
        return 0.0
    ranks = collectives.strided_group(replicas, layout.shards * layout.tp, node, constants)
    return collectives.all_reduce(ranks, gradients / layout.shards)


def _optimizer(model: Transformer, layout: Layout, device: Device, constants: Calibration) -> float:
    """Weights, gradients and moments are read and written once."""
    parameters = on_rank(model, layout, 0)
    count = parameters.shared + parameters.experts
    numbers, moments = layout.element_bytes, OPTIMIZER_MOMENTS[layout.optimizer]
    state = numbers.master + moments * numbers.moment
    traffic = (
        count / (layout.shards if layout.zero else 1) * (2 * state + 2 * numbers.weight + numbers.gradient)
    )
    if layout.offload:
        return traffic / (device.pcie_GBps * 1e9)
    return traffic / (device.hbm_GBps * 1e9 * device.hbm_achievable * constants.memory)
