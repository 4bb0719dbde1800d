"""Locks between processes of one machine, and the identity of a process.

A `FileLock` is an `flock`: the kernel releases it when its process ends, even by SIGKILL. Every wait for one has a
deadline. A `ProcessIdentity` distinguishes a process even from a later one with the same pid. `block_forks` protects
the start of a program in a thread while another thread may fork data workers.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any, Self, final

from headway.errors import HeadwayError
from headway.system import files
from headway.system.limits import boot_id

_POLL_S = 0.01
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


class LockTimeout(HeadwayError):
    """Raised when another process holds a lock longer than the deadline allows."""


@final
class Deadline:
    """A point in time after which waiting ends."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def pause(self, waiting_for: str) -> None:
        """Sleeps for a moment; raises `LockTimeout` when the time is over."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise LockTimeout(f"waited {self._seconds:g} s for {waiting_for}")
        time.sleep(min(_POLL_S, left))


@final
class FileLock:
    """An open file or directory that can be locked, exclusively or shared.

    Closing it releases the lock. A forked child closes its copy at once; otherwise it would hold the lock after its
    parent ended.

    >>> with FileLock.open(path) as lock:  # doctest: +SKIP
    ...     lock.acquire(Deadline(10), "another process that writes here")
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        register_after_fork(self, FileLock.close)

    @classmethod
    def open(cls, path: Path) -> FileLock:
        """Opens a lock file, or creates it for this user only. It is not locked yet."""
        return cls(files.open_private(path, os.O_RDWR | os.O_CREAT))

    @classmethod
    def open_directory(cls, path: Path) -> FileLock:
        """Opens an existing directory, to lock it instead of a file. It is not locked yet."""
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))

    def try_acquire(self, *, shared: bool = False) -> bool:
        """Locks unless another process holds the lock; returns whether it did.

        Raises `OSError` on a file system without locks: see `is_unsupported`.
        """
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def acquire(self, deadline: Deadline, waiting_for: str, *, shared: bool = False) -> None:
        """Locks as soon as no other process holds the lock; raises `LockTimeout`, which names `waiting_for`."""
        while not self.try_acquire(shared=shared):
            deadline.pause(waiting_for)

    def close(self) -> None:
        """Releases the lock and closes the file. Calling it again does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_unsupported(error: OSError) -> bool:
    """Returns whether an error of `FileLock` means that the file system has no locks."""
    return error.errno in _NO_FLOCK


@final
@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """Identifies a process among all others, in plain values that another host can read."""

    host: str
    machine: str
    """the boot and the pid namespace, in which a pid can be looked up"""
    pid: int
    born: str | None
    """when the process started, in ticks of its kernel; None if it had ended already"""

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessIdentity:
        """Returns the identity of a process of this machine, by default of the current one."""
        pid = os.getpid() if pid is None else pid
        return cls(host=socket.gethostname(), machine=_machine(), pid=pid, born=_birth(pid))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProcessIdentity:
        """Returns the identity in a larger record; other keys are ignored."""
        return cls(host=values["host"], machine=values["machine"], pid=values["pid"], born=values["born"])

    def to_dict(self) -> dict[str, Any]:
        """Returns the identity as it is written to files."""
        return asdict(self)

    def is_alive(self) -> bool | None:
        """Returns whether the process is still running; None if it is, or was, on another machine."""
        if self.machine != _machine():
            return None
        return self.born is not None and _birth(self.pid) == self.born

    def is_before_restart(self) -> bool:
        """Returns whether the process ran on a host of this name before its last boot; always False except on Linux."""
        boot = boot_id()
        return bool(boot) and self.host == socket.gethostname() and not self.machine.startswith(f"{boot} ")


def _machine() -> str:
    boot = boot_id()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}" if boot else socket.gethostname()


def _birth(pid: int) -> str | None:
    """Returns when a process started, in ticks since boot, independent of any clock; None if it has ended."""
    if sys.platform != "linux":
        import psutil

        try:
            return str(psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return None
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else fields[18]


_forks = threading.RLock()  # re-entrant: a thread that blocks forks may fork


@contextmanager
def block_forks() -> Iterator[None]:
    """Makes forks by other threads wait until the block ends. For threads that start a program.

    `subprocess.Popen` waits for a pipe to close, which happens when the program runs. A data worker forked in between
    keeps a copy of that pipe open, so Popen would return only when the worker ends.

    >>> import subprocess
    >>> with block_forks():
    ...     process = subprocess.Popen(["true"])
    >>> process.wait()
    0
    """
    _hook_forks()
    with _forks:
        yield


@cache
def _hook_forks() -> None:
    os.register_at_fork(before=_forks.acquire, after_in_parent=_release, after_in_child=_release)


def _release() -> None:
    with suppress(RuntimeError):  # these hooks were registered during the fork
        _forks.release()
