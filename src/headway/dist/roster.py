"""Who is where: the list of all ranks that everybody gets on joining."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank, as it introduced itself."""

    rank: int
    host: str
    node: str
    pid: int
    local_rank: int | None
    visible_gpus: str | None
    """CUDA_VISIBLE_DEVICES: where it differs between ranks of a node, the scheduler has dealt the GPUs out already"""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank's place among all: worked out from the roster, equal on all ranks."""

    node_rank: int
    nodes: int
    local_rank: int
    local_world_size: int
    gpus_dealt_out: bool
    ranks_per_node: tuple[int, ...]


def seat(members: Sequence[Member], rank: int) -> Seat:
    """Works out a rank's place on its node, and its node's place among the nodes.

    The launcher's local rank is kept where it gave one for each rank of the node; it is never rank % n, because ranks
    may lie across the nodes in any way.
    """
    nodes: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda member: member.rank):
        nodes.setdefault(member.node, []).append(member)  # nodes in the order of their lowest rank
    me = next(member for member in members if member.rank == rank)
    here = nodes[me.node]
    given = [member.local_rank for member in here]
    usable = None not in given and sorted(given, key=lambda number: number or 0) == list(range(len(here)))
    return Seat(
        node_rank=list(nodes).index(me.node),
        nodes=len(nodes),
        local_rank=me.local_rank if usable and me.local_rank is not None else here.index(me),
        local_world_size=len(here),
        gpus_dealt_out=len({member.visible_gpus for member in here}) > 1,
        ranks_per_node=tuple(len(group) for group in nodes.values()),
    )


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
