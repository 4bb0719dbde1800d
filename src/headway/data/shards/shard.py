"""Tar shards in the WebDataset layout: consecutive files with the same key are one sample.

    shard = Shard.open(Path("shard-000000.tar"))
    shard[7]["jpg"]                     # the bytes of one part of the eighth sample

Nothing is ever extracted. An index is not needed: headers are walked at some hundred thousand a second. If there is one
(DALI's text format, which `pack` writes, or energon's), it is used and checked against the shard: as a whole when the
shard is opened, and each of its lines when the sample is read.

Another program may truncate a shard while it is in use; if it were mapped, that would kill this process with SIGBUS. So
shards are read with `pread`, and bytes that are no longer there raise `BadShard`. Only the copies in the node cache,
which are ours, are mapped, and their bytes are not copied again.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final
from zlib import crc32

from headway.data.shards import checksums
from headway.data.shards.entries import EntryTable, ShardEntries, group_samples
from headway.data.shards.indexes import (
    compare_count,
    indexed_count,
    read_dali,
    stale_index,
)
from headway.data.shards.shard_file import ShardFile, Version, open_file
from headway.data.shards.tar import BLOCK_BYTES, OCTAL_LIMIT_BYTES, ShardLimits, header_size, members
from headway.errors import BadSample, BadShard


@final
@dataclass(frozen=True)
class ShardIndex:
    """Where the samples of a shard are. Much cheaper to keep than an open shard, or than to read it again."""

    entries: ShardEntries
    version: Version
    """of the shard that it describes"""
    stated: bool
    """whether it comes from a file beside the shard, and not from the headers"""
    sums: array[int] | None = None
    """the CRC32 of each sample, where the file of checksums states them"""

    @classmethod
    def read(
        cls, path: Path, data: ShardFile | mmap.mmap, version: Version, limits: ShardLimits
    ) -> ShardIndex:
        """Reads the index from the file beside a shard, or from its headers."""
        sums = _stated_sums(path, data)
        entries = read_dali(path, len(data), limits)
        stated = entries is not None
        if entries is None:
            entries = group_samples(members(data, str(path), limits), str(path))
            compare_count(path, entries, limits)
        if sums is not None and len(sums) != len(entries):
            raise checksums.mismatch(path, f"has {len(entries)} samples", f"{len(sums)}")
        return cls(entries, version, stated, sums)


def _stated_sums(path: Path, data: ShardFile | mmap.mmap) -> array[int] | None:
    """Returns the checksum of each sample. Where there is only one of the whole shard, all of it is compared now; a
    copy in the node cache was compared when it was made."""
    stated = checksums.read(path)
    if stated is None:
        return None
    if stated.bytes != len(data):
        raise checksums.mismatch(path, f"has {len(data)} bytes", f"{stated.bytes}")
    if not stated.samples and isinstance(data, ShardFile):
        checksums.compare(path, checksums.sum_file(data))
    return stated.sample_sums() if stated.samples else None


@final
class Shard:
    """A tar file of samples. Bytes are read when a sample is accessed.

    shard = hw.data.Shard.open(Path("shards/shard-000000.tar"))
    print(len(shard))
    """

    def __init__(self, path: Path, data: ShardFile | mmap.mmap, index: ShardIndex) -> None:
        self.path, self._data, self.index, self.entries = path, data, index, index.entries
        self._sums = index.sums
        self._mapped: tuple[EntryTable, memoryview] | None = None
        if isinstance(data, mmap.mmap):
            table = self.entries if isinstance(self.entries, EntryTable) else self._table(data)
            self.entries, self._mapped = table, (table, memoryview(data))
            self.index = replace(index, entries=table)

    @classmethod
    def open(
        cls,
        path: Path,
        limits: ShardLimits | None = None,
        *,
        source: ShardFile | None = None,
        copy: mmap.mmap | None = None,
        index: ShardIndex | None = None,
    ) -> Shard:
        """Opens a shard.

        `source` is its file, if it is open already; `copy` its bytes, if they are in the node cache; `index` an earlier
        index, which is used if the shard has not changed.
        """
        source = open_file(path) if source is None else source
        data = source if copy is None else copy
        if index is None or index.version != source.version:
            index = ShardIndex.read(path, data, source.version, limits or ShardLimits())
        return cls(path, data, index)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, number: int) -> dict[str, memoryview]:
        """Returns the parts of a sample by extension."""
        return self.read(number)[1]

    def read(
        self, number: int, allocate: Callable[[int], memoryview] | None = None
    ) -> tuple[str, dict[str, memoryview]]:
        """Returns the key of a sample, and its parts by extension, in memory from `allocate` if that is given."""
        if self._mapped is not None:
            table, view = self._mapped
            return table.key(number), table.cut(number, view)
        key, names, spans, contiguous = self.entries.locate(number)
        if not contiguous:
            return key, self._read_scattered(number, names, spans)
        found: dict[str, memoryview] = {}
        start, sums, crc = spans[0] - BLOCK_BYTES, self._sums, 0
        assert isinstance(self._data, ShardFile)
        data = b""
        if allocate is None:
            data = self._data.read(start, spans[-2] + spans[-1])
            view = memoryview(data)
        else:
            view = allocate(spans[-2] + spans[-1] - start)
            self._data.read_into(start, view)
        for name, offset, size in zip(names, spans[::2], spans[1::2], strict=True):
            offset -= start
            part = found[name] = view[offset : offset + size]
            if sums is not None:
                crc = crc32(part, crc)
        if sums is None or crc != sums[number]:
            self._check_headers(spans, data or bytes(view), start)
            self._check_sum(number, crc)
        return key, found

    def _read_scattered(
        self, number: int, names: Sequence[str], spans: Sequence[int]
    ) -> dict[str, memoryview]:
        """Reads parts one by one: an index may name them in any order. Their CRC32 goes by their offsets."""
        assert isinstance(self._data, ShardFile)
        found: dict[str, memoryview] = {}
        for name, offset, size in zip(names, spans[::2], spans[1::2], strict=True):
            data = self._data.read(offset - BLOCK_BYTES, offset + size)
            self._check_headers((offset, size), data, offset - BLOCK_BYTES)
            found[name] = memoryview(data)[BLOCK_BYTES:]
        in_shard = sorted(zip(spans[::2], names, strict=True))
        self._check_sum(number, checksums.sum_sample([found[name] for _, name in in_shard]))
        return found

    def _check_sum(self, number: int, crc: int) -> None:
        if self._sums is not None and crc != self._sums[number]:
            raise BadSample(
                f"its bytes do not match {checksums.checksum_path(self.path).name}: they are damaged, or the shard was "
                "replaced; copy both again"
            )

    def _check_headers(self, spans: Sequence[int], data: bytes, start: int) -> None:
        """Validates the headers of parts in the bytes from `start` on, as the shard or its index may have changed.

        Where the bytes of a sample have the checksum that was written with them, that says more.
        """
        for offset, size in zip(spans[::2], spans[1::2], strict=True):
            at = offset - start
            # nearly always equal; the full check takes ten times as long
            if not (data.startswith(b"ustar", at - 255) and data.startswith(b"%011o" % size, at - 388)):
                self._check(offset, size, data[at - BLOCK_BYTES : at])

    def _table(self, data: mmap.mmap) -> EntryTable:
        """Validates all headers of a mapped shard now; those of a file are validated when a sample is read."""
        table = EntryTable(self.entries)
        for part in (part for number in range(len(table)) for part in table.parts(number)):
            self._check_headers(
                part[1:], data[part.offset - BLOCK_BYTES : part.offset], part.offset - BLOCK_BYTES
            )
        return table

    def _check(self, offset: int, size: int, header: bytes) -> None:
        try:
            stated = header_size(header, offset - BLOCK_BYTES, str(self.path))
        except BadShard as error:
            if self.index.stated:
                raise stale_index(self.path) from error
            raise
        if stated != size and size < OCTAL_LIMIT_BYTES:
            raise (
                stale_index(self.path)
                if self.index.stated
                else BadShard(f"{self.path} was rewritten while in use; give a changed shard another name")
            )


def walk(path: Path, limits: ShardLimits | None = None) -> ShardEntries:
    """Returns the samples of a shard, from its headers alone."""
    return group_samples(members(open_file(path), str(path), limits), str(path))


def count_samples(path: Path, limits: ShardLimits | None = None) -> int:
    """Counts the samples of a shard: from its index if there is one, else by walking its headers."""
    count = indexed_count(path, limits or ShardLimits())
    return len(walk(path, limits)) if count is None else count
