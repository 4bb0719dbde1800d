"""Events of a run, one row each: starts, stages, checkpoints, warnings, stragglers, changed weights, ends of attempts.

Rank 0 writes `events.jsonl`. Each other rank has its own file, created with its first warning.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast, final, get_args

from headway.errors import HeadwayError
from headway.record.terminal_lines import plain
from headway.run import Run
from headway.system.jsonlines import JsonLinesWriter
from headway.system.log import logger
from headway.system.redact import redact

EventKind = Literal[
    "start",
    "restart",
    "stage",
    "checkpoint",
    "weights",
    "warning",
    "straggler",
    "changes",
    "plan",
    "done",
    "stopped",
    "failed",
    "interrupted",
]
"""the last four are the ways an attempt can end"""
_KINDS = frozenset(get_args(EventKind))
_MAX_CHARACTERS = 2000


@final
class EventLog:
    """Writes the events of one rank. The file is opened by the first event.

    >>> events.write("checkpoint", "saved step 1,000", step=1000, bytes=4_000_000)
    """

    def __init__(self, run: Run, *, rank: int, attempt: int) -> None:
        self._run, self._rank, self._attempt, self._pid = run, rank, attempt, os.getpid()
        self._rows: JsonLinesWriter | None = None

    def write(self, kind: EventKind, text: str, **facts: Any) -> None:
        """Appends an event: `text` is for people, `facts` are for programs. A full disk loses events, not the run."""
        if self._rows is None:
            self._rows = self._run.open_rows(self._run.events_file(self._rank), content="events")
        self._rows.write(
            {
                "time": time.time(),
                "kind": kind,
                "attempt": self._attempt,
                "rank": self._rank,
                "text": redact(plain(text))[:_MAX_CHARACTERS],
                **facts,
            }
        )

    def close(self) -> None:
        """Closes the file, if there is one."""
        if self._rows is not None:
            self._rows.close()

    @property
    def is_own(self) -> bool:
        """Whether this process opened the log: a forked child, such as a data worker, has a copy."""
        return os.getpid() == self._pid


@final
class EventHandler(logging.Handler):
    """Records each warning and error that headway logs as an event.

    `logger.warning(text, extra={"event": "straggler"})` sets another kind than "warning".
    """

    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._events, self._writing = events, False

    def emit(self, record: logging.LogRecord) -> None:
        if self._writing or not self._events.is_own:  # the event log itself may warn, of a full disk
            return
        given = getattr(record, "event", "warning")
        kind = cast(EventKind, given) if given in _KINDS else "warning"
        self._writing = True
        try:
            self._events.write(kind, record.getMessage())
        except HeadwayError:  # the run was taken, or its disk failed: the message was printed anyway
            pass
        finally:
            self._writing = False


@contextmanager
def recording_events(run: Run, *, rank: int, attempt: int) -> Iterator[EventLog]:
    """Records headway's warnings in the block as events of this rank."""
    events = EventLog(run, rank=rank, attempt=attempt)
    handler = EventHandler(events)
    logger.addHandler(handler)
    try:
        yield events
    finally:
        logger.removeHandler(handler)
        events.close()
