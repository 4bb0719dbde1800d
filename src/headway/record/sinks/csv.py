"""The sink for one CSV file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.record.sinks.base import MetricRow, RunStatus, Sink
from headway.record.sinks.rows import scalars
from headway.run import Run

_COLUMNS = ("step", "time", "kind", "stage", "epoch", "name", "value")


@final
@dataclass(kw_only=True)
class Csv(Sink):
    """Appends every number to a CSV file, one line each: step, time, kind, stage, epoch, name, value."""

    file: str | Path | None = None
    """None: `metrics.csv` in the run directory"""

    def __post_init__(self) -> None:
        if self.file is not None:
            self.file = str(Path(self.file).absolute())

    def open(self, run: Run) -> None:
        self._file = Path(self.file or run.csv_file).open("a", newline="")  # noqa: SIM115  `close` closes it
        self._writer = csv.writer(self._file)
        if not self._file.tell():
            self._writer.writerow(_COLUMNS)

    def write(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            point = [row.get(column, "") for column in _COLUMNS[:-2]]
            self._writer.writerows([*point, name, value] for name, value in scalars(row).items())
        self._file.flush()

    def close(self, status: RunStatus, exit_code: int) -> None:  # noqa: ARG002  a CSV file has no status
        self._file.close()
