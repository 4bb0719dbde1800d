"""SLURM's view of jobs: squeue for those that the controller has in memory, sacct for the rest."""

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
    """Translates one of SLURM's state words; `started` is when the job last started, as SLURM writes it.

    >>> job_status("PENDING", "Priority")
    JobStatus(state='queued', why='Priority')
    """
    if state == "PENDING":
        return JobStatus(state="queued", why=reason)
    why = _WHY.get(state, state.lower().replace("_", " "))
    return JobStatus(state=_STATES.get(state, "failed"), why=why, started=parse_time(started))


def parse_time(text: str) -> float | None:
    """Converts a time as SLURM writes it to seconds since 1970; None for N/A.

    >>> parse_time("N/A"), parse_time("Unknown")
    (None, None)
    """
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        return None


def ask_queue(client: SlurmClient, jobs: Iterable[JobIds]) -> Queue:
    """Returns the statuses of this user's jobs; those of `jobs` that squeue does not list are looked up in sacct.

    Without SLURM on this machine the queue is empty; if SLURM does not answer in time, it has a note.
    """
    # --all: without it, squeue leaves out jobs in hidden partitions
    columns = "--format=%i|%T|%r|%S"
    answer = client.run("squeue", "--me", "--all", "--noheader", "--array", "--states=all", columns)
    if answer.not_installed:
        return Queue()
    complaint = answer.err.strip().splitlines() or [f"squeue ended with exit code {answer.code}"]
    note = complaint[0] if answer.code else None
    statuses = dict(_parse(answer.out))
    unknown = {ids.job_id for ids in jobs if ("slurm", ids.number) not in statuses}
    # the ids may come from runs of other people: only well-formed ones reach the command line
    missing = sorted(filter(_JOB.fullmatch, unknown))
    if missing:  # without accounting, sacct adds nothing
        history = client.run("sacct", "-nPX", f"--jobs={','.join(missing)}", "--format=JobID,State,Reason")
        statuses = {**dict(_parse(history.out)), **statuses}
    return Queue(statuses=statuses, note=note)


def is_gone(client: SlurmClient, job: str) -> bool | None:
    """Whether squeue shows that no process of a job is left; None if it runs, or squeue does not answer."""
    answer = client.run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
    if answer.code:
        return True if "Invalid job id specified" in answer.err else None
    states = answer.out.split()
    if any(state in _SUSPENDED for state in states):
        return False  # its heartbeat has stopped as well, and the job will resume
    return True if all(state in _WITHOUT_PROCESSES for state in states) else None


def _parse(out: str) -> Iterator[tuple[tuple[str, str], JobStatus]]:
    for line in out.splitlines():
        job, state, reason, started = (*line.split("|"), "", "", "")[:4]
        if state and state != "REVOKED":  # another cluster of a federation runs it
            # "CANCELLED by 0" in sacct
            yield ("slurm", job), job_status(state.split()[0], "" if reason == "None" else reason, started)
