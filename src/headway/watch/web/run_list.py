"""The list of runs for the page: state, settings, the newest and best value of each metric, and a sparkline."""

from __future__ import annotations

import reprlib
import threading
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, final

from headway.schedulers.base import Queue
from headway.system.jsonlines import is_count, is_number
from headway.watch.comparison import settings_of
from headway.watch.runs import RunSummary, summarize
from headway.watch.terminal.screen import ordered_curves
from headway.watch.view.metric_rows import MetricRows
from headway.watch.view.source import clean
from headway.watch.web.blocks import digest
from headway.watch.web.run_library import RunLibrary, key_of

_REFRESH_S = 3.0
_BUDGET_S = 0.5
"""for reading metrics in the first refresh; the next one reads the other runs"""
_MAX_RUNS = 2000
_MAX_METRICS = 60
_MAX_SETTINGS = 200

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict = 3, 12, 12, 12


@final
@dataclass(kw_only=True)
class _Digest:
    """Settings and metrics of a run; its files are read again when they change."""

    version: tuple[tuple[int, int], tuple[int, int]]
    settings: dict[str, Any]
    metrics: list[dict[str, Any]]


@final
class RunList:
    """The rows of the list.

    >>> RunList(RunLibrary(root=Path("runs"))).rows()[0]["state"]
    'running'
    """

    def __init__(self, library: RunLibrary) -> None:
        self._library = library
        self._rows: list[dict[str, Any]] = []
        self._digests: dict[str, _Digest] = {}
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._passes = 0

    def rows(self) -> list[dict[str, Any]]:
        """Returns all runs, the newest first. The first call does not wait for schedulers and heartbeats."""
        if time.monotonic() - self._read_at > _REFRESH_S and self._lock.acquire(blocking=not self._passes):
            try:
                self._refresh()
            finally:
                self._lock.release()
        return self._rows

    def _refresh(self) -> None:
        runs = dict(islice(self._library.runs().items(), _MAX_RUNS))
        if self._passes:
            summaries = summarize(list(runs.values()))
        else:
            unknown = Queue(note="the scheduler has not answered yet")
            summaries = summarize(list(runs.values()), queue=unknown, heartbeat_wait_s=0)
        found = {key_of(summary.run): summary for summary in summaries}
        begin = time.monotonic()
        for key, summary in found.items():
            if time.monotonic() - begin > _BUDGET_S and self._passes == 0:
                break
            self._digests[key] = self._digest(key, summary)
        self._digests = {key: each for key, each in self._digests.items() if key in found}
        self._rows = [_row(key, summary, self._digests.get(key)) for key, summary in found.items()]
        self._passes += 1
        self._read_at = time.monotonic() if len(self._digests) == len(found) else float("-inf")

    def _digest(self, key: str, summary: RunSummary) -> _Digest:
        run = summary.run
        version = (_file_version(run.metrics_file(0)), _file_version(run.config_file))
        known = self._digests.get(key)
        if known is not None and known.version == version:
            return known
        rows = MetricRows(run)
        rows.refresh()
        names = [name for name in ordered_curves(rows.curves) if rows.curves[name].steps]
        return _Digest(
            version=version,
            settings=plain_settings(settings_of(run, summary.sweep)),
            metrics=[digest(name, rows.curves[name]) for name in names[:_MAX_METRICS]],
        )


def plain_settings(settings: dict[str, Any], most: int = _MAX_SETTINGS) -> dict[str, Any]:
    """Returns the first settings as numbers, switches and short texts.

    >>> plain_settings({"lr": 0.1, "sizes": [1, 2], "resume": True})
    {'lr': 0.1, 'sizes': '[1, 2]', 'resume': True}
    """
    found: dict[str, Any] = {}
    for name, value in islice(settings.items(), most):
        is_plain = value is None or isinstance(value, bool) or is_number(value)
        text = value if is_plain or isinstance(value, str) else _shown(value)
        found[clean(name, 120)] = clean(text, 200) if isinstance(text, str) else text
    return found


def _shown(value: object) -> str:
    try:
        return _short.repr(value)
    except ValueError:  # Python refuses to print an integer of so many digits
        return "a number too long to show"


def _file_version(path: Path) -> tuple[int, int]:
    """Returns when a file was changed, and its size: some file systems round times to a second."""
    try:
        found = path.lstat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _row(key: str, summary: RunSummary, known: _Digest | None) -> dict[str, Any]:
    member = summary.sweep
    return {
        "key": key,
        "id": clean(summary.run.id, 120),
        "name": clean(summary.run.name, 80),
        "state": summary.status.state,
        "why": clean(summary.status.why, 400),
        "created": summary.created.timestamp(),
        "seconds": summary.seconds,
        "attempts": summary.attempts,
        "step": summary.step if is_count(summary.step) else None,
        "job": clean(summary.job, 60) if summary.job else None,
        "sweep": clean(member.sweep, 120) if member else None,
        "settings": known.settings if known else {},
        "metrics": {each["name"]: each for each in known.metrics} if known else {},
        "is_read": known is not None,
    }
