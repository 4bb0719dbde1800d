"""The record of a job, written by the supervisor of its ranks: starts.jsonl, and ended.json for the last end.

A `Pipeline` also records its attempts in run.json, in more detail. For a function or a plain script there is only this
record, and only the supervisor sees how a killed rank ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, final

from headway.errors import TERMINATED, HeadwayError, Stopped, UsageError
from headway.run.directory import Run
from headway.run.info import is_end_of, read_end, read_json
from headway.run.progress import JobProgress
from headway.system import files, jsonlines
from headway.system.jsonlines import JsonLinesWriter, is_time
from headway.system.locks import ProcessIdentity


@final
@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a job; times are in seconds since 1970."""

    began: float
    ended: float | None = None
    """if it was killed, the time of its last output before the next start; None if that is unknown, too"""


def record_start(run: Run, *, job: str | None = None) -> None:
    """Records that this process starts the job of a run; `job` is the scheduler's number for it."""
    process = ProcessIdentity.of().to_dict()
    _append(run, {"event": "start", **process, "job": job, "output_before": last_output(run)})


def read_starts(run: Run) -> list[Start]:
    """Returns all starts, in order; none for a run of a version that did not record them."""
    rows: Iterable[Mapping[str, Any]] = ()
    with suppress(OSError):  # another user's file
        rows = list(jsonlines.read(run.starts_file))
    starts: list[Start] = []
    for row in rows:
        now = row.get("time")
        if not is_time(now):
            continue
        is_open = bool(starts) and starts[-1].ended is None
        if row.get("event") == "start":
            output = row.get("output_before")
            if is_open and is_time(output):
                starts[-1] = replace(starts[-1], ended=max(starts[-1].began, min(output, now)))
            starts.append(Start(began=now))
        elif is_open:
            starts[-1] = replace(starts[-1], ended=now)
    return starts


def open_start(run: Run) -> Mapping[str, Any]:
    """Returns the row of the last start if no end follows it; empty otherwise, or if a scheduler runs the job."""
    last = next(jsonlines.read_reversed(run.starts_file), {})
    return last if last.get("event") == "start" and last.get("job") is None else {}


def last_output(run: Run) -> float | None:
    """Returns the time at which the job last wrote to its log; None if it has none."""
    with suppress(OSError):
        return run.job_log.stat().st_mtime
    return None


def record_end(run: Run, code: int, *, error: str | None = None, progress: str = "") -> None:
    """Records that the job of a run ended; its supervisor, which has the exit code, calls this.

    `progress` is where a script keeps checkpoints of its own.

    Records nothing if another process trains in the run: this job was refused, or was replaced.
    """
    if not run.is_ours():
        return
    _append(run, {"event": "end", "exit_code": code})
    now = datetime.now(UTC)
    attempts = _attempts(run)
    facts = {
        "exit_code": code,
        "time": now.isoformat(timespec="milliseconds"),
        "attempts": None if attempts is None else len(attempts),
        "error": error,
        "exit_s": _since_last_attempt(attempts, now),
    }
    # the job ended before it could save, or after training, with nothing left to save
    if code == TERMINATED or (code == Stopped.exit_code and is_in_last_lines(run)):
        facts["progress"] = JobProgress.after(run, progress).to_dict()
    with files.storage(f"write {run.ended_file}"):
        files.write_atomic(run.ended_file, json.dumps(facts).encode())


def run_recorded(run: Run, work: Callable[[], int]) -> int:
    """Calls `work`, which runs the job on this machine and returns its exit code, and records its start and end.

    The end is also recorded if `work` raises an error, or a signal ends it.
    """
    record_start(run)
    try:
        code = work()
    except SystemExit as stop:
        record_end(run, stop.code if isinstance(stop.code, int) else 1)
        raise
    except BaseException as error:
        code = error.exit_code if isinstance(error, HeadwayError) else 1
        record_end(run, code, error=f"{type(error).__name__}: {error}")
        raise
    record_end(run, code)
    return code


def read_last_end(run: Run, attempts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns ended.json of a run; None if there is none, or if it describes an earlier attempt."""
    ended = read_end(run.ended_file)
    return None if ended and attempts and not is_end_of(ended, attempts[-1]) else ended


def is_over_for_good(run: Run) -> bool:
    """Returns whether the record of the last end alone proves that no job of the run is queued.

    A job that was stopped, ended by SIGTERM or lost a node may be queued again. Submitting another job removes the
    record first.
    """
    ended = read_last_end(run, run.info()["attempts"])
    if ended is None or ended["exit_code"] in (Stopped.exit_code, TERMINATED):
        return False
    return (read_json(run.failure_file) or {}).get("kind") not in ("lost", "vanished")


def exit_seconds(run: Run) -> float:
    """Returns the seconds from the end of the last job's attempt to the end of the job; 0 if unknown.

    A job must save at least that long before its time limit, since it is requeued only after ranks and agents end.
    """
    return float((read_json(run.ended_file) or {}).get("exit_s") or 0.0)


def is_in_last_lines(run: Run) -> bool:
    """Returns whether the training of a run is done and only the rest of its script remains."""
    last = (_attempts(run) or [{}])[-1]
    return last.get("status") == "done" and not last.get("script_ended", True)


def _since_last_attempt(attempts: Sequence[Mapping[str, Any]] | None, now: datetime) -> float | None:
    ended = (attempts or [{}])[-1].get("ended")
    return round((now - datetime.fromisoformat(ended)).total_seconds(), 3) if ended else None


def _attempts(run: Run) -> Sequence[Mapping[str, Any]] | None:
    """Returns the attempts so far; None if run.json cannot be read, which must not prevent recording the end."""
    try:
        return run.info()["attempts"]  # type: ignore[no-any-return]
    except UsageError:
        return None


def _append(run: Run, row: Mapping[str, Any]) -> None:
    with JsonLinesWriter(run.starts_file, content="starts of the job") as rows:
        rows.write({**row, "time": time.time()})
