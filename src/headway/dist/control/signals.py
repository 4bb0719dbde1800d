"""Signals to the run, kept away from its data workers.

SLURM may send a stop signal to every process of a step, data workers included. A worker that exits takes the rank down
before it can save, and a forked worker that inherits the rank's handler handles the signal a second time. So workers
ignore such signals from the start; their own rank ends them by a signal that nobody else sends.

    with block_signals():
        batches = iter(DataLoader(..., worker_init_fn=ignore_signals))
    for worker in batches._workers:
        end_by_own_signal(worker)

Programs that a worker starts handle signals as usual: workers have handlers that do nothing, and `exec` resets them. A
signal that is ignored or blocked would stay so in every such program, and `ffmpeg.terminate()` would do nothing.
"""

from __future__ import annotations

import ctypes
import multiprocessing.connection
import os
import signal
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

STOP_REQUESTS = (signal.SIGUSR1, signal.SIGUSR2)
"""signals by which schedulers and `headway` request that a run saves and stops"""
STOP_SIGNALS = (*STOP_REQUESTS, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""all signals that make a run save and stop; data workers must not react to them"""
END_OF_TIME = "the end of the job's time"
"""the reason for a stop without a signal, in a run that watches the clock itself"""
_OF_A_TERMINAL = (signal.SIGHUP, signal.SIGINT)
"""signals that a shell makes background programs ignore, so that a closed terminal or a Ctrl-C does not end them"""


_END_WORKER = getattr(signal, "SIGRTMAX", signal.SIGKILL)
"""the signal by which a rank ends its workers: no scheduler and no library sends it; macOS does not have it"""
BLOCKED_SIGNALS = {*STOP_SIGNALS, _END_WORKER}
"""signals that stay pending until a new process can ignore them"""


def handled_signals(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Returns those signals for which this process may install a handler: not those that a shell made it ignore.

    `nohup` makes a program ignore SIGHUP, and a script makes what it starts with `&` ignore SIGINT. Stop requests
    always get a handler, since headway itself starts ranks with these ignored, until they can handle them.

    >>> signal.SIGTERM in handled_signals(STOP_SIGNALS)
    True
    """
    return [
        number
        for number in numbers
        if number not in _OF_A_TERMINAL or signal.getsignal(number) != signal.SIG_IGN
    ]


@contextmanager
def block_signals() -> Iterator[None]:
    """Blocks stop signals in the processes that the block starts; this process receives its own when the block ends.

    A new interpreter needs a second until it can ignore a signal; until then the kernel keeps the signal pending.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_by_own_signal(worker: BaseProcess) -> None:
    """Makes `worker.terminate()`, which torch and the exit of this process call, end a worker that ignores SIGTERM."""
    # a weak proxy: in a cycle of references, the pipes of a worker that has ended would stay open
    popen: Any = weakref.proxy(worker._popen)  # type: ignore[attr-defined]
    popen.terminate = lambda: popen._send_signal(_END_WORKER)


def ignore_signals(worker: int = 0) -> None:  # noqa: ARG001 - torch calls a worker_init_fn with the worker's number
    """Makes a worker process ignore stop signals, and exit when its rank does. For `worker_init_fn`."""
    for number in STOP_SIGNALS:
        ignore_signal(number)
    if _END_WORKER != signal.SIGKILL:
        signal.signal(_END_WORKER, _exit_worker)
    # nothing else ends a worker whose rank was killed
    if (rank := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_exit_with, args=(rank.sentinel,), name="headway worker", daemon=True).start()
    os.register_at_fork(after_in_child=_restore_defaults)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)


def ignore_run_signals() -> None:
    """Makes a process that a rank has started in `block_signals` ignore all signals that are meant for the run."""
    for number in STOP_SIGNALS:
        ignore_signal(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)


def ignore_signal(number: int) -> None:
    """Ignores a signal in this process only; it interrupts no system call, not even one of a C library."""
    signal.signal(number, lambda *_: None)
    signal.siginterrupt(number, False)


def _restore_defaults() -> None:
    for number in (*STOP_SIGNALS, _END_WORKER):
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)


def _exit_worker(*_: object) -> None:
    os._exit(0)  # torch reports a worker that a signal has ended as a failure


def _exit_with(sentinel: int) -> None:
    """Kills this process when the rank exits. The kernel's parent-death signal would watch the fork server instead."""
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


replaced: dict[signal.Signals, Any] = {}
"""the handlers that `stop` has replaced, while its own are installed"""


def reset_in_child() -> None:
    """Lets SIGTERM and SIGHUP end a forked child again, and ignores stop requests: else it would act for the rank."""
    for number in STOP_REQUESTS:
        ignore_signal(number)
    for number in replaced.keys() & {signal.SIGTERM, signal.SIGHUP}:
        signal.signal(number, signal.SIG_DFL)


def ignore_termination() -> None:
    """Keeps this process alive until it has reported: torchrun and mpirun end all ranks when the first one exits.

    Through the C library, because Python allows it in the main thread only, which may be stuck in a collective.
    """
    for number in (signal.SIGTERM, *STOP_REQUESTS):
        ctypes.CDLL(None).signal(number, ctypes.c_void_p(signal.SIG_IGN))
