"""A rank that runs tests: a process that joins the group once, and then runs the tests that it receives."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import threading
import unittest
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, final

import psutil
import pytest
from _pytest import assertion
from _pytest._code.code import Traceback, filter_traceback
from _pytest._io import TerminalWriter
from _pytest.config import _prepareconfig

from headway.system import environment, failpoints
from headway.testing import body, leaks
from headway.testing.protocol import CallOutcome, RankReport, RankTask, WorkerSetup


def main(fd: int, stack_fd: int) -> None:
    """Becomes a rank, and runs the tests that it receives through `fd`, until it receives None.

    If this process crashes or is aborted, its stack is written to `stack_fd`.
    """
    connection: Connection[Any, Any] = Connection(fd)
    # a child must not keep the connection open after the end of this process
    os.register_at_fork(after_in_child=connection.close)
    start: WorkerSetup = connection.recv()
    tasks: SimpleQueue[RankTask | None] = SimpleQueue()
    threading.Thread(
        target=_receive_tasks, args=(connection, tasks), name="headway tasks", daemon=True
    ).start()
    faulthandler.enable(file=stack_fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    inherited = dict(start.environ)
    os.environ.clear()
    os.environ.update({**inherited, **start.variables})
    config = _configure(list(start.pytest_args))
    from headway import dist  # not before: a torch that is imported here reads OMP_NUM_THREADS

    dist.init(device="cpu", setup_timeout=100.0)
    del os.environ[environment.RENDEZVOUS]  # its directory is removed after the rendezvous
    names = inherited.keys() | os.environ.keys()
    own = {name: os.environ.get(name) for name in names if inherited.get(name) != os.environ.get(name)}
    rank = _RankWorker(config=config, own_variables=own)
    connection.send(RankReport(outcome="passed", reason="", text="", collectives=0, reusable=True))
    for task in iter(tasks.get, None):
        connection.send(rank.run(task))
    dist.leave()


def _receive_tasks(connection: Connection[Any, Any], tasks: SimpleQueue[RankTask | None]) -> None:
    """Queues the tasks that arrive. When pytest ends or is killed, kills this rank and its children."""
    with suppress(EOFError, OSError):  # OSError: pytest ended before it read the last report
        while True:
            tasks.put(connection.recv())
    for child in psutil.Process().children(recursive=True):
        if leaks.is_resource_tracker(child):
            continue  # it removes our shared memory after our end, and then ends by itself
        with suppress(psutil.Error):
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _configure(args: list[str]) -> pytest.Config:
    """Makes a pytest that runs no tests, but rewrites assertions and formats failures as the real one does."""
    config = _prepareconfig(args)
    item = SimpleNamespace(config=config, ihook=config.hook)
    explain = assertion.pytest_runtest_protocol(item)  # type: ignore[arg-type]
    next(explain)  # its first half makes `assert a == b` explain itself; its second half would undo that
    config.add_cleanup(explain.close)  # which also keeps it alive
    return config


@final
@dataclass(frozen=True, kw_only=True)
class _RankWorker:
    config: pytest.Config
    own_variables: Mapping[str, str | None]
    """set, or removed (None), when the rank joined: they override the variables of pytest's process"""

    def run(self, task: RankTask) -> RankReport:
        self._prepare(task)
        before = leaks.snapshot(shared_memory=False, except_variables=self.own_variables)
        outcome, reason, text = self._attempt(task)
        left = leaks.since(before)
        if left and outcome == "passed" and task.leaks:
            outcome, reason, text = "failed", f"left behind: {left[0]}", leaks.describe(left)
        collectives = _collectives()
        reusable = not left and collectives >= 0
        sys.stdout.flush()
        sys.stderr.flush()
        return RankReport(
            outcome=outcome, reason=reason, text=text, collectives=collectives, reusable=reusable
        )

    def _prepare(self, task: RankTask) -> None:
        """Sets the environment that fixtures made in pytest's process."""
        wanted = {**task.environ, **self.own_variables}
        for name in os.environ.keys() | wanted.keys():
            value = wanted.get(name)
            if value is None:
                os.environ.pop(name, None)
            elif os.environ.get(name) != value:  # other threads may be reading: change only what differs
                os.environ[name] = value
        os.chdir(task.cwd)
        sys.path[:] = task.path
        pytest.register_assert_rewrite(*(task.rewrite - sys.modules.keys()))
        failpoints.reset_calls()

    def _attempt(self, task: RankTask) -> tuple[CallOutcome, str, str]:
        """Loads and calls the test. Its traceback, and all that its frames hold, is freed when this returns."""
        loading = pytest.CallInfo.from_call(partial(body.load, self.config, task), when="setup")
        if loading.excinfo is not None:
            return self._describe(loading.excinfo, task)
        call = pytest.CallInfo.from_call(loading.result, when="call")
        if call.excinfo is not None:
            return self._describe(call.excinfo, task)
        return "passed", "", ""

    def _describe(
        self, excinfo: pytest.ExceptionInfo[BaseException], task: RankTask
    ) -> tuple[CallOutcome, str, str]:
        match excinfo.value:
            case pytest.skip.Exception() | unittest.SkipTest():
                return "skip", str(excinfo.value), ""
            case pytest.xfail.Exception():
                return "xfail", str(excinfo.value), ""
            case pytest.exit.Exception():
                return "exit", str(excinfo.value), ""
            case pytest.fail.Exception(pytrace=False):
                style: Any = "value"
            case _:
                style = self.config.option.tbstyle.replace("auto", "long")
        os.chdir(self.config.invocation_params.dir)  # pytest shows paths relative to this directory
        trim = partial(_trim, Path(task.module_file))
        shown = excinfo.getrepr(
            funcargs=True,
            showlocals=self.config.option.showlocals,
            style=style if trim(excinfo) else "value",
            tbfilter=False if self.config.option.fulltrace else trim,
            truncate_locals=self.config.get_verbosity() <= 1,
        )
        text = StringIO()
        shown.toterminal(TerminalWriter(text))
        return "failed", excinfo.exconly(tryshort=True).partition("\n")[0], text.getvalue()


def _trim(test_file: Path, excinfo: pytest.ExceptionInfo[BaseException]) -> Traceback:
    """Cuts a traceback to what follows the test, without pytest's frames; all but the first and last in short form."""
    entries = excinfo.traceback.cut(path=test_file).filter(excinfo).filter(filter_traceback)
    between = (entry.with_repr_style("short") for entry in entries[1:-1])
    return Traceback((entries[0], *between, entries[-1])) if len(entries) > 2 else entries


def _collectives() -> int:
    """Returns how many collectives this rank has taken part in, or -1 if it has left its group."""
    import torch.distributed as c10d

    group = c10d.group.WORLD if c10d.is_initialized() else None
    return int(group._get_sequence_number_for_group()) if group else -1  # type: ignore[attr-defined]
