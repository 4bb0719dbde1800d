"""The directory of a node cache: one per user and node, shared by all processes of that user that read shards.

    headway-cache-1000/  mode 0700, owned by the user, not a link; all names are opened relative to it
      live               locked (shared) by every process that uses the cache: the last one removes everything
      ledger             locked (exclusive) while space is taken or freed
      slot-0 ...         locked (exclusive) while a shard is copied: limits how many are copied at once
      KEY.part           a shard that is being copied; the process that copies holds a lock (exclusive)
      KEY.shard          a complete copy, and a line about it; each process that maps it holds a lock (shared)

There is no coordinating process, and a crash leaves nothing to repair: every claim is an `flock` on an open file. If a
`.part` is not locked, its process has ended, and the next process that needs the shard takes it over. The space in use
is computed from the files in the directory.

A lock belongs to an open file, not to a name, and the file may lose its name before the lock is acquired, because it is
evicted or published. So after every lock the name is looked up again. A reader's lock belongs to its mapping, and ends
when the last view of the bytes is gone.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, final

from headway.data.cache.budget import is_local
from headway.system.failpoints import failpoint
from headway.system.limits import boot_id
from headway.system.locks import Deadline, FileLock

_LIVE, _SPACE_LOCK = "live", "ledger"  # file names, the same as in caches of older versions
_COPIES = re.compile(r"[0-9a-f]{32}-\d+\.(shard|part)")
_ALL = re.compile(rf"{_COPIES.pattern}|slot-\d+|{_SPACE_LOCK}|{_LIVE}")
_MAX_NOTE_BYTES = 65536
_CLEARING = "the last process to remove the cache"


class NotCached(Exception):
    """Raised when a shard must be read at its source, with the reason. It never leaves the cache."""


class CopyNote(NamedTuple):
    """The line that follows the bytes of a copy."""

    source: str
    crc32: str
    boot: str
    """the boot id: bytes that were never synced may be lost when the machine goes down"""

    def line(self) -> bytes:
        """Encodes the note."""
        return json.dumps(self._asdict()).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> CopyNote | None:
        """Decodes a note; None if the copy is incomplete."""
        try:
            match json.loads(line):
                case {"source": str(source), "crc32": str(crc), "boot": str(boot)}:
                    return cls(source, crc, boot)
        except (ValueError, RecursionError):
            pass
        return None


class CachedCopy(NamedTuple):
    """A complete copy of a shard. It is not removed while it is mapped."""

    data: mmap.mmap
    note: CopyNote


class CacheEntry(NamedTuple):
    """One file of the cache, as `NodeCache.ls` lists it."""

    key: str
    source: str | None
    """None: not complete yet"""
    bytes: int
    in_use: bool


@final
class CacheDirectory:
    """The cache directory as one process uses it, from `join` to `leave`."""

    def __init__(self, path: Path) -> None:
        self.path, self._process = path, os.getpid()
        self._directory, self._live = FileLock(_open_directory(path)), FileLock(-1)

    @staticmethod
    def under(parent: Path) -> Path:
        """Returns the path of this user's cache."""
        return parent / f"headway-cache-{os.geteuid()}"

    @classmethod
    def join(cls, parent: Path, deadline: Deadline) -> CacheDirectory:
        """Opens or creates this user's directory under `parent`; raises `NotCached` if it is not safe to use."""
        while True:
            directory = cls(cls.under(parent))
            with suppress(FileNotFoundError):  # another process is removing it
                directory._live = directory._open(_LIVE, os.O_RDWR | os.O_CREAT)
                directory._live.acquire(deadline, _CLEARING, shared=True)
                if directory._has_name(directory._live, _LIVE):
                    return directory
            directory.close()
            deadline.pause(_CLEARING)

    def leave(self) -> bool:
        """Ends this process's use. The last process removes everything, including leftovers of killed ones; only its
        call returns True."""
        if self._live.fd < 0 or os.getpid() != self._process:
            return False
        last = self._live.try_acquire()
        if last and not self.is_gone():
            # the live file last, because processes that join wait for it
            for name in sorted(self._names(_ALL), key=_LIVE.__eq__):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._directory.fd)
            with suppress(OSError):  # it contains files that are not the cache's
                self.path.rmdir()
        self.close()
        return last

    def is_gone(self) -> bool:
        """Whether the directory was removed: mapped copies stay valid, but no new ones can be made."""
        return os.fstat(self._directory.fd).st_nlink == 0

    def close(self) -> None:
        """Ends this process's use, and leaves all files."""
        self._live.close()
        self._directory.close()

    # --- copies

    def find(self, key: str, deadline: Deadline) -> CachedCopy | None:
        """Returns the copy of a shard, mapped; None if there is none."""
        name = f"{key}.shard"
        with suppress(FileNotFoundError), self._open(name, os.O_RDONLY) as handle:
            handle.acquire(deadline, "a copy that is being removed", shared=True)
            if self._has_name(handle, name):
                note = _read_note(handle, key)
                if note is not None and note.boot == boot_id():
                    return CachedCopy(self.map(handle, key), note)
                self.discard(key)
        return None

    def map(self, handle: FileLock, key: str) -> mmap.mmap:
        """Maps a locked copy; the mapping keeps the file open, and with it the lock."""
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # else every sixteenth page is a page fault
        return mmap.mmap(handle.fd, size_of(key), flags=flags, prot=mmap.PROT_READ)

    def discard(self, key: str) -> None:
        """Removes a damaged copy from the cache."""
        with suppress(FileNotFoundError):
            os.unlink(f"{key}.shard", dir_fd=self._directory.fd)

    def claim(self, key: str) -> FileLock | None:
        """Returns the locked file to copy a shard to; None while another process copies it."""
        name = f"{key}.part"
        handle = self._open(name, os.O_RDWR | os.O_CREAT)
        if handle.try_acquire() and self._has_name(handle, name):
            return handle
        handle.close()
        return None

    def publish(self, key: str, handle: FileLock, deadline: Deadline) -> None:
        """Renames a complete copy. From then on, it is only read."""
        where = self._directory.fd
        os.rename(f"{key}.part", f"{key}.shard", src_dir_fd=where, dst_dir_fd=where)
        failpoint("cache.published")
        handle.acquire(deadline, "a copy that is being removed", shared=True)
        if not self._has_name(handle, f"{key}.shard"):
            raise NotCached("its copy was removed right after it was made")

    def abandon(self, key: str, handle: FileLock) -> None:
        """Removes a part that this process has claimed, unless it was published."""
        if self._has_name(handle, f"{key}.part"):
            os.unlink(f"{key}.part", dir_fd=self._directory.fd)

    # --- space

    @contextmanager
    def space_lock(self, deadline: Deadline) -> Iterator[None]:
        """Excludes other processes from taking or freeing space."""
        while True:
            with self._open(_SPACE_LOCK, os.O_RDWR | os.O_CREAT) as handle:
                handle.acquire(deadline, "the lock on the space of the cache")
                if self._has_name(handle, _SPACE_LOCK):
                    yield
                    return

    @contextmanager
    def slot(self, count: int, deadline: Deadline) -> Iterator[None]:
        """Holds one of `count` slots for copying at the same time."""
        while True:
            for number in range(count):
                with self._open(f"slot-{number}", os.O_RDWR | os.O_CREAT) as handle:
                    if handle.try_acquire():
                        yield
                        return
            deadline.pause(f"one of {count} shards to be copied")

    def used(self) -> int:
        """Returns the bytes that the cache takes, including those reserved for copies in progress.

        A copy that is published while files are listed may appear under neither name, so a listing counts only if the
        next one is equal.
        """
        seen: dict[str, int] = {}
        while (now := {name: self._bytes(name) for name in self._names()}) != seen:
            seen = now
        return sum(now.values())

    def free(self, want: int, order: Mapping[str, int], turn: int) -> int:
        """Removes unmapped copies until `want` bytes are free, or no more may be removed; returns the bytes freed.

        `order` gives when shards are needed next (0: first). Shards not in it are removed first, beginning with the
        oldest, then those that are needed last; never one that is needed before `turn`. The caller holds
        the space lock.
        """
        freed = 0
        for (kind, next_use), name in sorted((self._priority(name, order), name) for name in self._names()):
            if freed >= want or (kind == 2 and -next_use <= turn):
                break
            freed += self._remove(name)
        return freed

    def _priority(self, name: str, order: Mapping[str, int]) -> tuple[int, float]:
        """Returns a sort key, lowest for what is removed first: parts, unknown copies by age, then by next use."""
        key = name.removesuffix(".shard")
        if key in order:
            return 2, -order[key]
        with suppress(FileNotFoundError):
            return (1, self._status(name).st_mtime) if key != name else (0, 0)
        return 0, 0

    def sweep(self, deadline: Deadline) -> int:
        """Removes parts whose process has ended; returns the bytes freed."""
        with self.space_lock(deadline):
            return sum(self._remove(name) for name in self._names() if name.endswith(".part"))

    def _remove(self, name: str) -> int:
        """Removes a file that no process has locked; returns the bytes freed."""
        with suppress(FileNotFoundError), self._open(name, os.O_RDONLY) as handle:
            if handle.try_acquire() and self._has_name(handle, name):
                failpoint("cache.evicting")
                size = self._bytes(name)
                os.unlink(name, dir_fd=self._directory.fd)
                return size
        return 0

    def entries(self) -> list[CacheEntry]:
        """Lists the files of the cache."""
        entries = []
        for name in self._names():
            key, _, kind = name.rpartition(".")
            with suppress(FileNotFoundError), self._open(name, os.O_RDONLY) as handle:
                note = _read_note(handle, key) if kind == "shard" else None
                in_use = not handle.try_acquire()
                entries.append(CacheEntry(key, note and note.source, self._bytes(name), in_use))
        return entries

    # --- names

    def _names(self, kind: re.Pattern[str] = _COPIES) -> list[str]:
        return sorted(filter(kind.fullmatch, os.listdir(self._directory.fd)))  # noqa: PTH208 - an open one

    def _open(self, name: str, flags: int) -> FileLock:
        where = self._directory.fd
        return FileLock(os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=where))

    def _status(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._directory.fd, follow_symlinks=False)

    def _bytes(self, name: str) -> int:
        with suppress(FileNotFoundError):
            return self._status(name).st_blocks * 512
        return 0

    def _has_name(self, handle: FileLock, name: str) -> bool:
        """Whether an open file still has this name."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(handle.fd), self._status(name))
        return False


def size_of(key: str) -> int:
    """Returns the size of a shard in bytes, which is part of its key."""
    return int(key.rpartition("-")[2])


def _read_note(handle: FileLock, key: str) -> CopyNote | None:
    return CopyNote.parse(os.pread(handle.fd, _MAX_NOTE_BYTES, size_of(key)))


def _open_directory(path: Path) -> int:
    """Opens or creates a directory that only this user can use; refuses one that another user has created."""
    if not is_local(path.parent):
        raise NotCached(f"{path.parent} is not on a local file system of this machine")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise NotCached(_refusal(path, path.lstat())) from error
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o777 != 0o700:
        os.close(fd)
        raise NotCached(_refusal(path, status))
    return fd


def _refusal(path: Path, status: os.stat_result) -> str:
    """Returns the message for a directory that is not ours, with its type, mode and owner as `ls` shows them."""
    return (
        f"{path} is {stat.filemode(status.st_mode)} of user {status.st_uid}, not a directory that only user "
        f"{os.geteuid()} can use; remove it, or set another path"
    )
