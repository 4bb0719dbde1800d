"""Copies a shard into the node cache: claimed, space reserved, copied, compared, published. Trouble leaves no trace."""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.data.cache import budget as budgets
from headway.data.cache.directory import CacheFolder, Copy, Note
from headway.data.cache.leases import Deadline, Handle, NotCached
from headway.data.shards import checksums
from headway.data.shards.shard import File, version
from headway.errors import BadShard
from headway.system.failpoints import failpoint
from headway.system.limits import boot_id

_STEP = 8 * 2**20
_PAGE = 4096
_SETTLED = 2.0  # seconds: file systems count in ticks, and two versions of a file in one tick look the same


def identify(source: File) -> str:
    """Names a shard as it is now: once rewritten, it has another name in the cache."""
    status = source.status
    if time.time() - status.st_ctime < _SETTLED:
        raise NotCached("it has only just been written")
    return f"{hashlib.blake2b(repr(source.version).encode(), digest_size=16).hexdigest()}-{status.st_size}"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a copy may cost."""

    budget: str | int
    """bytes that the whole cache may take, or a part of what there is"""
    slots: int
    """shards that are copied at once, by all processes"""
    order: Mapping[str, int]
    """when shards are needed next, by key; 0 is first"""
    turn: int
    """when this one is: no copy that is needed before is removed for it"""
    deadline: Deadline
    given_up: Callable[[], bool]
    """asked while copying: whether nobody wants it any longer"""


def get(folder: CacheFolder, key: str, source: File, terms: Terms) -> tuple[Copy, bool]:
    """The copy of a shard, and whether this call made it. `NotCached` says why there is none."""
    while True:
        copy = folder.find(key, terms.deadline)
        if copy is not None:
            return copy, False
        part = folder.claim(key)
        if part is None:
            terms.deadline.pause("another process to copy it")
            continue
        with part:
            failpoint("cache.claimed")
            try:
                if folder.find(key, terms.deadline) is None:  # not published between the two looks
                    with folder.slot(terms.slots, terms.deadline):
                        _reserve(folder, part, source, terms)
                        note = _copy(part, source, terms)
                    folder.publish(key, part, terms.deadline)
                    return Copy(folder.map(part, key), note), True
            finally:
                folder.abandon(key, part)


def _reserve(folder: CacheFolder, part: Handle, source: File, terms: Terms) -> None:
    """Takes space for the whole copy at once: what is written later has its place, and the budget holds."""
    os.ftruncate(part.fd, 0)  # a fetcher that was killed may have left something in it
    need = -(-(len(source) + len(_note(source, 0).line())) // _PAGE) * _PAGE
    with folder.ledger(terms.deadline):
        limit = budgets.parse(terms.budget, budgets.whole(folder.path))
        if need > limit:
            raise NotCached(f"it has {len(source)} bytes, and the budget is {limit}")
        missing = max(folder.used() + need - limit, need - budgets.spare(folder.path))
        if missing > 0 and folder.free(missing, terms.order, terms.turn) < missing:
            raise NotCached(f"{missing} bytes more are needed, and all copies are in use or needed sooner")
        os.posix_fallocate(part.fd, 0, need)
    failpoint("cache.reserved")


def _copy(part: Handle, source: File, terms: Terms) -> Note:
    """Copies and compares: with the checksum beside the shard, and whether it stayed the same meanwhile."""
    crc = 0
    for start in range(0, len(source), _STEP):
        piece = _read(source, start)
        crc = zlib.crc32(piece, crc)
        _write(part, piece, start)
        # one copy in memory is enough: the file system need not keep another
        os.posix_fadvise(source.fileno(), start, len(piece), os.POSIX_FADV_DONTNEED)
        failpoint("cache.copying")
        if terms.given_up():
            raise NotCached("nobody wants it any longer")
    for now in (os.fstat(source.fileno()), source.path.stat()):
        if version(now) != source.version:
            raise NotCached("it was changed while it was copied")
    checksums.compare(source.path, checksums.Checksum(len(source), f"{crc:08x}"))
    note = _note(source, crc)
    _write(part, memoryview(note.line()), len(source))
    os.ftruncate(part.fd, len(source) + len(note.line()))
    failpoint("cache.copied")
    return note


def _read(source: File, start: int) -> memoryview:
    try:
        return memoryview(source[start : start + _STEP])
    except BadShard as error:  # samples that are still there can be read at the source
        raise NotCached(str(error)) from error


def _note(source: File, crc: int) -> Note:
    return Note(str(Path(os.path.abspath(source.path))), f"{crc:08x}", boot_id())  # noqa: PTH100 - links stay


def _write(part: Handle, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(part.fd, data, at)
        data, at = data[written:], at + written
