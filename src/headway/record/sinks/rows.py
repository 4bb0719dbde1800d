"""Rows of a metrics file, as trackers take them: read a little at a time, from where the last process stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from headway.system import files

MOST_BYTES = 1 << 20
"""How much of the file is in memory at a time: what a slow tracker has not taken yet stays on disk."""


@final
class Tail:
    """The rows of a file that is being written; `place` remembers how far they were taken, from process to process."""

    def __init__(self, path: Path, place: Path) -> None:
        self._path, self._place = path, place
        self._offset = 0
        with suppress(FileNotFoundError, ValueError):
            self._offset = int(place.read_text())

    def read(self) -> list[dict[str, Any]]:
        """The next rows; none if there are no new ones. A line that is not whole yet waits."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(MOST_BYTES)
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [row for line in whole.splitlines() if (row := _parsed(line)) is not None]

    def remember(self) -> None:
        """Notes that everything that was read has been told."""
        files.write_atomic(self._place, f"{self._offset}\n".encode())


def _parsed(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError):  # a line that a full disk cut short
        row = json.loads(line)
        return row if isinstance(row, dict) and "step" in row else None
    return None


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row by name: metrics under their own, the rest under `headway/`.

    >>> scalars({"kind": "train", "step": 5, "metrics": {"train/loss": 0.5, "hits": [1, 2]}, "memory_peak": 90})
    {'train/loss': 0.5, 'hits/0': 1.0, 'hits/1': 2.0, 'headway/memory_peak': 90.0}
    """
    prefix = "epoch/" if row["kind"] == "epoch" else ""
    found = {prefix + name: value for name, value in _numbers(row.get("metrics", {}))}
    known = ("kind", "time", "stage", "epoch", "step", "metrics")
    rest = {key: value for key, value in row.items() if key not in known}
    inside = "checkpoint/" if row["kind"] == "checkpoint" else ""
    return found | {f"headway/{inside}{name}": value for name, value in _numbers(rest)}


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    match value:
        case dict():
            for key, part in value.items():
                yield from _numbers(part, f"{name}/{key}" if name else str(key))
        case list():
            for place, part in enumerate(value):
                yield from _numbers(part, f"{name}/{place}")
        case bool() | int() | float():
            yield name, float(value)
        case "nan" | "inf" | "-inf":  # JSON has no such numbers
            yield name, float(value)


def safe(name: str) -> str:
    """A name without characters that MLflow refuses."""
    return re.sub(r"[^\w\-./ ]", "_", name)
