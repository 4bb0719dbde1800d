"""Tar shards in the WebDataset layout: consecutive files with the same key are one sample.

    shard = Shard.open(Path("shard-000000.tar"))
    shard[7]["jpg"]                     # the bytes of one part of the eighth sample

Nothing is ever extracted. An index is optional: headers are walked at some hundred thousand a second. If there is one
(DALI's text format, which `pack` writes, or energon's), it is used and checked against the shard: its end when the
shard is opened, and the names and sizes in each line when that sample is read.

Another program may truncate a shard while it is in use; if it were mapped, that would kill this process with SIGBUS. So
shards are read with `pread`, and missing bytes raise `BadShard`. Only copies in the node cache, which belong to us, are
mapped, and their bytes are not copied again.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final
from zlib import crc32

from headway.data.shards import checksums
from headway.data.shards.entries import (
    EntryTable,
    SampleEntry,
    SamplePart,
    ShardEntries,
    group_samples,
    iterate_samples,
)
from headway.data.shards.indexes import (
    compare_count,
    indexed_count,
    read_dali,
    stale_index,
)
from headway.data.shards.shard_file import ShardFile, Version, open_file
from headway.data.shards.tar import (
    BLOCK_BYTES,
    NAME_BYTES,
    OCTAL_LIMIT_BYTES,
    ShardLimits,
    header_size,
    members,
    possible_names,
)
from headway.errors import BadSample, BadShard


@final
@dataclass(frozen=True)
class ShardIndex:
    """Where the samples of a shard are. Keeping it is much cheaper than reading it again or keeping the shard open."""

    entries: ShardEntries
    version: Version
    """version of the shard that it describes"""
    stated: bool
    """whether it comes from a file beside the shard, not from the headers"""
    sums: array[int] | None = None
    """the CRC32 of each sample, if the checksum file has them"""
    faults: dict[int, str] = field(default_factory=dict)
    """why the line of a sample does not match the shard, by sample; filled only if all lines were compared"""

    @classmethod
    def read(
        cls, path: Path, data: ShardFile | mmap.mmap, version: Version, limits: ShardLimits
    ) -> ShardIndex:
        """Reads the index from the file beside a shard, or from its headers."""
        sums = _stated_sums(path, data)
        entries, stated = _read_entries(path, data, limits)
        if sums is not None and len(sums) != len(entries):
            raise checksums.mismatch(path, f"has {len(entries)} samples", f"{len(sums)}")
        return cls(entries, version, stated, sums)


def _read_entries(path: Path, data: ShardFile | mmap.mmap, limits: ShardLimits) -> tuple[ShardEntries, bool]:
    """Returns the samples of a shard, and whether they come from a file beside it."""
    stated = read_dali(path, len(data), limits)
    if stated is not None:
        _check_last(path, data, stated, limits)
        return stated, True
    walked = group_samples(members(data, str(path), limits), str(path))
    compare_count(path, walked, limits)
    return walked, False


def _check_last(path: Path, data: ShardFile | mmap.mmap, stated: ShardEntries, limits: ShardLimits) -> None:
    """Refuses an index if samples were appended to the shard after it was written."""
    last = stated.parts(len(stated) - 1) if len(stated) else []
    end = max([part.offset + part.size for part in last], default=0)
    end = -(-end // BLOCK_BYTES) * BLOCK_BYTES
    try:
        _ = data[end : end + BLOCK_BYTES]
    except BadShard:
        return  # truncated since it was opened: samples that are still there can be read
    rest = members(data, str(path), limits, offset=end)
    try:
        if not any(True for _ in iterate_samples(rest, str(path))):
            return
    except BadShard as error:
        raise stale_index(path) from error
    raise stale_index(path)


def _stated_sums(path: Path, data: ShardFile | mmap.mmap) -> array[int] | None:
    """Returns the checksum of each sample. If there is only one for the whole shard, the shard is compared with it now;
    a copy in the node cache was compared when it was made."""
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
            if not isinstance(index.entries, EntryTable):
                self.index = self._compare_all()
            table = self.entries = self.index.entries
            assert isinstance(table, EntryTable)
            self._mapped = table, memoryview(data)

    @classmethod
    def open(
        cls,
        path: str | Path,
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
        path = Path(path)
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
        if number in self.index.faults:
            raise BadShard(self.index.faults[number])
        if self._mapped is not None:
            return self._cut(number, *self._mapped)
        key, names, spans, contiguous = self.entries.locate(number)
        if not contiguous:
            return key, self._read_scattered(number, key, names, spans)
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
            self._check_headers(key, names, spans, data or bytes(view), start)
            self._check_sum(number, crc)
        return key, found

    def _cut(self, number: int, table: EntryTable, view: memoryview) -> tuple[str, dict[str, memoryview]]:
        """Slices a sample out of a mapped copy. Its bytes match the shard, but the index may be another shard's."""
        found, key, sums = table.cut(number, view), table.key(number), self._sums
        if sums is not None and checksums.sum_sample(found.values()) != sums[number]:
            parts = sorted(table.parts(number), key=lambda part: part.offset)
            crc = checksums.sum_sample(found[part.extension] for part in parts)
            if crc != sums[number]:
                self._check_parts(key, parts)
            self._check_sum(number, crc)
        return key, found

    def _read_scattered(
        self, number: int, key: str, names: Sequence[str], spans: Sequence[int]
    ) -> dict[str, memoryview]:
        """Reads parts one by one, because an index may list them in any order; the CRC32 is of the parts by offset."""
        assert isinstance(self._data, ShardFile)
        parts = [*map(SamplePart, names, spans[::2], spans[1::2])]
        found = {
            part.extension: memoryview(self._data.read(part.offset, part.offset + part.size))
            for part in parts
        }
        in_shard = sorted(parts, key=lambda part: part.offset)
        crc = checksums.sum_sample(found[part.extension] for part in in_shard)
        if self._sums is None or crc != self._sums[number]:
            self._check_parts(key, parts)
            self._check_sum(number, crc)
        return found

    def _check_sum(self, number: int, crc: int) -> None:
        if self._sums is not None and crc != self._sums[number]:
            raise BadSample(
                f"its bytes do not match {checksums.checksum_path(self.path).name}: they are damaged, or the shard was "
                "replaced; copy both again"
            )

    def _check_parts(self, key: str, parts: Sequence[SamplePart]) -> None:
        """Validates the headers of parts, which are read one by one."""
        for name, offset, size in parts:
            start = offset - BLOCK_BYTES
            self._check_headers(key, (name,), (offset, size), self._data[start:offset], start)

    def _check_headers(
        self, key: str, names: Sequence[str], spans: Sequence[int], data: bytes, start: int
    ) -> None:
        """Validates the headers of parts in the bytes from `start` on, as the shard or its index may have changed.

        Not needed for a sample that matches its checksum, which proves more.
        """
        for name, offset, size in zip(names, spans[::2], spans[1::2], strict=True):
            at = offset - start
            # nearly always equal; the full check takes ten times as long
            if not (data.startswith(b"ustar", at - 255) and data.startswith(b"%011o" % size, at - 388)):
                self._check(offset, size, data[at - BLOCK_BYTES : at])
            if self.index.stated:
                stated = f"{key}.{name}\0".encode("utf-8", "surrogateescape")
                if not data.startswith(stated, at - BLOCK_BYTES):
                    self._check_name(stated, f"{key}.", name, offset)

    def _check_name(self, stated: bytes, stem: str, extension: str, offset: int) -> None:
        """Refuses a part whose name in the header differs from the index, which then belongs to another shard."""
        if len(stated) > NAME_BYTES or not stated.isascii() or b"\\" in stated:
            return  # long names have a header of their own, and `wds2idx` escapes non-ASCII characters
        blocks = self._data[max(offset - 3 * BLOCK_BYTES, 0) : offset]
        for found in possible_names(blocks):
            if found.startswith(stem) and found[len(stem) :].lower() == extension:
                return
        raise stale_index(self.path)

    def _compare_all(self) -> ShardIndex:
        """Compares all lines of an index with a mapped shard; for a file, this happens when a sample is read."""
        faults: dict[int, str] = {}

        def compared(number: int) -> SampleEntry:
            key, parts = self.entries.key(number), list[SamplePart]()
            try:
                parts = self.entries.parts(number)
                if self._sums is None:
                    self._check_parts(key, parts)
            except BadShard as error:
                faults[number] = str(error)
            return SampleEntry(key, tuple(parts))

        table = EntryTable(map(compared, range(len(self.entries))))
        return replace(self.index, entries=table, faults=faults)

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


def count_samples(path: Path, limits: ShardLimits | None = None, *, compare: bool = False) -> int:
    """Counts the samples of a shard: from its index if there is one, else by walking its headers.

    With `compare`, an index that does not match its shard is refused, as it is when the shard is opened.
    """
    if compare:
        return len(_read_entries(path, open_file(path), limits or ShardLimits())[0])
    count = indexed_count(path, limits or ShardLimits())
    return len(walk(path, limits)) if count is None else count
