"""The sink for TensorBoard: event files, written without torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.record.sinks.base import MetricRow, RunStatus, Sink, require_package
from headway.record.sinks.rows import scalars
from headway.run import Run


@final
@dataclass(kw_only=True)
class TensorBoard(Sink):
    """Writes event files for TensorBoard."""

    replaces_steps = True
    directory: str | Path | None = None
    """None: `tensorboard/` in the run directory"""

    def __post_init__(self) -> None:
        require_package("tensorboard", self)
        if self.directory is not None:
            self.directory = str(Path(self.directory).absolute())

    def open(self, run: Run) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(self.directory or run.tensorboard_dir))
        self._restarted = len(run.info()["attempts"]) > 1

    def write(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            self._write_row(row)

    def _write_row(self, row: MetricRow) -> None:
        if self._restarted:  # hides what an earlier attempt wrote beyond this step
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(
                self._events.Event(wall_time=time.time(), step=row["step"], session_log=start)
            )
            self._restarted = False
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in scalars(row).items()
        ]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=row["time"], step=row["step"], summary=summary))

    def close(self, status: RunStatus, exit_code: int) -> None:  # noqa: ARG002  event files have no status
        self._writer.close()
