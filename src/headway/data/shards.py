"""Tar shards in the WebDataset layout, read in place: files of one key, one after the other, are one sample.

    shard = Shard.open(Path("shard-000000.tar"))
    shard[7]["jpg"]                     # a view of the file's bytes, mapped and not copied

Nothing is ever extracted. Links, devices and sparse files are refused, names are only names. An index is not needed:
headers are walked at some hundred thousand a second. Where there is one (DALI's text format, which `pack` writes, or
energon's), it is used, and checked against the shard.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, final, overload

import numpy as np

from headway.errors import BadShard, HeadwayError, UsageError

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_LARGEST_NAME = 2**20
_FILE, _DIRECTORY, _LONG_NAME, _LONG_LINK, _PAX, _PAX_ALL = b"0\0007", b"5", b"L", b"K", b"x", b"g"
_COMPRESSED = {
    b"\x1f\x8b": "gzip -d",
    b"\x28\xb5\x2f\xfd": "zstd -d",
    b"BZh": "bzip2 -d",
    b"\xfd7zXZ": "xz -d",
}


class Member(NamedTuple):
    """One file in a shard."""

    name: str
    offset: int
    size: int


class Component(NamedTuple):
    """One part of a sample: `jpg` of `a.jpg`, with the place of its bytes in the shard."""

    extension: str
    offset: int
    size: int


@dataclass(frozen=True)
class Entry:
    """One sample in the index of a shard."""

    key: str
    parts: tuple[Component, ...]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is taken from a file that somebody else made; above, a sample or a shard is bad."""

    member_bytes: int = 2**30
    """bytes of one file in a shard"""
    members: int = 10_000_000
    """files in a shard"""
    pixels: int = 100_000_000
    """width x height of an image"""


# --- tar


def members(data: mmap.mmap | bytes, where: str, limits: Limits | None = None) -> Iterator[Member]:
    """The files of a tar archive (ustar, GNU, PAX), header by header; raises `BadShard` where it is not one."""
    limits = limits or Limits()
    offset, name, size_given, seen = 0, "", None, 0
    while True:
        header = data[offset : offset + _BLOCK]
        if header == _ZEROS:
            return
        if len(header) < _BLOCK:
            raise BadShard(
                f"{where} ends at byte {len(data)} without an end mark: it was cut off; copy it again"
            )
        kind, size = header[156:157], _size(header, offset, where)
        if kind in _FILE and size_given is not None:
            size = size_given
        start = offset + _BLOCK
        offset = start + -(-size // _BLOCK) * _BLOCK
        if start + size > len(data):
            raise BadShard(
                f"{where} has a file of {size} bytes at byte {start}, but ends at byte {len(data)}: it was cut off; "
                "copy it again"
            )
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_ALL):
            if size > _LARGEST_NAME:
                raise BadShard(f"{where}: a name of {size} bytes at byte {start}")
            if kind == _LONG_NAME:
                name = _text(data[start : start + size])
            elif kind == _PAX:
                name, size_given = _pax(data[start : start + size], name, where, start)
            continue
        name = name or _name(header)
        if kind in _FILE:
            seen += 1
            if size > limits.member_bytes or seen > limits.members:
                raise BadShard(
                    f"{where}: {name!r}, file {seen} with {size} bytes, is beyond the limits: {limits}. "
                    "If it is meant to be so, give larger Limits"
                )
            yield Member(name, start, size)
        elif kind != _DIRECTORY:
            raise BadShard(
                f"{where}: {name!r} is a link, device or sparse file (type {kind!r}); pack files only"
            )
        name, size_given = "", None


def _size(header: bytes, offset: int, where: str) -> int:
    """The size of a member, after checking that this is a header at all."""
    try:
        stated = int(_until_zero(header[148:156]).strip() or b"-1", 8)
        size = header[124:136]
        if size[0] & 0x80:  # GNU's binary form, for sizes that do not fit eleven octal digits
            value = int.from_bytes(size[1:], "big")
        else:
            value = int(_until_zero(size).strip() or b"0", 8)
    except ValueError:
        stated = -1
    if stated != sum(header) - sum(header[148:156]) + 8 * 32 or value < 0:
        raise BadShard(
            f"{where} has no tar header at byte {offset}: not a tar file, or damaged; make it again"
        )
    return value


def _name(header: bytes) -> str:
    name, prefix = _until_zero(header[:100]), b""
    if header[257:263] == b"ustar\0":
        prefix = _until_zero(header[345:500])
    return _text(prefix + b"/" + name if prefix else name)


def _pax(records: bytes, name: str, where: str, start: int) -> tuple[str, int | None]:
    size = None
    while records:
        digits, _, _ = records.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        if not len(digits) + 1 < length <= len(records):
            raise BadShard(f"{where} has a damaged PAX header at byte {start}; make it again")
        keyword, _, value = records[len(digits) + 1 : length - 1].partition(b"=")
        if keyword.startswith(b"GNU.sparse"):
            raise BadShard(f"{where} has a sparse file at byte {start}; pack files only")
        if keyword == b"path":
            name = _text(value)
        elif keyword == b"size" and value.isdigit() and len(value) < 20:
            size = int(value)
        records = records[length:]
    return name, size


def _until_zero(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _text(name: bytes) -> str:
    return _until_zero(name).decode("utf-8", "surrogateescape")


# --- samples


def samples(files: Iterator[Member], where: str) -> list[Entry]:
    """Groups files by key: the path up to the first dot of its last part. `dir/a.seg.png` is `seg.png` of `dir/a`."""
    entries: list[Entry] = []
    key, parts = "", dict[str, Component]()
    for name, offset, size in files:
        folder, slash, base = name.rpartition("/")
        stem, dot, extension = base.partition(".")
        if not stem or not dot or (stem.startswith("__") and stem.endswith("__")):
            continue  # hidden files, and notes that other tools leave
        if folder + slash + stem != key:
            entries += [Entry(key, tuple(parts.values()))] if parts else []
            key, parts = folder + slash + stem, {}
        extension = extension.lower()
        if extension in parts:
            raise BadShard(f"{where}: {name!r} comes twice in one sample; give every sample a key of its own")
        parts[extension] = Component(extension, offset, size)
    entries += [Entry(key, tuple(parts.values()))] if parts else []
    return entries


@final
class Entries(Sequence[Entry]):
    """The index of a shard in a few arrays: as objects, the samples of a hundred open shards would fill a gigabyte."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        parts = [part for entry in entries for part in entry.parts]
        self._extensions = sorted({part.extension for part in parts})
        code = {extension: number for number, extension in enumerate(self._extensions)}
        self._parts = np.array([(code[e], offset, size) for e, offset, size in parts], np.int64).reshape(
            -1, 3
        )
        self._first = np.cumsum([0, *(len(entry.parts) for entry in entries)])
        keys = [entry.key.encode("utf-8", "surrogateescape") for entry in entries]
        self._keys, self._key_end = b"".join(keys), np.cumsum([0, *map(len, keys)])

    def __len__(self) -> int:
        return len(self._first) - 1

    @overload
    def __getitem__(self, number: int) -> Entry: ...
    @overload
    def __getitem__(self, number: slice) -> list[Entry]: ...
    def __getitem__(self, number: int | slice) -> Entry | list[Entry]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        rows: list[list[int]] = self._parts[self._first[number] : self._first[number + 1]].tolist()
        key = self._keys[self._key_end[number] : self._key_end[number + 1]].decode("utf-8", "surrogateescape")
        return Entry(
            key, tuple(Component(self._extensions[code], offset, size) for code, offset, size in rows)
        )


@final
class Shard:
    """A tar file of samples, mapped into memory. Bytes are read when they are touched."""

    def __init__(self, path: Path, data: mmap.mmap, entries: Sequence[Entry], *, indexed: bool) -> None:
        self.path, self._data, self.entries, self._indexed = path, data, Entries(entries), indexed

    @classmethod
    def open(cls, path: Path, limits: Limits | None = None) -> Shard:
        """Maps a shard, and reads its index or walks its headers."""
        data = _map(path)
        try:
            entries = _from_index(path, len(data))
            indexed = entries is not None
            if entries is None:
                entries = samples(members(data, str(path), limits), str(path))
                _compare_with_energon(path, entries)
        except HeadwayError:
            data.close()
            raise
        return cls(path, data, entries, indexed=indexed)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, number: int) -> dict[str, memoryview]:
        """The parts of a sample by extension, as views of the mapped file."""
        view, parts = memoryview(self._data), self.entries[number].parts
        if self._indexed:  # an index may be older than its shard; the header before the bytes is not
            for part in parts:
                header = self._data[part.offset - _BLOCK : part.offset]
                if _size(header, part.offset - _BLOCK, str(self.path)) != part.size:
                    raise _stale(self.path)
        return {part.extension: view[part.offset : part.offset + part.size] for part in parts}


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            head = file.read(6)
            for magic, command in _COMPRESSED.items():
                if head.startswith(magic):
                    raise UsageError(
                        f"{path} is compressed, and has no random access: unpack it first, {command} {path}"
                    )
            if not head:
                raise BadShard(f"{path} is empty; copy it again")
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except OSError as error:
        raise UsageError(f"cannot read the shard {path}: {error.strerror}") from error


def walk(path: Path, limits: Limits | None = None) -> list[Entry]:
    """The samples of a shard, from its headers alone."""
    return samples(members(_map(path), str(path), limits), str(path))


# --- indexes of others


def count_samples(path: Path, limits: Limits | None = None) -> int:
    """How many samples a shard has: from its index if there is one, else by walking it."""
    dali, energon = path.with_suffix(".idx"), path.with_name(path.name + ".idx")
    if dali.is_file():
        with dali.open("rb") as file:
            words = file.readline(64).split()
        if len(words) == 2 and words[0].startswith(b"v1.") and words[1].isdigit():
            return int(words[1])
    if energon.is_file():
        return len(_energon_offsets(energon)) - 1
    return len(walk(path, limits))


def _from_index(path: Path, size: int) -> list[Entry] | None:
    """The entries of DALI's text index beside a shard: a line `v1.2 COUNT`, then `EXT OFFSET SIZE NAME ...` each."""
    index = path.with_suffix(".idx")
    if not index.is_file():
        return None
    head, *lines = index.read_text("utf-8", "surrogateescape").splitlines() or [""]
    version, _, count = head.partition(" ")
    width = {"v1.1": 3, "v1.2": 4}.get(version)
    if width is None:
        return None  # not DALI's; the shard itself knows
    entries = [_entry(line.split(), width, size) for line in lines]
    if None in entries or not count.isdigit() or int(count) != len(entries):
        raise BadShard(
            f"{index} does not belong to {path}; remove it, or make it again with headway data index"
        )
    return [entry for entry in entries if entry is not None]


def _stale(path: Path) -> BadShard:
    return BadShard(
        f"{path.with_suffix('.idx')} does not belong to {path}; remove it, or make it again with "
        f"hw.data.index({str(path)!r}, overwrite=True)"
    )


def _entry(words: list[str], width: int, size: int) -> Entry | None:
    parts = []
    for at in range(0, len(words), width):
        group = words[at : at + width]
        if len(group) < width or not (group[1].isdigit() and group[2].isdigit()):
            return None
        part = Component(group[0].lower(), int(group[1]), int(group[2]))
        if part.offset % _BLOCK or part.offset < _BLOCK or part.offset + part.size > size:
            return None
        parts.append(part)
    if not parts:
        return None
    name = words[3] if width == 4 else ""
    return Entry(name.removesuffix("." + words[0]), tuple(parts))


def _energon_offsets(index: Path) -> list[int]:
    """energon's binary index: where the header of each sample is, and where the last sample ends."""
    raw = index.read_bytes()
    offsets = list(struct.unpack(f"={len(raw) // 8}Q", raw[: len(raw) // 8 * 8]))
    if len(raw) % 8 or not offsets or any(low >= high for low, high in pairwise(offsets)):
        raise BadShard(f"{index} is not an index of energon's; remove it")
    return offsets


def _compare_with_energon(path: Path, entries: Sequence[Entry]) -> None:
    index = path.with_name(path.name + ".idx")
    if index.is_file() and len(_energon_offsets(index)) - 1 != len(entries):
        raise BadShard(f"{index} does not belong to {path}, which has {len(entries)} samples; remove it")


def index_text(entries: Sequence[Entry]) -> str | None:
    """DALI's text index of a shard; None where a name has a space, which that format cannot say."""
    lines = [
        " ".join(
            f"{part.extension} {part.offset} {part.size} {entry.key}.{part.extension}" for part in entry.parts
        )
        for entry in entries
    ]
    if any(len(line.split()) != 4 * len(entry.parts) for line, entry in zip(lines, entries, strict=True)):
        return None
    return "\n".join([f"v1.2 {len(entries)}", *lines, ""])
