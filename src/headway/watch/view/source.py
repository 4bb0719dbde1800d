"""Reads run directories that are not trusted: in bounded memory, without following links out of them or blocking."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, final

from headway.system.jsonlines import parse_json

Row = dict[str, Any]

LINE_BYTES = 1 << 18
"""a longer line is skipped"""
_CHUNK_BYTES = 1 << 20
_SAMPLED_BYTES = (1 << 13, 1 << 17)
"""the least and the most that is read to sample a line; a run with many metrics has long lines"""
_SCANNED_BYTES = 1 << 26
"""takes a tenth of a second; rare lines before that are found only if they happen to be sampled"""
_MAX_RARE_LINES = 100_000
_LINE_CHARACTERS = 600
_TEXT_BYTES = 1 << 20


def open_regular(root: Path, path: Path) -> BinaryIO | None:
    """Opens a regular file inside `root`; None if there is none, or if a link leads outside."""
    try:
        real = path.parent.resolve(strict=True)
        if not real.is_relative_to(root.resolve()):
            return None
        # a pipe would block without O_NONBLOCK
        fd = os.open(real / path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, RuntimeError):  # missing, not permitted, a link, or a loop of links
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return os.fdopen(fd, "rb")


def clean(text: object, limit: int = 400) -> str:
    """Makes a line of text harmless for a terminal: without control characters, and not longer than `limit`.

    >>> clean("a\\x1b[31mred\\nline" + "!" * 500, limit=12)
    'ared line!!…'
    """
    from headway.record.terminal_lines import plain  # a few ms of regular expressions

    whole = " ".join(plain(str(text)[: 4 * limit]).split())
    shown = "".join(c for c in whole if c.isprintable())
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def clean_indented(line: str) -> str:
    """Makes a line harmless like `clean`, but keeps its spaces, so that columns stay aligned.

    >>> clean_indented("  name\\tms  \\x1b[31mcalls ")
    '  name  ms  calls'
    """
    from headway.record.terminal_lines import plain

    spaced = plain(line[: 4 * _LINE_CHARACTERS]).expandtabs()
    shown = "".join(c if c.isprintable() else " " if c.isspace() else "" for c in spaced).rstrip()
    return shown if len(shown) <= _LINE_CHARACTERS else f"{shown[: _LINE_CHARACTERS - 1]}…"


def read_text(root: Path, path: Path, limit_bytes: int = _TEXT_BYTES) -> str | None:
    """Returns the beginning of a text file; None if it cannot be read."""
    file = open_regular(root, path)
    if file is None:
        return None
    with file:
        return file.read(limit_bytes).decode("utf-8", "replace")


def read_object(root: Path, path: Path) -> Row:
    """Returns a JSON object from a file; empty if there is none."""
    try:
        found = parse_json(read_text(root, path) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def last_lines(root: Path, path: Path, limit_bytes: int = 1 << 16) -> list[str]:
    """Returns the last lines of a text file, uncleaned."""
    return lines_before(root, path, None, limit_bytes)[0]


def newest_object(root: Path, path: Path) -> str:
    """Returns the last row of a file of JSON lines as indented text; empty if that is not an object."""
    try:
        found = parse_json(last_lines(root, path, _TEXT_BYTES)[-1])
        return json.dumps(found, indent=2, ensure_ascii=False) if isinstance(found, dict) else ""
    except (IndexError, ValueError, RecursionError):  # too deeply nested to be written
        return ""


def lines_before(
    root: Path, path: Path, end: int | None, limit_bytes: int = 1 << 16
) -> tuple[list[str], int]:
    """Returns the lines before an offset of a text file, by default its end, and the offset where they begin.

    >>> lines, begin = lines_before(run.path, run.log_file(0), None)
    >>> earlier, _ = lines_before(run.path, run.log_file(0), begin)
    """
    file = open_regular(root, path)
    if file is None:
        return [], 0
    with file:
        size = os.fstat(file.fileno()).st_size
        end = size if end is None else min(size, max(0, end))
        begin = max(0, end - limit_bytes)
        file.seek(begin)
        data = file.read(end - begin)
    cut = data.find(b"\n") + 1 if begin else 0  # skips the rest of a line
    lines = data[cut:].decode("utf-8", "replace").splitlines()
    return lines, begin + cut


def newest_rows(root: Path, path: Path, count: int, *, limit_bytes: int) -> list[Row]:
    """Returns the last `count` rows of a file, or those in its last `limit_bytes`, however long the rows are."""
    file = open_regular(root, path)
    if file is None:
        return []
    with file:
        size, length = os.fstat(file.fileno()).st_size, _SAMPLED_BYTES[0]
        while True:
            begin = max(0, size - length)
            file.seek(begin)
            data = file.read(size - begin)
            if not begin or length >= limit_bytes or data.count(b"\n") > count:
                break
            length *= 4
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")[1 if begin else 0 : -1]
    return list(parse(lines[-count:]))


def parse(lines: Iterable[bytes]) -> Iterator[Row]:
    """Yields the lines that are JSON objects and not too long."""
    for line in lines:
        if not line or len(line) > LINE_BYTES:
            continue
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


@final
class RowTail:
    """Reads the rows of a file that grows, a bounded number of bytes at a time.

    >>> tail = RowTail(run.path, run.metrics_file(0))
    >>> tail.skip_to_end(keep_bytes=4096)
    >>> tail.read()
    [{'kind': 'train', 'step': 50, ...}]
    """

    def __init__(self, root: Path, path: Path) -> None:
        self._root, self._path = root, path
        self.offset = 0

    @property
    def size(self) -> int:
        """The size of the file; 0 if there is none. The file is not opened: of a thousand files, few have grown."""
        try:
            found = self._path.lstat()
        except OSError:
            return 0
        return found.st_size if stat.S_ISREG(found.st_mode) else 0

    def read(self, limit_bytes: int = _CHUNK_BYTES) -> list[Row]:
        """Returns the next whole rows; an empty list if there are no new ones. A line that is too long is skipped."""
        file = open_regular(self._root, self._path) if self.size != self.offset else None
        if file is None:
            return []
        with file:
            if os.fstat(file.fileno()).st_size < self.offset:  # replaced by a shorter one
                self.offset = 0
            file.seek(self.offset)
            data = file.read(limit_bytes)
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= min(limit_bytes, LINE_BYTES):
            end = len(data)  # a part of a line that is too long, which does not parse
        self.offset += end
        return list(parse(data[:end].split(b"\n")))

    def skip_to_end(self, keep_bytes: int) -> None:
        """Moves to at most `keep_bytes` before the end. A line that begins before that is skipped."""
        self.offset = max(self.offset, self.size - keep_bytes)

    def sample(self, places: int, rare: Sequence[bytes] = ()) -> Iterator[Row]:
        """Yields rows from `places` evenly spaced places before the current offset, in the order of the file.

        Also yields rows that begin with one of `rare`: all in the newest 64 MiB, but at most about ten per place.
        """
        file = open_regular(self._root, self._path)
        if file is None:
            return
        with file:
            found = (islice(self._find_lines(file, beginning), _MAX_RARE_LINES) for beginning in rare)
            begins = sorted(chain.from_iterable(found))
            begins = begins[:: 1 + len(begins) // (10 * places)]
            spread = [(self.offset * number // places, number == 0) for number in range(places)]
            for at, is_begin in sorted([*spread, *((begin, True) for begin in begins)]):
                file.seek(at)
                ends = 1 if is_begin else 2
                lines = _read_lines(file, ends).split(b"\n", ends)
                yield from parse(lines[-2:-1] if len(lines) > ends else ())

    def _find_lines(self, file: BinaryIO, beginning: bytes) -> Iterator[int]:
        """Yields the offsets of lines with this beginning, in the 64 MiB before the current offset."""
        wanted = b"\n" + beginning
        begin = max(0, self.offset - _SCANNED_BYTES)
        while begin < self.offset:
            file.seek(begin)
            data = file.read(min(_CHUNK_BYTES, self.offset - begin))
            if len(data) < len(wanted):
                return
            at = data.find(wanted)
            while at >= 0:
                yield begin + at + 1
                at = data.find(wanted, at + 1)
            begin += len(data) - len(wanted) + 1  # a match may span two chunks


def _read_lines(file: BinaryIO, count: int) -> bytes:
    """Reads at least `count` ends of lines, within `_SAMPLED_BYTES`."""
    least, most = _SAMPLED_BYTES
    data = b""
    while data.count(b"\n") < count and len(data) < most:
        more = file.read(max(least, len(data)))
        if not more:
            break
        data += more
    return data
