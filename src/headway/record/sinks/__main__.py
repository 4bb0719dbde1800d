"""`python -m headway.record.sinks`: the process that feeds one sink.

Standard input comes from the training process. Its first line is a JSON object with the run and the sink, its second
says how the run ended. If the pipe closes before that, the training process was killed.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from headway.record.sinks import transport
from headway.record.sinks.base import MetricRow
from headway.run import Run
from headway.system import files
from headway.system.jsonlines import Tail

_POLL_S = 1.0
_CHUNK_BYTES = 1 << 20
_STATUS_WAIT_S = 5.0  # a run that was killed may need as long until its record says so


def main() -> None:
    parent = ParentPipe(sys.stdin.fileno())
    request = json.loads(parent.read_line(timeout_s=None) or "{}")
    run = Run.open(request["run"]).held_as(request["owner"])
    sink = transport.make(request["sink"])
    offset_file = run.sink_offset_file(sink.name)
    tail = Tail(run.metrics_file(0), _read_offset(offset_file))
    sent = SentSteps()
    if not sink.replaces_steps:
        sent.read(run.metrics_file(0), tail.offset)
    sink.open(run)
    ended: dict[str, Any] | None = None
    while True:
        if not run.is_ours():  # its new owner feeds this sink from here on
            print(
                "another process trains in this run now: its rows are not for this process", file=sys.stderr
            )
            return
        start = tail.offset
        rows = [row for row in tail.read() if "step" in row]
        if rows := rows if sink.replaces_steps else sent.leave_out(rows):
            sink.write(rows)
        if tail.offset > start:
            files.write_atomic(offset_file, f"{tail.offset}\n".encode())
        elif ended is not None:
            break
        elif (line := parent.read_line(timeout_s=_POLL_S)) is not None:
            ended = json.loads(line) if line else _recorded_end(run)
    sink.close(ended["status"], ended["exit_code"])


@final
class SentSteps:
    """Which rows a sink has, by kind, stage, step and names: after a restart, a tracker would have some steps twice.

    >>> sent = SentSteps()
    >>> [len(sent.leave_out([{"kind": "train", "step": step}])) for step in (1, 2, 1, 3)]
    [1, 1, 0, 1]
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def read(self, file: Path, end: int) -> None:
        """Notes the rows before byte `end` of the metrics file."""
        tail = Tail(file)
        while tail.offset < end and (rows := tail.read(min(_CHUNK_BYTES, end - tail.offset))):
            self.leave_out(row for row in rows if "step" in row)

    def leave_out(self, rows: Iterable[MetricRow]) -> list[MetricRow]:
        """Returns the rows that are not there yet, and notes them."""
        new = []
        for row in rows:
            metrics = row.get("metrics")
            names = tuple(sorted(metrics)) if isinstance(metrics, dict) else ()
            key = hash((str(row.get("kind")), str(row.get("stage")), str(row["step"]), names))
            if key not in self._seen:
                self._seen.add(key)
                new.append(row)
        return new


@final
class ParentPipe:
    """Lines from the training process, read without a buffer, which `select` would not see."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._received = descriptor, b""

    def read_line(self, *, timeout_s: float | None) -> str | None:
        """Returns the next line; None if there is none in time; an empty one if the pipe is closed."""
        while b"\n" not in self._received:
            if not select.select([self._descriptor], [], [], timeout_s)[0]:
                return None
            data = os.read(self._descriptor, 1 << 16)
            if not data:
                return ""
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()


def _read_offset(file: Path) -> int:
    """Returns how far an earlier attempt's rows were written to this sink, in bytes."""
    with suppress(FileNotFoundError, ValueError):
        return int(files.read_regular(file))
    return 0


def _recorded_end(run: Run) -> dict[str, Any]:
    """Returns how the run ended by its own record, which may take a moment to be written."""
    deadline = time.monotonic() + _STATUS_WAIT_S
    while (attempt := run.info()["attempts"][-1])["status"] == "running":
        if time.monotonic() > deadline:
            return {"status": "failed", "exit_code": 1}
        time.sleep(0.2)
    return dict(attempt)


if __name__ == "__main__":
    main()
