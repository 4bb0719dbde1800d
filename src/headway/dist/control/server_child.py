"""Imported by multiprocessing's fork server if a loader starts one: unblocks stop signals in the server's children.

The server itself keeps them blocked: a signal that a scheduler sends to every process would end it, and torch would
report all of its workers as dead. Data workers that ignore such signals unblock them themselves, once they do.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import forkserver
from multiprocessing.util import register_after_fork
from typing import Any

from headway.dist.control.signals import BLOCKED_SIGNALS


def preload() -> None:
    """Makes a fork server that is started from now on import this module, in addition to what it imports anyway."""
    server: Any = forkserver._forkserver
    if __name__ not in server._preload_modules:
        server.set_forkserver_preload([*server._preload_modules, __name__])


def _unblock(_: object) -> None:
    process = multiprocessing.current_process()
    arguments = process._args  # type: ignore[attr-defined]
    if not any(getattr(type(argument), "ignores_signals", False) for argument in arguments):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)


register_after_fork(_unblock, _unblock)  # the server can only be made to import a module
