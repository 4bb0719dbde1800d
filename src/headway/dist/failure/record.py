"""The record of a failure, and its text for people. No torch, since node agents use it, too."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from headway.run.status import NOT_OF_A_RANK

FailureKind = Literal[
    "exception", "interrupted", "hang", "vanished", "left",
    "exit", "lost", "agent", "step", "staging", "doctor",
]  # fmt: skip
"""the first line is found by ranks, the second by agents: exit is the end of a rank as its parent sees it; lost is for
a whole node, agent and step for what had started the ranks, staging and doctor for what came before them"""


class FailureRecord(TypedDict, total=False):
    """How a launch failed; which keys there are depends on the kind."""

    kind: FailureKind
    rank: int | None
    """None for a hang without suspects"""
    host: str | None
    pid: int | None
    phase: str | None
    step: int | None
    error: str
    sentence: str | None
    """what to print instead of the traceback, where the error is headway's own"""
    hint: str | None
    traceback: str | None
    """for the kind left, that of the rank which still waited"""
    output: str | None
    """the end of the rank's log, where native code crashed"""
    exit_code: int
    time: str
    echo: bool
    """whether the error only results from the exit of another rank"""
    locked_out: bool
    """whether another process owns the run"""
    suspects: list[int]
    victims: list[int]
    age: float
    global_batch_size: int | None
    """of a batch that this number of ranks cannot share"""
    failure_file: str | None
    """in the copies of the agent and of the hub: where the run keeps the record; None if it could not be written"""
    owner: int | None
    """in the agent's copy: the number of the lock that the rank's attempt holds on the run"""


_NATIVE_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")


def format_cause(record: Mapping[str, Any], world_size: int, where: Path | str | None) -> str:
    """Formats the last block on the screen: which rank failed first, why, and where the record is."""
    if record["kind"] == "interrupted":
        return "headway: interrupted by Ctrl-C\n"
    if record["kind"] == "hang":
        text = f"headway: {record['error']}\n\n{record['traceback']}\n"
        return text + (f"record: {where}\n" if where is not None else "")
    if record["kind"] in NOT_OF_A_RANK:
        return f"headway: {record['error']}\n" + (f"record: {where}\n" if where is not None else "")
    who = f"rank {record['rank']} of {world_size} on {record['host']} (pid {record['pid']})"
    doing = f", in {record['phase']}" if record.get("phase") else ""
    doing += f" at step {record['step']}" if record.get("step") is not None else ""
    if record.get("sentence"):
        text = f"headway: {record['sentence']}\n" + (f"  raised by {who}\n" if world_size > 1 else "")
    elif record["kind"] == "exception":
        text = f"headway: {who} failed{doing}\n\n{str(record['traceback']).rstrip()}\n"
    else:
        hint = f": {record['hint']}" if record.get("hint") else ""
        text = f"headway: {who} {record['error']}{doing}{hint}\n"
        if record.get("output"):
            text += f"\n{str(record['output']).rstrip()}\n"
        if record.get("traceback"):  # of another rank, which this one has left: the cause comes last
            text = f"{str(record['traceback']).rstrip()}\n\n{text}"
    return text + (f"record: {where}\n" if where is not None else "")


def format_pointer(rank: int, record: Mapping[str, Any], where: Path | str | None) -> str:
    """Formats the line of a healthy rank that stops because another one failed."""
    place = f"see {where}" if where is not None else "the cause is at the end of this output"
    what = "no rank makes progress" if record.get("kind") == "hang" else f"rank {record['rank']} failed"
    return f"headway: rank {rank} stops because {what} ({record['error']}); {place}\n"


def is_native_crash(status: int) -> bool:
    """Whether a process crashed in native code, which writes an explanation, if any, to its standard error."""
    return status < 0 and signal.Signals(-status).name in _NATIVE_CRASHES


def describe_exit_status(status: int) -> str:
    """Describes how a process ended, from its return code in the convention of `subprocess`.

    >>> describe_exit_status(-9)
    'was killed by SIGKILL (kill -9, or the out-of-memory killer: see dmesg)'
    """
    if status >= 0:
        return f"exited with code {status}"
    if -status not in set(signal.Signals):  # programs exit with codes like 255, too
        return f"exited with code {128 - status}"
    name = signal.Signals(-status).name
    if name == "SIGKILL":
        return "was killed by SIGKILL (kill -9, or the out-of-memory killer: see dmesg)"
    if name in _NATIVE_CRASHES:
        return f"crashed in native code ({name})"
    return f"was terminated by {name}"
