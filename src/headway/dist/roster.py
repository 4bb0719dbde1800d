"""Who is where: the list of all ranks that everybody gets on joining."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One rank, as it introduced itself."""

    rank: int
    host: str
    node: str
    pid: int
    local_rank: int | None
    visible_gpus: str | None
    """CUDA_VISIBLE_DEVICES: where it differs between ranks of a node, the scheduler has dealt the GPUs out already"""


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """A rank's place among all, worked out once by rank 0 and told to each."""

    node_rank: int
    nodes: int
    local_rank: int
    local_world_size: int
    neighbours: tuple[int, ...]
    """the ranks of this node, this one included"""
    gpus_dealt_out: bool
    spread: str
    """how all ranks lie on the nodes, in words"""


def seats(members: Sequence[RankInfo]) -> list[RankPlacement]:
    """Works out every rank's place on its node, and its node's place among the nodes; `members` in order of rank.

    The launcher's local rank is kept where it gave one for each rank of the node; it is never rank % n, because ranks
    may lie across the nodes in any way.
    """
    nodes: dict[str, list[RankInfo]] = {}
    for member in members:
        nodes.setdefault(member.node, []).append(member)  # nodes in the order of their lowest rank
    how = spread([len(here) for here in nodes.values()])
    found = {}
    for node_rank, here in enumerate(nodes.values()):
        given = [member.local_rank for member in here if member.local_rank is not None]
        local_ranks = given if sorted(given) == list(range(len(here))) else list(range(len(here)))
        for local_rank, member in zip(local_ranks, here, strict=True):
            found[member.rank] = RankPlacement(
                node_rank=node_rank,
                nodes=len(nodes),
                local_rank=local_rank,
                local_world_size=len(here),
                neighbours=tuple(neighbour.rank for neighbour in here),
                gpus_dealt_out=len({neighbour.visible_gpus for neighbour in here}) > 1,
                spread=how,
            )
    return [found[member.rank] for member in members]


def spread(ranks_per_node: Sequence[int]) -> str:
    """How ranks lie on nodes, in words.

    >>> spread([4, 4]), spread([3, 1]), spread([1])
    ('2 nodes x 4', '2 nodes: 3 + 1', '1 node x 1')
    """
    nodes = f"{len(ranks_per_node)} node{'s' if len(ranks_per_node) != 1 else ''}"
    if len(set(ranks_per_node)) == 1:
        return f"{nodes} x {ranks_per_node[0]}"
    shown = " + ".join(str(count) for count in ranks_per_node[:8])
    return f"{nodes}: {shown}{' + ...' if len(ranks_per_node) > 8 else ''}"
