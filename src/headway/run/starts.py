"""starts.jsonl: when the job of a run was started and how it ended, written by whoever supervises its ranks.

A `Pipeline` records its attempts in run.json, with more facts. A function or a plain script has only this.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, final

from headway.run.directory import Run
from headway.system import jsonlines
from headway.system.jsonlines import JsonLinesWriter, is_time


@final
@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a job; times are in seconds since 1970."""

    began: float
    ended: float | None = None
    """of one that was killed, the last output before the next start; None if that is not known either"""


def record_start(run: Run, *, job: str | None = None) -> None:
    """Records that the job of a run starts now; `job` is its number."""
    output = last_output(run)
    _append(run, {"event": "start", "host": socket.gethostname(), "job": job, "output_before": output})


def record_exit(run: Run, code: int) -> None:
    """Records that the job of a run has ended."""
    _append(run, {"event": "end", "exit_code": code})


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


def last_output(run: Run) -> float | None:
    """Returns when the job last wrote to its log; None if it has none."""
    with suppress(OSError):
        return run.job_log.stat().st_mtime
    return None


def _append(run: Run, row: Mapping[str, Any]) -> None:
    with JsonLinesWriter(run.starts_file, content="starts of the job") as rows:
        rows.write({**row, "time": time.time()})
