"""Many runs at a glance: what `headway runs` lists and `headway compare` sets side by side.

Everything is read from the run directories, each file once; the scheduler is asked once for all of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from headway import schedulers
from headway.errors import UsageError
from headway.launcher import sweep
from headway.run import Run, lock, runs_under
from headway.run.status import Status, read_json, status
from headway.schedulers.base import JobIds, Queue

_TAIL = 16_384  # bytes from the end of a metrics file: a few rows at least
_LOOK_AGAIN = 2.5 * lock.BEAT


@final
@dataclass(frozen=True, kw_only=True)
class Row:
    """One run, in the facts that people ask for first."""

    run: Run
    status: Status
    created: datetime
    started: datetime | None
    """of the last attempt"""
    seconds: float
    """that its attempts have run, all together"""
    attempts: int
    step: int | None
    job: str | None
    """the scheduler's number, or host and pid"""
    sweep: sweep.Member | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """the last row that the root wrote"""

    def plain(self) -> dict[str, Any]:
        """For programs."""
        return {
            "id": self.run.id,
            "name": self.run.name,
            "path": str(self.run.path),
            "state": self.status.state,
            "why": self.status.why,
            "created": self.created.isoformat(),
            "started": self.started and self.started.isoformat(),
            "seconds": round(self.seconds, 3),
            "attempts": self.attempts,
            "step": self.step,
            "job": self.job,
            "sweep": self.sweep and {"id": self.sweep.sweep, "settings": self.sweep.settings},
            "metrics": dict(self.metrics),
        }


def rows(
    runs: Sequence[Run], *, queue: Queue | None = None, tell: Callable[[str], object] = lambda _: None
) -> list[Row]:
    """Looks at each run; at those whose only sign of life is a heartbeat elsewhere it looks twice.

    >>> [(row.run.id, row.status.state) for row in rows(runs_under("runs"))]
    [('digits-2026.11.15-14.30-x7k2', 'running')]
    """
    submitted = [read_json(run.submission_file) or {} for run in runs]
    if queue is None:
        queue = schedulers.queue(map(JobIds.from_submission, submitted))
    if queue.note:
        tell(f"{queue.note}; what follows is from the run directories alone")
    found = [_row(run, queue, facts) for run, facts in zip(runs, submitted, strict=True)]
    doubtful = [row.run for row in found if row.status.state == "running" and not row.status.certain]
    if not doubtful:
        return found
    before = {run.path: _beat(run) for run in doubtful}
    time.sleep(_LOOK_AGAIN)
    return [
        _silenced(row) if row.run.path in before and _beat(row.run) == before[row.run.path] else row
        for row in found
    ]


def select(
    root: str | os.PathLike[str],
    *,
    states: Iterable[str] = (),
    name: str | None = None,
    most: int | None = None,
    queue: Queue | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> list[Row]:
    """The runs under a root, newest first, of these states and that name; `tell` gets a line about each damaged one."""
    if not Path(root).is_dir():
        raise UsageError(
            f"there is no folder {str(root)!r} with runs in it; give another: headway runs --root DIR"
        )
    wanted = set(states)
    runs = runs_under(root, name=name, tell=tell)
    if not wanted:  # then the newest are known before anything is read of them
        runs = runs[:most]
    found = [row for row in rows(runs, queue=queue, tell=tell) if not wanted or row.status.state in wanted]
    return found[:most]


def resolve(places: Sequence[str], root: str | os.PathLike[str] = "runs") -> list[Run]:
    """The runs that people mean: by path, or by id, its beginning or its end; a sweep stands for its runs."""
    meant = [run for place in places for run in _meant(place, root)]
    return list({run.path: run for run in meant}.values())


def _meant(place: str, root: str | os.PathLike[str]) -> list[Run]:
    if Path(place, "run.json").exists():
        first = Run.open(place)
    else:
        here = [run for run in runs_under(root) if run.id.startswith(place) or run.id.endswith(f"-{place}")]
        sweeps = {member.sweep for run in here if (member := sweep.member(run))}
        if len(here) > 1 and len(sweeps) == 1 and all(sweep.member(run) for run in here):
            here = here[-1:]  # one sweep, named by what its runs have in common
        if len(here) != 1:
            what = f"{len(here)} runs" if here else "no run"
            raise UsageError(f"{place!r} means {what}: give a path, or more of an id, of a run in {root}")
        first = here[0]
    member = sweep.member(first)
    if member is None or member.sweep != first.id:
        return [first]
    members = [(found, run) for run in runs_under(first.path.parent) if (found := sweep.member(run))]
    return [run for found, run in sorted(members, key=lambda pair: pair[0].index) if found.sweep == first.id]


def _row(run: Run, queue: Queue, submitted: Mapping[str, Any]) -> Row:
    info = run.info()
    attempts = info["attempts"]
    now = status(run, queue, info)
    last = last_metrics(run)
    return Row(
        run=run,
        status=now,
        created=datetime.fromisoformat(info["created"]),
        started=datetime.fromisoformat(attempts[-1]["started"]) if attempts else None,
        seconds=sum(_seconds(attempt, now) for attempt in attempts),
        attempts=len(attempts),
        step=last.get("step"),
        job=_job(submitted, attempts),
        sweep=sweep.member(run),
        metrics=last.get("metrics", {}),
    )


def _seconds(attempt: Mapping[str, Any], now: Status) -> float:
    """How long an attempt took, or has taken. One that was cut off has no end: what is not known counts nothing."""
    begin = datetime.fromisoformat(attempt["started"])
    if attempt["ended"]:
        return (datetime.fromisoformat(attempt["ended"]) - begin).total_seconds()
    return max(0.0, (datetime.now(UTC) - begin).total_seconds()) if now.state == "running" else 0.0


def _job(submitted: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> str | None:
    if ids := JobIds.from_submission(submitted):
        return ids.number
    if ids := JobIds.from_dict(attempts[-1]) if attempts else None:
        return ids.job_id
    facts = submitted if "pid" in submitted else attempts[-1] if attempts else None
    return f"{facts['host']}:{facts['pid']}" if facts else None


def _beat(run: Run) -> int | None:
    owner = lock.newest_owner(run.path / "lock")
    return owner.beat if owner else None


def _silenced(row: Row) -> Row:
    why = f"{row.status.why}: silent now"
    return replace(row, status=Status(state="lost", why=why))


def last_metrics(run: Run) -> dict[str, Any]:
    """The last whole row of the root's metrics; empty if there is none."""
    try:
        with run.metrics_file(0).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is half-written
    except OSError:
        return {}
    return next(metric_rows(reversed(lines)), {})


def metric_rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The rows with metrics among the lines of a metrics file; what a kill or a full disk cut off is passed over."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "metrics" in row:
            yield row
