"""The directory of a node cache: one user's, on one node, shared by all processes of that user that read shards.

    headway-cache-1000/  mode 0700, owned by the user, not a link; all names are opened inside of it
      live               locked (shared) by every process that uses the cache: the last one clears it away
      ledger             locked (alone) while space is taken or freed
      slot-0 ...         locked (alone) while a shard is copied: so many at once, and no more
      KEY.part           a shard that is being copied; its fetcher holds a lock (alone)
      KEY.shard          a whole copy, and a line about it; whoever has it mapped holds a lock (shared)

There is no master, and a crash leaves nothing to repair: every claim is an `flock` on an open file. A `.part` without a
lock has lost its fetcher, and the next process that wants that shard takes it over. The truth about space is what lies
in the directory.

A lock is on an open file and not on a name, and the file may have lost its name meanwhile, to an evictor or to its
fetcher, who published it: so after every lock the name is looked up again. A reader's lock is that of its mapping, and
ends when the last view of the bytes is gone.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_SH
from pathlib import Path
from typing import NamedTuple, final

from headway.data.cache.budget import is_local
from headway.data.cache.leases import Deadline, Handle, NotCached
from headway.system.failpoints import failpoint
from headway.system.limits import boot_id

_LIVE, _LEDGER = "live", "ledger"
_COPIES = re.compile(r"[0-9a-f]{32}-\d+\.(shard|part)")
_ALL = re.compile(rf"{_COPIES.pattern}|slot-\d+|{_LEDGER}|{_LIVE}")
_LONGEST_NOTE = 65536
_CLEARING = "the last process to clear the cache away"


class Note(NamedTuple):
    """What is written behind the bytes of a copy."""

    source: str
    crc32: str
    boot: str
    """of which start of this machine: what was never synced may have lost its bytes when the machine went down"""

    def line(self) -> bytes:
        return json.dumps(self._asdict()).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> Note | None:
        try:
            match json.loads(line):
                case {"source": str(source), "crc32": str(crc), "boot": str(boot)}:
                    return cls(source, crc, boot)
        except (ValueError, RecursionError):
            pass  # not whole
        return None


class Copy(NamedTuple):
    """A whole copy of a shard. Nobody removes it while it is mapped."""

    data: mmap.mmap
    note: Note


class Found(NamedTuple):
    """One file of the cache, for people."""

    key: str
    source: str | None
    """None: not whole yet"""
    bytes: int
    in_use: bool


@final
class CacheFolder:
    """One process's place in the cache of its user; `join` makes one, and `leave` ends it."""

    def __init__(self, path: Path) -> None:
        self.path, self._process = path, os.getpid()
        self._directory, self._live = Handle(_open_directory(path)), Handle(-1)

    @staticmethod
    def under(parent: Path) -> Path:
        """Where the cache of this user is."""
        return parent / f"headway-cache-{os.geteuid()}"

    @classmethod
    def join(cls, parent: Path, deadline: Deadline) -> CacheFolder:
        """Opens, or makes, the directory of this user under `parent`; `NotCached` if it is not safe to use."""
        while True:
            folder = cls(cls.under(parent))
            with suppress(FileNotFoundError):  # it was just being cleared away
                folder._live = folder._open(_LIVE, os.O_RDWR | os.O_CREAT)
                folder._live.wait(LOCK_SH, deadline, _CLEARING)
                if folder._is(folder._live, _LIVE):
                    return folder
            folder.close()
            deadline.pause(_CLEARING)

    def leave(self) -> bool:
        """Ends this process's use. The last one out removes everything, also what killed processes left: then True."""
        if self._live.fd < 0 or os.getpid() != self._process:
            return False
        last = self._live.lock(LOCK_EX)
        if last and not self.is_gone():
            for name in sorted(self._names(_ALL), key=_LIVE.__eq__):  # that one last: newcomers wait for it
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._directory.fd)
            with suppress(OSError):  # there is something in it that is not the cache's
                self.path.rmdir()
        self.close()
        return last

    def is_gone(self) -> bool:
        """Whether somebody removed the directory: what is mapped stays, but nothing new finds a place in it."""
        return os.fstat(self._directory.fd).st_nlink == 0

    def close(self) -> None:
        """Ends this process's use, and leaves everything as it is."""
        self._live.close()
        self._directory.close()

    # --- copies

    def find(self, key: str, deadline: Deadline) -> Copy | None:
        """The copy of a shard, mapped; None if there is none."""
        name = f"{key}.shard"
        with suppress(FileNotFoundError), self._open(name, os.O_RDONLY) as handle:
            handle.wait(LOCK_SH, deadline, "a copy that is being removed")
            if self._is(handle, name):
                note = Note.read(os.pread(handle.fd, _LONGEST_NOTE, size_of(key)))
                if note is not None and note.boot == boot_id():
                    return Copy(self.map(handle, key), note)
                self.discard(key)
        return None

    def map(self, handle: Handle, key: str) -> mmap.mmap:
        """The bytes of a locked copy; the mapping keeps the file open, and so the lock."""
        how = mmap.MAP_SHARED | mmap.MAP_POPULATE  # at once, and not with a fault for every sixteenth page
        return mmap.mmap(handle.fd, size_of(key), flags=how, prot=mmap.PROT_READ)

    def discard(self, key: str) -> None:
        """Takes a copy that is not what it should be out of the cache."""
        with suppress(FileNotFoundError):
            os.unlink(f"{key}.shard", dir_fd=self._directory.fd)

    def claim(self, key: str) -> Handle | None:
        """The right to copy a shard, and the file to copy it to; None while another process has it."""
        name = f"{key}.part"
        handle = self._open(name, os.O_RDWR | os.O_CREAT)
        if handle.lock(LOCK_EX) and self._is(handle, name):
            return handle
        handle.close()
        return None

    def publish(self, key: str, handle: Handle, deadline: Deadline) -> None:
        """Gives a whole copy its name. From here on it may be read, and only read."""
        where = self._directory.fd
        os.rename(f"{key}.part", f"{key}.shard", src_dir_fd=where, dst_dir_fd=where)
        failpoint("cache.published")
        handle.wait(LOCK_SH, deadline, "a copy that is being removed")
        if not self._is(handle, f"{key}.shard"):
            raise NotCached("its copy was removed at once")

    def abandon(self, key: str, handle: Handle) -> None:
        """Removes a part that we hold, if it still is one."""
        if self._is(handle, f"{key}.part"):
            os.unlink(f"{key}.part", dir_fd=self._directory.fd)

    # --- space

    @contextmanager
    def ledger(self, deadline: Deadline) -> Iterator[None]:
        """While in here, nobody else takes or frees space."""
        while True:
            with self._open(_LEDGER, os.O_RDWR | os.O_CREAT) as handle:
                handle.wait(LOCK_EX, deadline, "the ledger of the cache")
                if self._is(handle, _LEDGER):
                    yield
                    return

    @contextmanager
    def slot(self, count: int, deadline: Deadline) -> Iterator[None]:
        """One of `count` rights to copy at the same time."""
        while True:
            for number in range(count):
                with self._open(f"slot-{number}", os.O_RDWR | os.O_CREAT) as handle:
                    if handle.lock(LOCK_EX):
                        yield
                        return
            deadline.pause(f"one of {count} shards to be copied")

    def used(self) -> int:
        """Bytes that the cache takes, with those that are reserved for copies under way.

        A copy that is published during a look has neither name in it, so only what was seen twice counts.
        """
        seen: dict[str, int] = {}
        while (now := {name: self._bytes(name) for name in self._names()}) != seen:
            seen = now
        return sum(now.values())

    def free(self, want: int, order: Mapping[str, int], turn: int) -> int:
        """Removes copies that nobody has mapped until `want` bytes are free, or no more may go; returns how many.

        `order` says when shards are needed next (0: first). Those not in it go first, the oldest before others, then
        those that are needed last; never one that is needed before `turn`. The caller holds the ledger.
        """
        freed = 0
        for (kind, next_use), name in sorted((self._worth(name, order), name) for name in self._names()):
            if freed >= want or (kind == 2 and -next_use <= turn):
                break
            freed += self._remove(name)
        return freed

    def _worth(self, name: str, order: Mapping[str, int]) -> tuple[int, float]:
        """Parts first: if one can be removed, its fetcher is gone. Then unknown copies by age, others by next use."""
        key = name.removesuffix(".shard")
        if key in order:
            return 2, -order[key]
        with suppress(FileNotFoundError):
            return (1, self._status(name).st_mtime) if key != name else (0, 0)
        return 0, 0

    def sweep(self, deadline: Deadline) -> int:
        """Removes parts that lost their fetcher; returns how many bytes that were."""
        with self.ledger(deadline):
            return sum(self._remove(name) for name in self._names() if name.endswith(".part"))

    def _remove(self, name: str) -> int:
        """Removes a file that nobody holds; returns its bytes."""
        with suppress(FileNotFoundError), self._open(name, os.O_RDONLY) as handle:
            if handle.lock(LOCK_EX) and self._is(handle, name):
                failpoint("cache.evicting")
                size = self._bytes(name)
                os.unlink(name, dir_fd=self._directory.fd)
                return size
        return 0

    def found(self) -> list[Found]:
        """What is in the cache now."""
        files = []
        for name in self._names():
            key, _, kind = name.rpartition(".")
            with suppress(FileNotFoundError), self._open(name, os.O_RDONLY) as handle:
                note = (
                    Note.read(os.pread(handle.fd, _LONGEST_NOTE, size_of(key))) if kind == "shard" else None
                )
                files.append(Found(key, note and note.source, self._bytes(name), not handle.lock(LOCK_EX)))
        return files

    # --- names

    def _names(self, kind: re.Pattern[str] = _COPIES) -> list[str]:
        return sorted(filter(kind.fullmatch, os.listdir(self._directory.fd)))  # noqa: PTH208 - an open one

    def _open(self, name: str, flags: int) -> Handle:
        where = self._directory.fd
        return Handle(os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=where))

    def _status(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._directory.fd, follow_symlinks=False)

    def _bytes(self, name: str) -> int:
        with suppress(FileNotFoundError):
            return self._status(name).st_blocks * 512
        return 0

    def _is(self, handle: Handle, name: str) -> bool:
        """Whether an open file still has this name."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(handle.fd), self._status(name))
        return False


def size_of(key: str) -> int:
    """The bytes of a shard, which are a part of its key."""
    return int(key.rpartition("-")[2])


def _open_directory(path: Path) -> int:
    """Opens, or makes, a directory that is ours and nobody else's. Others may have made one of that name before us."""
    if not is_local(path.parent):
        raise NotCached(f"{path.parent} is not on a file system of this machine alone")
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
    """What the file type, the owner and the mode are, in the letters of `ls`."""
    return (
        f"{path} is {stat.filemode(status.st_mode)} of user {status.st_uid}, and not a directory that only user "
        f"{os.geteuid()} may use; have it removed, or give another path"
    )
