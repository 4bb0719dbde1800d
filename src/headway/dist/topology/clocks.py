"""Measures by round trips how far apart the clocks of the nodes are.

Rank 0 sends a message, the peer answers with the time of its clock, and rank 0 compares that with the middle of the
trip. The result is wrong by at most half of the trip; the shortest trip counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
import torch.distributed as td

from headway.dist.topology.interconnect import ProcessGroupTransport, Transport

_TRIPS: Final = 8


@final
@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """By how many seconds the clock of a rank is ahead of rank 0's, and by how much that may be wrong."""

    rank: int
    offset_s: float
    error_s: float
    """half of the shortest round trip"""

    @property
    def certain_s(self) -> float:
        """The least number of seconds by which the two clocks differ.

        >>> ClockOffset(rank=1, offset_s=-3.0, error_s=1.0).certain_s
        2.0
        """
        return max(0.0, abs(self.offset_s) - self.error_s)


def measure_clocks(peers: Sequence[int], *, clock: Callable[[], float] = time.time) -> list[ClockOffset]:
    """Compares the clocks of other ranks, `peers`, with rank 0's; rank 0 gets the result. All ranks must call it.

    >>> measure_clocks([8, 16])  # on all ranks of three nodes with 8 each
    [ClockOffset(rank=8, offset_s=0.0001, error_s=0.00004), ClockOffset(rank=16, offset_s=-0.0003, error_s=0.00005)]
    """
    if not peers:
        return []
    transport, rank = ProcessGroupTransport(), td.get_rank()
    if rank == 0:
        return [_ask(transport, peer, clock) for peer in peers]
    if rank in peers:
        for _ in range(_TRIPS):
            transport.receive(_moment(transport), 0)
            transport.send(_moment(transport, clock()), 0)
    return []


def _ask(transport: Transport, peer: int, clock: Callable[[], float]) -> ClockOffset:
    trips = []
    for _ in range(_TRIPS):
        answer, before, start = _moment(transport), clock(), time.perf_counter()
        transport.send(_moment(transport), peer)
        transport.receive(answer, peer)
        trip_s = time.perf_counter() - start
        trips.append((trip_s / 2, float(answer) - (before + trip_s / 2)))
    error_s, offset_s = min(trips)
    return ClockOffset(rank=peer, offset_s=offset_s, error_s=error_s)


def _moment(transport: Transport, seconds: float = 0.0) -> torch.Tensor:
    return torch.full((1,), seconds, dtype=torch.float64, device=transport.device)
