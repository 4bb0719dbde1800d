"""Signals to the run, kept away from its data workers.

SLURM may send a stop signal to every process of a step, data workers included. A worker that exits takes the rank down
before it can save, and a forked worker that inherits the rank's handler handles the signal a second time. So workers
ignore such signals from the start.

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
    """Makes a worker process ignore stop signals and exit with its rank. For `worker_init_fn`."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    rank = multiprocessing.parent_process()
    if rank is not None:  # nothing else ends a worker that ignores these signals
        threading.Thread(target=_exit_with, args=(rank.sentinel,), name="headway worker", daemon=True).start()


def _exit_with(sentinel: int) -> None:
    """Kills this process when the rank exits. The kernel's parent-death signal would watch the fork server instead."""
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_stop_requests() -> None:
    """Ignores stop requests in a forked child, whose inherited handler would act for the rank."""
    for number in STOP_REQUESTS:
        signal.signal(number, signal.SIG_IGN)


def ignore_termination() -> None:
    """Keeps this process alive until it has reported: torchrun and mpirun end all ranks when the first one exits.

    Through the C library, because Python allows it in the main thread only, which may be stuck in a collective.
    """
    ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_IGN))
