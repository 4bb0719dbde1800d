"""JSON lines: files of one JSON object per line, with one writer and any number of readers.

A row is appended in one system call, so a reader sees whole lines and at most one half-written line at the end. A
killed process or a full disk may leave half a line in the middle of a file: the next writer begins a new line, and
readers skip lines that are not complete objects.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TypeGuard, final

from headway.errors import RunLocked, StorageError
from headway.system import files
from headway.system.log import logger

_CHUNK_BYTES = 1 << 20
_LAST_BYTES = 1 << 14
_LONGEST_BYTES = 1 << 26  # a longer line is not a row
_LONGEST_DIGITS = 100
_LARGEST = 1e15
"""a larger step or number of bytes is an error"""
_LATEST_S = 4e9
"""a later time, after the year 2096, is an error"""

Row = dict[str, Any]


class FileSpan(NamedTuple):
    """A part of a file, in bytes, and the CRC-32 of its content."""

    begin: int
    end: int
    checksum: int


@final
class AppendOnlyFile:
    """A private file to which whole lines are appended. A full disk loses lines, but never stops the writer.

    Raises `StorageError` only when the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with files.storage(f"open {path}"):
            self.descriptor = files.open_private(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            size = os.fstat(self.descriptor).st_size
            self._torn = size > 0 and os.pread(self.descriptor, 1, size - 1) != b"\n"
        self.span = FileSpan(size, size, 0)
        """what this process, and no other, has appended"""

    def append(self, lines: bytes) -> tuple[int, str]:
        """Appends lines in one system call; returns how many of them were lost, and why.

        With one call, lines of threads and forked children do not mix.
        """
        torn = self._torn
        data = b"\n" + lines if torn else lines
        try:
            written = os.write(self.descriptor, data)
        except OSError as error:
            return lines.count(b"\n"), str(error.strerror)
        begin, end, checksum = self.span
        self.span = FileSpan(begin, end + written, zlib.crc32(memoryview(data)[:written], checksum))
        if written == len(data):
            self._torn = False
            return 0, ""
        # a write to a regular file is short only if the disk or the quota is full
        self._torn = not data[:written].endswith(b"\n") if written else torn
        return min(lines.count(b"\n"), data.count(b"\n", written)), "no space left"

    def close(self) -> str:
        """Closes the file; returns why lines may be lost, empty if none are. Calling it again does nothing.

        A network file system may report a full disk only here.
        """
        descriptor, self.descriptor = self.descriptor, -1
        try:
            if descriptor >= 0:
                os.close(descriptor)
        except OSError as error:
            return str(error.strerror)
        return ""


@final
class JsonLinesWriter:
    """Appends rows to a file that no other process writes. Rows that cannot be written are counted in `lost`.

    NaN and infinities, which JSON does not have, are written as the strings "nan", "inf" and "-inf". `content` names
    the rows in the one warning about lost ones. `default` converts values that JSON cannot represent. `before_write` is
    called before rows are appended, and raises `RunLocked` if this process must no longer write; if it raises another
    `StorageError`, the rows are lost.

    >>> with JsonLinesWriter(Path("metrics.jsonl"), content="metric rows") as rows:  # doctest: +SKIP
    ...     rows.write({"step": 50, "metrics": {"train/loss": 0.7}})
    """

    def __init__(
        self,
        path: Path,
        *,
        content: str = "rows",
        default: Callable[[Any], Any] | None = None,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.lost = 0
        self.error = ""
        self._content = content
        self._before_write = before_write
        self._encode = json.JSONEncoder(allow_nan=False, default=default).encode
        self._file = AppendOnlyFile(path)

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row."""
        self.write_all((row,))

    def write_all(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Appends rows in one system call; returns how many of them were lost."""
        lines = "".join(to_line(row, self._encode) for row in rows).encode()
        try:
            self._before_write()
            lost, self.error = self._file.append(lines) if lines else (0, "")
        except StorageError as error:  # whether this process may write is unknown
            if isinstance(error, RunLocked):
                raise
            lost, self.error = lines.count(b"\n"), str(error)
        if lost and not self.lost:
            logger.warning("%s are being lost: %s: %s", self._content, self._file.path, self.error)
        self.lost += lost
        return lost

    @property
    def span(self) -> FileSpan:
        """The part of the file with the rows that were written since it was opened, or since `begin_span`."""
        return self._file.span

    def begin_span(self) -> None:
        end = self._file.span.end
        self._file.span = FileSpan(end, end, 0)

    def sync(self) -> None:
        """Waits until the rows are on disk, where other hosts see them, too."""
        try:
            os.fsync(self._file.descriptor)
        except OSError as error:
            logger.warning("%s may be lost: %s: %s", self._content, self._file.path, error.strerror)

    def close(self) -> None:
        """Closes the file. Calling it again does nothing."""
        if why := self._file.close():
            logger.warning("%s may be lost: %s: %s", self._content, self._file.path, why)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_encode = json.JSONEncoder(allow_nan=False).encode


def to_line(row: Mapping[str, Any], encode: Callable[[Any], str] = _encode) -> str:
    """Returns a row as a line; NaN and infinities, which JSON does not have, become strings."""
    try:
        return encode(row) + "\n"
    except ValueError:  # a number is not finite, which is rare
        return encode(to_finite(row)) + "\n"


def read(path: Path) -> Iterator[Row]:
    """Yields the rows of a file; none if it does not exist yet. Lines that are not whole are skipped."""
    try:
        file = files.open_regular(path)
    except FileNotFoundError:
        return
    with file:
        yield from _parse(iter(partial(file.readline, _LONGEST_BYTES), b""))


def is_whole(path: Path, span: FileSpan) -> bool:
    """Returns whether a file has this part, unchanged."""
    checksum, left = 0, span.end - span.begin
    try:
        with files.open_regular(path) as file:
            file.seek(span.begin)
            while left > 0 and (data := file.read(min(left, _CHUNK_BYTES))):
                checksum, left = zlib.crc32(data, checksum), left - len(data)
    except OSError:
        return False
    return left == 0 and checksum == span.checksum


def read_span(path: Path, span: FileSpan) -> Iterator[Row]:
    """Yields the rows in a part of a file."""
    with files.open_regular(path) as file:
        file.seek(span.begin)
        left = span.end - span.begin
        while left > 0 and (line := file.readline(left)):
            left -= len(line)
            yield from _parse((line,))


def read_reversed(path: Path, *, limit_bytes: int = _LAST_BYTES) -> Iterator[Row]:
    """Yields the rows in the last `limit_bytes` of a file, the newest first; nothing if the file does not exist."""
    try:
        with files.open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit_bytes))
            lines = file.read(limit_bytes).split(b"\n")
    except OSError:
        return
    yield from _parse(reversed(lines))


def last_time(path: Path, *, before: float) -> float | None:
    """Returns the last time before `before` in a file whose rows are sorted by time; None if there is none.

    It searches by bisection, so a long file takes only a few reads.
    """
    try:
        file = files.open_regular(path)
    except OSError:
        return None
    with file:
        low, high = 0, os.fstat(file.fileno()).st_size
        while high - low > _LAST_BYTES:  # rows up to `low` are early enough, rows after `high` too late
            middle = (low + high) // 2
            first = next(_times(file, middle, min(high, middle + _CHUNK_BYTES)), None)
            if first is not None and first < before:
                low = middle
            else:
                high = middle
        return max((time for time in _times(file, low, high) if time < before), default=None)


def _times(file: BinaryIO, begin: int, end: int) -> Iterator[float]:
    """Yields the times of the rows that begin after the byte `begin`, or at 0, and not after `end`."""
    file.seek(begin)
    if begin:
        file.readline(_CHUNK_BYTES)
    while file.tell() <= end and (line := file.readline(_CHUNK_BYTES)):
        for row in _parse((line,)):
            if is_time(time := row.get("time")):
                yield float(time)


@final
class Tail:
    """Reads the rows of a file while it is being written.

    `offset` is the number of bytes read so far: pass it to the next `Tail` to continue there.

    >>> tail = Tail(run.metrics_file(0))  # doctest: +SKIP
    >>> tail.read()  # doctest: +SKIP
    [{'step': 50, 'metrics': {'train/loss': 0.7}}]
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.offset = offset
        self._path = path

    def read(self, most_bytes: int = _CHUNK_BYTES) -> list[Row]:
        """Returns the next rows, about `most_bytes` bytes of them; an empty list if there are no new ones.

        An incomplete line is left for the next call.
        """
        try:
            with files.open_regular(self._path) as file:
                file.seek(self.offset)
                data = file.read(most_bytes)
                if b"\n" not in data:  # a row may be longer than that
                    data += file.readline(_LONGEST_BYTES)
        except FileNotFoundError:
            return []
        # a line that is too long to be a row is skipped
        end = len(data) if b"\n" not in data and len(data) >= _LONGEST_BYTES else data.rfind(b"\n") + 1
        whole = data[:end]
        self.offset += len(whole)
        return list(_parse(whole.split(b"\n")))


def _whole(digits: str) -> float:
    return int(digits) if len(digits) <= _LONGEST_DIGITS else float(digits)


_DECODER = json.JSONDecoder(parse_int=_whole)


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value from a file is a finite number of a plausible size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def is_time(value: object) -> TypeGuard[float]:
    """Returns whether a value from a file is a time in seconds since 1970."""
    return is_number(value) and 0 <= value <= _LATEST_S


def is_count(value: object) -> TypeGuard[int]:
    """Returns whether a value from a file is a step, a rank or another count."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def parse_json(data: bytes | str) -> Any:
    """Parses JSON; raises `ValueError` if it is invalid or nested too deeply.

    An integer of more than 100 digits becomes a float, with which callers can compute.

    >>> parse_json('{"step": 50}')
    {'step': 50}
    """
    try:
        return _DECODER.decode(data if isinstance(data, str) else data.decode(json.detect_encoding(data)))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _parse(lines: Iterable[bytes]) -> Iterator[Row]:
    for line in lines:
        try:
            row = parse_json(line) if line else None
        except ValueError:  # cut off by a kill or a full disk
            continue
        if isinstance(row, dict):
            yield row


def to_finite(value: Any) -> Any:
    """Returns plain values with strings in place of NaN and infinities, which JSON does not have.

    >>> to_finite({"loss": float("nan"), "steps": [1, 2]})
    {'loss': 'nan', 'steps': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {key: to_finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
