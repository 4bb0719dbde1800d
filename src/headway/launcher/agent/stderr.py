"""What ranks write to standard error: an agent reads it, passes it on at once, and keeps the end of it.

So the first cause can be printed last, below what other ranks wrote because of it, for any script. Where this process
writes to a terminal, so do its ranks: each gets a terminal of its own, and keeps its colors and progress bars.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import select
import selectors
import termios
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import final

from headway.dist.failure.echo import is_echo

_STDERR = 2
_KEPT_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 16
_READER_GONE = (errno.EPIPE, errno.EIO)
_HEADER = re.compile(r"^(\s*[|+] )?Traceback \(most recent call last\):$", re.MULTILINE)
_CHAINED = ("the direct cause of the following exception", "another exception occurred")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch's
_TEARDOWN = re.compile(r"^terminate called without an active exception\n?", re.MULTILINE)
"""what C++ writes when a script ends, for whatever reason, while the threads of a process group still run"""
_MAX_LINES_AFTER = 20
"""a traceback further from the end is that of an exception which the script caught"""


@final
@dataclass(kw_only=True)
class RankStderr:
    """The end of what one rank has written."""

    descriptor: int
    tail: bytes = b""
    traced: float = 0.0
    """when the last traceback began, in seconds since 1970"""

    def add(self, chunk: bytes) -> None:
        self.tail = (self.tail + chunk)[-_KEPT_BYTES:]
        if b"Traceback (most recent call last)" in chunk:
            self.traced = time.time()

    def text(self) -> str:
        return _RANK_PREFIX.sub("", self.tail.decode(errors="backslashreplace").replace("\r\n", "\n"))

    def traceback(self) -> str | None:
        """Returns the traceback with which the rank has ended, with those of the exceptions that led to it."""
        text = _TEARDOWN.sub("", self.text())
        headers = [found.start() for found in _HEADER.finditer(text)]
        if not headers:
            return None
        rest = [line for line in text[headers[-1] :].splitlines()[1:] if not line.startswith((" ", "|", "+"))]
        if len(rest) > _MAX_LINES_AFTER:
            return None
        begin = headers.pop()
        while headers and any(words in text[headers[-1] : begin] for words in _CHAINED):
            begin = headers.pop()
        return text[begin:].rstrip()

    def was_torn_down(self) -> bool:
        """Whether the rank aborted because its script had ended while its process group still existed."""
        return _TEARDOWN.search(self.tail.decode(errors="replace")) is not None


def error_line(traceback: str) -> str:
    """Returns the line that names the exception.

    >>> error_line("Traceback (most recent call last):\\n  File ...\\nValueError: no\\nand more")
    'ValueError: no'
    """
    lines = traceback[[found.start() for found in _HEADER.finditer(traceback)][-1] :].splitlines()[1:]
    return next((line for line in lines if line and not line.startswith((" ", "|", "+"))), lines[-1])


def is_echo_of_another(traceback: str) -> bool:
    """Whether this traceback only shows that another rank has ended."""
    kind, _, text = error_line(traceback).partition(": ")
    return is_echo(kind, text)


@final
@dataclass(kw_only=True)
class StderrRelay:
    """Reads what the ranks of one round write, in a thread.

    >>> relay = StderrRelay()
    >>> start_rank(command, stderr=relay.open(0))  # and so on
    >>> relay.start()
    >>> relay.finish(2.0)
    >>> relay.ranks[0].traceback()
    """

    ranks: dict[int, RankStderr] = field(default_factory=dict)
    _thread: threading.Thread | None = None

    def open(self, rank: int) -> int:
        """Returns a descriptor for the standard error of a new rank, which the caller closes."""
        own, theirs = _terminal() if os.isatty(_STDERR) else os.pipe()
        os.set_inheritable(own, False)
        self.ranks[rank] = RankStderr(descriptor=own)
        return theirs

    def start(self) -> None:
        """Begins to read. After the ranks have been started: until then this process forks."""
        self._thread = threading.Thread(target=self._read, name="headway stderr", daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Waits until all is read, at most `timeout_s`: a process that a rank has left may keep it open."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks.values():
                selector.register(rank.descriptor, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._pass_on(key.data):
                        selector.unregister(key.data.descriptor)
                        os.close(key.data.descriptor)

    def _pass_on(self, rank: RankStderr) -> bool:
        """Reads from one rank; returns whether there may be more."""
        try:
            chunk = os.read(rank.descriptor, _CHUNK_BYTES)
        except OSError:  # a terminal whose other end is closed
            chunk = b""
        if not chunk:
            return False
        rank.add(chunk)
        try:
            write_all(_STDERR, chunk)
        except OSError as error:
            # ranks notice that nobody reads, as they would without this process between; output is lost on a full disk
            return error.errno not in _READER_GONE
        return True


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of `data`, also to a pipe that does not block."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


def _terminal() -> tuple[int, int]:
    """Returns both ends of a new terminal of the size of this one, which passes bytes on as they are."""
    own, theirs = pty.openpty()
    with suppress(OSError):
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(_STDERR, termios.TIOCGWINSZ, bytes(8)))
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    return own, theirs
