"""`python -m headway.record.sinks`: feeds one tracker. Standard input is the line to the training process.

Its first line says what to feed; its second, how the run ended. If the line is cut, the training process is dead.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any, final

from headway.record.sinks.rows import Tail
from headway.record.sinks.trackers import TRACKERS
from headway.run import Run

LOOK_SECONDS = 1.0
"""how often the metrics file is looked at"""
DEATH_SECONDS = 5.0
"""how long a run may need to write down what it died of"""


def main() -> None:
    parent = Parent(sys.stdin.fileno())
    request = json.loads(parent.line(timeout=None) or "{}")
    run = Run.open(request["run"])
    tail = Tail(run.metrics_file(0), run.sink_place(request["kind"]))
    tracker = TRACKERS[request["kind"]](run, request["settings"])
    ended: dict[str, Any] | None = None
    while True:
        rows = tail.read()
        for row in rows:
            tracker.log(row)
        if rows:
            tail.remember()
        elif ended is not None:
            break
        elif (said := parent.line(timeout=LOOK_SECONDS)) is not None:
            ended = json.loads(said) if said else _found_dead(run)
    tracker.close(ended["status"], ended["exit_code"])


@final
class Parent:
    """The line to the training process, read without a buffer that would hide what has come."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._held = descriptor, b""

    def line(self, *, timeout: float | None) -> str | None:
        """The next line; None if there is none in time; empty if there will never be one."""
        while b"\n" not in self._held:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                return None
            data = os.read(self._descriptor, 1 << 16)
            if not data:
                return ""
            self._held += data
        line, _, self._held = self._held.partition(b"\n")
        return line.decode()


def _found_dead(run: Run) -> dict[str, Any]:
    """How the run ended, by its own record; it may need a moment for that."""
    until = time.monotonic() + DEATH_SECONDS
    while (attempt := run.info()["attempts"][-1])["status"] == "running":
        if time.monotonic() > until:
            return {"status": "failed", "exit_code": 1}
        time.sleep(0.2)
    return dict(attempt)


if __name__ == "__main__":
    main()
