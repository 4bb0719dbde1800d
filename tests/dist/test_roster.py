from __future__ import annotations

from hypothesis import given, strategies as st

from headway.dist.roster import RankInfo, RankPlacement, place_ranks


def placement(members: list[RankInfo], rank: int) -> RankPlacement:
    return place_ranks(members)[rank]


def member(rank: int, node: str, local_rank: int | None = None, gpus: str | None = None) -> RankInfo:
    return RankInfo(rank=rank, host=node, node=node, pid=rank, local_rank=local_rank, visible_gpus=gpus)


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=12))
def test_every_rank_has_a_seat_of_its_own(nodes: list[str]) -> None:
    """However ranks lie across nodes, local ranks count from 0 on each, and nodes count by their first rank."""
    members = [member(rank, node) for rank, node in enumerate(nodes)]
    found = place_ranks(members)
    assert len({(s.node_rank, s.local_rank) for s in found}) == len(nodes)
    for s, node in zip(found, nodes, strict=True):
        assert s.nodes == len(set(nodes))
        assert s.local_world_size == nodes.count(node)
        assert 0 <= s.local_rank < s.local_world_size
        assert s.node_rank == list(dict.fromkeys(nodes)).index(node)
        assert [nodes[rank] for rank in s.ranks_on_node] == [node] * s.local_world_size
    assert found[0].node_rank == 0


def test_the_launchers_local_rank_is_kept() -> None:
    """Open MPI 5 gives rank 1 the local rank 2: whatever it binds to goes by that number."""
    members = [member(0, "a", 0), member(1, "a", 2), member(2, "a", 1)]
    assert [placement(members, rank).local_rank for rank in range(3)] == [0, 2, 1]


def test_local_ranks_that_cannot_be_are_counted_anew() -> None:
    members = [member(0, "a", 0), member(1, "a", 0)]
    assert [placement(members, rank).local_rank for rank in range(2)] == [0, 1]


def test_gpus_that_differ_between_ranks_were_assigned() -> None:
    assert placement([member(0, "a", gpus="0"), member(1, "a", gpus="1")], 1).gpus_assigned
    assert not placement([member(0, "a", gpus="0,1"), member(1, "a", gpus="0,1")], 1).gpus_assigned
    assert not placement([member(0, "a", gpus="0"), member(1, "b", gpus="1")], 1).gpus_assigned
