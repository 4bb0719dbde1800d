"""`watch`: refreshes the screen and reads keys. It only reads the run directory, so training is not affected."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import final

from rich.console import Console, Group
from rich.live import Live

from headway.run import Run
from headway.watch.terminal.screen import Selection, layout
from headway.watch.view import RunView, Snapshot
from headway.watch.view.source import clean_indented, last_lines

REFRESH_S = 1.0
_KEYS = {"\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "n", "\x1b[D": "p", "\x03": "q", "\x1b": "m"}
_KEY = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|[^\[O])?|.", re.DOTALL)
"""a character, or the escape sequence of an arrow, a function key, or a key with Alt"""
_TYPED_BYTES = 1 << 10
_CYCLE_MOST = 0.08
"""fraction of a core that the screen may use: the pause after a slow refresh is longer"""


def watch(runs: Sequence[Run], console: Console, *, refresh_s: float = REFRESH_S) -> None:
    """Shows runs on the terminal, beginning with the first one, until q is pressed.

    >>> watch([Run.open("runs/digits-2026.11.15-14.30-x7k2")], Console())
    """
    watcher = Watcher(runs)
    with (
        raw_keys() as descriptor,
        Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        ) as live,
    ):
        while True:
            begin = time.monotonic()
            watcher.refresh()
            busy_s = time.monotonic() - begin
            deadline = begin + max(refresh_s, busy_s / _CYCLE_MOST)
            while True:
                size = console.size
                lines = layout(watcher.snapshot, size.width, size.height, watcher.chosen)
                live.update(Group(*lines), refresh=True)
                keys = read_keys(descriptor, max(0.0, deadline - time.monotonic()))
                if "q" in keys:
                    return
                has_switched = [watcher.press(key) for key in keys]
                if not keys or any(has_switched):
                    break


@final
class Watcher:
    """The runs that are watched, and the selection that keys change."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs, self._views = runs, {0: RunView(runs[0])}
        self._at = 0
        self.chosen = Selection(run=(1, len(runs)))
        self.snapshot: Snapshot = self._views[0].refresh()

    def refresh(self) -> None:
        """Reads what was added to the selected run."""
        view = self._views.get(self._at)
        if view is None:
            view = self._views[self._at] = RunView(self._runs[self._at])
        self.snapshot = view.refresh()
        self._read_log()

    def press(self, key: str) -> bool:
        """Handles a key; returns whether it selected another run, which must be read."""
        ranks = [row.rank for row in self.snapshot.ranks] or [0]
        match key:
            case "n" | "p":
                self._at = (self._at + (1 if key == "n" else -1)) % len(self._runs)
                self.chosen = Selection(run=(self._at + 1, len(self._runs)))
                return True
            case "c" | "C":
                self.chosen = replace(self.chosen, curve=self.chosen.curve + (1 if key == "c" else -1))
            case "up" | "k" | "down" | "j":
                at = ranks.index(self.chosen.rank) if self.chosen.rank in ranks else -1
                at = max(0, at - 1) if key in ("up", "k") else min(len(ranks) - 1, at + 1)
                self.chosen = replace(self.chosen, rank=ranks[at])
                self._read_log()
            case "m":
                self.chosen = replace(self.chosen, rank=None, log=())
        return False

    def _read_log(self) -> None:
        if self.chosen.rank is not None:
            run = self._runs[self._at]
            lines = last_lines(run.path, run.log_file(self.chosen.rank))
            self.chosen = replace(self.chosen, log=[clean_indented(line) for line in lines[-100:]])


@contextmanager
def raw_keys() -> Iterator[int | None]:
    """Lets single keys be read within the context; yields the descriptor of the terminal, None without a terminal."""
    descriptor = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
    if descriptor is None:
        yield None
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def read_keys(descriptor: int | None, timeout_s: float) -> list[str]:
    """Returns the keys that were pressed, several if one is held down; an empty list after `timeout_s`."""
    if descriptor is None:
        time.sleep(timeout_s)
        return []
    if not select.select([descriptor], [], [], timeout_s)[0]:
        return []
    typed = os.read(descriptor, _TYPED_BYTES).decode("utf-8", "replace")
    return [_KEYS.get(key, key) for key in _KEY.findall(typed)] or ["q"]  # the terminal is gone
