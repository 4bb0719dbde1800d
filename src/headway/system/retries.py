"""Retries of reads: a file system that many nodes share fails now and then, although its data is intact.

An I/O error is not damage. It neither makes a sample bad nor changes the order: the read is retried, with growing
waits, and counted. If it never succeeds, a `StorageError` ends the run so that it can be resumed.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headway.errors import StorageError
from headway.system.log import logger

T = TypeVar("T")

WAITS_S: tuple[float, ...] = (0.1, 0.3, 0.9, 2.7, 8.1, 24.3)
"""before each retry"""
_STOPPING_WAIT_S = 1.0
_NOTICE_PERIOD_S = 10.0
stop_requested = threading.Event()
"""set once the ranks are requested to stop: see `headway.dist.control.stop`"""
_NAMES = (
    "EIO ESTALE EREMOTEIO EAGAIN EINTR EBUSY ENFILE ETIMEDOUT ECONNRESET ECONNABORTED ECONNREFUSED ENOTCONN ESHUTDOWN "
    "EPIPE EHOSTDOWN EHOSTUNREACH ENETDOWN ENETUNREACH ENOLINK ECOMM EPROTO"
)
_TRANSIENT = {getattr(errno, name) for name in _NAMES.split() if hasattr(errno, name)}
_in_thread = threading.local()
_next_notice = 0.0


def retry(doing: str, action: Callable[[], T], failed: OSError | None = None) -> T:
    """Calls a read and retries it after transient errors; returns its result. Other `OSError`s are raised.

    Raises `StorageError` if all tries fail. `failed` is the error of a first try that the caller made. Once a stop is
    requested, it retries every second, for the same total time: a run can save only after the step that waits for this
    read.
    """
    began, tries = time.monotonic(), 0
    while True:
        try:
            if failed is None:
                return action()
            raise failed
        except OSError as error:
            failed, tries, took_s = None, tries + 1, time.monotonic() - began
            if error.errno not in _TRANSIENT:
                raise
            if tries > len(WAITS_S) and (took_s >= sum(WAITS_S) or not stop_requested.is_set()):
                raise StorageError(
                    f"could not {doing}: {error.strerror}, {tries} times in {took_s:.0f} s; check that file system, "
                    "and resume"
                ) from error
            wait_s = WAITS_S[min(tries, len(WAITS_S)) - 1]
            _note(doing, error, wait_s)
        if stop_requested.is_set():
            time.sleep(min(wait_s, _STOPPING_WAIT_S))
        else:
            stop_requested.wait(wait_s)


def retries_in_this_thread() -> int:
    """Returns the number of retries in this thread. A loader counts the difference over each chunk that it reads."""
    return getattr(_in_thread, "count", 0)


def _note(doing: str, error: OSError, wait_s: float) -> None:
    global _next_notice
    _in_thread.count = retries_in_this_thread() + 1
    if time.monotonic() >= _next_notice:
        _next_notice = time.monotonic() + _NOTICE_PERIOD_S
        logger.warning(f"could not {doing}: {error.strerror}; trying again in {wait_s:g} s")


def read_start(path: Path, size: int) -> bytes | None:
    """Reads at most the first `size` bytes of a file; None if there is no regular file at that path."""

    def read() -> bytes | None:
        try:  # O_NONBLOCK: opening a pipe would wait for its writer
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            with os.fdopen(fd, "rb", closefd=False) as file:
                return file.read(size)
        finally:
            os.close(fd)

    try:
        return retry(f"read {path}", read)
    except OSError as error:
        raise StorageError(
            f"could not read {path}: {error.strerror}; check its permissions, or remove it"
        ) from error
