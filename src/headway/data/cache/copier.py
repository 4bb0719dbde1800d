"""Copies files to a node: computes a digest of the bytes, compares it, and only then gives the copy its name.

`copy_bytes` copies for the node cache and for staging. `fetch` makes the copy of a shard in the node cache: claim it,
reserve space, copy, compare, publish. A failure leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.data.cache import budget as budgets
from headway.data.cache.directory import CachedCopy, CacheDirectory, CopyNote, NotCached
from headway.data.shards import checksums
from headway.data.shards.checksums import Crc32, Digest
from headway.data.shards.shard_file import ShardFile, file_version
from headway.errors import BadShard
from headway.system.failpoints import failpoint
from headway.system.limits import boot_id
from headway.system.locks import Deadline, FileLock

_PAGE_BYTES = 4096


def copy_bytes(
    source: ShardFile,
    fd: int,
    digest: Digest,
    *,
    start: int = 0,
    chunk_bytes: int = checksums.CHUNK_BYTES,
    on_chunk: Callable[[int, int], bool],
) -> int:
    """Copies a file from an offset on, and returns the offset where the copy ended.

    `on_chunk` is called with offset and size of each chunk; the copy ends if it returns False.
    """
    end = start
    while end < len(source):
        chunk, offset = source[end : end + chunk_bytes], end
        digest.update(chunk)
        end = _write(fd, chunk, offset)
        if not on_chunk(offset, len(chunk)):
            break
    return end


def _write(fd: int, data: bytes, offset: int) -> int:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
    return offset


# --- the node cache


@final
@dataclass(frozen=True, kw_only=True)
class CopyRequest:
    """The limits of a copy in the node cache, and whether it is still needed."""

    budget: str | int
    """bytes that the whole cache may take, or a share of the memory"""
    slots: int
    """shards that all processes together copy at the same time"""
    order: Mapping[str, int]
    """when shards are needed next, by key; 0 is first"""
    turn: int
    """when this shard is needed: copies that are needed before it are not removed for it"""
    deadline: Deadline
    is_cancelled: Callable[[], bool]
    """called after each chunk: whether the copy is no longer needed"""
    chunk_bytes: int = checksums.CHUNK_BYTES


def identify(source: ShardFile, min_age_s: float) -> str:
    """Returns the key of a shard's current version: a rewritten shard has another key."""
    status = source.status
    if time.time() - status.st_ctime < min_age_s:
        raise NotCached("it was written a moment ago")
    return f"{hashlib.blake2b(repr(source.version).encode(), digest_size=16).hexdigest()}-{status.st_size}"


def fetch(
    directory: CacheDirectory, key: str, source: ShardFile, request: CopyRequest
) -> tuple[CachedCopy, bool]:
    """Returns the copy of a shard, and whether this call made it; raises `NotCached` if there cannot be one."""
    while True:
        copy = directory.find(key, request.deadline)
        if copy is not None:
            return copy, False
        part = directory.claim(key)
        if part is None:
            request.deadline.pause("another process to copy it")
            continue
        with part:
            failpoint("cache.claimed")
            try:
                if directory.find(key, request.deadline) is None:  # not published since the first look
                    with directory.slot(request.slots, request.deadline):
                        _reserve(directory, part, source, request)
                        note = _copy(part, source, request)
                    directory.publish(key, part, request.deadline)
                    return CachedCopy(directory.map(part, key), note), True
            finally:
                directory.abandon(key, part)


def _reserve(directory: CacheDirectory, part: FileLock, source: ShardFile, request: CopyRequest) -> None:
    """Reserves space for the whole copy, so that writing cannot fail later and the budget is respected."""
    os.ftruncate(part.fd, 0)  # a process that was killed may have left bytes in it
    needed = -(-(len(source) + len(_note(source, Crc32()).line())) // _PAGE_BYTES) * _PAGE_BYTES
    with directory.space_lock(request.deadline):
        limit = budgets.parse_budget(request.budget, budgets.total_bytes(directory.path))
        if needed > limit:
            raise NotCached(f"it has {len(source)} bytes, and the budget is {limit}")
        missing = max(directory.used() + needed - limit, needed - budgets.spare_bytes(directory.path))
        if missing > 0 and directory.free(missing, request.order, request.turn) < missing:
            raise NotCached(f"{missing} more bytes are needed, and all copies are in use or needed sooner")
        os.posix_fallocate(part.fd, 0, needed)
    failpoint("cache.reserved")


def _copy(part: FileLock, source: ShardFile, request: CopyRequest) -> CopyNote:
    """Copies a shard, and compares it with the checksum beside it; fails if the shard changed in the meantime."""

    def on_chunk(offset: int, size: int) -> bool:
        # the page cache need not hold both the source and its copy
        os.posix_fadvise(source.fileno(), offset, size, os.POSIX_FADV_DONTNEED)
        failpoint("cache.copying")
        return not request.is_cancelled()

    crc = Crc32()
    try:
        end = copy_bytes(source, part.fd, crc, chunk_bytes=request.chunk_bytes, on_chunk=on_chunk)
    except BadShard as error:  # samples before the damage can be read at the source
        raise NotCached(str(error)) from error
    if request.is_cancelled() or end < len(source):
        raise NotCached("it is no longer needed")
    for now in (os.fstat(source.fileno()), source.path.stat()):
        if file_version(now) != source.version:
            raise NotCached("it changed while it was copied")
    _compare(source, crc)
    note = _note(source, crc)
    os.ftruncate(part.fd, _write(part.fd, note.line(), len(source)))
    failpoint("cache.copied")
    return note


def _compare(source: ShardFile, crc: Crc32) -> None:
    """Compares a copy with the checksum beside the shard. If samples have their own checksums, a damaged shard is read
    at its source, where these are compared, so that the same samples are bad with and without a cache."""
    try:
        checksums.compare(source.path, checksums.Checksum(len(source), crc.hexdigest()))
    except BadShard as error:
        stated = checksums.read(source.path)
        if stated is not None and stated.samples:
            raise NotCached(str(error)) from error
        raise


def _note(source: ShardFile, crc: Crc32) -> CopyNote:
    return CopyNote(str(Path(os.path.abspath(source.path))), crc.hexdigest(), boot_id())  # noqa: PTH100 - links stay
