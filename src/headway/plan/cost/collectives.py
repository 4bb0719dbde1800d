"""Times of collectives by the alpha-beta model: latency per step plus bytes over bandwidth."""

from __future__ import annotations

from typing import NamedTuple

from headway.plan.machine.calibration import Calibration
from headway.plan.machine.hardware import Node
from headway.plan.model.layout import Layout


class CollectiveGroup(NamedTuple):
    """Ranks that communicate: their number, how many share a node, and the links between them."""

    size: int
    per_node: int
    bytes_per_s: float
    """Bandwidth of a ring: between nodes, the ranks of a node use all their shares of the network."""
    latency_s: float
    peer_bytes_per_s: float
    """Bandwidth of one rank to the others of its node."""
    own_bytes_per_s: float
    """Bandwidth of one rank to the next: the share of one GPU in the node's network, or the links inside a node."""

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)


def axis_group(axis: str, layout: Layout, node: Node, constants: Calibration) -> CollectiveGroup:
    """Returns the group along one axis. Ranks are ordered tp, cp, dp, pp, the innermost first, as in Megatron.

    The groups of a node share its network: a ring with r of the node's g ranks gets r/g of the bandwidth.
    """
    inner = layout.tp * layout.cp
    strides = {"tp": 1, "cp": layout.tp, "dp": inner, "ep": layout.expert_ways, "pp": inner * layout.dp}
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "ep": layout.ep, "pp": layout.pp}
    return strided_group(sizes[axis], strides[axis], node, constants)


def shard_group(layout: Layout, node: Node, constants: Calibration) -> CollectiveGroup:
    """Returns the ranks over which ZeRO shards one replica."""
    return strided_group(layout.shards, layout.tp, node, constants)


def expert_shard_group(layout: Layout, node: Node, constants: Calibration) -> CollectiveGroup:
    """Returns the ranks that hold the same experts: of all shards, every (ep x expert_ways)-th rank."""
    apart = layout.ep * layout.expert_ways
    return strided_group(max(1, layout.shards * layout.tp // apart), apart, node, constants)


def strided_group(size: int, stride: int, node: Node, constants: Calibration) -> CollectiveGroup:
    """Returns the group of `size` ranks that are `stride` apart."""
    per_node = max(1, min(size, node.gpus // stride))
    others = per_node - 1 if per_node > 1 else node.gpus
    peer = node.device.reached_bytes_per_s(others) * constants.peer
    if per_node == size:
        one = node.device.reached_bytes_per_s(1) * constants.peer
        return CollectiveGroup(size, per_node, peer, constants.peer_latency_s, peer, one)
    own = min(peer, node.inter_bytes_per_s * constants.network / node.gpus)
    return CollectiveGroup(size, per_node, min(peer, own * per_node), constants.network_latency_s, peer, own)


def all_reduce(group: CollectiveGroup, size_bytes: float) -> float:
    """Seconds of an all-reduce: 2(n-1)/n of the bytes, and the latency of a ring or of a tree, whichever is less."""
    n = group.size
    if n == 1:
        return 0.0
    tree = 8 * n.bit_length() * group.latency_s
    return 2 * min(_ring_latency(group), tree) + 2 * (n - 1) / n * size_bytes / group.bytes_per_s


def reduce_scatter(group: CollectiveGroup, size_bytes: float, *, pieces: int = 1) -> float:
    """Seconds of a ring reduce-scatter: n-1 steps, (n-1)/n of the bytes. An all-gather takes as long.

    Bytes that are sent in `pieces`, such as the layers of a sharded model, pay the latency once for each.
    """
    n = group.size
    if n == 1:
        return 0.0
    return pieces * _ring_latency(group) + (n - 1) / n * size_bytes / group.bytes_per_s


all_gather = reduce_scatter


def all_to_all(
    group: CollectiveGroup, size_bytes: float, *, inside: float = 1.0, outside: float = 1.0
) -> float:
    """Seconds of an all-to-all: each rank sends 1/n of its bytes to every other, by its own links.

    Bytes for its own node and for other nodes are sent at the same time; the slower of the two counts. Only the
    fractions `inside` and `outside` of them are sent, if the rest are copies for the same rank or node.
    """
    if group.size == 1:
        return 0.0
    within = (group.per_node - 1) / group.size * inside * size_bytes / group.peer_bytes_per_s
    between = (group.size - group.per_node) / group.size * outside * size_bytes / group.own_bytes_per_s
    return group.latency_s + max(within, between)


def send(group: CollectiveGroup, size_bytes: float) -> float:
    """Seconds to send bytes to the next rank, which is on another node if the group spans nodes."""
    return 0.0 if group.size == 1 else group.latency_s + size_bytes / group.own_bytes_per_s


def _ring_latency(group: CollectiveGroup) -> float:
    """A ring pays the latency once per step, however long it is: there is no tree that scatters or gathers."""
    return group.latency_s * (group.size - 1)
