"""Detection of stragglers: ranks that are slower than the others at several log points in a row, reported once.

The times compared are those that a rank spends on its own: waiting for data and the forward pass. The backward pass is
left out, since with DDP all ranks wait in it for the slowest. A forward pass with collectives, as in FSDP, takes the
same time on all ranks, so no rank is reported. The times are those of the previous interval; the reduction at a log
point exchanges them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import final

SLOW_FACTOR = 1.3  # times the median of all ranks
SLOW_LOG_POINTS = 3  # in a row, before a rank is reported
SLOW_LOG_POINTS_SAMPLED = 10  # where only one step of an interval is measured, which may be an outlier
MIN_LOST_FRACTION = 0.1  # of an interval
MIN_LOST_S = 1.0  # over these log points: of steps below a millisecond, a few are slower by chance


def busy(seconds: Mapping[str, float]) -> tuple[float, float]:
    """Returns the seconds that a rank spent on its own in an interval, and the seconds of the whole interval."""
    return seconds.get("data", 0.0) + seconds.get("compute", 0.0), sum(seconds.values())


@final
class Stragglers:
    """Compares the busy times of all ranks at each log point.

    >>> stragglers = Stragglers()
    >>> [stragglers.observe([1.0, 1.0, 2.0], whole=2.0) for _ in range(3)]  # log points
    [None, None, 'rank 2 is slower than ...']
    """

    def __init__(self) -> None:
        self._slow: dict[int, tuple[int, float]] = {}  # rank -> log points in a row, and the seconds lost
        self._reported: dict[int, int] = {}  # rank -> log points in a row since, at which it was not slow

    def observe(self, times: Sequence[float], *, whole: float, sampled: bool = False) -> str | None:
        """Returns a message at the log point where a rank counts as a straggler; None at all others.

        A rank is reported again only after it was as fast as the others for as many log points.
        `sampled` means that only one step of the interval was measured.
        """
        enough = SLOW_LOG_POINTS_SAMPLED if sampled else SLOW_LOG_POINTS
        # of two ranks, the faster one: compared with their mean, a rank would count as slow only at 1.9 times the other
        usual = median_low(times)
        slow: dict[int, tuple[int, float]] = {}
        for rank, time in enumerate(times):
            if time > SLOW_FACTOR * usual and time - usual > MIN_LOST_FRACTION * whole:
                points, lost = self._slow.get(rank, (0, 0.0))
                slow[rank] = points + 1, lost + time - usual
        self._slow = slow
        since = {rank: 0 if rank in slow else count + 1 for rank, count in self._reported.items()}
        self._reported = {rank: count for rank, count in since.items() if count < enough}
        reached = [
            rank
            for rank, (points, lost) in slow.items()
            if points >= enough and lost >= MIN_LOST_S and rank not in self._reported
        ]
        self._reported |= dict.fromkeys(reached, 0)
        if not reached:
            return None
        worst = max(reached, key=lambda rank: times[rank])
        return (
            f"rank {worst} is slower than the others: at {slow[worst][0]} log points in a row its data and forward "
            f"pass took more than {SLOW_FACTOR:g} times the median, now {_seconds(times[worst])} against "
            f"{_seconds(usual)}"
        )


def _seconds(time: float) -> str:
    return f"{time:.2f} s" if time >= 0.1 else f"{time * 1e3:.3g} ms"
