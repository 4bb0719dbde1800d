"""Accounts for the time of a run: training, and time lost to data, other ranks, saves, restarts and startup."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

from headway.run import Run
from headway.system.jsonlines import is_count
from headway.system.text import plural
from headway.watch.runs import attempt_spans, timestamp
from headway.watch.view import RunView, Snapshot
from headway.watch.view.metric_rows import StepRange

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
class RepeatedSteps:
    """How many steps were trained again after restarts.

    >>> str(RepeatedSteps(count=15, made=55, is_exact=False))
    'at least 15 steps repeated'
    """

    count: int
    made: int
    """steps of all attempts, including repeated ones"""
    is_exact: bool
    """False if an attempt was killed before it recorded its last step: only its last log point is known"""

    def __str__(self) -> str:
        return f"{'' if self.is_exact else 'at least '}{plural(self.count, 'step')} repeated"


@final
@dataclass(frozen=True, kw_only=True)
class TimeAccount:
    """Where the time of all attempts went, in seconds of rank 0, and what it cost."""

    parts: Mapping[str, float]
    """by the names of `PARTS`; they add up to `total_s`"""
    total_s: float
    """of all attempts"""
    between_s: float
    """between attempts: in the queue, or until somebody started the run again"""
    repeated: RepeatedSteps
    rank_hours: float
    """sum over all ranks: GPU-hours if each rank has a GPU"""

    @property
    def goodput(self) -> float | None:
        """The fraction of the time of all attempts that was spent on training steps that count."""
        return self.parts["training"] / self.total_s if self.total_s > 0 else None


def account_run(run: Run) -> TimeAccount:
    """Accounts for the time of all attempts of a run.

    >>> account_run(Run.open("runs/digits-2026.11.15-14.30-x7k2")).goodput
    0.93
    """
    view = RunView(run, thorough=True)
    return account(view, view.refresh())


def account(view: RunView, snapshot: Snapshot) -> TimeAccount:
    """Accounts for the time of all attempts, from rows of rank 0. The view must be thorough, and just refreshed."""
    is_running = snapshot.header.state in ("running", "starting")
    spans = attempt_spans(view.run, view.attempts, is_running=is_running)
    total = sum(end - begin for begin, end in spans)
    seconds = view.metrics.seconds
    trained = sum(seconds.get(phase, 0.0) for phase in _TRAINING)
    again = count_repeated(view.attempts, view.metrics.step_ranges)
    repeated = trained * again.count / again.made if again.made else 0.0
    parts = {
        "training": trained - repeated,
        "repeated": repeated,
        "data": seconds.get("data", 0.0),
        "ranks": seconds.get("wait", 0.0),
        "validation": seconds.get("validation", 0.0),
        "saves": seconds.get("checkpoint", 0.0),
    }
    measured = sum(parts.values())
    if measured > total > 0:  # only some short steps are measured, and scaled up
        parts = {name: value * total / measured for name, value in parts.items()}
    parts["rest"] = max(0.0, total - sum(parts.values()))
    gaps = [max(0.0, begin - end) for (_, end), (begin, _) in pairwise(spans)]
    sizes = [size for _, size in view.metrics.worlds]
    hours = sum((end - begin) * size for (begin, end), size in zip(spans, sizes, strict=True)) / 3600
    return TimeAccount(
        parts=parts,
        total_s=total,
        between_s=sum(gaps),
        repeated=again,
        rank_hours=hours,
    )


def count_repeated(attempts: Sequence[Mapping[str, Any]], ranges: Sequence[StepRange]) -> RepeatedSteps:
    """Counts the steps that attempts repeated: from the step where each resumed to the last step of those before it.

    Both are in run.json. Where they are missing, log points give a lower bound.
    """
    begins = [timestamp(each.get("started")) for each in attempts]
    count, made, reached, is_exact, is_reached_exact = 0, 0, -1, True, True
    for attempt, (begin, end) in zip(attempts, pairwise([*begins, math.inf]), strict=True):
        first = min((each.first_step for each in ranges if begin <= each.first_time < end), default=None)
        last = max((each.last_step for each in ranges if begin <= each.last_time < end), default=0)
        started, ended = _step(attempt, "step_started"), _step(attempt, "step_ended")
        if started is None and first is None:
            continue  # it ran no step
        begun = started if started is not None else (first or 1) - 1
        stopped = ended if ended is not None else max(begun, last)
        count += max(0, min(stopped, reached) - begun)
        made += max(0, stopped - begun)
        if reached >= 0:  # not the first
            is_exact &= started is not None and is_reached_exact and (ended is not None or stopped >= reached)
        reached, is_reached_exact = max(reached, stopped), is_reached_exact and ended is not None
    return RepeatedSteps(count=count, made=made, is_exact=is_exact)


def _step(attempt: Mapping[str, Any], name: str) -> int | None:
    step = attempt.get(name)
    return step if is_count(step) else None
