"""Records uncaught exceptions, and exits from a process that may be stuck.

An error that only follows from another rank's exit is marked as an echo: see `echo`.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import traceback
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from types import TracebackType

from headway.dist.failure.echo import is_echo
from headway.dist.failure.exit_deadline import exit_within
from headway.dist.failure.heartbeat import Heartbeat
from headway.dist.failure.hints import memory_hint
from headway.dist.failure.record import FailureRecord
from headway.errors import INTERRUPTED, HeadwayError, RunLocked, UnevenBatch
from headway.system.log import print_last
from headway.system.redact import redact

_FLUSH_S = 2.0
"""how long a process that exits may wait for the reader of its output"""
_READER = "the process that read it was ended; under SLURM that is slurmstepd on this node"
_LONGEST_TEXT = 100_000
"""characters of an error that are recorded: three such texts fit into a message to the hub, in any alphabet"""

HEARTBEAT = Heartbeat()
"""the heartbeat of this rank; the training loop updates it at every step"""


def set_phase(phase: str, step: int | None = None) -> None:
    """Sets what this rank is doing, for failure.json and hang reports.

    With a step, the rank must make progress: if it makes none for longer than `hw.init(step_timeout=...)`, the run
    ends. Call it at every step of a loop of your own, and without a step when the loop is over.

    >>> set_phase("train", step=37)
    """
    HEARTBEAT.move(phase, step)


def no_hang_check() -> AbstractContextManager[None]:
    """Switches off the check for hangs while the block runs, however long that takes.

    >>> with no_hang_check():
    ...     upload(checkpoint)
    """
    return HEARTBEAT.no_hang_check()


def exception_record(error: BaseException, trace: TracebackType | None, rank: int) -> FailureRecord:
    """Returns the record of an uncaught exception."""
    interrupted = isinstance(error, KeyboardInterrupt)
    name, text = type(error).__qualname__, _text(error)
    if hint := _memory_hint(error):
        error.add_note(hint)
        text = hint
    own_code = error.exit_code if isinstance(error, HeadwayError) else 1
    sentence = _shorten(redact(text)) if isinstance(error, HeadwayError) else None
    unread = isinstance(error, BrokenPipeError) and _is_unread()
    if unread:
        sentence = (
            f"nobody reads the output of rank {rank} on {socket.gethostname()} any more ({error}): {_READER}"
        )
    return {
        "kind": "interrupted" if interrupted else "exception",
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "phase": HEARTBEAT.phase,
        "step": HEARTBEAT.step,
        "error": _shorten(redact(f"{name}: {text}" if text else name)),
        "traceback": _shorten(redact("".join(traceback.format_exception(type(error), error, trace)))),
        "sentence": sentence,
        "exit_code": INTERRUPTED if interrupted else own_code,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "echo": is_echo_error(error) and not unread,
        "locked_out": isinstance(error, RunLocked),
        "global_batch_size": error.global_batch_size if isinstance(error, UnevenBatch) else None,
    }


def _memory_hint(error: BaseException | None) -> str | None:
    """Looks in the errors that led to this one, too: torch raises another one while it handles the worker's end."""
    hint = None
    while error is not None and hint is None:
        hint, error = memory_hint(_text(error)), error.__cause__ or error.__context__
    return hint


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  whatever the class's own code raises; the traceback says that it did
        return ""


def _shorten(text: str) -> str:
    """Leaves out the middle of a text that no message could hold: an error may list every key of a large model."""
    half = _LONGEST_TEXT // 2
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:half]}\n[{len(text) - 2 * half:,} characters are left out]\n{text[-half:]}"


def _is_unread() -> bool:
    """Returns whether standard output or standard error is a pipe that nobody reads."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def is_echo_error(error: BaseException) -> bool:
    """Returns whether this error only shows that another rank has exited."""
    kind = type(error)
    names = (f"{each.__module__}.{each.__qualname__}".removeprefix("builtins.") for each in kind.__mro__)
    text = _text(error)
    return any(is_echo(name, text) for name in names)


def hard_exit(code: int, last_words: str = "") -> None:
    """Prints the last words and ends this process now, even if threads are stuck in a collective or in a full pipe."""
    exit_within(_FLUSH_S, code)  # printing and flushing may block forever
    if last_words:
        print_last(last_words)  # this process ends even if nobody reads them
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe or stream
            stream.flush()
    os._exit(code)
