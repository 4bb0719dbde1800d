"""Rank logs: the output of each rank, in `log/rank-NNNNN.txt`.

Rank 0 keeps its terminal and also writes the file: `sys.stdout` and `sys.stderr` become streams that write to both and
otherwise (isatty, fileno, encoding, buffer) act as the originals. The other ranks write only the file; file descriptors
1 and 2 point to it as well, so that the output of C and C++ code, of child processes, and crash dumps go there, too,
unchanged. Output of Python is written in whole lines, each in its last state, without escape sequences or secrets.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, AnyStr, Generic, TextIO, final

from headway.errors import Stopped
from headway.record.terminal_lines import TerminalLines, plain
from headway.run import Run
from headway.system.jsonlines import AppendOnlyFile
from headway.system.log import logger
from headway.system.redact import redact

_READER_GONE = (errno.EPIPE, errno.EIO)
"""the error of a write when the reader of a pipe, or the terminal, is gone"""


@final
@dataclass(frozen=True, kw_only=True)
class RankLog:
    """The log of a rank while it is installed.

    with hw.record.rank_log(run, rank=world.rank, attempt=1):
        print("to the log of this rank, and on rank 0 also to the terminal")
    """

    file: LogFile
    original_stderr_fd: int
    """the original stderr, for a message that must reach the terminal from any rank"""

    @property
    def path(self) -> Path:
        """The file on disk."""
        return self.file.path

    @property
    def lost(self) -> int:
        """How many lines could not be written because the storage failed."""
        return self.file.lost


@contextmanager
def rank_log(run: Run, *, rank: int, attempt: int, echo: bool | None = None) -> Iterator[RankLog]:
    """Records stdout and stderr of this process in the run's log for `rank` until the block ends.

    With `echo` (the default on rank 0) the output also goes to the terminal. If the block fails, the log ends with the
    traceback. The streams are restored afterwards.

        with rank_log(run, rank=world.rank, attempt=1):
            print("into the file")
    """
    echo = rank == 0 if echo is None else echo
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    with ExitStack() as stack:
        terminal = 2 if echo else stack.enter_context(_duplicate(2))
        file = stack.enter_context(LogFile(run.log_file(rank), terminal=terminal))
        if not echo:
            _flush(streams.values())
            for descriptor in (1, 2):
                stack.enter_context(_redirected(file.descriptor, descriptor))
            stack.callback(_flush, streams.values())
        file.write([_headline(attempt, rank)])
        stack.push(file.write_traceback)
        for name, stream in streams.items():
            stack.enter_context(_recorded(name, stream, file, echo=echo))
        yield RankLog(file=file, original_stderr_fd=terminal)


def _headline(attempt: int, rank: int) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"--- attempt {attempt}  {now}  rank {rank}  host {socket.gethostname()}  pid {os.getpid()} ---"


@final
class LogFile:
    """A log file that never fails its writer: a full disk loses lines, which are counted."""

    def __init__(self, path: Path, *, terminal: int) -> None:
        self.path = path
        self.lost = 0
        self._unreported = 0  # lost lines that the file does not mention yet
        self._file = AppendOnlyFile(path)
        self._terminal = terminal

    @property
    def descriptor(self) -> int:
        return self._file.descriptor

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, *_: object) -> None:
        if why := self._file.close():
            self._lose(1, why)

    def write(self, lines: Sequence[str]) -> None:
        """Appends `lines` in one system call, so that lines of forked children and threads do not mix."""
        note = f"--- {self._unreported} lines are missing here ---\n" if self._unreported else ""
        text = note + redact("\n".join(lines)) + "\n"
        lost, why = self._file.append(text.encode("utf-8", "backslashreplace"))
        if lost:
            self._lose(min(lost, len(lines)), why)
        else:
            self._unreported = 0

    def write_traceback(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Writes the traceback of a failure; it is printed to the terminal after the streams are restored."""
        if not isinstance(error, Exception) or isinstance(error, Stopped):
            return
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__package__") == __package__:
            trace = trace.tb_next  # begin with the user's code
        text = "".join(traceback.format_exception(type(error), error, trace))
        self.write([plain(line) for line in text.splitlines()])

    def _lose(self, count: int, why: str) -> None:
        if not self.lost:
            warning = (
                f"headway: the log {self.path} cannot be written ({why}); the run continues without it\n"
            )
            with suppress(OSError):  # the terminal is gone, too
                os.write(self._terminal, warning.encode("utf-8", "backslashreplace"))
        self.lost += count
        self._unreported += count


@final
class _Channel:
    """Converts the text of one stream into lines of the log."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # re-entrant: a signal handler may print during a print
        self._lines = TerminalLines()
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def text(self, text: str) -> None:
        if os.getpid() != self._pid:  # forked: the unfinished line is the parent's, and so is the lock
            self._start()
        with self._lock:
            if lines := self._lines.feed(text):
                self._file.write(lines)

    def data(self, data: bytes) -> None:
        self.text(self._decoder.decode(data))

    def close(self) -> None:
        self.text("")
        with self._lock:
            if lines := self._lines.rest():
                self._file.write(lines)


@final
class _Tee(Generic[AnyStr]):
    """Replaces `stream` and records everything written to it. Once released, it only writes to the stream."""

    def __init__(self, stream: IO[AnyStr], record: Callable[[AnyStr], None], *, echo: bool) -> None:
        self._stream: IO[AnyStr] = stream
        self._record: Callable[[AnyStr], None] | None = record
        self._echo = echo

    def write(self, data: AnyStr) -> int:
        if self._record is not None:
            self._record(data)  # first, in case the terminal is gone
            if not self._echo:
                return len(data)
        try:
            return self._stream.write(data)
        except OSError as error:
            self._lose_terminal(error)
            return len(data)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose_terminal(error)

    def _lose_terminal(self, error: OSError) -> None:
        """Lets a run continue although slurmstepd or the terminal, which read its output, is gone.

        Its descriptor is redirected to /dev/null, also for output after the run and from native code.
        """
        if error.errno not in _READER_GONE or self._record is None:
            raise error
        self._echo = False
        null = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError, ValueError, AttributeError):  # it has no descriptor
            os.dup2(null, self._stream.fileno())
        os.close(null)
        logger.warning("the reader of the output is gone (%s); the run continues, and writes its log", error)

    def writelines(self, lines: Iterable[AnyStr]) -> None:
        for line in lines:
            self.write(line)

    def release(self) -> None:
        self._record = None

    def __enter__(self) -> _Tee[AnyStr]:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _recorded(name: str, stream: TextIO | None, file: LogFile, *, echo: bool) -> Iterator[None]:
    """Replaces `sys.stdout` or `sys.stderr` with a recording stream."""
    if stream is None:  # a program without a console has nothing to record
        yield
        return
    channel = _Channel(file)
    tee = _Tee(stream, channel.text, echo=echo)
    tees: list[_Tee[Any]] = [tee]
    binary = getattr(stream, "buffer", None)  # notebooks and StringIO have none
    if binary is not None:
        tees.append(_Tee(binary, channel.data, echo=echo))
        vars(tee)["buffer"] = tees[-1]
    _replace(name, stream, tee)
    try:
        yield
    finally:
        for released in tees:
            released.release()
        channel.close()
        _replace(name, tee, stream)


def _replace(name: str, old: object, new: Any) -> None:
    """Replaces the stream in `sys` and in the log handlers that were made with it and still hold it."""
    if getattr(sys, name) is old:  # otherwise other code has wrapped it, and its wrapper stays
        setattr(sys, name, new)
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for each in loggers:
        for handler in each.handlers if isinstance(each, logging.Logger) else ():
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)


@contextmanager
def _duplicate(descriptor: int) -> Iterator[int]:
    copy = os.dup(descriptor)
    try:
        yield copy
    finally:
        os.close(copy)


@contextmanager
def _redirected(target: int, descriptor: int) -> Iterator[None]:
    """Makes `descriptor` point to `target`, for this process and the children that it starts."""
    with _duplicate(descriptor) as before:
        os.dup2(target, descriptor)
        try:
            yield
        finally:
            os.dup2(before, descriptor)


def _flush(streams: Iterable[TextIO | None]) -> None:
    """Flushes the buffers of Python and the C library before the descriptors change."""
    for stream in streams:
        if stream is not None:
            with suppress(OSError, ValueError):  # the terminal is gone, or the stream is closed
                stream.flush()
    ctypes.CDLL(None).fflush(None)
