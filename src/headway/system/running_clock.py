"""A clock that leaves out the time in which this process was stopped.

`scontrol suspend`, SIGSTOP and a laptop that sleeps stop every process of a job at once, while the clock of the machine
continues. How long ago anything has happened is then no evidence of a hang. So every check for one asks such a clock.
"""

from __future__ import annotations

import os
import threading
import time
from typing import final

_TICK_S = 0.5
_LONGEST_S = 1.5


@final
class RunningClock:
    """Measures how long this process has run since a moment of the monotonic clock.

    Something has to call `tick` often. Between two ticks at most `longest_s` count: in the rest the process was
    stopped.

    >>> clock = RunningClock(longest_s=5.0)
    >>> clock.tick()  # often
    >>> round(clock.since(time.monotonic() - 3), 3)
    3.0
    """

    def __init__(self, *, longest_s: float) -> None:
        self._longest_s = longest_s
        # the last tick, and the gaps before it: one object, since threads read it while another one ticks
        self._ticks: tuple[float, tuple[tuple[float, float], ...]] | None = None

    def tick(self) -> None:
        """Notes that this process runs."""
        now = time.monotonic()
        self._ticks = (now, self._gaps(now))

    def since(self, moment: float) -> float:
        """Returns the seconds that this process has run since `moment`."""
        now = time.monotonic()
        return now - moment - sum(max(0.0, end - max(begin, moment)) for begin, end in self._gaps(now))

    def forget(self) -> None:
        """Forgets the ticks so far: nobody ticks any more, and all time counts until the next tick."""
        self._ticks = None

    def _gaps(self, now: float) -> tuple[tuple[float, float], ...]:
        if self._ticks is None:
            return ()
        last, gaps = self._ticks
        return (*gaps, (last + self._longest_s, now)) if now - last > self._longest_s else gaps


RUNNING_CLOCK = RunningClock(longest_s=_LONGEST_S)
"""the clock of this process, once `start` was called; until then all time counts"""
_ended = threading.Event()
_thread: threading.Thread | None = None


def start() -> None:
    """Starts the thread that ticks. Native code that holds the interpreter lock stops it, too."""
    global _thread
    if _thread is None:
        _ended.clear()
        RUNNING_CLOCK.tick()
        _thread = threading.Thread(target=_tick_until_stop, name="headway clock", daemon=True)
        _thread.start()


def stop() -> None:
    """Ends the thread."""
    global _thread
    if _thread is not None:
        _ended.set()
        _thread.join()
        _in_forked_child()


def _tick_until_stop() -> None:
    while not _ended.wait(_TICK_S):
        RUNNING_CLOCK.tick()


def _in_forked_child() -> None:
    """Lets all time count again: no thread ticks there."""
    global _thread
    _thread = None
    RUNNING_CLOCK.forget()


os.register_at_fork(after_in_child=_in_forked_child)
