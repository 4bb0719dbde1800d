"""The status of a run: from the scheduler's queue, the records of the run, and whether its processes are alive.

    queued       the scheduler has not started it          running      by its heartbeat, its process or its job
    done, failed, stopped (may be resumed), interrupted    as the run recorded it
    cancelled    before or while it ran                    lost         it was running; no process is left
    new          created, never started

A process can be killed before it records its end, so the recorded status "running" counts only with a heartbeat, a
process or a job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, final

from headway import schedulers
from headway.errors import DONE, UsageError
from headway.run import Run, lock
from headway.run.exit_codes import EXIT_CODES, code_of, state_of
from headway.run.info import read_json
from headway.run.job_record import open_start, read_last_end
from headway.schedulers.base import JobIds, JobStatus, Queue
from headway.system.locks import ProcessIdentity

State = Literal["queued", "running", "done", "failed", "stopped", "interrupted", "cancelled", "lost", "new"]
OVER: frozenset[State] = frozenset({"done", "failed", "stopped", "interrupted", "cancelled", "lost"})
_RECORDED_ENDS = ("failed", "stopped", "interrupted")  # for these, the run recorded more than an exit code
NOT_OF_A_RANK = ("lost", "agent", "step")
"""kinds of failure records whose error names what failed: a node, its agent, or the step of the job"""
_UNANSWERED = "the scheduler has not confirmed the job; if it is not in the queue: headway resume"


@final
@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a run, and the reason if there is one."""

    state: State
    why: str = ""
    certain: bool = True
    """False if it rests on a heartbeat of another machine, or on a scheduler that does not answer."""

    @property
    def over(self) -> bool:
        return self.certain and self.state in OVER


def status(run: Run, queue: Queue, info: Mapping[str, Any] | None = None) -> Status:
    """Returns the status of a run; `queue` has the jobs of all schedulers, read once for many runs.

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
    in_queue = queue.find(job) if job else None
    attempts = info["attempts"]
    if job and in_queue and not in_queue.is_over:
        held = _held_after_the_end(run, job, in_queue, attempts[-1]) if attempts else None
        return held or Status(state=in_queue.state, why=in_queue.why)
    ended = read_last_end(run, attempts)
    queue_why = in_queue.why if in_queue and in_queue.state == "failed" else ""  # such as its time limit
    recorded = None
    if attempts:
        reasons = ((ended or {}).get("error"), queue_why)
        recorded = _recorded_status(run, attempts[-1], job if in_queue else None, reasons)
    process = _process(submitted or open_start(run))
    for sign in (recorded, process):
        if sign and sign.state == "running" and sign.certain:
            return sign
    if ended:
        if recorded and recorded.state in _RECORDED_ENDS:
            return recorded
        state: State = state_of(ended["exit_code"])
        return Status(state=state, why=_reason(run, state, ended["exit_code"], ended.get("error"), queue_why))
    by_hand = attempts and _began_since(submitted, attempts[-1])  # a job would have recorded its number
    if is_unanswered(submitted) and not by_hand and (recorded is None or recorded.state != "running"):
        return Status(state="queued", why=f"{_UNANSWERED} {run.shell_name}", certain=False)
    if recorded and recorded.state != "lost":
        return recorded
    if in_queue:
        return Status(state=in_queue.state, why=in_queue.why)
    if job and recorded is None:
        return Status(
            state="lost",
            why=f"{schedulers.describe(job)} is not known to its scheduler here, and left no record",
        )
    return recorded or process or Status(state="new")


def is_unanswered(submitted: Mapping[str, Any]) -> bool:
    """Returns whether a job was sent to a scheduler whose reply was lost, or has not come yet."""
    return "scheduler" in submitted and "job_id" not in submitted


def _began_since(submitted: Mapping[str, Any], attempt: Mapping[str, Any]) -> bool:
    """Returns whether an attempt began after the job of its run was sent to the scheduler."""
    try:
        return datetime.fromisoformat(attempt["started"]) >= datetime.fromisoformat(submitted["time"])
    except (KeyError, TypeError, ValueError):  # from an older version or another user
        return False


def _held_after_the_end(
    run: Run, job: JobIds, in_queue: JobStatus, attempt: Mapping[str, Any]
) -> Status | None:
    """Returns the status of a job that runs although its attempt has ended; None if it may be another job's attempt."""
    begin = datetime.fromisoformat(attempt["started"]).timestamp()
    if in_queue.state != "running" or in_queue.started is None or begin < in_queue.started:
        return None
    recorded = _recorded_status(run, attempt)
    if recorded.state == "running":
        return None
    how = f"{recorded.state}: {recorded.why}" if recorded.why else recorded.state
    why = f"attempt {attempt['number']} is {how}; {schedulers.describe(job)} still holds its nodes"
    return Status(state="running", why=why)


def _recorded_status(
    run: Run, attempt: Mapping[str, Any], over: JobIds | None = None, reasons: Sequence[str | None] = ()
) -> Status:
    """Returns the status that the last attempt recorded, unless that is "running" and its process is gone.

    `over` is a job that is over according to its scheduler: so are its processes, if they cannot be checked. `reasons`
    are those of other records, for an attempt that did not record why it ended.
    """
    if attempt["status"] != "running":
        state, why = attempt["status"], attempt.get("why")
        if state == "done" and not attempt.get("script_ended", True) and (failure := _failure(run)):
            return Status(state="failed", why=f"after the training was done: {failure}")
        return Status(state=state, why=_reason(run, state, attempt.get("exit_code"), why, *reasons))
    owner = lock.newest_owner(run.lock_dir)
    gone = "it ended without recording how"
    if owner is not None and not owner.released:
        alive = owner.identity.is_alive()
        if alive:
            return Status(state="running")
        if alive is None and not _is_same_job(owner.job, over):
            return Status(
                state="running", why=f"on {owner.host}, according to its last heartbeat", certain=False
            )
        gone = f"{owner} is gone"
    end = run.conclude_end(attempt)
    if end["status"] == "lost":
        return Status(state="lost", why=gone)
    return Status(state=end["status"], why=_reason(run, end["status"], end["exit_code"], *reasons))


def _is_same_job(one: JobIds | None, other: JobIds | None) -> bool:
    if one is None or other is None:
        return False
    return (one.scheduler, one.number) == (other.scheduler, other.number)


def _reason(run: Run, state: State, code: int | None, *reasons: str | None) -> str:
    """Returns why a run ended: its failure record, else the first of `reasons`, else the meaning of its exit code."""
    if state not in _RECORDED_ENDS:
        return ""
    code = code if isinstance(code, int) else 0
    if code in EXIT_CODES:
        by_code = EXIT_CODES[code].why
    else:
        by_code = f"exit code {code}" if code else "it did not record why"
    return " ".join(str(next(filter(None, (_failure(run), *reasons)), by_code)).split())


def _process(started: Mapping[str, Any]) -> Status | None:
    """Returns the status of a job that was started as a process, without a scheduler; None if there is none."""
    match started:
        case {"host": str(), "machine": str(), "pid": int(), "born": str() | None}:
            process = ProcessIdentity.from_dict(started)
            alive = False if process.is_before_restart() else process.is_alive()
        case _:
            return None
    if alive:
        return Status(state="running")
    if alive is None:
        return Status(
            state="running", why=f"on {process.host}, which cannot be checked from here", certain=False
        )
    return Status(state="lost", why=f"pid {process.pid} is gone and recorded no end")


def _failure(run: Run) -> str:
    """Returns the failure record of a run in one line; empty without one."""
    record = read_json(run.failure_file)
    return describe_failure(record) if record else ""


def describe_failure(record: Mapping[str, Any]) -> str:
    """Returns the first failing rank, if it was one, and its error in one line.

    >>> describe_failure({"kind": "exception", "rank": 3, "step": 7, "error": "ValueError: too hot"})
    'rank 3 at step 7: ValueError: too hot'
    """
    who = ""
    # the error of a hang names the ranks that cause it, if any
    if record.get("kind") not in (*NOT_OF_A_RANK, "hang"):
        step = f" at step {record['step']}" if record.get("step") is not None else ""
        who = f"rank {record.get('rank')}{step}: "
    return " ".join(f"{who}{record.get('error')}".split())


def check_over(run: Run, now: Status) -> None:
    """Raises `UsageError` unless a run is known to be over, and so may be started again."""
    if now.over or (now.state == "queued" and is_unanswered(read_json(run.submission_file) or {})):
        return  # its status asks the user to look into the queue before starting it again
    if now.certain or now.state == "running":
        raise UsageError(f"{run.id} is {now.state}: only a run that is over can be started again")
    raise UsageError(
        f"{run.id} may be queued or running ({now.why}): only a run that is known to be over can be started again"
    )


def exit_code(run: Run, now: Status) -> int:
    """Returns the exit code of a run that is over: the one its supervisor recorded, else one for its state."""
    ended = read_last_end(run, run.info()["attempts"])
    if ended and (ended["exit_code"] == DONE) == (now.state == "done"):
        return int(ended["exit_code"])
    return code_of(now.state)
