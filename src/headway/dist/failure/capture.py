"""Failing well: what is known about an exception that nobody caught, and the way out of a process that may be stuck.

One cause, printed once, as the last thing on the screen. The other ranks say whom they stop for and where the record
is; "connection reset by peer" is never the cause.
"""

from __future__ import annotations

import faulthandler
import os
import re
import socket
import sys
import traceback
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from types import TracebackType

from headway.dist.failure.heartbeat import Heartbeat
from headway.dist.failure.record import FailureRecord
from headway.errors import INTERRUPTED, HeadwayError
from headway.system.redact import redact

_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (timeout|closed)|timed out (after )?waiting|"
    r"remote process (has terminated|exited)|communicator was aborted|connection was likely closed|"
    r"failed to (recv|send)|recvvalue failed|sendbytes failed",
    re.IGNORECASE,
)


HEARTBEAT = Heartbeat()
"""what this rank is doing, kept current by the loop at no cost"""


def set_phase(phase: str, step: int | None = None) -> None:
    """Notes what this rank is doing; failure.json and hang reports say it.

    With a step, the rank is expected to move on: one that stands still for longer than `hw.init(step_timeout=...)`
    ends the run. Call it at every step of a loop of your own, and without a step when the loop is over.

    >>> set_phase("train", step=37)
    """
    HEARTBEAT.move(phase, step)


def no_hang_check() -> AbstractContextManager[None]:
    """What is done in here may take any time, and is no hang.

    >>> with no_hang_check():
    ...     upload(checkpoint)
    """
    return HEARTBEAT.no_hang_check()


def exception_record(error: BaseException, trace: TracebackType | None, rank: int) -> FailureRecord:
    """Everything known about an exception that nobody caught."""
    interrupted = isinstance(error, KeyboardInterrupt)
    name = type(error).__qualname__
    return {
        "kind": "interrupted" if interrupted else "exception",
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "phase": HEARTBEAT.phase,
        "step": HEARTBEAT.step,
        "error": redact(f"{name}: {error}" if str(error) else name),
        "traceback": redact("".join(traceback.format_exception(type(error), error, trace))),
        "sentence": redact(str(error)) if isinstance(error, HeadwayError) else None,
        "exit_code": INTERRUPTED
        if interrupted
        else error.exit_code
        if isinstance(error, HeadwayError)
        else 1,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "echo": is_echo(error),
    }


def is_echo(error: BaseException) -> bool:
    """Is this the sound of another rank's death rather than a cause of its own?"""
    network = isinstance(error, (RuntimeError, ConnectionError, TimeoutError)) and not isinstance(
        error, HeadwayError
    )
    return network and (isinstance(error, ConnectionError) or _LOST_PEER.search(str(error)) is not None)


def hard_exit(code: int) -> None:
    """Ends this process now. Threads stuck in a collective, or in a full pipe, cannot hold it up."""
    # a C thread that ends the process by itself: flushing below may block for ever
    faulthandler.dump_traceback_later(2, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe or stream: nobody is there to read it
            stream.flush()
    os._exit(code)
