"""Displays of a stage's progress: a live table on a terminal, a plain line every few seconds elsewhere.

They are updated at log points, from numbers that are on the host anyway.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

from rich.console import Console
from rich.live import Live
from rich.table import Table

from headway.system.text import format_duration

LINE_SECONDS = 10.0
"""seconds between lines where there is no terminal"""
REFRESH_SECONDS = 0.25
_WIDE_COLUMNS = 100


@final
@dataclass(frozen=True, kw_only=True)
class ProgressSnapshot:
    """The numbers that a display shows at one moment."""

    stage: str
    epoch: int
    """counted from 1"""
    max_epochs: int | None
    step: int
    values: dict[str, Any]
    columns: Sequence[str]
    samples_per_second: float | None
    data_wait: float | None
    """fraction of the time spent waiting for data, from 0 to 1"""
    seconds_left: float | None
    checkpoint_age_s: float | None = None
    """seconds since the newest whole checkpoint was written"""

    def cells(self) -> list[tuple[str, str]]:
        """Returns headings and texts, in order."""
        of = f"/{self.max_epochs}" if self.max_epochs else ""
        left = "" if self.seconds_left is None else str(timedelta(seconds=round(self.seconds_left)))
        rate = "" if self.samples_per_second is None else f"{self.samples_per_second:,.0f}"
        wait = "" if self.data_wait is None else f"{self.data_wait:.0%}"
        metrics = [(name, _number(self.values.get(name))) for name in self.columns]
        return [
            ("epoch", f"{self.epoch}{of}"),
            ("step", f"{self.step:,}"),
            *metrics,
            ("samples/s", rate),
            ("data wait", wait),
            ("ETA", left),
            *(
                []
                if self.checkpoint_age_s is None
                else [("saved", f"{format_duration(self.checkpoint_age_s)} ago")]
            ),
        ]


class Display(ABC):
    """Shows the progress of a stage."""

    @abstractmethod
    def due(self, now: float) -> bool:
        """Whether the next update is due at `now`, by the monotonic clock."""

    @abstractmethod
    def update(self, snapshot: ProgressSnapshot) -> None:
        """Shows the numbers of a log point. Called if an update is due."""

    @abstractmethod
    def end_epoch(self, snapshot: ProgressSnapshot) -> None:
        """Shows the numbers of a finished epoch."""

    @abstractmethod
    def close(self) -> None:
        """Ends the display when the stage ends."""


@final
class LineDisplay(Display):
    """Prints one plain line every few seconds and one per epoch, which suits log files."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def due(self, now: float) -> bool:
        return now - self._last >= LINE_SECONDS

    def update(self, snapshot: ProgressSnapshot) -> None:
        self._last = time.monotonic()
        parts = [f"{name} {text}" for name, text in snapshot.cells() if text]
        print(f"{snapshot.stage}: {', '.join(parts)}", file=sys.stderr, flush=True)

    def end_epoch(self, snapshot: ProgressSnapshot) -> None:
        self.update(snapshot)

    def close(self) -> None:
        pass


@final
class TableDisplay(Display):
    """Draws a table with a row per epoch; the last row is the current epoch."""

    def __init__(self) -> None:
        self._live = Live(console=Console(file=sys.stderr), auto_refresh=False)
        self._done: list[list[tuple[str, str]]] = []
        self._stage = ""
        self._last = 0.0
        self._live.start()

    def due(self, now: float) -> bool:
        return now - self._last >= REFRESH_SECONDS

    def update(self, snapshot: ProgressSnapshot) -> None:
        self._last = time.monotonic()
        self._show(snapshot, [*self._done, snapshot.cells()])

    def end_epoch(self, snapshot: ProgressSnapshot) -> None:
        self._done.append(snapshot.cells())
        self._show(snapshot, self._done)

    def close(self) -> None:
        self._live.stop()

    def _show(self, snapshot: ProgressSnapshot, rows: list[list[tuple[str, str]]]) -> None:
        # else headings would be cut on a terminal of 80 columns
        narrow = self._live.console.width < _WIDE_COLUMNS
        table = Table(
            title=snapshot.stage,
            title_justify="left",
            box=None,
            header_style="bold",
            pad_edge=not narrow,
            collapse_padding=narrow,
        )
        for heading, _ in snapshot.cells():
            table.add_column(heading, justify="right")
        for row in rows[-20:]:  # what fits on a screen; the metrics file has all
            table.add_row(*(text for _, text in row))
        self._live.update(table, refresh=True)


def open_display() -> Display:
    """Returns a table if stderr is a terminal, lines otherwise."""
    return TableDisplay() if Console(file=sys.stderr).is_terminal else LineDisplay()


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
