"""Where the time of a run went: training, and what was lost to data, other ranks, saves, restarts and starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

from headway.run import Run
from headway.system.jsonlines import is_count
from headway.watch.view import RunView, Snapshot
from headway.watch.view.run_view import timestamp

_TRAINING = ("compute", "optimizer")
PARTS = {
    "training": "forward, backward and optimizer steps that count",
    "repeated": "steps that were trained again after a restart",
    "data": "waiting for data",
    "ranks": "waiting for other ranks at log points",
    "validation": "validation",
    "saves": "saving checkpoints, while training waits",
    "rest": "starting, ending, and everything else",
}
"""the parts of a run's time, and what they are"""


@final
@dataclass(frozen=True, kw_only=True)
class TimeAccount:
    """Where the time of all attempts went, in seconds of rank 0, and what it cost."""

    parts: Mapping[str, float]
    """by the names of `PARTS`; they add to `total_s`"""
    total_s: float
    """of all attempts"""
    between_s: float
    """between attempts: in the queue, or until somebody started the run again"""
    repeated_steps: int
    rank_hours: float
    """hours of all ranks together, which are GPU-hours if each has a GPU"""

    @property
    def goodput(self) -> float | None:
        """The fraction of the time of all attempts in which steps were trained that count."""
        return self.parts["training"] / self.total_s if self.total_s > 0 else None


def account_run(run: Run) -> TimeAccount:
    """Accounts for the time of all attempts of a run.

    >>> account_run(Run.open("runs/digits-2026.11.15-14.30-x7k2")).goodput
    0.93
    """
    view = RunView(run, thorough=True)
    snapshot = view.refresh()
    return account(
        view, snapshot, [each for each in view.info().get("attempts", []) if isinstance(each, dict)]
    )


def account(view: RunView, snapshot: Snapshot, attempts: Sequence[Mapping[str, Any]]) -> TimeAccount:
    """Accounts for the time of all attempts, from what rank 0 recorded. The view must be thorough."""
    spans = [_span(each, snapshot) for each in attempts]
    total = sum(end - begin for begin, end in spans)
    seconds = view.metrics.seconds
    trained = sum(seconds.get(phase, 0.0) for phase in _TRAINING)
    repeated = min(trained, view.metrics.lost_steps * (snapshot.speed.step_median_s or 0.0))
    parts = {
        "training": trained - repeated,
        "repeated": repeated,
        "data": seconds.get("data", 0.0),
        "ranks": seconds.get("wait", 0.0),
        "validation": seconds.get("validation", 0.0),
        "saves": seconds.get("checkpoint", 0.0),
    }
    measured = sum(parts.values())
    if measured > total > 0:  # of short steps few are measured, and stand for all
        parts = {name: value * total / measured for name, value in parts.items()}
    parts["rest"] = max(0.0, total - sum(parts.values()))
    gaps = [max(0.0, begin - end) for (_, end), (begin, _) in pairwise(spans)]
    ranks = [_world_size(each) for each in attempts]
    hours = sum((end - begin) * count for (begin, end), count in zip(spans, ranks, strict=True)) / 3600
    return TimeAccount(
        parts=parts,
        total_s=total,
        between_s=sum(gaps),
        repeated_steps=view.metrics.lost_steps,
        rank_hours=hours,
    )


def _span(attempt: Mapping[str, Any], snapshot: Snapshot) -> tuple[float, float]:
    """Begin and end of an attempt; one that was killed ended with its last row, as far as that is known."""
    begin = timestamp(attempt.get("started"))
    if attempt.get("ended"):
        return begin, max(begin, timestamp(attempt["ended"]))
    is_last = attempt.get("number") == snapshot.header.attempts
    if is_last and snapshot.header.state in ("running", "starting"):
        return begin, max(begin, time.time())
    times = [series.times[-1] for series in snapshot.curves.values() if series.times] if is_last else []
    return begin, max([begin, *times])


def _world_size(attempt: Mapping[str, Any]) -> int:
    world = attempt.get("world")
    size = world.get("world_size") if isinstance(world, dict) else None
    return size if is_count(size) and size > 0 else 1
