"""The sink for one CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, final

from headway.record.sinks.base import MetricRow, RunStatus, Sink
from headway.record.sinks.rows import RestartDetector, scalars
from headway.run import Run

_COLUMNS = ("step", "time", "kind", "stage", "epoch", "name", "value")
_LINE_BYTES = 1 << 16


@final
@dataclass(kw_only=True)
class Csv(Sink):
    """Writes every number to a CSV file, one line each: step, time, kind, stage, epoch, name, value.

    Steps that a restart repeats replace the first ones, so every step is in the file once. A row that is sent again,
    which has the time of the first one, changes nothing.
    """

    replaces_steps = True
    file: str | Path | None = None
    """None: `metrics.csv` in the run directory"""

    def __post_init__(self) -> None:
        if self.file is not None:
            self.file = str(Path(self.file).absolute())

    def open(self, run: Run) -> None:
        self._path = Path(self.file or run.csv_file)
        _remove_incomplete_line(self._path)
        self._restarts = RestartDetector(max(map(_train_step, self._lines()), default=-1))
        self._earlier = {hash(tuple(line[:-1])) for line in self._lines()}
        self._append()

    def write(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            values, step = scalars(row), row["step"]
            point = [row.get(column, "") for column in _COLUMNS[:-2]]
            missing = self._missing(point, values)
            if len(missing) == len(values):  # a new row; all later ones are new, too
                self._earlier.clear()
                is_train = row.get("kind") == "train"  # rows of saves may come late, with an earlier step
                if is_train and self._restarts.observe(row):
                    self._remove_repeated(step)
            self._writer.writerows([*point, name, value] for name, value in missing.items())
        _sync(self._file)

    def _missing(self, point: Sequence[Any], values: dict[str, float]) -> dict[str, float]:
        """Returns the values that an earlier process did not write; it may have been killed before recording a row."""
        if not self._earlier:
            return values
        start = ["" if each is None else str(each) for each in point]
        return {name: value for name, value in values.items() if hash((*start, name)) not in self._earlier}

    def _append(self) -> None:
        self._file = self._path.open("a", newline="")
        self._writer = csv.writer(self._file)
        if not self._file.tell():
            self._writer.writerow(_COLUMNS)

    def _remove_repeated(self, step: int) -> None:
        """Removes the lines of `step` and all later ones, which a restart from an earlier checkpoint repeats."""
        self._file.close()
        kept = self._path.with_name(f".{self._path.name}.tmp")
        with kept.open("w", newline="") as file:
            csv.writer(file).writerows(line for line in self._lines() if _step(line) < step)
            _sync(file)
        kept.replace(self._path)
        self._append()

    def _lines(self) -> Iterator[list[str]]:
        if self._path.exists():
            with self._path.open(newline="") as file:
                yield from csv.reader(file)

    def close(self, status: RunStatus, exit_code: int) -> None:  # noqa: ARG002  a CSV file has no status
        self._file.close()


def _sync(file: TextIO) -> None:
    """Writes the lines to the disk: from then on, the rows count as sent."""
    file.flush()
    os.fsync(file.fileno())


def _step(line: Sequence[str]) -> int:
    """Returns the step of a line; -1 for the heading, and for an incomplete line."""
    return int(line[0]) if len(line) == len(_COLUMNS) and line[0].isdecimal() else -1


def _train_step(line: Sequence[str]) -> int:
    return _step(line) if len(line) == len(_COLUMNS) and line[2] == "train" else -1


def _remove_incomplete_line(path: Path) -> None:
    """Removes an incomplete line that a killed process left at the end: its row is sent again."""
    if path.exists():
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, size - _LINE_BYTES))
            file.truncate(start + file.read().rfind(b"\n") + 1)
