"""Analyzes a run that makes no progress: which ranks hold it up, which only wait, and the report. No torch.

The hub collects the statuses of ranks over its connections, a node agent from shared memory; the analysis is the same.
Suspects are ranks that are stopped or do not reply; else those that are behind in steps; else those that have ended
their epoch while the others wait within theirs; else those that are behind in collectives; else those whose stack is
not waiting for others. All other ranks are victims.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, final

from headway.dist.failure.record import FailureRecord

Condition = Literal["answers", "silent", "stopped", "blocked"]
"""stopped: by a signal; blocked: inside the kernel, as by a file system that does not respond"""

WAITING_IN = {
    "dist/collective/exchange.py": "_wait|read|gather_rows",
    "dist/collective/guard.py": "barrier",
    "dist/collective/averaging.py": ".*",
    "dist/topology/interconnect.py": ".*",
}
"""headway's functions in which a rank waits for others"""
OWN_THREADS = ("testing/", "dist/control/", "run/lock.py")
"""modules of headway's own threads, whose stacks do not explain a hang"""
_WAITS = re.compile(
    r"distributed_c10d\.py|in _engine_run_backward|in barrier$|"
    + "|".join(rf"/headway/{path}\", line \d+ in ({names})$" for path, names in WAITING_IN.items()),
    re.M,
)
_OURS = re.compile("|".join(f"/headway/{path}" for path in OWN_THREADS))
_DESCRIPTIONS = {
    "silent": "does not respond: stopped, or busy in native code that holds the interpreter lock",
    "stopped": "is stopped (SIGSTOP): kill -CONT resumes it",
    "blocked": "is blocked in the kernel, as by a disk or a network file system that does not respond",
}


@final
@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What is known about one rank."""

    rank: int
    host: str
    pid: int
    phase: str | None = None
    step: int | None = None
    ended_epoch: int | None = None
    """the epoch that it has ended, counted from 1; None within an epoch"""
    age: float
    """seconds since it made progress"""
    collectives: int | None = None
    """how many collectives it has begun, where that is known"""
    condition: Condition = "answers"
    stack: str = ""


def suspects(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Returns the ranks that hold up the others; none if no rank differs from the rest."""
    for found in (
        [one for one in statuses if one.condition != "answers"],
        _behind(statuses, [one.step for one in statuses]),
        _ended_early(statuses),
        _behind(statuses, [one.collectives for one in statuses]),
        [one for one in statuses if _works(one)],
    ):
        if 0 < len(found) < len(statuses):
            return found
    return []


def _behind(statuses: Sequence[RankStatus], counts: Sequence[int | None]) -> list[RankStatus]:
    known = [count for count in counts if count is not None]
    return [
        one for one, count in zip(statuses, counts, strict=True) if count is not None and count < max(known)
    ]


def _ended_early(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Returns the ranks that have no batch for the step in which all others wait; none if one of those others works."""
    if any(one.ended_epoch is None and _works(one) for one in statuses):
        return []
    return [one for one in statuses if one.ended_epoch is not None]


def _works(one: RankStatus) -> bool:
    """Whether its stack shows that it does not wait for other ranks."""
    return bool(one.stack) and not _WAITS.search(one.stack)


def make_record(statuses: Sequence[RankStatus], world_size: int) -> FailureRecord:
    """Returns the record of a hang."""
    suspected = suspects(statuses)
    return _record(statuses, suspected, _sentence(statuses, suspected, world_size))


def make_overdue_record(
    absent: Sequence[RankStatus], world_size: int, limit_s: float, why: str
) -> FailureRecord:
    """Returns the record of ranks that have not left their group, although rank 0 has waited `limit_s` for them."""
    who, has = _who(absent, world_size), _plural(absent, "has", "have")
    ended = f"{why}, and {who} {has} not left within {limit_s:g} s"
    return _record(absent, absent, f"{ended}{_place(absent[0])}")


def _record(statuses: Sequence[RankStatus], suspected: Sequence[RankStatus], error: str) -> FailureRecord:
    first = (suspected or statuses)[0]
    return {
        "kind": "hang",
        "rank": first.rank if suspected else None,
        "host": first.host if suspected else None,
        "pid": first.pid if suspected else None,
        "phase": first.phase,
        "step": first.step,
        "error": error,
        "traceback": _report(statuses),
        "sentence": None,
        "suspects": [one.rank for one in suspected],
        "victims": [one.rank for one in statuses if one not in suspected],
        "age": round(min(one.age for one in statuses), 1),
        "exit_code": 1,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "echo": False,
    }


def _sentence(statuses: Sequence[RankStatus], suspected: Sequence[RankStatus], world_size: int) -> str:
    stalled = f"for {min(one.age for one in statuses):.0f} s no rank has made progress"
    if not suspected:
        ranks = format_ranks(one.rank for one in statuses)
        return f"{stalled}: {ranks} of {world_size} {_plural(statuses, 'is', 'are')} in the same place"
    waiting = [one.rank for one in statuses if one not in suspected]
    first = suspected[0]
    who = _who(suspected, world_size)
    what = _DESCRIPTIONS.get(first.condition) or _fault(suspected)
    verb = "waits" if len(waiting) == 1 else "wait"
    wait = f"; {format_ranks(waiting)} {verb} for {_plural(suspected, 'it', 'them')}"
    return f"{stalled}: {who} {what}{_place(first)}{wait}"


def _who(suspected: Sequence[RankStatus], world_size: int) -> str:
    first = suspected[0]
    one = f" on {first.host} (pid {first.pid})" if len(suspected) == 1 else ""
    return f"{format_ranks(one.rank for one in suspected)} of {world_size}{one}"


def _place(one: RankStatus) -> str:
    place = f", in {one.phase}" if one.phase else ""
    return place + (f" at step {one.step}" if one.step is not None else "")


def _fault(suspected: Sequence[RankStatus]) -> str:
    """Describes what suspects that reply have done or not done."""
    epoch = suspected[0].ended_epoch
    if epoch is None:
        return _plural(suspected, "is behind the others", "are behind the others")
    has, its = _plural(suspected, "has", "have"), _plural(suspected, "its loader", "their loaders")
    return f"{has} ended epoch {epoch}, since {its} gave fewer batches than those of other ranks"


def _plural(statuses: Sequence[RankStatus], one: str, many: str) -> str:
    return one if len(statuses) == 1 else many


def _report(statuses: Sequence[RankStatus]) -> str:
    """Describes where every rank is; ranks in the same place share a paragraph."""
    return "\n\n".join(
        f"{who}{text}" for who, text in group_equal((one.rank, _describe(one)) for one in statuses)
    )


def _describe(one: RankStatus) -> str:
    text = f" {_DESCRIPTIONS[one.condition]}" if one.condition != "answers" else ""
    text += _place(one)
    text += f", epoch {one.ended_epoch} ended" if one.ended_epoch is not None else ""
    text += f", in collective {one.collectives}" if one.collectives is not None else ""
    stack = trim_stack(one.stack)
    return text + (f"; most recent call first:\n{stack}" if stack else "")


def trim_stack(dump: str) -> str:
    """Removes what differs between ranks, and headway's own threads and frames, from a dump of faulthandler."""
    threads = []
    for block in dump.split("\n\n"):
        heading, *frames = block.split("\n")
        frames = [frame for frame in frames if frame.strip() and "/threading.py" not in frame]
        if "most recent call first" not in heading or not frames or _OURS.search(frames[-1]):
            continue
        ours = [index for index, frame in enumerate(frames) if _OURS.search(frame)]
        threads.append("\n".join(frames[: ours[0]] if ours else frames))
    return "\n  in another thread:\n".join(reversed(threads))  # the main thread comes last in the dump


def group_equal(texts: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
    """Returns [("ranks 0-2, 4", text), ...]: equal texts once, in the order of their first rank."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks_by_text.setdefault(text, []).append(rank)
    return [(format_ranks(ranks), text) for text, ranks in ranks_by_text.items()]


def format_ranks(ranks: Iterable[int]) -> str:
    """Formats a list of ranks.

    >>> format_ranks([0, 1, 2, 4])
    'ranks 0-2, 4'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"rank{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {', '.join(words)}"


def condition(pid: int) -> Condition:
    """Returns the state of a process of this machine, from the kernel."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # the process has exited, or the system has no /proc
        return "answers"
    return {"T": "stopped", "t": "stopped", "D": "blocked"}.get(state, "answers")  # type: ignore[return-value]
