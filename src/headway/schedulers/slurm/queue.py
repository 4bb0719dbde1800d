"""What SLURM says about jobs, asked once for all of them: squeue for those it still has in mind, sacct for the rest.

A machine without SLURM has an empty queue. A SLURM that does not answer in time has one, too, with a note.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

_PATIENCE = 10.0  # seconds
_WAITING = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
)
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING")


@final
@dataclass(frozen=True, kw_only=True)
class Ticket:
    """One job in SLURM's words."""

    state: str
    reason: str = ""

    @property
    def waiting(self) -> bool:
        return self.state in _WAITING

    @property
    def over(self) -> bool:
        return not self.waiting and self.state not in _RUNNING

    @property
    def end(self) -> Literal["done", "failed", "cancelled"]:
        """How it ended, as far as SLURM can know."""
        return {"COMPLETED": "done", "CANCELLED": "cancelled"}.get(self.state, "failed")  # type: ignore[return-value]

    @property
    def why(self) -> str:
        """What is worth saying about it."""
        words = {
            "PENDING": self.reason,
            "SUSPENDED": "suspended",
            "TIMEOUT": "ran into its time limit",
            "OUT_OF_MEMORY": "out of memory",
            "NODE_FAIL": "a node failed",
            "PREEMPTED": "preempted",
            "RUNNING": "",
            "COMPLETED": "",
            "CANCELLED": "",
        }
        return words.get(self.state, self.state.lower().replace("_", " "))


@final
@dataclass(frozen=True, kw_only=True)
class Queue:
    """Jobs by their id: `12`, or `12_3` for the fourth of an array."""

    tickets: Mapping[str, Ticket] = field(default_factory=dict)
    note: str | None = None

    @classmethod
    def ask(cls) -> Queue:
        """SLURM's view of this user's jobs, as far as squeue still has them."""
        if shutil.which("squeue") is None:
            return cls()
        out, note = _ask("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%T|%r")
        return cls(tickets=dict(_parse(out)), note=note)

    def with_history(self, submitted: Iterable[Mapping[str, Any]]) -> Queue:
        """The same, with what sacct remembers of these jobs; where SLURM keeps no accounts, nothing is added."""
        missing = sorted(
            {facts["job_id"] for facts in submitted if "job_id" in facts and not self.find(facts)}
        )
        if not missing or shutil.which("sacct") is None:
            return self
        out, _ = _ask("sacct", "-nPX", f"--jobs={','.join(missing)}", "--format=JobID,State,Reason")
        return Queue(tickets={**dict(_parse(out)), **self.tickets}, note=self.note)

    def find(self, submitted: Mapping[str, Any]) -> Ticket | None:
        """What is known of a submitted run, from what submitted.json says."""
        return self.tickets.get(number_of(submitted))


def number_of(submitted: Mapping[str, Any]) -> str:
    """How SLURM's programs call a submitted job; of an array, one of its jobs.

    >>> number_of({"job_id": "7", "array_task": 2})
    '7_2'
    """
    task = submitted.get("array_task")
    return str(submitted["job_id"]) if task is None else f"{submitted['job_id']}_{task}"


def _ask(*command: str) -> tuple[str, str | None]:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"{command[0]} did not answer within {_PATIENCE:g} s"
    except OSError as error:
        return "", f"{command[0]} could not be started: {error.strerror}"
    trouble = done.stderr.strip().splitlines()
    return done.stdout, (trouble[0] if done.returncode and trouble else None)


def _parse(out: str) -> Iterable[tuple[str, Ticket]]:
    for line in out.splitlines():
        job, state, reason = (*line.split("|"), "", "")[:3]
        if state:  # "CANCELLED by 0" in sacct
            yield job, Ticket(state=state.split()[0], reason="" if reason in ("None", "") else reason)
