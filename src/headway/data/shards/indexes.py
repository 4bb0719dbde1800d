"""Index files beside shards: DALI's text format (`shard.idx`), which `pack` writes too, and energon's binary one.

    v1.2 2                                       DALI: version, number of samples
    jpg 512 70412 a.jpg cls 71680 1 a.cls        one line each: extension, offset, size, name
    ...

An index of v1.1 has no names, without which samples have no keys: it states how many there are, and the headers of the
shard are walked.

energon's `shard.tar.idx` holds 64-bit offsets: of each sample's header, and of the end of the last sample.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt

from headway.data.shards.entries import SampleEntry, SamplePart, ShardEntries
from headway.data.shards.tar import BLOCK_BYTES, ShardLimits, over_limit
from headway.errors import BadShard
from headway.system.retries import read_start, retry

_DALI = b"v1."
_NAMED = b"v1.2"
_WIDTH = 4  # words for each part of a sample
_BLOCK_LINES = 128  # parsed at a time
_MAX_DIGITS = 18  # of a number that surely fits into 64 bits

Ints = npt.NDArray[np.int64]


def indexed_count(path: Path, limits: ShardLimits) -> int | None:
    """Returns the number of samples that the index of a shard states; None without an index."""
    for index in _names(path):
        words = _head(index).partition(b"\n")[0].split()
        if len(words) == 2 and words[0].startswith(_DALI) and words[1].isdigit():
            return int(words[1])
    energon = _energon_file(path)
    return len(_energon_offsets(energon, limits)) - 1 if energon is not None else None


def read_dali(path: Path, size: int, limits: ShardLimits) -> ShardEntries | None:
    """Reads DALI's index beside a shard of `size` bytes; None where there is none."""
    index = _dali_file(path)
    if index is None:
        return None
    most = 2 * size + 64  # each entry describes a header of the shard, which is longer
    text = read_start(index, most + 1) or b""
    version, _, count = text[:64].partition(b"\n")[0].strip().partition(b" ")
    if version != _NAMED:
        return None  # without names, or unknown: the headers of the shard are walked instead
    entries = DaliIndex(text, path, size, limits)
    if len(text) > most or not count.isdigit() or int(count) != len(entries):
        raise stale_index(path)
    if len(entries) > limits.members:
        raise over_limit(f"{path}: {len(entries)} samples", limits)
    for number in {0, len(entries) - 1} if entries else ():
        entries.parts(number)  # raises if the index belongs to another shard
    return entries


def stale_index(path: Path) -> BadShard:
    """Returns the error for an index that does not match its shard."""
    return BadShard(
        f"{_dali_file(path) or path.with_suffix('.idx')} does not match {path}; remove it, or write it again with "
        f"hw.data.index({str(path)!r}, overwrite=True)"
    )


@final
class DaliIndex(ShardEntries):
    """The samples in DALI's index. Lines are parsed when a sample near them is read: a loader that resumes in the
    middle of large shards needs few of them, and should not wait for all."""

    def __init__(self, text: bytes, path: Path, size: int, limits: ShardLimits) -> None:
        self._text = text if text.endswith(b"\n") else text + b"\n"
        ends = np.flatnonzero(np.frombuffer(self._text, np.uint8) == ord("\n"))
        self._ends = array("q", ends.astype(np.int64).tobytes())
        self._path, self._size, self._limits = path, size, limits
        self._most = limits.member_bytes
        self._extensions: dict[bytes, str] = {}  # decoded once; two samples rarely have others
        self._blocks: dict[int, _LineBlock | None] = {}

    def __len__(self) -> int:
        return len(self._ends) - 1

    def key(self, number: int) -> str:
        return _key(self._words(number))

    def parts(self, number: int) -> list[SamplePart]:
        return self._parts(number, self._words(number))

    def locate(self, number: int) -> tuple[str, Sequence[tuple[str, int, int]]]:
        """Finds a sample in the block of lines around it, which is parsed once, at a fifth of the time for each."""
        place = number // _BLOCK_LINES
        block = self._blocks.get(place)
        if block is None:
            if place not in self._blocks:
                block = self._blocks[place] = self._block(place)
            if block is None:  # a line by itself says what is wrong with it
                words = self._words(number)
                return _key(words), self._parts(number, words)
        return block.locate(number % _BLOCK_LINES)

    def _block(self, place: int) -> _LineBlock | None:
        """Parses neighboring lines at once; None if they do not have the same parts, or one of them is not valid."""
        first = place * _BLOCK_LINES
        self._check(first)
        last = min(first + _BLOCK_LINES, len(self))
        rows = [line.split() for line in self._text[self._ends[first] + 1 : self._ends[last]].split(b"\n")]
        if len(rows[0]) < _WIDTH or {*map(len, rows)} != {len(rows[0]) // _WIDTH * _WIDTH}:
            return None
        columns = list(zip(*rows, strict=True))
        names, starts, lengths = columns[::_WIDTH], columns[1::_WIDTH], columns[2::_WIDTH]
        numbers = [digits for column in (*starts, *lengths) for digits in column]
        if any(len({*name}) > 1 for name in names) or not b"".join(numbers).isdigit():
            return None
        if max(map(len, numbers)) > _MAX_DIGITS:
            return None
        values = np.array(list(map(int, numbers)), np.int64).reshape(2, len(names), len(rows))
        offsets, sizes = values
        valid = (offsets % BLOCK_BYTES == 0) & (offsets >= BLOCK_BYTES) & (offsets + sizes <= self._size)
        if not (valid & (sizes <= self._most)).all():
            return None
        suffix = b"." + names[0][0]
        keys = [name.removesuffix(suffix) for name in columns[3]]
        decoded = [name[0].decode("utf-8", "surrogateescape").lower() for name in names]
        return _LineBlock(decoded, offsets, sizes, keys)

    def _parts(self, number: int, words: list[bytes]) -> list[SamplePart]:
        """Parses a line. Optimized, because it runs for each sample."""
        if not words or len(words) % _WIDTH:
            raise stale_index(self._path)
        parts, extensions, end, most = list[SamplePart](), self._extensions, self._size, self._most
        for at in range(0, len(words), _WIDTH):
            name, start, length = words[at], words[at + 1], words[at + 2]
            if not (start.isdigit() and length.isdigit()):
                raise stale_index(self._path)
            offset, size = int(start), int(length)
            if offset % BLOCK_BYTES or offset < BLOCK_BYTES or offset + size > end:
                raise stale_index(self._path)
            if size > most:
                raise over_limit(f"{self._path}: sample {number} with {size} bytes", self._limits)
            extension = extensions.get(name)
            if extension is None:
                extension = extensions[name] = name.decode("utf-8", "surrogateescape").lower()
            parts.append(SamplePart(extension, offset, size))
        return parts

    def _words(self, number: int) -> list[bytes]:
        ends = self._ends
        if not 0 <= number < len(ends) - 1:
            self._check(number)
        return self._text[ends[number] + 1 : ends[number + 1]].split()


@final
class _LineBlock:
    """Some neighboring lines of an index whose samples have the same parts, in arrays: as objects they would take ten
    times as much memory."""

    def __init__(self, names: list[str], offsets: Ints, sizes: Ints, keys: list[bytes]) -> None:
        self._names, self._keys = names, b"".join(keys)
        self._key_ends = array("q", np.cumsum([0, *map(len, keys)]).tobytes())
        self._offsets, self._sizes = array("q", offsets.T.tobytes()), array("q", sizes.T.tobytes())

    def locate(self, number: int) -> tuple[str, Sequence[tuple[str, int, int]]]:
        """Returns the key of a sample, and extension, offset and size of each part."""
        names, ends = self._names, self._key_ends
        first = number * len(names)
        last = first + len(names)
        key = self._keys[ends[number] : ends[number + 1]].decode("utf-8", "surrogateescape")
        return key, list(zip(names, self._offsets[first:last], self._sizes[first:last], strict=True))


def _key(words: list[bytes]) -> str:
    if len(words) < _WIDTH:
        return ""
    return words[3].removesuffix(b"." + words[0]).decode("utf-8", "surrogateescape")


def _dali_file(path: Path) -> Path | None:
    """Returns the text index of a shard, recognized by its content, as `wds2idx` lets users choose the name."""
    return next((index for index in _names(path) if _head(index).startswith(_DALI)), None)


def _names(path: Path) -> tuple[Path, Path]:
    return path.with_suffix(".idx"), path.with_name(path.name + ".idx")


def _head(index: Path) -> bytes:
    """Returns the first bytes of a file; nothing if there is no file."""
    return read_start(index, 64) or b""


def _energon_file(path: Path) -> Path | None:
    index = path.with_name(path.name + ".idx")
    return index if retry(f"look for {index}", index.is_file) and index != _dali_file(path) else None


def _energon_offsets(index: Path, limits: ShardLimits) -> list[int]:
    """Returns the offset of each sample's header, and where the last sample ends."""
    size = retry(f"look at {index}", index.stat).st_size
    raw = (read_start(index, size) or b"") if size <= 8 * (limits.members + 1) else b""
    offsets = list(struct.unpack(f"={len(raw) // 8}Q", raw[: len(raw) // 8 * 8]))
    if len(raw) % 8 or not offsets or any(low >= high for low, high in pairwise(offsets)):
        raise BadShard(f"{index} is not a valid energon index; remove it")
    return offsets


def compare_count(path: Path, walked: Sequence[SampleEntry], limits: ShardLimits) -> None:
    """Refuses an index that states another number of samples than the headers of its shard."""
    stated = indexed_count(path, limits)
    if stated is not None and stated != len(walked):
        index = _dali_file(path) or _energon_file(path)
        raise BadShard(
            f"{index} does not match {path}: {stated} samples there, {len(walked)} in the shard; remove it"
        )


def index_text(entries: Sequence[SampleEntry]) -> str | None:
    """Returns DALI's text index of a shard; None if a name contains a space, which the format cannot represent."""
    lines = [
        " ".join(
            f"{part.extension} {part.offset} {part.size} {entry.key}.{part.extension}" for part in entry.parts
        )
        for entry in entries
    ]
    if any(len(line.split()) != 4 * len(entry.parts) for line, entry in zip(lines, entries, strict=True)):
        return None
    return "\n".join([f"v1.2 {len(entries)}", *lines, ""])
