"""SLURM's view of jobs: squeue for those that it still holds in memory, sacct for the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

from headway.schedulers.base import JobIds, JobState, JobStatus, Queue
from headway.schedulers.slurm.client import SlurmClient

_QUEUED = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
)
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING")
_STATES: Mapping[str, JobState] = {
    **dict.fromkeys(_QUEUED, "queued"),
    **dict.fromkeys(_RUNNING, "running"),
    "COMPLETED": "done",
    "CANCELLED": "cancelled",
}
_WHY = {
    "SUSPENDED": "suspended",
    "TIMEOUT": "ran into its time limit",
    "OUT_OF_MEMORY": "out of memory",
    "NODE_FAIL": "a node failed",
    "PREEMPTED": "preempted",
    "RUNNING": "",
    "COMPLETED": "",
    "CANCELLED": "",
}
_JOB = re.compile(r"[0-9]+([_+][0-9]+)?")
_SUSPENDED = ("SUSPENDED", "STOPPED")
_WITHOUT_PROCESSES = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PENDING",
    "PREEMPTED",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REVOKED",
    "SPECIAL_EXIT",
    "TIMEOUT",
)


def job_status(state: str, reason: str = "", started: str = "") -> JobStatus:
    """What one of SLURM's state words means; `started` is when the job started last, as SLURM writes it.

    >>> job_status("PENDING", "Priority")
    JobStatus(state='queued', why='Priority')
    """
    if state == "PENDING":
        return JobStatus(state="queued", why=reason)
    why = _WHY.get(state, state.lower().replace("_", " "))
    return JobStatus(state=_STATES.get(state, "failed"), why=why, started=parse_time(started))


def parse_time(text: str) -> float | None:
    """A moment as SLURM writes it, in seconds since 1970; None for N/A.

    >>> parse_time("N/A"), parse_time("Unknown")
    (None, None)
    """
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        return None


def ask_queue(client: SlurmClient, jobs: Iterable[JobIds]) -> Queue:
    """SLURM's view of this user's jobs; `jobs` are those to look up in its accounts if it has forgotten them.

    A machine without SLURM has an empty queue; a SLURM that does not answer in time has one with a note.
    """
    answer = client.run("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%S")
    if answer.not_installed:
        return Queue()
    complaint = answer.err.strip().splitlines()
    note = complaint[0] if answer.code and complaint else None
    statuses = dict(_parse(answer.out))
    unknown = {ids.job_id for ids in jobs if ("slurm", ids.number) not in statuses}
    # others may have written what they like into their runs
    missing = sorted(filter(_JOB.fullmatch, unknown))
    if missing:  # where SLURM keeps no accounts, nothing is added
        history = client.run("sacct", "-nPX", f"--jobs={','.join(missing)}", "--format=JobID,State,Reason")
        statuses = {**dict(_parse(history.out)), **statuses}
    return Queue(statuses=statuses, note=note)


def is_gone(client: SlurmClient, job: str) -> bool | None:
    """Whether squeue says that no process of a job is left; None when it runs, or when squeue does not know."""
    answer = client.run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
    if answer.code:
        return True if "Invalid job id specified" in answer.err else None
    states = answer.out.split()
    if any(state in _SUSPENDED for state in states):
        return False  # its heartbeat stands still as well, and it will come back
    return True if all(state in _WITHOUT_PROCESSES for state in states) else None


def _parse(out: str) -> Iterator[tuple[tuple[str, str], JobStatus]]:
    for line in out.splitlines():
        job, state, reason, started = (*line.split("|"), "", "", "")[:4]
        if state:  # "CANCELLED by 0" in sacct
            yield ("slurm", job), job_status(state.split()[0], "" if reason == "None" else reason, started)
