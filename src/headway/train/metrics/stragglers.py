"""Which rank holds up the others, day in, day out? Told once it has been so for a while, in one line.

Compared is what ranks do by themselves: waiting for data and the forward pass. The backward pass is not, since with DDP
all ranks wait in it for the slowest; nor is a forward pass with collectives in it, as FSDP's is: all ranks look alike
then, and nobody is named. The numbers are those of the interval before, and ride on the reduction of a log point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import final

SLOWER = 1.3  # times the median of all ranks
PERSISTENT = 3  # log points in a row
PERSISTENT_IF_BRIEF = 10  # where one step stands for all of an interval, and may have been out of luck
WORTH_IT = 0.1  # the part of an interval that is lost to it


def busy(seconds: Mapping[str, float]) -> tuple[float, float]:
    """What a rank did by itself in an interval, and the whole of the interval."""
    return seconds.get("data", 0.0) + seconds.get("compute", 0.0), sum(seconds.values())


@final
class Stragglers:
    """Looks at the busy times of all ranks, log point after log point.

    >>> stragglers = Stragglers()
    >>> [stragglers.observe([1.0, 1.0, 2.0], whole=2.0) for _ in range(3)]
    [None, None, 'rank 2 is slower than ...']
    """

    def __init__(self) -> None:
        self._slow: dict[int, int] = {}  # rank -> log points in a row

    def observe(self, times: Sequence[float], *, whole: float, brief: bool = False) -> str | None:
        """A sentence when a rank has just become a persistent straggler."""
        enough = PERSISTENT_IF_BRIEF if brief else PERSISTENT
        usual = median(times)
        slow = [
            rank
            for rank, time in enumerate(times)
            if time > SLOWER * usual and time - usual > WORTH_IT * whole
        ]
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        named = [rank for rank, count in self._slow.items() if count == enough]
        if not named:
            return None
        worst = max(named, key=lambda rank: times[rank])
        return (
            f"rank {worst} is slower than the others: at {enough} log points in a row its data and forward pass "
            f"took more than {SLOWER:g} times the median, now {times[worst]:.2f} s against {usual:.2f} s"
        )
