"""`python -m headway.record.sinks`: the process that feeds one sink.

Standard input comes from the training process. Its first line is a JSON object with the run and the sink, its second
has the status and exit code of the run. If the pipe closes before that, the training process was killed.
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

from headway.dist.control.signals import ignore_run_signals
from headway.record.media.index import MediaItem, MediaTail
from headway.record.sinks import transport
from headway.record.sinks.base import MetricRow, Sink
from headway.run import Run
from headway.system import files
from headway.system.jsonlines import Tail, parse_json

_POLL_S = 1.0
_CHUNK_BYTES = 1 << 20
_ROOT_WAIT_S = 120.0
_STATUS_WAIT_S = 5.0  # how long the end of a killed run may take to be recorded


def main() -> None:
    parent = ParentPipe(sys.stdin.fileno())
    request = json.loads(parent.read_line(timeout_s=None) or "{}")
    run = Run.open(request["run"]).held_as(request["owner"])
    sink = transport.make(request["sink"])
    sink.rank, sink.local_rank = request["rank"], request["local_rank"]
    if sink.rank and not _wait_for_root(run, sink):
        print("rank 0 has not opened this sink: no rows are sent", file=sys.stderr)
        return
    source = SinkSource(run, sink)
    sink.open(run)
    source.note_rows()
    ended: dict[str, Any] | None = None
    while True:
        if not run.is_ours():  # its new owner feeds this sink from now on
            print("another process trains in this run now, and feeds this sink", file=sys.stderr)
            return
        if source.feed():
            continue
        if ended is not None:
            break
        if (line := parent.read_line(timeout_s=_POLL_S)) is not None:
            ended = json.loads(line) if line else _recorded_end(run)
    sink.close(ended["status"], ended["exit_code"])


@final
class SentSteps:
    """The rows that a sink has, by kind, stage, epoch, step and names, since a restart repeats some steps.

    >>> sent = SentSteps()
    >>> [len(sent.leave_out([{"kind": "train", "step": step}])) for step in (1, 2, 1, 3)]
    [1, 1, 0, 1]
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def read(self, file: Path, end: int) -> None:
        """Adds the rows before byte `end` of the metrics file."""
        tail = Tail(file)
        while tail.offset < end and (rows := tail.read(min(_CHUNK_BYTES, end - tail.offset))):
            self.leave_out(row for row in rows if "step" in row)

    def leave_out(self, rows: Iterable[MetricRow]) -> list[MetricRow]:
        """Returns the rows that the sink does not have yet, and adds them."""
        new = []
        for row in rows:
            metrics = row.get("metrics")
            names = tuple(sorted(metrics)) if isinstance(metrics, dict) else ()
            place = (row.get("kind"), row.get("stage"), row.get("epoch"), row["step"])
            key = hash((*map(str, place), names))
            if key not in self._seen:
                self._seen.add(key)
                new.append(row)
        return new


@final
class SinkSource:
    """The rows of the metrics file and the media that a sink has not received yet."""

    def __init__(self, run: Run, sink: Sink) -> None:
        self._run, self._sink = run, sink
        self._rows_file = run.sink_offset_file(sink.name, sink.rank)
        self._media_file = run.sink_media_file(sink.name, sink.rank)
        self._rows = Tail(run.metrics_file(sink.rank), _read_offset(self._rows_file))
        own = sink.rank if sink.feeds_all_ranks else None
        self._media = MediaTail(run, _read_media_offsets(self._media_file), rank=own)
        self._sent, self._sent_media = SentSteps(), set[str]()
        if not sink.replaces_steps:
            self._sent.read(run.metrics_file(sink.rank), self._rows.offset)
            self._sent_media.update(item.file for item in self._media.read_again())

    def feed(self) -> bool:
        """Sends new rows and media to the sink; returns whether there were any."""
        before = self._rows.offset, self._media.offsets
        rows = [row for row in self._rows.read() if "step" in row]
        if rows := rows if self._sink.replaces_steps else self._sent.leave_out(rows):
            self._sink.write(rows)
        if before[0] != self._rows.offset:
            self.note_rows()  # before the media: if the sink fails at one of them, it has these rows
        for item in self._media.read():
            self._give(item)
        if before[1] != self._media.offsets:
            files.write_atomic(self._media_file, json.dumps(self._media.offsets).encode())
        return before != (self._rows.offset, self._media.offsets)

    def _give(self, item: MediaItem) -> None:
        """Sends an item to the sink, unless it was sent before a restart or its file is gone."""
        was_sent, path = item.file in self._sent_media, item.path(self._run)
        if not self._sink.replaces_steps:
            self._sent_media.add(item.file)
        if was_sent or not path.is_file():
            return
        try:
            self._sink.write_media([item])
        except Exception:
            if path.is_file():
                raise
            # the run reached its limit and removed the file while the sink read it

    def note_rows(self) -> None:
        """Records up to where the sink has received the rows; the file exists once the sink is open."""
        files.write_atomic(self._rows_file, f"{self._rows.offset}\n".encode())


@final
class ParentPipe:
    """Lines from the training process, read without a buffer that would hide data from `select`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._received = descriptor, b""

    def read_line(self, *, timeout_s: float | None) -> str | None:
        """Returns the next line; None if none comes in time; an empty string if the pipe is closed."""
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
    """Returns how many bytes of the metrics file earlier attempts sent to this sink."""
    with suppress(FileNotFoundError, ValueError):
        return int(files.read_regular(file))
    return 0


def _read_media_offsets(file: Path) -> dict[int, int]:
    with suppress(FileNotFoundError, ValueError, AttributeError):
        return {int(rank): int(offset) for rank, offset in parse_json(files.read_regular(file)).items()}
    return {}


def _wait_for_root(run: Run, sink: Sink) -> bool:
    """Waits until rank 0 has opened the sink, whose run the other ranks join."""
    deadline = time.monotonic() + _ROOT_WAIT_S
    while not run.sink_offset_file(sink.name).exists():
        if time.monotonic() > deadline or not run.is_ours():
            return False
        time.sleep(0.5)
    return True


def _recorded_end(run: Run) -> dict[str, Any]:
    """Returns the recorded end of the run, which may take a moment to be written."""
    deadline = time.monotonic() + _STATUS_WAIT_S
    while (attempt := run.info()["attempts"][-1])["status"] == "running":
        if time.monotonic() > deadline:
            return {"status": "failed", "exit_code": 1}
        time.sleep(0.2)
    return dict(attempt)


if __name__ == "__main__":
    ignore_run_signals()
    main()
