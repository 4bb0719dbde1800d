"""The rows of rank 0's metrics file as curves, speeds and counters, kept up to date while the file grows."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

from headway.record.sinks.rows import RestartDetector
from headway.run import Run
from headway.system.jsonlines import is_count, is_number, is_time
from headway.watch.view.series import LARGEST_VALUE, Series
from headway.watch.view.snapshot import DatasetRow
from headway.watch.view.source import Row, RowTail, clean

_WHOLE_BYTES = 4 << 20
"""longer files are sampled, unless `thorough`"""
_KEPT_BYTES = 1 << 19
_THOROUGH_BYTES = 1 << 30
"""longer files are sampled in any case: a sparse file can have any size"""
_PLACES = 400
_RARE = (b'{"kind": "validation"', b'{"kind": "epoch"')
"""beginnings of rows that are too rare for a sample"""
_RECENT = 50
"""log points from which speeds are computed"""
_MAX_CURVES = 400
_NAME_CHARACTERS = 120
_PAUSES = ("validation", "checkpoint")
PHASES = ("data", "compute", "optimizer", "wait", "validation", "checkpoint", "other")
"""known phases of a step; the seconds of others count in totals only"""
_PART_BYTES = 1 << 20
_MAX_PARTS = 8
"""parts of the file that are read again to show a range of steps in detail"""


class StepRange(NamedTuple):
    """Consecutive log points; an attempt that repeats steps begins another range."""

    first_step: int
    first_time: float
    last_step: int
    last_time: float


class FilePart(NamedTuple):
    """A part of the metrics file, and the steps of its rows."""

    begin: int
    end: int
    first_step: int
    last_step: int


@final
class MetricRows:
    """Reads the metrics of a run. With `thorough`, it reads every row of a long file, which takes seconds per 100 MB.

    Of a file larger than 1 GiB, it reads the last part and samples the rest.
    """

    def __init__(self, run: Run, *, thorough: bool = False) -> None:
        self.curves: dict[str, Series] = {}
        self.seconds: dict[str, float] = {}
        """of each phase, over all rows that were read"""
        self.last: Row = {}
        """the newest row of a log point"""
        self.data: Mapping[str, Any] = {}
        self.step_ranges: list[StepRange] = []
        self.phases: dict[str, Series] = {}
        """seconds per step in each phase"""
        self.samples = Series()
        """samples of all ranks so far"""
        self.worlds: Sequence[tuple[float, int]] = ()
        """start time and number of ranks of each attempt"""
        self.began: float | None = None
        """time of the first row"""
        self.is_sampled = False
        """whether rows between the sampled ones were skipped"""
        self._path, self._run_path = run.metrics_file(0), run.path
        self._parts: list[FilePart] = []
        self._is_gap = False  # rows were skipped between the last row and the next
        self._restarts, self._attempt_began = RestartDetector(), 0.0
        self._counted = 0  # samples of rank 0's loader, by its own count
        self._tail = RowTail(run.path, run.metrics_file(0))
        self._thorough, self._begun = thorough, False
        self._recent: deque[Row] = deque(maxlen=_RECENT)
        self._paces: deque[float] = deque(maxlen=4 * _RECENT)
        self._pause_s = 0.0
        self.longest_gap_s = 0.0
        """between two rows of an attempt"""
        self._row_time = math.inf  # of the newest row
        self._names: dict[str, str] = {}  # metric name in the file -> name to show

    def refresh(self) -> bool:
        """Reads the rows that were added; returns whether there were any."""
        before = self._tail.offset
        if not self._begun:
            self._begun = True
            whole, kept = (_THOROUGH_BYTES,) * 2 if self._thorough else (_WHOLE_BYTES, _KEPT_BYTES)
            if self._tail.size > whole:
                self.is_sampled = True
                self._tail.skip_to_end(kept)
                for row in self._tail.sample(_PLACES, _RARE):
                    self._add(row)
                self.phases.clear()  # sampled rows are further apart than log points
                self._is_gap = True
                self.forget_pace()
        end = self._tail.size  # rows that are written meanwhile are left to the next call
        while True:
            at = self._tail.offset
            rows = self._tail.read()
            for row in rows:
                self._add(row)
            self._note_part(at, self._tail.offset, rows)
            # a chunk without a whole row is not the end
            if self._tail.offset == at or self._tail.offset >= end:
                return self._tail.offset > before

    def forget_pace(self) -> None:
        """Forgets recent speeds: a new attempt has begun, perhaps on other machines."""
        self._recent.clear()
        self._paces.clear()
        self.longest_gap_s, self._row_time = 0.0, math.inf

    def within(self, name: str, first_step: int, last_step: int) -> Series | None:
        """Reads a range of steps of a curve from the file again, with every row.

        Returns None if the range is too long, or outside the part of the file that was read in full.
        """
        parts = [
            part for part in self._parts if part.first_step <= last_step and part.last_step >= first_step
        ]
        known = self.curves.get(name)
        if not parts or known is None or len(parts) > _MAX_PARTS or self._parts[0].first_step > first_step:
            return None
        found, restarts = Series(of_epochs=known.of_epochs), RestartDetector()
        for row in self._rows_of(parts):
            step, time, metrics = row.get("step"), row.get("time"), row.get("metrics")
            if not is_count(step) or not is_time(time) or not isinstance(metrics, dict):
                continue
            if row.get("kind") == "train" and restarts.observe(row):
                found.cut(step)
            if row.get("kind") == "epoch" and not known.of_epochs:
                continue
            for given, value in metrics.items():
                number = _number(value) if self._names.get(given) == name else None
                if number is not None and first_step <= step <= last_step:
                    found.add(step, float(time), number)
        return found

    def _rows_of(self, parts: Sequence[FilePart]) -> Iterator[Row]:
        for part in parts:
            tail = RowTail(self._run_path, self._path)
            tail.offset = part.begin
            while tail.offset < part.end:
                at = tail.offset
                yield from tail.read(part.end - at)
                if tail.offset == at:
                    break

    def _note_part(self, begin: int, end: int, rows: Sequence[Row]) -> None:
        """Records which part of the file has which steps."""
        steps = [step for row in rows if is_count(step := row.get("step"))]
        if not steps:
            return
        part = FilePart(begin, end, min(steps), max(steps))
        last = self._parts[-1] if self._parts else None
        if last and part.end - last.begin <= _PART_BYTES:
            low, high = min(last.first_step, part.first_step), max(last.last_step, part.last_step)
            self._parts[-1] = FilePart(last.begin, end, low, high)
        else:
            self._parts.append(part)

    # --- results

    @property
    def step_s(self) -> tuple[float | None, float | None]:
        """Median and 95th percentile of the seconds per step, without validations and saves."""
        if not self._paces:
            return None, None
        ordered = sorted(self._paces)
        return statistics.median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]

    @property
    def shares(self) -> dict[str, float]:
        """Returns where the time of the newest log points goes; fractions that add up to 1."""
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
        self.began = float(time) if self.began is None else self.began
        if kind in ("train", "validation"):
            self._add_log_point(row, step)
        metrics = row.get("metrics")
        if not isinstance(metrics, dict):
            return
        for given, value in metrics.items():
            number = _number(value)
            if number is None:
                continue
            name = self._name(given)
            if kind == "epoch" and name in self.curves and not self.curves[name].of_epochs:
                continue  # the mean over an epoch of values that log points have
            series = self.curves.get(name)
            if series is None:
                if len(self.curves) >= _MAX_CURVES:
                    self._names.pop(given, None)
                    continue
                series = self.curves[name] = Series(of_epochs=kind == "epoch")
            series.add(step, float(time), number)

    def _name(self, given: str) -> str:
        """Returns the name of a metric without control characters, from a cache of limited size."""
        name = self._names.get(given)
        if name is None:
            name = clean(given, _NAME_CHARACTERS)
            if len(self._names) < 2 * _MAX_CURVES:
                self._names[given] = name
        return name

    def _add_log_point(self, row: Row, step: int) -> None:
        self._pause_s += sum(_seconds(row).get(phase, 0.0) for phase in _PAUSES)
        for phase, seconds in _seconds(row).items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        data = row.get("data")
        if isinstance(data, dict):
            self.data = data
        if row["kind"] == "train":
            self._add_steps(row, step)
        self.longest_gap_s = max(self.longest_gap_s, row["time"] - self._row_time)
        self._row_time = float(row["time"])
        self._recent.append(row)

    def _add_steps(self, row: Row, step: int) -> None:
        """Adds the steps between the previous log point and this one."""
        before, time = self.last, float(row["time"])
        attempt = next((each for each in reversed(self.worlds) if each[0] <= time), (0.0, 1))
        is_continued = attempt[0] == self._attempt_began
        self._attempt_began = attempt[0]
        if self._restarts.observe(row):
            self._forget(step)
        elif (
            before and step == before["step"]
        ):  # a second log point at the same step, as at the end of an epoch
            self.last, self._pause_s = before | {"time": time}, 0.0
            return
        elif before and is_continued:
            passed = time - before["time"] - self._pause_s
            if passed > 0:
                self._paces.append(passed / (step - before["step"]))
        elif before:  # the time between two attempts is not a pace
            self.forget_pace()
        self._add_phases(row, step, step - before["step"] if before else step)
        self._add_samples(row, step, ranks=attempt[1], is_continued=is_continued)
        self._extend_range(step, time)
        self.last, self._pause_s = row, 0.0

    def _forget(self, step: int) -> None:
        """Removes values at `step` and later: a restart repeats these steps."""
        self.forget_pace()
        for series in self.curves.values():
            series.cut(step)
        self.curves = {
            name: series for name, series in self.curves.items() if series.steps or series.non_finite
        }

    def _extend_range(self, step: int, time: float) -> None:
        last = self.step_ranges[-1] if self.step_ranges else None
        if last is None or step <= last.last_step:
            self.step_ranges.append(StepRange(step, time, step, time))
        else:
            self.step_ranges[-1] = last._replace(last_step=step, last_time=time)

    def _add_phases(self, row: Row, step: int, steps: int) -> None:
        """Adds the seconds per step, unless the number of steps since the previous row is unknown."""
        if steps <= 0 or self._is_gap:
            for series in self.phases.values():
                series.cut(step)
            self._is_gap = False
            return
        seconds = _seconds(row)
        for phase in PHASES:  # all of them in every row, so that their curves share steps
            series = self.phases.setdefault(phase, Series())
            series.add(step, float(row["time"]), seconds.get(phase, 0.0) / steps)

    def _add_samples(self, row: Row, step: int, *, ranks: int, is_continued: bool) -> None:
        """Counts samples by rank 0's counter, which starts from 0 in each attempt."""
        counters = self.data.get("train", next(iter(self.data.values()), None)) if self.data else None
        count = counters.get("samples") if isinstance(counters, dict) else None
        if not is_count(count):
            return
        is_repeated = bool(self.samples.steps) and step <= self.samples.steps[-1]
        if is_repeated or not is_continued or count < self._counted:
            self.samples.cut(step)
            self._counted = 0
        before = self.samples.highs[-1] if self.samples.highs else 0.0
        self.samples.add(step, float(row["time"]), before + max(0, count - self._counted) * ranks)
        self._counted = count


def _seconds(row: Row) -> dict[str, float]:
    found = row.get("seconds")
    if not isinstance(found, dict):
        return {}
    return {phase: float(s) for phase, s in found.items() if is_number(s) and s > 0}


def _number(value: object) -> float | None:
    """Returns the value of a metric; one that is too large to compute with becomes infinite."""
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    number = float(value)
    return number if not abs(number) > LARGEST_VALUE else math.copysign(math.inf, number)


def _dataset(name: str, counters: Mapping[str, Any]) -> DatasetRow:
    numbers = {key: value for key, value in counters.items() if is_number(value)}
    opened = [
        numbers.get(f"cache/{kind}", 0) for kind in ("hit", "copied", "source")
    ]  # "local" shards need no cache
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
