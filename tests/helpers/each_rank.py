"""A sink that all ranks feed, in a module that imports no torch: each process of a sink imports the sink's module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.record.sinks import Sink
from headway.run import Run


@dataclass
class EachRank(Sink):
    file: str

    @property
    def feeds_all_ranks(self) -> bool:
        return True

    def open(self, run: Run) -> None: ...

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        with Path(self.file).open("a") as file:
            file.writelines(f"{self.rank}:{row['step']}\n" for row in rows)

    def close(self, status: str, exit_code: int) -> None:
        Path(f"{self.file}.end").write_text(f"{status} {exit_code}")
