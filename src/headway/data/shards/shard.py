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

import errno
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from headway.data.shards.entries import EntryTable, SamplePart, ShardEntries, group_samples
from headway.data.shards.indexes import (
    compare_with_energon,
    indexed_count,
    read_dali,
    stale_index,
)
from headway.data.shards.retries import retry
from headway.data.shards.tar import BLOCK_BYTES, OCTAL_LIMIT_BYTES, ShardLimits, header_size, members
from headway.errors import BadShard, StorageError, UsageError

_COMPRESSED = {
    b"\x1f\x8b": "gzip -d",
    b"\x28\xb5\x2f\xfd": "zstd -d",
    b"BZh": "bzip2 -d",
    b"\xfd7zXZ": "xz -d",
}
Version = tuple[int, ...]
_MAX_GAP_BYTES = 4 * BLOCK_BYTES  # between two parts of a sample: the rest of a block, a header, a long name


@final
class ShardFile:
    """A file that others may change, read in pieces: `file[512:1024]` returns bytes or raises `BadShard`.

    Reads that fail are tried again; if that does not help, they raise `StorageError`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._fd = path, -1
        try:
            self._fd, self.status = retry(f"open the shard {path}", lambda: _open(path))
        except OSError as error:
            raise UsageError(f"cannot read the shard {path}: {error.strerror}") from error
        if not stat.S_ISREG(self.status.st_mode):
            raise BadShard(f"{path} is not a regular file; give tar files only")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit, os may be gone
        if self._fd >= 0:
            close(self._fd)

    def __len__(self) -> int:
        return self.status.st_size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        return self.read(start, stop)

    def read(self, start: int, stop: int) -> bytes:
        """Reads the bytes from `start` to `stop`, which must lie within the file as it was opened."""
        try:
            return self._read(start, stop)
        except OSError as error:
            return self._read_again(start, stop, error)

    def _read_again(self, start: int, stop: int, failed: OSError) -> bytes:
        doing = f"read {self.path} at byte {start}"
        try:
            return retry(doing, lambda: self._read(start, stop), failed)
        except OSError as error:
            raise StorageError(f"could not {doing}: {error.strerror}; check that file system") from error

    def _read(self, start: int, stop: int) -> bytes:
        try:
            data = os.pread(self._fd, stop - start, start)
            while len(data) < stop - start:  # interrupted by a signal, or larger than one read may be
                more = os.pread(self._fd, stop - start - len(data), start + len(data))
                if not more:
                    raise BadShard(
                        f"{self.path} had {len(self)} bytes when it was opened, and now ends at byte "
                        f"{start + len(data)}: it was truncated or rewritten while in use; copy it again"
                    )
                data += more
        except OSError as error:
            if error.errno == errno.ESTALE:
                self._open_again()  # before the next try
            raise
        return data

    def _open_again(self) -> None:
        """Replaces a file handle that its server no longer knows by one of the same file, for all threads."""
        fd, status = _open(self.path)
        try:
            if (
                file_version(status)[1:] != self.version[1:]
            ):  # all but the device, which a new mount may change
                raise BadShard(f"{self.path} was replaced while in use; give a changed shard another name")
            os.dup2(fd, self._fd, inheritable=False)
        finally:
            os.close(fd)

    def fileno(self) -> int:
        return self._fd

    @property
    def version(self) -> Version:
        return file_version(self.status)


def _open(path: Path) -> tuple[int, os.stat_result]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    try:
        return fd, os.fstat(fd)
    except OSError:
        os.close(fd)
        raise


def file_version(status: os.stat_result) -> Version:
    """Returns a value that changes when a file is written or replaced."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@final
@dataclass(frozen=True)
class ShardIndex:
    """Where the samples of a shard are. Much cheaper to keep than an open shard, or than to read it again."""

    entries: ShardEntries
    version: Version
    """of the shard that it describes"""
    stated: bool
    """whether it comes from a file beside the shard, and not from the headers"""

    @classmethod
    def read(
        cls, path: Path, data: ShardFile | mmap.mmap, version: Version, limits: ShardLimits
    ) -> ShardIndex:
        """Reads the index from the file beside a shard, or from its headers."""
        entries = read_dali(path, len(data), limits)
        if entries is not None:
            return cls(entries, version, stated=True)
        walked = group_samples(members(data, str(path), limits), str(path))
        compare_with_energon(path, walked, limits)
        return cls(walked, version, stated=False)


@final
class Shard:
    """A tar file of samples. Bytes are read when a sample is accessed."""

    def __init__(self, path: Path, data: ShardFile | mmap.mmap, index: ShardIndex) -> None:
        self.path, self._data, self.index, self.entries = path, data, index, index.entries
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
        if self._mapped is not None:
            table, view = self._mapped
            return table.cut(number, view)
        parts = self.entries.parts(number)
        if _are_contiguous(parts):
            return self._read(parts)
        return {part.extension: self._read([part])[part.extension] for part in parts}

    def _read(self, parts: list[SamplePart]) -> dict[str, memoryview]:
        """Reads contiguous parts at once, and validates their headers, as the shard or its index may have changed.
        Optimized, because it runs for each sample."""
        assert isinstance(self._data, ShardFile)
        start, found = parts[0].offset - BLOCK_BYTES, dict[str, memoryview]()
        data = self._data.read(start, parts[-1].offset + parts[-1].size)
        view = memoryview(data)
        for part in parts:
            extension, offset, size = part
            at = offset - start
            # nearly always equal; the full check takes ten times as long
            if data[at - 255 : at - 250] != b"ustar" or data[at - 388 : at - 377] != b"%011o" % size:
                self._check(part, data[at - BLOCK_BYTES : at])
            found[extension] = view[at : at + size]
        return found

    def _table(self, data: mmap.mmap) -> EntryTable:
        """Validates all headers of a mapped shard now; those of a file are validated when a sample is read."""
        table = EntryTable(self.entries)
        for part in (part for number in range(len(table)) for part in table.parts(number)):
            self._check(part, data[part.offset - BLOCK_BYTES : part.offset])
        return table

    def _check(self, part: SamplePart, header: bytes) -> None:
        if header[257:262] == b"ustar" and header[124:135] == b"%011o" % part.size:
            return
        try:
            stated = header_size(header, part.offset - BLOCK_BYTES, str(self.path))
        except BadShard as error:
            if self.index.stated:
                raise stale_index(self.path) from error
            raise
        if stated != part.size and part.size < OCTAL_LIMIT_BYTES:
            raise (
                stale_index(self.path)
                if self.index.stated
                else BadShard(f"{self.path} was rewritten while in use; give a changed shard another name")
            )


def _are_contiguous(parts: list[SamplePart]) -> bool:
    """Whether one read can get all parts; checked, because an index may state anything."""
    end = parts[0].offset
    for _, offset, size in parts:
        if not 0 <= offset - end <= _MAX_GAP_BYTES:
            return False
        end = offset + size
    return True


def open_file(path: Path) -> ShardFile:
    """Opens a shard; refuses compressed and empty files."""
    file = ShardFile(path)
    head = file[:6]
    for magic, command in _COMPRESSED.items():
        if head.startswith(magic):
            raise UsageError(f"{path} is compressed, and does not allow random access: run {command} {path}")
    if not head:
        raise BadShard(f"{path} is empty; copy it again")
    return file


def walk(path: Path, limits: ShardLimits | None = None) -> ShardEntries:
    """Returns the samples of a shard, from its headers alone."""
    return group_samples(members(open_file(path), str(path), limits), str(path))


def count_samples(path: Path, limits: ShardLimits | None = None) -> int:
    """Counts the samples of a shard: from its index if there is one, else by walking its headers."""
    count = indexed_count(path, limits or ShardLimits())
    return len(walk(path, limits)) if count is None else count
