"""Tar shards in the WebDataset layout: files of one key, one after the other, are one sample.

    shard = Shard.open(Path("shard-000000.tar"))
    shard[7]["jpg"]                     # the bytes of one file of the eighth sample

Nothing is ever extracted. An index is not needed: headers are walked at some hundred thousand a second. Where there is
one (DALI's text format, which `pack` writes, or energon's), it is used, and checked against the shard: as a whole when
the shard is opened, each of its lines when the sample is read.

A shard belongs to somebody else, who may shorten it while it is in use; of a mapped file, that would kill this process
with SIGBUS. So shards are read piece by piece, and what is no longer there is a `BadShard`. Only copies of our own, in
the node cache, are mapped, and their bytes are not copied again.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from headway.data.shards.entries import Component, Entries, Entry, Table, samples
from headway.data.shards.indexes import compare_with_energon, index_text, read_dali, stale, stated_count
from headway.data.shards.tar import BEYOND_OCTAL, BLOCK, Limits, members, size_in
from headway.errors import BadShard, UsageError

__all__ = [
    "Component",
    "Entries",
    "Entry",
    "File",
    "Index",
    "Limits",
    "Shard",
    "count_samples",
    "index_text",
    "members",
    "open_file",
    "samples",
    "version",
    "walk",
]

_COMPRESSED = {
    b"\x1f\x8b": "gzip -d",
    b"\x28\xb5\x2f\xfd": "zstd -d",
    b"BZh": "bzip2 -d",
    b"\xfd7zXZ": "xz -d",
}
Version = tuple[int, ...]
_BETWEEN = 4 * BLOCK  # bytes before a file of a sample: the rest of a block, a header, a long name


@final
class File:
    """A file of somebody else's, read piece by piece: `file[512:1024]` are bytes, or a `BadShard`."""

    def __init__(self, path: Path) -> None:
        self.path, self._fd = path, -1
        try:  # a pipe in the place of a shard would make us wait for its writer
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self.status = os.fstat(self._fd)
        except OSError as error:
            raise UsageError(f"cannot read the shard {path}: {error.strerror}") from error
        if not stat.S_ISREG(self.status.st_mode):
            raise BadShard(f"{path} is not a file; give tar files only")

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def __len__(self) -> int:
        return self.status.st_size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        return self.read(start, stop)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`, which must be within the file as it was opened."""
        try:
            data = os.pread(self._fd, stop - start, start)
            while len(data) < stop - start:  # a signal came between, or it is larger than one read may be
                more = os.pread(self._fd, stop - start - len(data), start + len(data))
                if not more:
                    raise BadShard(
                        f"{self.path} had {len(self)} bytes when it was opened, and now ends at byte "
                        f"{start + len(data)}: it was cut off or rewritten in use; copy it again"
                    )
                data += more
        except OSError as error:
            raise BadShard(f"cannot read {self.path} at byte {start}: {error.strerror}") from error
        return data

    def fileno(self) -> int:
        return self._fd

    @property
    def version(self) -> Version:
        return version(self.status)


def version(status: os.stat_result) -> Version:
    """Changes when a file is written, or another one takes its place."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@final
@dataclass(frozen=True)
class Index:
    """Where the samples of a shard are. To keep it is much cheaper than to keep the shard open, or to read it again."""

    entries: Entries
    version: Version
    """of the shard that it is about"""
    stated: bool
    """by a file beside the shard, and not by its headers"""

    @classmethod
    def read(cls, path: Path, data: File | mmap.mmap, version: Version, limits: Limits) -> Index:
        """From the file beside a shard, or from its headers."""
        entries = read_dali(path, len(data), limits)
        if entries is not None:
            return cls(entries, version, stated=True)
        walked = samples(members(data, str(path), limits), str(path))
        compare_with_energon(path, walked, limits)
        return cls(walked, version, stated=False)


@final
class Shard:
    """A tar file of samples. Bytes are read when they are asked for."""

    def __init__(self, path: Path, data: File | mmap.mmap, index: Index) -> None:
        self.path, self._data, self.index, self.entries = path, data, index, index.entries
        self._mapped: tuple[Table, memoryview] | None = None
        if isinstance(data, mmap.mmap):
            table = self.entries if isinstance(self.entries, Table) else self._table(data)
            self.entries, self._mapped = table, (table, memoryview(data))
            self.index = replace(index, entries=table)

    @classmethod
    def open(
        cls,
        path: Path,
        limits: Limits | None = None,
        *,
        source: File | None = None,
        copy: mmap.mmap | None = None,
        index: Index | None = None,
    ) -> Shard:
        """Opens a shard.

        `source` is its file, if that is open; `copy` its bytes, if they are in the node cache; `index` that of the last
        time, which is used if the shard is still the same.
        """
        source = open_file(path) if source is None else source
        data = source if copy is None else copy
        if index is None or index.version != source.version:
            index = Index.read(path, data, source.version, limits or Limits())
        return cls(path, data, index)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, number: int) -> dict[str, memoryview]:
        """The parts of a sample by extension."""
        if self._mapped is not None:
            table, view = self._mapped
            return table.cut(number, view)
        parts = self.entries.parts(number)
        if _are_together(parts):
            return self._read(parts)
        return {part.extension: self._read([part])[part.extension] for part in parts}

    def _read(self, parts: list[Component]) -> dict[str, memoryview]:
        """Files that lie together, in one piece; after a look at their headers: the shard, or its index, may be of
        another day. Written to be fast, as it runs for each sample."""
        assert isinstance(self._data, File)
        start, found = parts[0].offset - BLOCK, dict[str, memoryview]()
        data = self._data.read(start, parts[-1].offset + parts[-1].size)
        view = memoryview(data)
        for part in parts:
            extension, offset, size = part
            at = offset - start
            # nearly always so; to be sure takes ten times as long
            if data[at - 255 : at - 250] != b"ustar" or data[at - 388 : at - 377] != b"%011o" % size:
                self._check(part, data[at - BLOCK : at])
            found[extension] = view[at : at + size]
        return found

    def _table(self, data: mmap.mmap) -> Table:
        """Of a mapped shard, all headers are looked at now; of a file, those of a sample when it is read."""
        table = Table(self.entries)
        for part in (part for number in range(len(table)) for part in table.parts(number)):
            self._check(part, data[part.offset - BLOCK : part.offset])
        return table

    def _check(self, part: Component, header: bytes) -> None:
        if header[257:262] == b"ustar" and header[124:135] == b"%011o" % part.size:
            return
        try:
            stated = size_in(header, part.offset - BLOCK, str(self.path))
        except BadShard as error:
            if self.index.stated:
                raise stale(self.path) from error
            raise
        if stated != part.size and part.size < BEYOND_OCTAL:
            raise (
                stale(self.path)
                if self.index.stated
                else BadShard(
                    f"{self.path} was rewritten while it was in use; give a changed shard a name of its own"
                )
            )


def _are_together(parts: list[Component]) -> bool:
    """Whether files follow each other, so that one read gets them all; an index can say anything."""
    end = parts[0].offset
    for _, offset, size in parts:
        if not 0 <= offset - end <= _BETWEEN:
            return False
        end = offset + size
    return True


def open_file(path: Path) -> File:
    """Opens a file that may be a shard; what cannot be one is refused."""
    file = File(path)
    head = file[:6]
    for magic, command in _COMPRESSED.items():
        if head.startswith(magic):
            raise UsageError(
                f"{path} is compressed, and has no random access: unpack it first, {command} {path}"
            )
    if not head:
        raise BadShard(f"{path} is empty; copy it again")
    return file


def walk(path: Path, limits: Limits | None = None) -> Entries:
    """The samples of a shard, from its headers alone."""
    return samples(members(open_file(path), str(path), limits), str(path))


def count_samples(path: Path, limits: Limits | None = None) -> int:
    """How many samples a shard has: from its index if there is one, else by walking it."""
    count = stated_count(path, limits or Limits())
    return len(walk(path, limits)) if count is None else count
