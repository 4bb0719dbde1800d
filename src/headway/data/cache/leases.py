"""Locks that the kernel frees when their process ends, however it ends; every wait for one has a deadline."""

from __future__ import annotations

import fcntl
import os
import time
from multiprocessing.util import register_after_fork
from typing import Self, final

_PAUSE = 0.01  # seconds between two looks at a lock that another process holds


class NotCached(Exception):
    """Why a shard is read at its source instead. It never leaves the cache."""


class WaitedTooLong(NotCached):
    """Another process is in the way, and stays there."""


@final
class Deadline:
    """A point in time after which nobody waits any longer."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def pause(self, waiting_for: str) -> None:
        """Sleeps for a moment; raises `WaitedTooLong` when the time is over."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise WaitedTooLong(f"waited {self._seconds:g} s for {waiting_for}")
        time.sleep(min(_PAUSE, left))


@final
class Handle:
    """An open file, and the lock on it. A forked child would hold the lock as well, and after our death: it lets go."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        register_after_fork(self, Handle.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def lock(self, how: int) -> bool:
        """Locks with `fcntl.LOCK_SH` or `LOCK_EX`, unless another process is in the way."""
        try:
            fcntl.flock(self.fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait(self, how: int, deadline: Deadline, waiting_for: str) -> None:
        """Locks, when those who are in the way are gone."""
        while not self.lock(how):
            deadline.pause(waiting_for)
