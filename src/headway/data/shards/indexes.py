"""Index files beside shards: DALI's text format (`shard.idx`), which `pack` writes too, and energon's binary one.

    v1.2 2                                       DALI: version, number of samples
    jpg 512 70412 a.jpg cls 71680 1 a.cls        one line each: extension, offset, size, name
    ...

An index of v1.1 has no names, and so no keys of samples: only its count is used, and the headers of the shard are
walked.

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

from headway.data.shards.entries import (
    MAX_GAP_BYTES,
    SampleEntry,
    SamplePart,
    ShardEntries,
    StoredSample,
    store,
)
from headway.data.shards.tar import BLOCK_BYTES, ShardLimits, over_limit
from headway.errors import BadShard, UsageError
from headway.system.retries import read_start, retry

_DALI = b"v1."
_NAMED = b"v1.2"
_WIDTH = 4  # words for each part of a sample
_BLOCK_LINES = 128  # parsed at a time
_MAX_DIGITS = 18  # of a number that always fits into 64 bits
_TRUSTED_COUNT = 10_000  # samples; above, the count of an index is compared with the size of its shard

Ints = npt.NDArray[np.int64]


def indexed_count(path: Path, limits: ShardLimits) -> int | None:
    """Returns the number of samples that the index of a shard states; None without an index."""
    for index in _names(path):
        words = _head(index).partition(b"\n")[0].split()
        if len(words) == 2 and words[0].startswith(_DALI) and words[1].isdigit():
            count = int(words[1])
            if count > _TRUSTED_COUNT:
                _check_count(path, index, count, limits)
            return count
    energon = _energon_file(path)
    return len(_energon_offsets(energon, limits)) - 1 if energon is not None else None


def _check_count(path: Path, index: Path, count: int, limits: ShardLimits) -> None:
    """Refuses a count that the shard has no room for: an epoch over that many samples might never end."""
    try:
        size = retry(f"look at {path}", path.stat).st_size
    except OSError as error:
        raise UsageError(
            f"cannot read the shard {path}: {error.strerror}; check its path and permissions"
        ) from error
    most = min(size // BLOCK_BYTES, limits.members)
    if count > most:
        raise BadShard(
            f"{index} states {count} samples, and {path} can have {most} at most; remove it, or write it again with "
            f"hw.data.index({str(path)!r}, overwrite=True)"
        )


def read_dali(path: Path, size: int, limits: ShardLimits) -> ShardEntries | None:
    """Reads DALI's index beside a shard of `size` bytes; None if there is none."""
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


def check_files(path: Path) -> None:
    """Raises `BadShard` if a file beside a shard has the name of an index, and its content is none.

    Loaders ignore such a file, and walk the headers of the shard instead.
    """
    for index in _names(path):
        if not index.is_file() or index == _energon_file(path):
            continue
        version, _, count = _head(index).partition(b"\n")[0].strip().partition(b" ")
        if not version.startswith(_DALI) or not count.strip().isdigit():
            content = repr(_head(index)[:16])[1:] if _head(index) else "nothing"
            raise BadShard(
                f"{index} is not a valid index, since it begins with {content}; remove it, or write it again with "
                f"hw.data.index({str(path)!r}, overwrite=True)"
            )


@final
class DaliIndex(ShardEntries):
    """The samples in DALI's index. Lines are parsed when a sample near them is read, because a loader that resumes in
    the middle of large shards needs only a few of them."""

    def __init__(self, text: bytes, path: Path, size: int, limits: ShardLimits) -> None:
        self._text = text if text.endswith(b"\n") else text + b"\n"
        ends = np.flatnonzero(np.frombuffer(self._text, np.uint8) == ord("\n"))
        self._ends = array("q", ends.astype(np.int64).tobytes())
        self._path, self._size, self._limits = path, size, limits
        self._most = limits.member_bytes
        self._extensions: dict[bytes, str] = {}  # decoded once: nearly all samples have the same
        self._blocks: dict[int, _LineBlock | None] = {}  # None: parsed line by line
        self._seen: set[int] = set()  # blocks from which one line was read

    def __len__(self) -> int:
        return len(self._ends) - 1

    def key(self, number: int) -> str:
        return _key(self._words(number))

    def parts(self, number: int) -> list[SamplePart]:
        return self._parts(number, self._words(number))

    def locate(self, number: int) -> StoredSample:
        """Finds a sample in the block of lines around it, which is parsed as a whole when its second line is needed:
        that takes a sixth of the time per line, but the first batch needs only one line of most blocks."""
        place = number // _BLOCK_LINES
        block = self._blocks.get(place)
        if block is None and place in self._seen and place not in self._blocks:
            block = self._blocks[place] = self._block(place)
        if block is not None:
            return block.locate(number % _BLOCK_LINES)
        words = self._words(number)  # parsing a single line also finds what is wrong with it
        self._seen.add(place)
        return store(_key(words), self._parts(number, words))

    def _block(self, place: int) -> _LineBlock | None:
        """Parses neighboring lines at once; None if they do not have the same parts, or one of them is not valid."""
        first = place * _BLOCK_LINES
        last = min(first + _BLOCK_LINES, len(self))
        lines = self._text[self._ends[first] + 1 : self._ends[last] + 1].replace(b"\n", b" \n ")
        words = lines.split(b" ")[:-1]
        step = len(words) // (last - first)
        if step % _WIDTH != 1 or step == 1 or words[step - 1 :: step] != [b"\n"] * (last - first):
            return None
        names = [{*words[at::step]} for at in range(0, step - 1, _WIDTH)]
        numbers = [words[at::step] for at in range(step) if at % _WIDTH in (1, 2) and at < step - 1]
        if max(map(len, names)) > 1 or not all(
            b"" not in column and b"".join(column).isdigit() for column in numbers
        ):
            return None
        if max(len(digits) for column in numbers for digits in column) > _MAX_DIGITS:
            return None
        spans = np.array([[*map(int, column)] for column in numbers], np.int64)
        if not self._are_valid(spans[::2], spans[1::2]):
            return None
        extensions = [name.pop() for name in names]
        keys = [name.removesuffix(b"." + extensions[0]) for name in words[3::step]]
        return _LineBlock([_text(name).lower() for name in extensions], spans, [*map(_text, keys)])

    def _are_valid(self, offsets: Ints, sizes: Ints) -> bool:
        """Whether parts x samples lie in the shard, within the limits, and those of each sample next to each other."""
        ends = offsets + sizes
        gaps = offsets[1:] - ends[:-1]
        inside = (offsets % BLOCK_BYTES == 0) & (offsets >= BLOCK_BYTES) & (ends <= self._size)
        return bool((inside & (sizes <= self._most)).all() and ((gaps >= 0) & (gaps <= MAX_GAP_BYTES)).all())

    def _parts(self, number: int, words: list[bytes]) -> list[SamplePart]:
        """Parses a line. Optimized, because it runs for each sample."""
        if not words or len(words) % _WIDTH:
            raise stale_index(self._path)
        parts, extensions, end, most = list[SamplePart](), self._extensions, self._size, self._most
        for at in range(0, len(words), _WIDTH):
            name, start, length = words[at], words[at + 1], words[at + 2]
            if not (start.isdigit() and length.isdigit()) or max(len(start), len(length)) > _MAX_DIGITS:
                raise stale_index(self._path)
            offset, size = int(start), int(length)
            if offset % BLOCK_BYTES or offset < BLOCK_BYTES or offset + size > end:
                raise stale_index(self._path)
            if size > most:
                raise over_limit(f"{self._path}: sample {number} with {size} bytes", self._limits)
            extension = extensions.get(name)
            if extension is None:
                extension = extensions[name] = _text(name).lower()
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

    def __init__(self, names: list[str], spans: Ints, keys: list[str]) -> None:
        self._names, self._keys = names, "".join(keys)
        self._key_ends = array("q", np.cumsum([0, *map(len, keys)]).tobytes())
        self._spans, self._row = spans.T.tobytes(), struct.Struct(f"={len(spans)}q")

    def locate(self, number: int) -> StoredSample:
        """Returns the same as `DaliIndex.locate`, for a line of the block."""
        row, ends = self._row, self._key_ends
        key = self._keys[ends[number] : ends[number + 1]]
        return key, self._names, row.unpack_from(self._spans, number * row.size), True


def _key(words: list[bytes]) -> str:
    if len(words) < _WIDTH:
        return ""
    return _text(words[3].removesuffix(b"." + words[0]))


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


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
