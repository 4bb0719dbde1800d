"""Metric rows: one JSON object per log point, appended to the run's metrics/rank-NNNNN.jsonl."""

from __future__ import annotations

import json
import math
import os
import sys
from types import TracebackType
from typing import Any, final

from headway.run import Run
from headway.system import files

_encode = json.JSONEncoder(allow_nan=False).encode


@final
class RowWriter:
    """Appends rows, each in one system call. A full disk costs rows, which are counted, and not the run.

    >>> with RowWriter(run, rank=0) as rows:
    ...     rows.write({"step": 50, "metrics": {"train/loss": 0.7}})
    """

    def __init__(self, run: Run, *, rank: int) -> None:
        self._path = run.metrics_file(rank)
        with files.storage(f"open {self._path}"):
            self._fd = files.open_private(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.lost = 0

    def write(self, row: dict[str, Any]) -> None:
        try:
            text = _encode(row)
        except ValueError:  # some number is not finite, which is rare
            text = _encode(_plain(row))
        data = text.encode() + b"\n"
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self._lose(str(error.strerror))
            return
        if written < len(data):
            self._lose("no space left")

    def _lose(self, why: str) -> None:
        self.lost += 1
        if self.lost == 1:
            print(f"headway: metric rows are being lost: {self._path}: {why}", file=sys.stderr)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they are written as words."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
