"""The metrics of a run, by epoch and by log point, for plots and for scripts that decide by them.

A checkpoint does not contain the history, but says which bytes of rank 0's metrics file do: a save costs the same after
any number of steps. A resumed process reads those rows when the script first asks for them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast, final

from headway import dist
from headway.dist.collective.guard import from_root
from headway.system.jsonlines import FileSpan, JsonLinesWriter, is_whole, read_span
from headway.system.log import logger
from headway.train.metrics.meter import Value

MAX_ROWS = 10_000
"""epochs, and log points, kept in memory; the metrics file keeps all"""
MAX_VALUES = 1_000_000
"""values of epochs, and of log points, kept in memory: 300 metrics of the last 3,333 log points, in 8 MB"""
_MAX_NAMES = 1000  # lists of names that rows share; a script may log other names at every step
_COPIED_ROWS = 100  # in one system call


@final
@dataclass(frozen=True, kw_only=True)
class HistoryRow:
    """Metrics at one moment of a run; `step` counts through all stages."""

    stage: str
    epoch: int
    step: int
    values: Mapping[str, Value]

    def is_same_epoch(self, other: HistoryRow) -> bool:
        return (self.stage, self.epoch) == (other.stage, other.epoch)


class PackedRow(NamedTuple):
    """A row with the tuple of names that it shares with others, and its numbers in 8 bytes each."""

    stage: str
    epoch: int
    step: int
    names: tuple[str, ...]
    values: Sequence[Value]

    def unpack(self) -> HistoryRow:
        values = dict(zip(self.names, self.values, strict=True))
        return HistoryRow(stage=self.stage, epoch=self.epoch, step=self.step, values=values)


@final
class HistoryTable:
    """The newest rows, in bounded memory."""

    def __init__(self) -> None:
        self.rows: deque[PackedRow] = deque()
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._count = 0

    def append(self, row: HistoryRow) -> None:
        """Adds a row and removes the oldest ones if there are too many."""
        if len(self._names) >= _MAX_NAMES:
            self._names.clear()
        given, values = tuple(row.values), tuple(row.values.values())
        names = self._names.setdefault(given, given)
        packed = cast("Sequence[Value]", array("d", cast("Any", values))) if _are_floats(values) else values
        self.rows.append(PackedRow(row.stage, row.epoch, row.step, names, packed))
        self._count += len(names)
        while len(self.rows) > MAX_ROWS or (self._count > MAX_VALUES and len(self.rows) > 1):
            self._count -= len(self.rows.popleft().names)

    def append_epoch(self, row: HistoryRow) -> None:
        """Adds the row of an epoch, or its metrics to the last row if that is of the same epoch."""
        last = self.rows[-1].unpack() if self.rows else None
        if last is not None and last.is_same_epoch(row):
            self._count -= len(self.rows.pop().names)
            row = replace(last, values={**last.values, **row.values})
        self.append(row)

    def values_of(self, name: str) -> Iterator[tuple[PackedRow, Value]]:
        """Yields the rows that have a metric, each with its value."""
        places = {names: names.index(name) for names in {row.names for row in self.rows} if name in names}
        for row in self.rows:
            if (place := places.get(row.names)) is not None:
                yield row, row.values[place]

    def names(self) -> set[str]:
        return {name for names in {row.names for row in self.rows} for name in names}


@final
class History:
    """The metrics of a run so far.

    >>> pipe.history["val/loss"]            # one value per epoch that has one
    [0.61, 0.48]
    >>> pipe.history.points("train/loss")   # (step, value) of the log points
    [(50, 0.91), (100, 0.66)]
    """

    def __init__(self) -> None:
        self._epochs, self._points = HistoryTable(), HistoryTable()
        self._last_epoch: HistoryRow | None = None
        self._rows: JsonLinesWriter | None = None  # the metrics file, on rank 0
        self._spans: list[FileSpan] = []  # of the rows of earlier attempts
        self._unread: Path | None = None  # the file that has these rows, until they are read

    # --- what a script asks

    def __getitem__(self, name: str) -> list[Value]:
        """Returns the value of each epoch that has one; for a metric of log points only, the last in each epoch."""
        self._read()
        if found := [value for _, value in self._epochs.values_of(name)]:
            return found
        ended = {(row.stage, row.epoch) for row in self._epochs.rows}
        points = self._points.values_of(name)
        return list({place: value for row, value in points if (place := row[:2]) in ended}.values())

    def __contains__(self, name: object) -> bool:
        """Returns whether any epoch has a value of the metric."""
        return name in set(self)

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of the metrics that epochs have."""
        self._read()
        return iter(sorted(self._epochs.names()))

    def points(self, name: str) -> list[tuple[int, Value]]:
        """Returns the values of a metric at log points, each with its step."""
        self._read()
        return [(row.step, value) for row, value in self._points.values_of(name)]

    def names(self) -> list[str]:
        """Returns the names of all metrics that any epoch or log point has."""
        self._read()
        return sorted(self._epochs.names() | self._points.names())

    @property
    def epochs(self) -> list[HistoryRow]:
        """The metrics of the last 10,000 epochs, or of fewer if these have more than a million values."""
        self._read()
        return [row.unpack() for row in self._epochs.rows]

    @property
    def log_points(self) -> list[HistoryRow]:
        """The metrics of the last 10,000 log points, or of fewer if these have more than a million values."""
        self._read()
        return [row.unpack() for row in self._points.rows]

    # --- what the loop adds

    @property
    def last_epoch(self) -> HistoryRow | None:
        """The metrics of the last epoch, which a checkpoint contains."""
        return self._last_epoch

    def add_log_point(self, row: HistoryRow) -> None:
        self._points.append(row)

    def add_epoch(self, row: HistoryRow) -> None:
        """Adds an epoch, or metrics to the last one."""
        last = self._last_epoch
        more = last is not None and last.is_same_epoch(row)
        self._last_epoch = replace(row, values={**last.values, **row.values}) if last and more else row
        self._epochs.append_epoch(row)

    # --- checkpoints

    def write_to(self, rows: JsonLinesWriter) -> None:
        """Sets the metrics file of rank 0, which gets a row for each log point and epoch; it gets those so far, too."""
        self._rows = rows
        _copy(self._in_memory(), rows)

    def state_dict(self, *, with_rows: bool = False) -> dict[str, Any]:
        """Returns the place of the rows in the metrics file; `with_rows`, for another pipeline, also the rows."""
        last = self._last_epoch and asdict(self._last_epoch)
        if not with_rows:
            now = [] if self._rows is None else [self._rows.span]
            spans = [list(span) for span in (*self._spans, *now) if span.end > span.begin]
            return {"spans": spans, "last_epoch": last}
        self._read()
        rows = [(is_epoch, asdict(row)) for is_epoch, row in self._in_memory()]
        return {"spans": [], "last_epoch": last, "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        last = state["last_epoch"]
        self._last_epoch = last and HistoryRow(**last)
        self._spans = [FileSpan(*span) for span in state["spans"]]
        self._epochs, self._points = HistoryTable(), HistoryTable()
        self._fill((is_epoch, HistoryRow(**row)) for is_epoch, row in state.get("rows", ()))

    def read_from(self, file: Path) -> None:
        """Sets the file that has the rows of the state that was loaded."""
        self._unread = file

    def copy_from_parent(self, own: Path) -> None:
        """Copies the rows of a parent run, which may be removed, into the metrics file of this one."""
        self._spans = [FileSpan(*span) for span in from_root(self._copy_saved)]
        self._unread = own

    def _copy_saved(self) -> list[list[int]]:
        assert self._rows is not None, "rank 0 has opened the metrics file"
        self._rows.begin_span()
        _copy(self._saved_rows(), self._rows)
        self._rows.sync()  # other ranks read them
        copied = self._rows.span
        self._rows.begin_span()
        return [list(copied)]

    def _in_memory(self) -> Iterator[tuple[bool, HistoryRow]]:
        for is_epoch, table in ((True, self._epochs), (False, self._points)):
            yield from ((is_epoch, row.unpack()) for row in table.rows)

    def _fill(self, rows: Iterable[tuple[bool, HistoryRow]]) -> None:
        for is_epoch, row in rows:
            (self._epochs.append_epoch if is_epoch else self._points.append)(row)

    def _read(self) -> None:
        """Reads the rows of earlier attempts, once."""
        if self._unread is None:
            return
        new = list(self._in_memory())
        self._epochs, self._points = HistoryTable(), HistoryTable()
        self._fill(self._saved_rows())
        self._unread = None
        self._fill(new)

    def _saved_rows(self) -> Iterator[tuple[bool, HistoryRow]]:
        """Yields the rows of earlier attempts, each with whether it is of an epoch."""
        assert self._unread is not None, "read_from was called"
        for span in self._spans:
            if not is_whole(self._unread, span):
                if dist.is_root():
                    logger.warning(
                        "the metric history of earlier attempts is incomplete: %s was changed or removed; training "
                        "does not need it",
                        self._unread,
                    )
                return
            for row in read_span(self._unread, span):
                if (found := _to_history(row)) is not None:
                    yield found


def _are_floats(values: Sequence[Value]) -> bool:
    return all(type(value) is float for value in values)


def _copy(rows: Iterable[tuple[bool, HistoryRow]], file: JsonLinesWriter) -> None:
    """Writes rows that readers of the metrics file skip: they have no step and no metrics of their own."""
    lines = (
        {"kind": "history", "row": {"kind": "epoch" if is_epoch else "train", **_to_metrics(row)}}
        for is_epoch, row in rows
    )
    while some := list(islice(lines, _COPIED_ROWS)):
        file.write_all(some)


def _to_metrics(row: HistoryRow) -> dict[str, Any]:
    return {"stage": row.stage, "epoch": row.epoch, "step": row.step, "metrics": dict(row.values)}


def _to_history(row: Mapping[str, Any]) -> tuple[bool, HistoryRow] | None:
    """Returns the metrics of a row of the metrics file, and whether they are of an epoch; None if it has none."""
    if row.get("kind") == "history":
        row = row["row"]
    if row.get("kind") not in ("train", "validation", "epoch"):
        return None
    values = {name: _to_value(value) for name, value in row["metrics"].items()}
    found = HistoryRow(stage=row["stage"], epoch=row["epoch"], step=row["step"], values=values)
    return row["kind"] == "epoch", found


def _to_value(value: Any) -> Value:
    """Returns a value as it was logged: NaN and infinities are strings in the file."""
    if isinstance(value, list):
        return [_to_value(each) for each in value]
    return float(value)
