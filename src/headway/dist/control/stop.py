"""Requests to stop: a signal, Ctrl-C, or the end of the job's time. Signal handlers only put the request in a queue.

Saving inside a handler hangs sooner or later. So a thread reads the queue and asks all ranks for a common point to
stop at (see `agreement`), and the loop saves there.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from headway.dist.control.signals import (
    END_OF_TIME,
    STOP_REQUESTS,
    STOP_SIGNALS,
    handled_signals,
    ignore_signal,
    replaced,
)
from headway.errors import Stopped
from headway.system.retries import stop_requested

MARGIN_S = 15.0
"""spare time before the end of the job: for leaving, and for clocks that differ"""


@contextmanager
def handle_stop_signals(
    request_stop: Callable[[str], object],
    end: float | None = None,
    lead: Callable[[], float] = lambda: 0.0,
    *,
    clock_check_s: float = 1.0,
) -> Iterator[list[str]]:
    """Turns stop signals into a request that all ranks stop at one point; a second Ctrl-C raises KeyboardInterrupt.

    `request_stop`, usually the method of the `RankGroup`, is called from a thread with the reason: the name of a
    signal, or `END_OF_TIME`. `end` is when the job's time is over (seconds since 1970), on the rank that watches it,
    and `lead()` how long before that a stop must be requested; both are compared with the clock every `clock_check_s`.
    Earlier handlers are called as well, and restored afterwards; but after `Stopped`, requests are ignored until
    `restoring_handlers` ends, since a scheduler may repeat them. Yields the list of reasons so far.

    >>> with handle_stop_signals(current().request_stop, end=schedulers.end_time(), lead=lambda: 60.0):
    ...     train()
    """
    # the only kind of queue that a signal handler may put into
    requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reasons: list[str] = []
    deadline = None if end is None else time.monotonic() + end - time.time()
    thread = threading.Thread(
        target=_forward,
        args=(requests, request_stop, reasons, deadline, lead, clock_check_s),
        name="headway stop",
        daemon=True,
    )
    before = _handle(requests)
    stop_requested.clear()
    thread.start()
    stopped = False
    try:
        yield reasons
    except Stopped:
        stopped = True
        raise
    finally:
        if stopped:
            for number in {signal.SIGTERM, signal.SIGHUP, *STOP_REQUESTS} & before.keys():
                ignore_signal(number)
        else:
            _restore_handlers()
        requests.put(None)
        thread.join()
        stop_requested.clear()


@contextmanager
def restoring_handlers() -> Iterator[None]:
    """Restores the handlers of stop signals when a run is closed, which may take a while after it has stopped."""
    try:
        yield
    finally:
        _restore_handlers()


def _restore_handlers() -> None:
    for number, handler in replaced.items():
        signal.signal(number, handler)
    replaced.clear()


def _handle(requests: queue.SimpleQueue[str | None]) -> dict[signal.Signals, Any]:
    """Installs the handlers; returns the earlier ones. Python allows this in the main thread only."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is not threading.main_thread():
        return before
    interrupts = 0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        requests.put(signal.Signals(number).name)
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            raise KeyboardInterrupt
        users = before[signal.Signals(number)]
        if callable(users) and users is not signal.default_int_handler:
            users(number, frame)

    for number in handled_signals(STOP_SIGNALS):
        before[number] = signal.getsignal(number)
        signal.signal(number, handler)
    replaced.update(before)
    return before


def _forward(
    requests: queue.SimpleQueue[str | None],
    request_stop: Callable[[str], object],
    reasons: list[str],
    deadline: float | None,
    lead: Callable[[], float],
    clock_check_s: float,
) -> None:
    while True:
        try:
            request = requests.get(timeout=None if deadline is None else clock_check_s)
        except queue.Empty:
            assert deadline is not None
            if time.monotonic() + lead() < deadline:
                continue
            request, deadline = END_OF_TIME, None
        if request is None:
            return
        reasons.append(request)
        stop_requested.set()
        request_stop(request)
