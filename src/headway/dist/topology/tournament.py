"""A round-robin schedule: rounds of disjoint pairs, in which every two ranks are paired once.

A round has only links inside machines or only links between them, and as many between each two machines as possible,
so that links that are compared with each other are measured under the same load.
"""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[int, int]


def schedule(hosts: Sequence[str]) -> list[list[Pair]]:
    """Returns rounds in which every two ranks are paired once: first those on one host, then hosts, pair by pair.

    >>> schedule(["n1", "n1", "n2", "n2"])
    [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    nodes = list(ranks_of.values())
    widest = max(map(len, nodes))
    inside = [
        [(node[a], node[b]) for node in nodes for a, b in pairs if max(a, b) < len(node)]
        for pairs in _tournament(widest)
    ]
    between = [
        [
            (nodes[a][place], nodes[b][(place + shift) % widest])
            for a, b in pairs
            for place in range(len(nodes[a]))
            if (place + shift) % widest < len(nodes[b])
        ]
        for pairs in _tournament(len(nodes))
        for shift in range(widest)
    ]
    return [pairs for pairs in inside + between if pairs]


def _tournament(players: int) -> list[list[Pair]]:
    """Schedules by the circle method: one player stays, the others rotate by one position, opposite ones play."""
    circle = list(range(players + players % 2))  # with an odd number, one player pauses in each round
    rounds = []
    for _ in range(len(circle) - 1):
        opposite = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        rounds.append([pair for pair in opposite if max(pair) < players])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds
