"""The rows of rank 0's metrics file as curves, speeds and counters, kept up to date while the file grows."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, final

from headway.run import Run
from headway.watch.view.series import Series
from headway.watch.view.snapshot import DatasetRow
from headway.watch.view.source import Row, RowTail, clean, is_count, is_number, is_time

_WHOLE_BYTES = 4 << 20
"""longer files are sampled, unless all of it is asked for"""
_KEPT_BYTES = 1 << 19
_THOROUGH_BYTES = 1 << 30
"""of a longer file the rest is sampled in any case: a file may have any size without having any content"""
_PLACES = 400
_RECENT = 50
"""log points from which speeds are computed"""
_MAX_CURVES = 400
_NAME_CHARACTERS = 120
_PAUSES = ("validation", "checkpoint")


@final
class MetricRows:
    """Reads the metrics of a run. `thorough` reads every row of a long file, which takes seconds per 100 MB.

    Of a file of more than 1 GiB it reads the last part, and samples the rest.
    """

    def __init__(self, run: Run, *, thorough: bool = False) -> None:
        self.curves: dict[str, Series] = {}
        self.seconds: dict[str, float] = {}
        """of each phase, over all rows that were read"""
        self.last: Row = {}
        """the newest row of a log point"""
        self.data: Mapping[str, Any] = {}
        self.lost_steps = 0
        """steps that restarts repeated"""
        self._tail = RowTail(run.path, run.metrics_file(0))
        self._thorough, self._begun = thorough, False
        self._recent: deque[Row] = deque(maxlen=_RECENT)
        self._paces: deque[float] = deque(maxlen=4 * _RECENT)
        self._pause_s = 0.0
        self._names: dict[str, str] = {}  # of metrics, as they may be shown

    def refresh(self) -> bool:
        """Reads what is new; returns whether anything was."""
        before = self._tail.offset
        if not self._begun:
            self._begun = True
            whole, kept = (_THOROUGH_BYTES,) * 2 if self._thorough else (_WHOLE_BYTES, _KEPT_BYTES)
            if self._tail.size > whole:
                self._tail.skip_to_end(kept)
                for row in self._tail.sample(_PLACES):
                    self._add(row)
                self._recent.clear()
                self._paces.clear()
        end = self._tail.size  # what is written meanwhile is for the next time
        while True:
            at = self._tail.offset
            for row in self._tail.read():
                self._add(row)
            if self._tail.offset == at or self._tail.offset >= end:  # a chunk without a whole row is no end
                return self._tail.offset > before

    def forget_pace(self) -> None:
        """Starts the speeds again: another attempt has begun, perhaps on other machines."""
        self._recent.clear()
        self._paces.clear()

    # --- what the rows say

    @property
    def step_s(self) -> tuple[float | None, float | None]:
        """Median and 95th percentile of the seconds per step, without validations and saves."""
        if not self._paces:
            return None, None
        ordered = sorted(self._paces)
        return statistics.median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]

    @property
    def shares(self) -> dict[str, float]:
        """Returns where the time of the newest log points goes; fractions that add to 1."""
        totals: dict[str, float] = {}
        for row in self._recent:
            for phase, seconds in _seconds(row).items():
                totals[phase] = totals.get(phase, 0.0) + seconds
        whole = sum(totals.values())
        return {phase: seconds / whole for phase, seconds in totals.items()} if whole else {}

    @property
    def wall_s_per_step(self) -> float | None:
        """Seconds per step, validations and saves included."""
        rows = self._log_points()
        steps = rows[-1]["step"] - rows[0]["step"] if rows else 0
        return max(0.0, rows[-1]["time"] - rows[0]["time"]) / steps if steps > 0 else None

    @property
    def log_point_s(self) -> float | None:
        """Seconds between two log points."""
        rows = self._log_points()
        return (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1) if len(rows) > 1 else None

    def _log_points(self) -> list[Row]:
        return [row for row in self._recent if row["kind"] == "train"]

    def datasets(self) -> list[DatasetRow]:
        """Returns the counters of rank 0's loaders."""
        return [
            _dataset(clean(name, 40), counters)
            for name, counters in list(self.data.items())[:20]
            if isinstance(counters, dict)
        ]

    # --- reading

    def _add(self, row: Row) -> None:
        kind, step, time = row.get("kind"), row.get("step"), row.get("time")
        if not is_count(step) or not is_time(time):
            return
        if kind in ("train", "validation"):
            self._add_log_point(row, step)
        metrics = row.get("metrics")
        if not isinstance(metrics, dict):
            return
        for given, value in metrics.items():
            number = _number(value)
            name = self._names.get(given) or self._names.setdefault(given, clean(given, _NAME_CHARACTERS))
            if number is None or (
                kind == "epoch" and name in self.curves and not self.curves[name].of_epochs
            ):
                continue  # the mean over an epoch of what log points have
            series = self.curves.get(name)
            if series is None:
                if len(self.curves) >= _MAX_CURVES:
                    self._names.pop(given)
                    continue
                series = self.curves[name] = Series(of_epochs=kind == "epoch")
            series.add(step, float(time), number)

    def _add_log_point(self, row: Row, step: int) -> None:
        self._pause_s += sum(_seconds(row).get(phase, 0.0) for phase in _PAUSES)
        for phase, seconds in _seconds(row).items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        data = row.get("data")
        if isinstance(data, dict):
            self.data = data
        if row["kind"] == "train":
            before = self.last
            if before and step > before["step"]:
                passed = row["time"] - before["time"] - self._pause_s
                if passed > 0:
                    self._paces.append(passed / (step - before["step"]))
            elif before:
                self.lost_steps += before["step"] - step + 1
                self.forget_pace()
            self.last, self._pause_s = row, 0.0
        self._recent.append(row)


def _seconds(row: Row) -> dict[str, float]:
    found = row.get("seconds")
    if not isinstance(found, dict):
        return {}
    return {phase: float(s) for phase, s in found.items() if is_number(s) and s > 0}


def _number(value: object) -> float | None:
    if is_number(value) or value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def _dataset(name: str, counters: Mapping[str, Any]) -> DatasetRow:
    numbers = {key: value for key, value in counters.items() if is_number(value)}
    opened = [numbers.get(f"cache/{kind}", 0) for kind in ("hit", "copied", "source")]  # local needs no cache
    mixture = [
        (clean(key[6:], 40), value, numbers.get(f"target/{key[6:]}", 0.0))
        for key, value in numbers.items()
        if key.startswith("share/")
    ]
    return DatasetRow(
        name=name,
        samples=int(numbers.get("samples", 0)),
        bad=int(numbers["bad"]) if "bad" in numbers else None,
        cache_hits=opened[0] / sum(opened) if sum(opened) else None,
        mixture=mixture,
    )
