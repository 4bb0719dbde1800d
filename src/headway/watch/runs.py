"""Summaries of runs: what `headway runs` lists and `headway compare` shows side by side.

Everything is read from the run directories, each file once. The scheduler is queried once for all runs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, final

from headway import schedulers
from headway.errors import HeadwayError, UsageError
from headway.launcher import sweep
from headway.run import Run, find_runs, lock, own_runs, runs_under
from headway.run.info import DAMAGED, read_json
from headway.run.job_record import Start, last_output, read_starts
from headway.run.status import Status, status
from headway.schedulers.base import JobIds, Queue
from headway.system import jsonlines
from headway.system.jsonlines import is_count, is_time
from headway.system.text import plural

_HEARTBEAT_WAIT_S = 2.5 * lock.HEARTBEAT_S
_END_BYTES = (1 << 14, 1 << 20)
"""how much of the end of a file is searched for its newest row: first little, then more"""


@final
@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The most important facts about one run."""

    run: Run
    status: Status
    created: datetime
    started: datetime | None
    """start of the last attempt"""
    seconds: float
    """total time of all attempts"""
    attempts: int
    step: int | None
    job: str | None
    """the scheduler's job number, or host and pid"""
    sweep: sweep.SweepMember | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """the newest row of rank 0"""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
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


def summarize(
    runs: Sequence[Run],
    *,
    queue: Queue | None = None,
    warn: Callable[[str], object] = lambda _: None,
    heartbeat_wait_s: float = _HEARTBEAT_WAIT_S,
) -> list[RunSummary]:
    """Summarizes runs. `warn` is called with a line if a scheduler does not answer.

    Of a run on another machine, only the heartbeat is known: it counts as running if the heartbeat changes within
    `heartbeat_wait_s` seconds, or always if that is 0.

    >>> [(summary.run.id, summary.status.state) for summary in summarize(runs_under("runs"))]
    [('digits-2026.11.15-14.30-x7k2', 'running')]
    """
    submitted = [read_json(run.submission_file) or {} for run in runs]
    if queue is None:
        own = {
            run.path for run in own_runs(runs)
        }  # the queue is this user's; other users' files are not trusted
        mine = (facts for run, facts in zip(runs, submitted, strict=True) if run.path in own)
        queue = schedulers.queue(map(JobIds.from_submission, mine))
    if queue.note:
        warn(f"{queue.note}; the states below are from the run directories alone")
    found = []
    for run, facts in zip(runs, submitted, strict=True):
        try:
            found.append(_summary(run, queue, facts))
        except (HeadwayError, OSError, *DAMAGED) as error:
            warn(f"{run.path} cannot be read: its files are damaged ({type(error).__name__}: {error!s:.200})")
    uncertain = [each.run for each in found if each.status.state == "running" and not each.status.certain]
    if not uncertain or not heartbeat_wait_s:
        return found
    before = {run.path: _heartbeat(run) for run in uncertain}
    time.sleep(heartbeat_wait_s)
    lost = {run.path for run in uncertain if _heartbeat(run) == before[run.path]}
    return [_as_lost(each) if each.run.path in lost else each for each in found]


def summary_of(run: Run) -> RunSummary:
    """Summarizes one run; `UsageError` if its files are damaged.

    >>> summary_of(Run.open("runs/digits-2026.11.15-14.30-x7k2")).status.state
    'running'
    """
    warnings: list[str] = []
    found = summarize([run], warn=warnings.append)
    if not found:
        raise UsageError(f"{warnings[-1]}; write run.json again with: headway runs rebuild {run.shell_path}")
    return found[0]


def select(
    root: str | os.PathLike[str],
    *,
    states: Iterable[str] = (),
    name: str | None = None,
    most: int | None = None,
    warn: Callable[[str], object] = lambda _: None,
) -> list[RunSummary]:
    """Summarizes the runs under a root that are in one of `states` and have this `name`, the newest first.

    `warn` is called with a line for each run that cannot be read.
    """
    if not Path(root).is_dir():
        raise UsageError(
            f"there is no directory {str(root)!r}; give the directory of the runs: headway runs --root DIR"
        )
    wanted = set(states)
    runs = runs_under(root, name=name, warn=warn)
    if not wanted:  # the order is known from the names: read only the newest
        runs = runs[:most]
    found = summarize(runs, warn=warn)
    found = [each for each in found if not wanted or each.status.state in wanted]
    return found[:most]


def resolve(places: Sequence[str], root: str | os.PathLike[str] = "runs") -> list[Run]:
    """Finds runs by path, by id, or by the beginning or end of an id.

    The first run of a sweep stands for all runs of the sweep, unless another of them is named, too.
    """
    found = [_resolve_one(place, root) for place in places]
    named = {runs[0].path for runs in found if len(runs) == 1}
    chosen = [runs[:1] if named & {run.path for run in runs} else runs for runs in found]
    return list({run.path: run for runs in chosen for run in runs}.values())


def resolve_one(place: str, root: str | os.PathLike[str] = "runs") -> Run:
    """Finds a run by path, by id, or by the beginning or end of an id; the first run of a sweep is only itself."""
    return _only(find_runs(place, root), place, root)


def _only(found: Sequence[Run], place: str, root: str | os.PathLike[str]) -> Run:
    if len(found) != 1:
        raise UsageError(
            f"{place!r} matches {plural(len(found), 'run') if found else 'no run'} in {root}; give the path of a run, "
            "or more of its id"
        )
    return found[0]


def newest_run(root: str | os.PathLike[str] = "runs") -> list[Run]:
    """Returns the newest run under `root`; raises `UsageError` if there is none."""
    if not (runs := runs_under(root)):
        raise UsageError(f"there is no run in {root}; start one: headway run train.py")
    return (own_runs(runs) or runs)[:1]


def _resolve_one(place: str, root: str | os.PathLike[str]) -> list[Run]:
    here = find_runs(place, root)
    sweeps = {member.sweep if (member := sweep.member(run)) else None for run in here}
    if len(here) > 1 and len(sweeps) == 1:  # one sweep, named by what its ids begin with, or end with
        here = [run for run in here if run.id in sweeps] or here
    first = _only(here, place, root)
    member = sweep.member(first)
    if member is None or member.sweep != first.id:
        return [first]
    # if this is a link in another directory, the other runs are beside the run itself
    beside = runs_under((first.path.resolve() if first.path.is_symlink() else first.path).parent)
    if own_runs([first]):
        beside = own_runs(beside)  # other users may claim that their runs belong to this sweep
    members = [(found, run) for run in beside if (found := sweep.member(run))]
    runs = [run for found, run in sorted(members, key=lambda pair: pair[0].index) if found.sweep == first.id]
    return runs or [first]


def _summary(run: Run, queue: Queue, submitted: Mapping[str, Any]) -> RunSummary:
    info = run.info()
    attempts = info["attempts"]
    now = status(run, queue, info)
    last = last_metrics(run)
    starts = [] if attempts else read_starts(run)  # without a pipeline there are no attempts
    return RunSummary(
        run=run,
        status=now,
        created=datetime.fromisoformat(info["created"]).astimezone(UTC),  # another user's may have no zone
        started=_started(attempts, starts),
        seconds=sum(
            end - begin for begin, end in attempt_spans(run, attempts, is_running=now.state == "running")
        )
        + sum(_start_seconds(run, each, now) for each in starts),
        attempts=len(attempts) or len(starts),
        step=last.get("step"),
        job=_job(submitted, attempts),
        sweep=sweep.member(run),
        metrics=last.get("metrics", {}),
    )


def _started(attempts: Sequence[Mapping[str, Any]], starts: Sequence[Start]) -> datetime | None:
    if attempts:
        return datetime.fromisoformat(attempts[-1]["started"])
    return datetime.fromtimestamp(starts[-1].began, UTC) if starts else None


def _start_seconds(run: Run, start: Start, now: Status) -> float:
    """Returns the seconds of a start so far. A start that was killed has no end: it counts up to its last output."""
    if start.ended is not None:
        return max(0.0, start.ended - start.began)
    until = time.time() if now.state == "running" else last_output(run) or start.began
    return max(0.0, until - start.began)


def attempt_spans(
    run: Run, attempts: Sequence[Mapping[str, Any]], *, is_running: bool
) -> list[tuple[float, float]]:
    """Returns begin and end of each attempt, in seconds since 1970.

    An attempt that was killed ends with its last row of metrics, and the last attempt of a run that `is_running`, now.

    >>> attempt_spans(run, run.info()["attempts"], is_running=False)
    [(1794750478.6, 1794750489.2), (1794750516.6, 1794750519.3)]
    """
    begins = [timestamp(each.get("started")) for each in attempts]
    spans = []
    for attempt, (begin, following) in zip(attempts, pairwise([*begins, math.inf]), strict=True):
        end = timestamp(attempt.get("ended"))
        if not end and is_running and following == math.inf:
            end = time.time()
        elif not end:
            end = jsonlines.last_time(run.metrics_file(0), before=following) or 0.0
        spans.append((begin, max(begin, end)))
    return spans


def timestamp(text: object) -> float:
    """Returns a time of run.json in seconds since 1970; 0 if it is not valid."""
    try:
        found = datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):  # the year 1 in a time zone east of UTC
        return 0.0
    return found if is_time(found) else 0.0


def job_ids(submitted: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> JobIds | None:
    """Returns the job in submitted.json, or else the job in which the last attempt ran; None if there is neither."""
    return JobIds.from_submission(submitted) or (JobIds.from_dict(attempts[-1]) if attempts else None)


def _job(submitted: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> str | None:
    if ids := job_ids(submitted, attempts):
        return ids.number
    facts = submitted if "pid" in submitted else attempts[-1] if attempts else None
    return f"{facts['host']}:{facts['pid']}" if facts else None


def _heartbeat(run: Run) -> int | None:
    owner = lock.newest_owner(run.lock_dir)
    return owner.beat if owner else None


def _as_lost(summary: RunSummary) -> RunSummary:
    why = f"{summary.status.why}, which no longer changes"
    return replace(summary, status=Status(state="lost", why=why))


def last_metrics(run: Run) -> dict[str, Any]:
    """Returns the newest row of rank 0's metrics file that has metrics; empty if there is none."""
    file = run.metrics_file(0)
    for limit_bytes in _END_BYTES:  # most rows are short
        for row in filter(_has_metrics, jsonlines.read_reversed(file, limit_bytes=limit_bytes)):
            return row
    return {}


def metric_rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yields the rows of rank 0's metrics file that have metrics, in the order of writing."""
    with suppress(OSError):  # no metrics yet
        yield from filter(_has_metrics, jsonlines.read(run.metrics_file(0)))


def _has_metrics(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("metrics"), dict) and is_count(row.get("step"))
