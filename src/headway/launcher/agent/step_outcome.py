"""How the launch of a submitted job ended: from the records of its agents, and from how the step that ran them ended.

Usually the agents' records explain it. Where one of them is missing, the exit status of the step and the record of the
ranks show which process was killed, or why no agent could write.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from headway.dist.control.signals import STOP_REQUESTS
from headway.dist.failure.record import FailureRecord, describe_exit_status
from headway.errors import DONE, TERMINATED, Stopped
from headway.launcher.agent.launch_records import LaunchRecords, Outcome
from headway.run.exit_codes import EXIT_CODES

_TIMED_OUT = (
    "the time limit of the job came before its ranks had stopped; give them more time with --signal-lead"
)
_SETTLE_S = 3.0
"""how long a network file system may hide the last record of an agent"""
_UNREADABLE_S = 30.0
"""how long a network file system may fail to list the records at all"""


@final
@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """How a step ended: its exit status, and the agents without a record for which it was still waiting.

    A step that still runs has no status: the job's own end came first.
    """

    status: int | None
    lost: tuple[int, ...] = ()
    killed_by: int | None = None
    """the signal that ended the step's own process, unless headway sent it"""


def read_outcome(records: LaunchRecords, end: StepEnd, *, is_prologue: bool = False) -> Outcome:
    """Returns how the launch ended; with `is_prologue`, `end` is of the step that prepares the nodes for the ranks."""
    if end.lost and is_prologue and not records.outcome():  # srun kills the others when one has failed
        return _lost_in_prologue(records, end)
    if end.status is not None and not end.lost:
        if records.missing() and records.trouble:
            records.settle(_UNREADABLE_S)
        elif records.ends():
            records.settle(_SETTLE_S)
    return (
        _from_agents(records, end)
        or _from_status(end.status, is_prologue=is_prologue)
        or _from_ranks(records, end)
    )


def _lost_in_prologue(records: LaunchRecords, end: StepEnd) -> Outcome:
    hosts = records.hosts(end.lost)
    error = f"{hosts} is lost: it was silent while the nodes were prepared for the ranks"
    return {"exit_code": 1, "record": {"kind": "lost", "host": hosts, "error": error, "exit_code": 1}}


def _from_agents(records: LaunchRecords, end: StepEnd) -> Outcome | None:
    """Returns the outcome that the agents recorded; None if it does not explain why all of them ended."""
    outcome: Outcome = records.outcome() or {"exit_code": DONE, "record": None}
    ends = records.ends()
    code = outcome["exit_code"] or max(ends.values(), default=DONE)
    # srun ends all agents by SIGTERM when one of them fails, as SLURM does when the job must end: only in the second
    # case does each of them leave a record
    if code in (DONE, TERMINATED) and len(ends) < records.size:
        return None
    return _killed_agent(records, end, outcome.get("record")) or outcome | {"exit_code": code}


def _from_status(status: int | None, *, is_prologue: bool) -> Outcome | None:
    """Returns the outcome that the exit status of the step implies; None if it only shows that something failed."""
    record: FailureRecord | None = {"sentence": "stopped before the ranks had started"}
    if status is None:  # the step was still running when the job had to end
        code, record = TERMINATED, {"sentence": _TIMED_OUT}
    elif is_prologue and status in (TERMINATED, Stopped.exit_code):
        code = status
    elif status - 128 in STOP_REQUESTS:
        # the signal ended an agent that had just been started and had no handler yet
        code = Stopped.exit_code
    elif status in EXIT_CODES and status < 128:
        # with a full disk no agent can record its end; codes above 128 may also come from a signal
        code, record = status, None
    elif is_prologue:
        how = describe_exit_status(status if status <= 128 else 128 - status)
        sentence = f"the step that prepares the nodes {how}; its output, above, says more"
        code, record = 1, {"kind": "staging", "sentence": sentence}
    else:
        return None
    return {"exit_code": code, "record": record}


def _from_ranks(records: LaunchRecords, end: StepEnd) -> Outcome:
    """Returns the outcome that the ranks recorded, if it names a cause; else which process was killed, if known."""
    record = records.failure()
    if record and record["kind"] != "vanished":
        return {"exit_code": int(record["exit_code"]), "record": record}
    return _killed_step(end) or _killed_agent(records, end, record) or _unrecorded(records, end)


def _killed_step(end: StepEnd) -> Outcome | None:
    """Returns the outcome if the step's own process was killed, which ends its agents with the job."""
    if end.killed_by is None or end.lost:
        return None
    how = describe_exit_status(-end.killed_by)
    error = f"the process of the job's step (srun) {how}, and the ranks were ended with it"
    return {"exit_code": 1, "record": {"kind": "step", "error": error, "exit_code": 1}}


def _killed_agent(records: LaunchRecords, end: StepEnd, record: FailureRecord | None) -> Outcome | None:
    """Returns the outcome if a rank is gone because its agent was killed; `record` is the record of the rank."""
    if not record or record["kind"] != "vanished" or end.status is None or end.lost:
        return None
    rank = record["rank"]
    assert rank is not None, "only a hang has none"
    number = records.agent_of(rank)
    return None if number not in records.missing() else _unrecorded(records, end, (number,), record)


def _unrecorded(
    records: LaunchRecords,
    end: StepEnd,
    agents: Sequence[int] = (),
    record: FailureRecord | None = None,
) -> Outcome:
    """Returns the outcome of a launch in which `agents`, by default all that are missing, left no record."""
    agents, status = agents or records.missing(), end.status or 0
    hosts = records.hosts(agents)
    if status > 128 and status not in records.ends().values():
        how = f"{describe_exit_status(128 - status)}, and its ranks with it"
    elif records.ends():  # the exit status belongs to another agent, which had to end
        how = f"{describe_exit_status(-signal.SIGKILL)}, and its ranks with it"
    else:
        how = (
            f"ended without a record; the exit status of its step is {status}, and the output above says more"
        )
    of_rank = {"rank": None, "pid": None, "step": None, **(record or {}), "hint": None}
    trouble = f" ({records.directory} cannot be read: {records.trouble})" if records.trouble else ""
    error = f"the agent on {hosts} {how}{trouble}"
    return {
        "exit_code": 1,
        "record": {**of_rank, "kind": "agent", "host": hosts, "error": error, "exit_code": 1},
    }
