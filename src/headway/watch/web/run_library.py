"""The runs that the page may show, by key. Open runs share a budget of memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from headway.errors import UsageError
from headway.run import Run, runs_under
from headway.watch.view import RunView, Snapshot
from headway.watch.view.metric_rows import MetricRows
from headway.watch.web.media import MediaShelf, Picture

REFRESH_S = 1.0
"""the least time between two reads of a run"""
_LISTED_S = 2.0
_UNKNOWN_S = 0.2
_BUDGET_BYTES = 256 << 20
_POINT_BYTES = 200
"""of a point of a curve: seven Python numbers"""
_RUN_BYTES = 1 << 20
"""of an open run, curves and media aside"""


@final
class OpenRun:
    """A run that a page shows. Several threads may use it."""

    def __init__(self, run: Run, read_rows: Callable[[MetricRows], Future[bool]]) -> None:
        self.run = run
        self._view = RunView(run)
        self._read_rows = read_rows
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._read_at = 0.0
        self._full: tuple[MetricRows, Future[bool]] | None = None
        self._media = MediaShelf(run)
        self._media_lock = threading.Lock()  # of its own: reading a long index takes a second

    def refresh(self) -> Snapshot:
        """Returns the state of the run, at most `REFRESH_S` old."""
        with self._lock:
            if self._snapshot is None or time.monotonic() - self._read_at >= REFRESH_S:
                self._snapshot = self._view.refresh()
                self._read_at = time.monotonic()
                self._refresh_full()
                if (whole := self._whole()) is not None:
                    self._snapshot = replace(self._snapshot, curves=whole.curves)
            return self._snapshot

    def metrics(self) -> tuple[MetricRows, bool]:
        """Returns the rows of the run, and whether all of them were read; those of a long file are sampled at first."""
        self.refresh()
        with self._lock:
            whole = self._whole()
            return (whole, True) if whole else (self._view.metrics, not self._view.metrics.is_sampled)

    def media_page(self, name: str, search: str) -> dict[str, Any]:
        """Returns the newest images, figures, histograms and texts."""
        with self._media_lock:
            return self._media.page(name, search)

    def media_content(self, file: str) -> Picture | dict[str, Any] | None:
        """Returns the content of a media file; None if there is no such file."""
        with self._media_lock:
            item = self._media.find(file)
        return None if item is None else self._media.content(item)

    def _whole(self) -> MetricRows | None:
        """Returns all rows of a long file, once they are read."""
        return self._full[0] if self._full is not None and self._full[1].done() else None

    def _refresh_full(self) -> None:
        """Reads a long file in full, in another thread, while a sample is shown; later calls read what was added."""
        rows = self._view.metrics
        if not rows.is_sampled:
            return
        if self._full is None:
            full = MetricRows(self.run, thorough=True)
            full.worlds = rows.worlds
            self._full = (full, self._read_rows(full))
        elif self._full[1].done():
            self._full[0].worlds = rows.worlds
            self._full[0].refresh()

    @property
    def size_bytes(self) -> int:
        """An estimate of the memory that this run uses."""
        rows = [self._view.metrics, *([self._full[0]] if self._full else [])]
        points = sum(len(series.steps) for each in rows for series in list(each.curves.values()))
        return _RUN_BYTES + points * _POINT_BYTES + self._media.size_bytes


@final
class RunLibrary:
    """The runs under a root, or a fixed list of runs.

    A request names a run by its key, the name of its directory, which is looked up and never made part of a path.

    >>> RunLibrary(root=Path("runs")).open("digits-2026.11.15-14.30-x7k2").refresh().header.state
    'running'
    """

    def __init__(
        self, *, root: Path | None = None, runs: Sequence[Run] = (), budget_bytes: int = _BUDGET_BYTES
    ) -> None:
        self._root, self._budget_bytes = root, budget_bytes
        self._runs = {key_of(run): run for run in runs}
        self._listed_at = float("-inf")
        self._open: OrderedDict[str, OpenRun] = OrderedDict()
        self._lock = threading.Lock()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="headway-web-reader")

    def runs(self, max_age_s: float = _LISTED_S) -> dict[str, Run]:
        """Returns all runs by key, the newest first, from a list that is at most `max_age_s` old."""
        with self._lock:
            if self._root is not None and time.monotonic() - self._listed_at > max_age_s:
                with suppress(UsageError):  # the directory cannot be read just now
                    self._runs = {key_of(run): run for run in runs_under(self._root)}
                self._listed_at = time.monotonic()
            return dict(self._runs)

    def open(self, key: str) -> OpenRun | None:
        """Returns the run with this key; None if there is none. Closes the least recently used runs over the budget."""
        run = self.runs().get(key) or self.runs(_UNKNOWN_S).get(key)  # it may be new
        with self._lock:
            if run is None:
                self._open.pop(key, None)
                return None
            found = self._open.get(key)
            if found is None:
                found = self._open[key] = OpenRun(run, lambda rows: self._reader.submit(rows.refresh))
            self._open.move_to_end(key)
            sizes = {name: each.size_bytes for name, each in self._open.items()}
            while len(self._open) > 1 and sum(sizes.values()) > self._budget_bytes:
                sizes.pop(self._open.popitem(last=False)[0])
            return found


def key_of(run: Run) -> str:
    """Returns the name of a run's directory, as text that is valid in a URL."""
    return run.path.name.encode("utf-8", "backslashreplace").decode()
