"""Where a run stands, from what can be known: the scheduler's word, the run's own notes, signs of life.

    queued       the scheduler has it                      running      alive, by its heartbeat, its process or its job
    done, failed, stopped (may be resumed), interrupted    as the run wrote it down
    cancelled    taken back before or while it ran         lost         it was running, and nothing of it is alive
    new          made, never started

Whoever writes can be killed before it writes, so a note that says "running" is believed only with a sign of life.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, final

from headway import schedulers
from headway.errors import INTERRUPTED, TERMINATED, Stopped
from headway.run import Run, lock
from headway.schedulers.base import JobIds, Queue
from headway.system import files
from headway.system.locks import ProcessIdentity

State = Literal["queued", "running", "done", "failed", "stopped", "interrupted", "cancelled", "lost", "new"]
OVER: frozenset[State] = frozenset({"done", "failed", "stopped", "interrupted", "cancelled", "lost"})
_TELLING = ("failed", "stopped", "interrupted")  # of these the run says more than an exit code
_BY_CODE: Mapping[int, State] = {
    0: "done",
    Stopped.exit_code: "stopped",
    INTERRUPTED: "interrupted",
    TERMINATED: "interrupted",
}


@final
@dataclass(frozen=True, kw_only=True)
class Status:
    """The state, and why it is so where that is not plain."""

    state: State
    why: str = ""
    certain: bool = True
    """False where only a heartbeat on another machine can tell, or a scheduler that does not answer: look again."""

    @property
    def over(self) -> bool:
        return self.certain and self.state in OVER


def status(run: Run, queue: Queue, info: Mapping[str, Any] | None = None) -> Status:
    """Where the run stands; `queue` is what the scheduler says of all jobs, asked once.

    >>> status(run, schedulers.queue([ids])).state
    'running'
    """
    submitted = read_json(run.submission_file) or {}
    found = _status(run, queue, run.info() if info is None else info, submitted)
    if queue.note is None or "job_id" not in submitted or found.state in ("running", "done"):
        return found
    return Status(state=found.state, why="; ".join(filter(None, (found.why, queue.note))), certain=False)


def _status(run: Run, queue: Queue, info: Mapping[str, Any], submitted: Mapping[str, Any]) -> Status:
    job = JobIds.from_submission(submitted)
    ticket = queue.find(job) if job else None
    if ticket and not ticket.is_over:
        return Status(state=ticket.state, why=ticket.why)
    attempts = info["attempts"]
    noted = _noted(run, attempts[-1]) if attempts else None
    process = _process(submitted) if "pid" in submitted else None
    for sign in (noted, process):
        if sign and sign.state == "running" and sign.certain:
            return sign
    ended = read_json(run.ended_file)
    of_an_earlier_start = ended and attempts and ended["time"] < attempts[-1]["started"]
    if ended and not of_an_earlier_start:
        return noted if noted and noted.state in _TELLING else _by_exit_code(run, ended)
    if noted and noted.state != "lost":
        return noted
    if ticket:
        return Status(state=ticket.state, why=ticket.why)
    if job and noted is None:
        return Status(state="lost", why=f"{schedulers.describe(job)} is no longer known, and left no record")
    return noted or process or Status(state="new")


def _noted(run: Run, attempt: Mapping[str, Any]) -> Status:
    """What the last attempt wrote down, if it can be believed."""
    if attempt["status"] != "running":
        return Status(state=attempt["status"], why=_failure(run) if attempt["status"] == "failed" else "")
    owner = lock.newest_owner(run.path / "lock")
    gone = "it ended without a word"
    if owner is not None and not owner.released:
        alive = owner.identity.is_alive()
        if alive:
            return Status(state="running")
        if alive is None:
            return Status(state="running", why=f"on {owner.host}, by its last heartbeat", certain=False)
        gone = f"{owner} is gone"
    # with a record of the failure, rank 0 was killed before it could write down how the attempt ended
    failure = _failure(run)
    return Status(state="failed", why=failure) if failure else Status(state="lost", why=gone)


def _by_exit_code(run: Run, ended: Mapping[str, Any]) -> Status:
    state = _BY_CODE.get(ended["exit_code"], "failed")
    if state != "failed":
        return Status(state=state)
    return Status(state=state, why=_failure(run) or ended.get("error") or f"exit code {ended['exit_code']}")


def _process(submitted: Mapping[str, Any]) -> Status:
    """A job that runs, or ran, on some machine without a scheduler."""
    alive = ProcessIdentity.from_dict(submitted).is_alive()
    if alive:
        return Status(state="running")
    if alive is None:
        return Status(
            state="running", why=f"on {submitted['host']}, as far as can be told from here", certain=False
        )
    return Status(state="lost", why=f"pid {submitted['pid']} is gone and left no word")


def _failure(run: Run) -> str:
    """The first failing rank in a few words."""
    record = read_json(run.failure_file)
    if not record:
        return ""
    step = f" at step {record['step']}" if record.get("step") is not None else ""
    return " ".join(f"rank {record.get('rank')}{step}: {record.get('error')}".split())


def note_end(run: Run, code: int, *, error: str | None = None) -> None:
    """Writes down that the job of a run is over: for whoever kept it, and knows nothing but its exit code."""
    facts = {"exit_code": code, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "error": error}
    with files.storage(f"write {run.ended_file}"):
        files.write_atomic(run.ended_file, json.dumps(facts).encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """A small file of facts; None if it is not there or not whole."""
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None
