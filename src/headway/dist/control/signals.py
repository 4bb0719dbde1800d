"""Signals that mean the run, not its helpers.

SLURM may send a stop signal to every process of a step, data workers included: a worker that dies of it takes the
rank down before it can save, and a forked worker that inherits the rank's handler acts twice. Workers ignore such
signals, from their first moment on.

    with dist.block_signals():
        batches = iter(DataLoader(..., worker_init_fn=dist.ignore_signals))
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
_SHIELDED = (*STOP_REQUESTS, signal.SIGTERM, signal.SIGINT)


@contextmanager
def block_signals() -> Iterator[None]:
    """Processes started in here begin life with stop signals blocked; this process gets them a moment later.

    A fresh interpreter needs a second until it can ignore a signal; until then the kernel holds it back.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SHIELDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals(worker: int = 0) -> None:  # noqa: ARG001 - torch calls a worker_init_fn with the worker's number
    """Makes a worker process deaf to stop signals, and lets it die with its rank. For `worker_init_fn`."""
    for number in _SHIELDED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SHIELDED)
    rank = multiprocessing.parent_process()
    if rank is not None:  # nobody else ends a worker that is deaf
        threading.Thread(target=_die_with, args=(rank.sentinel,), name="headway worker", daemon=True).start()


def _die_with(sentinel: int) -> None:
    """Not by the kernel's parent-death signal: a worker of a fork server has the server for a parent, not the rank."""
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_stop_requests() -> None:
    """What every forked child does by itself: a handler it inherited would act on the rank's behalf."""
    for number in STOP_REQUESTS:
        signal.signal(number, signal.SIG_IGN)


def ignore_termination() -> None:
    """Keeps this process alive for its last words: torchrun and mpirun end all with the first rank that leaves.

    By the C library, as Python lets only the main thread do so, which may be stuck in a collective.
    """
    ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_IGN))
