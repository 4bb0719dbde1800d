"""Starts data workers, which ignore the rank's signals, and seeds random numbers by sample.

A worker that returns no batch for a minute is named in the log, with its stack or the command that resumes it. A batch
that a worker cannot send is an error.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import queues, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, final

import numpy as np
import psutil
import torch
from torch._utils import ExceptionWrapper
from torch.utils import data as torch_data
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from headway.dist.control import server_child
from headway.dist.control.signals import block_signals, end_by_own_signal, ignore_signals
from headway.system import environment
from headway.system.log import logger

_POLL_PERIOD_S = 5.0
"""how often a loop that waits for a worker checks that it is alive"""
_SILENT_S = 60.0
"""how long a worker may take for a batch before a warning; the next warning comes after twice that time, and so on"""
_MAX_PATH_CHARS = 75
"""length of a directory in which a socket can be created: the whole path has at most 107 characters"""


def open_workers(loader: torch_data.DataLoader[Any]) -> Iterator[Any]:
    """Returns `iter(loader)` of torch's loader, whose `worker_init_fn` is a `WorkerInit`; workers end with the rank."""
    if not loader.num_workers:
        return iter(loader)
    _make_temp_dir()
    context = loader.multiprocessing_context or multiprocessing.get_context()
    if context.get_start_method() != "fork":
        with block_signals():  # a separate block: Python unblocks signals when it has started the tracker
            resource_tracker.ensure_running()
    if context.get_start_method() == "forkserver":
        server_child.preload()  # processes of the user are forked from the server, too
    with block_signals():  # workers start with these signals blocked, which are meant for the rank
        batches = iter(loader)
    workers = getattr(batches, "_workers", None)  # a subclass may have an iterator of its own
    for worker in workers if isinstance(workers, list) else ():
        if isinstance(worker, BaseProcess):
            end_by_own_signal(worker)
    if isinstance(batches, _MultiProcessingDataLoaderIter) and not loader.timeout:
        vars(batches)["_try_get_data"] = _SilenceWatch(batches).try_get_data
    return batches


def _make_temp_dir() -> None:
    """Makes one directory for the sockets through which torch sends batches, so that workers do not make their own.

    A worker that is killed would leave its directory behind. This one is removed with the rank, or with its node agent.
    If another program has removed it, such as one that cleans /tmp, it is made again.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if (directory := config.get("tempdir")) is not None and not Path(directory).is_dir():
        config["tempdir"] = None
    agent = environment.directory(environment.HEARTBEAT)
    if config.get("tempdir") is None and agent and agent.is_dir() and len(str(agent)) < _MAX_PATH_CHARS:
        config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=agent)
    get_temp_dir()


@final
class _SilenceWatch:
    """Warns of the worker whose batch a loop waits for. It does not own the workers, which end with their loop."""

    def __init__(self, batches: Any) -> None:
        self._batches = weakref.ref(batches)
        self._polls, self._next_s = 0, _SILENT_S

    def try_get_data(self) -> tuple[bool, Any]:
        """Replaces a method of torch's iterator. It counts polls, not time, because a job may have been suspended."""
        batches: Any = self._batches()
        found: tuple[bool, Any] = type(batches)._try_get_data(batches, _POLL_PERIOD_S)
        if found[0]:
            self._polls, self._next_s = 0, _SILENT_S
            return found
        self._polls += 1
        if (waited := self._polls * _POLL_PERIOD_S) >= self._next_s:
            self._next_s = 2 * waited
            self._report(batches, waited)
        return found

    def _report(self, batches: Any, waited: float) -> None:
        number = batches._task_info.get(batches._rcvd_idx, (0,))[0]  # the first, while persistent ones resume
        pid = batches._workers[number].pid
        state = _describe_state(pid)
        is_stopped = state == psutil.STATUS_STOPPED  # it would write its stack only when it is resumed
        dumps_stack = not is_stopped and _writes_stack(pid)
        hint = (
            f"; kill -CONT {pid} resumes it" if is_stopped else "; its stack follows" if dumps_stack else ""
        )
        logger.warning(
            "data worker %d (pid %d, %s) has returned no batch for %.0f s%s", number, pid, state, waited, hint
        )
        if dumps_stack:
            with suppress(ProcessLookupError):  # it has just ended, and torch raises that
                os.kill(pid, signal.SIGQUIT)


def _describe_state(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return "ended"


def _writes_stack(pid: int) -> bool:
    """Whether a process handles SIGQUIT, as workers do once they have started; the signal would end any other."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGQUIT - 1) & 1)
    return False


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restores the random state of the training process afterwards, because it belongs to the model."""
    if torch_data.get_worker_info() is not None:
        yield
        return
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def rng_states() -> tuple[bytes, object, object]:
    """Returns the states of the random number generators of torch, random and numpy, for comparison."""
    _, words, *rest = np.random.get_state(legacy=True)
    drawn_by_numpy = np.asarray(words).tobytes(), *rest
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), drawn_by_numpy


def reseed(seed: int) -> None:
    """Seeds torch, random and numpy; not by `torch.manual_seed`, which queues work for a GPU that is never used."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed >> 32)


@final
class WorkerInit:
    """The `worker_init_fn` of torch's loader; an object, because workers that are not forks receive it by pickle."""

    ignores_signals = True

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self._user_init = user_init

    def __call__(self, worker: int) -> None:
        gc.freeze()  # garbage of the rank may hold CUDA tensors, and freeing one in a fork aborts the process
        ignore_signals(worker)
        # the rank sends it to a silent worker
        faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)
        queues.Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]
        if self._user_init is not None:
            self._user_init(worker)


def _send_error(queue: queues.Queue[Any], error: Exception, item: Any) -> None:
    """Sends the error in place of a batch that cannot be sent. Python drops both, and the rank would wait forever."""
    traceback.print_exception(error)
    number, batch = item if isinstance(item, tuple) and len(item) == 2 else (None, None)
    if isinstance(number, int) and not isinstance(batch, ExceptionWrapper):
        info = torch_data.get_worker_info()
        where = f"when data worker {info.id if info else 0} sent a batch to its rank"
        cause: Any = ExceptionWrapper((type(error), error, error.__traceback__), where)  # type: ignore[no-untyped-call]
        queue.put((number, cause))
    elif isinstance(batch, ExceptionWrapper):  # the error cannot be sent either
        os._exit(1)
