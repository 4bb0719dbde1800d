"""Where the ranks run: how each describes itself when it joins, and its place on its node and among the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.system.text import plural


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One rank, as it describes itself when it joins."""

    rank: int
    host: str
    node: str
    pid: int
    local_rank: int | None
    visible_gpus: str | None
    """CUDA_VISIBLE_DEVICES: where it differs between ranks of a node, the scheduler has assigned the GPUs already"""


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """A rank's place on its node and among the nodes, computed by rank 0 for all ranks."""

    node_rank: int
    nodes: int
    local_rank: int
    local_world_size: int
    ranks_on_node: tuple[int, ...]
    """the ranks of this node, this one included"""
    gpus_assigned: bool
    layout: str
    """how all ranks are spread over the nodes, in words"""


def place_ranks(ranks: Sequence[RankInfo]) -> list[RankPlacement]:
    """Computes every rank's place on its node, and its node's place among the nodes; `ranks` are in order.

    The launcher's local ranks are kept if it gave one to each rank of the node. They are never rank % n, because ranks
    may be spread over the nodes in any way.
    """
    nodes: dict[str, list[RankInfo]] = {}
    for info in ranks:
        nodes.setdefault(info.node, []).append(info)  # nodes in the order of their lowest rank
    layout = describe_layout([len(here) for here in nodes.values()])
    found = {}
    for node_rank, here in enumerate(nodes.values()):
        given = [info.local_rank for info in here if info.local_rank is not None]
        local_ranks = given if sorted(given) == list(range(len(here))) else list(range(len(here)))
        ranks_on_node, assigned = tuple(info.rank for info in here), {info.visible_gpus for info in here}
        for local_rank, info in zip(local_ranks, here, strict=True):
            found[info.rank] = RankPlacement(
                node_rank=node_rank,
                nodes=len(nodes),
                local_rank=local_rank,
                local_world_size=len(here),
                ranks_on_node=ranks_on_node,
                gpus_assigned=len(assigned) > 1,
                layout=layout,
            )
    return [found[info.rank] for info in ranks]


def describe_layout(ranks_per_node: Sequence[int]) -> str:
    """Describes how ranks are spread over nodes.

    >>> describe_layout([4, 4]), describe_layout([3, 1]), describe_layout([1])
    ('2 nodes x 4', '2 nodes: 3 + 1', '1 node x 1')
    """
    nodes = plural(len(ranks_per_node), "node")
    if len(set(ranks_per_node)) == 1:
        return f"{nodes} x {ranks_per_node[0]}"
    shown = " + ".join(str(count) for count in ranks_per_node[:8])
    return f"{nodes}: {shown}{' + ...' if len(ranks_per_node) > 8 else ''}"
