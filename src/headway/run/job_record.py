"""What whoever supervises the ranks of a job records about it: starts.jsonl, and ended.json about its last end.

A `Pipeline` records its attempts in run.json, with more facts. A function or a plain script has only this, and only
the supervisor knows how a rank ended that was killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, final

from headway.errors import TERMINATED, HeadwayError, Stopped, UsageError
from headway.run.directory import Run
from headway.run.info import is_end_of, newest_step, read_end, read_json
from headway.system import files, jsonlines
from headway.system.jsonlines import JsonLinesWriter, is_time
from headway.system.locks import ProcessIdentity


@final
@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a job; times are in seconds since 1970."""

    began: float
    ended: float | None = None
    """of one that was killed, the last output before the next start; None if that is not known either"""


def record_start(run: Run, *, job: str | None = None) -> None:
    """Records that the job of a run starts now, by this process; `job` is its number."""
    process = ProcessIdentity.of().to_dict()
    _append(run, {"event": "start", **process, "job": job, "output_before": last_output(run)})


def read_starts(run: Run) -> list[Start]:
    """Returns all starts, in their order; none for a run that was started before headway recorded them."""
    rows: Iterable[Mapping[str, Any]] = ()
    with suppress(OSError):  # a file of another user
        rows = list(jsonlines.read(run.starts_file))
    found: list[Start] = []
    for row in rows:
        now = row.get("time")
        if not is_time(now):
            continue
        is_open = bool(found) and found[-1].ended is None
        if row.get("event") == "start":
            output = row.get("output_before")
            if is_open and is_time(output):
                found[-1] = replace(found[-1], ended=max(found[-1].began, min(output, now)))
            found.append(Start(began=now))
        elif is_open:
            found[-1] = replace(found[-1], ended=now)
    return found


def open_start(run: Run) -> Mapping[str, Any]:
    """Returns what is recorded of the last start if its end is not; empty if it is, or a scheduler knows the job."""
    last = next(jsonlines.read_reversed(run.starts_file), {})
    return last if last.get("event") == "start" and last.get("job") is None else {}


def last_output(run: Run) -> float | None:
    """Returns when the job last wrote to its log; None if it has none."""
    with suppress(OSError):
        return run.job_log.stat().st_mtime
    return None


def record_end(run: Run, code: int, *, error: str | None = None) -> None:
    """Records that the job of a run ended; called by its supervisor, which knows the exit code.

    Nothing is recorded if another process trains in the run: this job was refused, or has been replaced.
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
    # nothing was saved at the end, or nothing was left to save
    if code == TERMINATED or (code == Stopped.exit_code and is_in_last_lines(run)):
        step, before = newest_step(run.path), read_json(run.ended_file) or {}
        same = "newest_step" in before and before["newest_step"] == step
        facts |= {"newest_step": step, "same_step_ends": before["same_step_ends"] + 1 if same else 1}
    with files.storage(f"write {run.ended_file}"):
        files.write_atomic(run.ended_file, json.dumps(facts).encode())


def record_failed_start(run: Run, error: BaseException) -> None:
    """Records how a job of a run ended whose supervisor has raised an error, or was ended by a signal."""
    if isinstance(error, SystemExit):
        record_end(run, error.code if isinstance(error.code, int) else 1)
    else:
        code = error.exit_code if isinstance(error, HeadwayError) else 1
        record_end(run, code, error=f"{type(error).__name__}: {error}")


def read_last_end(run: Run, attempts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns how the last start of a run ended; None if that is not recorded, or only of an earlier start."""
    ended = read_end(run.ended_file)
    return None if ended and attempts and not is_end_of(ended, attempts[-1]) else ended


def is_over_for_good(run: Run) -> bool:
    """Returns whether the record of the last end alone says that no job of the run is queued.

    A job that was stopped, ended by SIGTERM or has lost a node may be queued again. Who submits another one removes the
    record first.
    """
    ended = read_last_end(run, run.info()["attempts"])
    if ended is None or ended["exit_code"] in (Stopped.exit_code, TERMINATED):
        return False
    return (read_json(run.failure_file) or {}).get("kind") not in ("lost", "vanished")


def exit_seconds(run: Run) -> float:
    """Returns how long the last job took from the end of its attempt to the record of its own end; 0 if unknown.

    So long before its time limit must a job have saved: ranks and agents end, and only then is it queued again.
    """
    return float((read_json(run.ended_file) or {}).get("exit_s") or 0.0)


def ends_at_same_step(run: Run) -> int:
    """Returns how many jobs of this run in a row were ended with the same newest checkpoint, or none, and no progress.

    That is by SIGTERM before they had saved, or in the rest of the script of a finished run.
    """
    return int((read_json(run.ended_file) or {}).get("same_step_ends", 0))


def is_in_last_lines(run: Run) -> bool:
    """Returns whether the training of a run is done, and only the rest of its script is left."""
    last = (_attempts(run) or [{}])[-1]
    return last.get("status") == "done" and not last.get("script_ended", True)


def _since_last_attempt(attempts: Sequence[Mapping[str, Any]] | None, now: datetime) -> float | None:
    ended = (attempts or [{}])[-1].get("ended")
    return round((now - datetime.fromisoformat(ended)).total_seconds(), 3) if ended else None


def _attempts(run: Run) -> Sequence[Mapping[str, Any]] | None:
    """Returns the attempts so far; None if run.json cannot be read: the end is recorded all the same."""
    try:
        return run.info()["attempts"]  # type: ignore[no-any-return]
    except UsageError:
        return None


def _append(run: Run, row: Mapping[str, Any]) -> None:
    with JsonLinesWriter(run.starts_file, content="starts of the job") as rows:
        rows.write({**row, "time": time.time()})
