"""Signals to the run, kept away from its data workers.

SLURM may send a stop signal to every process of a step, data workers included. A worker that exits takes the rank down
before it can save, and a forked worker that inherits the rank's handler handles the signal a second time. So workers
ignore such signals from the start; only the SIGTERM of their own rank, which exits, ends them.

    with block_signals():
        batches = iter(DataLoader(..., worker_init_fn=ignore_signals))
"""

from __future__ import annotations

import ctypes
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOP_REQUESTS = (signal.SIGUSR1, signal.SIGUSR2)
"""what schedulers and `headway` send to ask a run to save and stop"""
STOP_SIGNALS = (*STOP_REQUESTS, signal.SIGTERM, signal.SIGINT)
"""all that make a run save and stop; data workers must not get them"""
FORWARDED_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)
"""what the parent process of ranks passes on to them"""


@contextmanager
def block_signals() -> Iterator[None]:
    """Starts processes in here with stop signals blocked; this process receives them when the block ends.

    A new interpreter needs a second until it can ignore a signal; until then the kernel keeps the signal pending.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals(worker: int = 0) -> None:  # noqa: ARG001 - torch calls a worker_init_fn with the worker's number
    """Makes a worker process ignore stop signals, except its rank's, and exit with the rank. For `worker_init_fn`."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    rank, blocked = multiprocessing.parent_process(), set[int]()
    if rank is not None:  # nothing else ends a worker that ignores these signals
        if hasattr(signal, "sigwaitinfo"):  # not on macOS
            blocked = {signal.SIGTERM}  # so that it stays pending until a thread takes it
            signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
            threading.Thread(target=_exit_for, args=(rank.pid,), name="headway worker", daemon=True).start()
        threading.Thread(target=_exit_with, args=(rank.sentinel,), name="headway worker", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS} - blocked)


def _exit_with(sentinel: int) -> None:
    """Kills this process when the rank exits. The kernel's parent-death signal would watch the fork server instead."""
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _exit_for(rank: int | None) -> None:
    """Exits when the rank sends SIGTERM, as multiprocessing does at its end; a scheduler's SIGTERM is for the rank."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank:
        pass
    os._exit(0)  # torch reports a worker that a signal has ended as a failure


replaced: dict[signal.Signals, Any] = {}
"""the handlers that this process had before those of `stop`, while these are installed"""


def reset_in_child() -> None:
    """Ends a forked child on SIGTERM again, and ignores stop requests: inherited handlers would act for the rank."""
    for number in STOP_REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    if signal.SIGTERM in replaced:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ignore_termination() -> None:
    """Keeps this process alive until it has reported: torchrun and mpirun end all ranks when the first one exits.

    Through the C library, because Python allows it in the main thread only, which may be stuck in a collective.
    """
    for number in (signal.SIGTERM, *STOP_REQUESTS):
        ctypes.CDLL(None).signal(number, ctypes.c_void_p(signal.SIG_IGN))
