"""Asked to stop: by a signal, by Ctrl-C, or by the end of the job's time. Handlers only pass a word on.

Saving inside a handler hangs sooner or later; so a thread takes the word, asks all ranks for a common point to stop at
(see `dist.agreement`), and the loop saves there.
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

from headway.dist.group import current

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
MARGIN_S = 15.0
"""seconds to spare when the job's time ends: for leaving, and for clocks that differ"""
_CLOCK_CHECK_S = 1.0  # seconds between two looks at the clock


@contextmanager
def handle_stop_signals(end: float | None = None, lead: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
    """While in here, stop signals ask all ranks to stop at one point; a second Ctrl-C raises KeyboardInterrupt.

    `end` is when the job's time is over (seconds since 1970), on the rank that watches it, and `lead()` how long
    before that a stop must be asked for. Handlers that were there before are called as well, and put back afterwards.

    >>> with handle_stop_signals(end=schedulers.end_time(), lead=lambda: 60.0):
    ...     train()
    """
    words: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # the one queue that a handler may put into
    deadline = None if end is None else time.monotonic() + end - time.time()
    thread = threading.Thread(target=_pass_on, args=(words, deadline, lead), name="headway stop", daemon=True)
    before = _handle(words)
    thread.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        words.put(None)
        thread.join()


def _handle(words: queue.SimpleQueue[str | None]) -> dict[signal.Signals, Any]:
    """Installs the handlers; returns what was there. Only the main thread of a process may."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is not threading.main_thread():
        return before
    interrupts = 0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        words.put(signal.Signals(number).name)
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            raise KeyboardInterrupt
        users = before[signal.Signals(number)]
        if callable(users) and users is not signal.default_int_handler:
            users(number, frame)

    for number in SIGNALS:
        before[number] = signal.getsignal(number)
        signal.signal(number, handler)
    return before


def _pass_on(words: queue.SimpleQueue[str | None], deadline: float | None, lead: Callable[[], float]) -> None:
    while True:
        try:
            word = words.get(timeout=None if deadline is None else _CLOCK_CHECK_S)
        except queue.Empty:
            assert deadline is not None
            if time.monotonic() + lead() < deadline:
                continue
            word, deadline = "the end of the job's time", None
        if word is None:
            return
        current().request_stop(word)
