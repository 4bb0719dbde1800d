"""A rank that runs tests: a fresh interpreter that joins the group once and serves pytest's process until that ends."""

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
from headway.testing.protocol import Outcome, Report, Start, Task


def main(fd: int) -> None:
    """Becomes a rank, and serves the tests that come through `fd` until told to stop."""
    connection: Connection[Any, Any] = Connection(fd)
    os.register_at_fork(after_in_child=connection.close)  # else a child of ours would hide our death
    start: Start = connection.recv()
    tasks: SimpleQueue[Task | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, tasks), name="headway tasks", daemon=True).start()
    faulthandler.enable(file=start.stack_fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    inherited = dict(os.environ)
    os.environ.update(start.variables)
    config = _configure(list(start.pytest_args))
    from headway import dist  # not before: torch counts its threads, OMP_NUM_THREADS, when it is imported

    dist.init(device="cpu", setup_timeout=100.0)
    del os.environ[environment.RENDEZVOUS]  # the meeting is over, and its folder will be gone
    names = inherited.keys() | os.environ.keys()
    own = {name: os.environ.get(name) for name in names if inherited.get(name) != os.environ.get(name)}
    rank = _Rank(config=config, own_variables=own)
    connection.send(Report(outcome="passed", reason="", text="", collectives=0, reusable=True))
    for task in iter(tasks.get, None):
        connection.send(rank.run(task))
    dist.leave()


def _listen(connection: Connection[Any, Any], tasks: SimpleQueue[Task | None]) -> None:
    """Passes tasks on. Pytest may be killed at any moment; then nobody wants this rank, nor anything it started."""
    with suppress(EOFError, OSError):  # OSError: it died before it read our last report
        while True:
            tasks.put(connection.recv())
    for child in psutil.Process().children(recursive=True):
        if leaks.is_resource_tracker(child):
            continue  # it removes our shared memory when we are gone, and then ends itself
        with suppress(psutil.Error):
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _configure(args: list[str]) -> pytest.Config:
    """A pytest that runs no tests, but has the real one's assertion rewriting and its way to tell failures."""
    config = _prepareconfig(args)
    item = SimpleNamespace(config=config, ihook=config.hook)
    explain = assertion.pytest_runtest_protocol(item)  # type: ignore[arg-type]
    next(explain)  # its first half makes `assert a == b` explain itself; its second half would undo that
    config.add_cleanup(explain.close)  # which also keeps it alive
    return config


@final
@dataclass(frozen=True, kw_only=True)
class _Rank:
    config: pytest.Config
    own_variables: Mapping[str, str | None]
    """what joining has set, or removed (None): it stays so, whatever pytest's process has"""

    def run(self, task: Task) -> Report:
        self._prepare(task)
        before = leaks.snapshot(shared_memory=False, except_variables=self.own_variables)
        outcome, reason, text = self._attempt(task)
        left = leaks.since(before)
        if left and outcome == "passed" and task.leaks:
            outcome, reason, text = "failed", f"left {left[0]} behind", leaks.describe(left)
        collectives = _collectives()
        reusable = not left and collectives >= 0
        sys.stdout.flush()
        sys.stderr.flush()
        return Report(outcome=outcome, reason=reason, text=text, collectives=collectives, reusable=reusable)

    def _prepare(self, task: Task) -> None:
        """Gives the test the surroundings that its fixtures made in pytest's process."""
        wanted = {**task.environ, **self.own_variables}
        for name in os.environ.keys() | wanted.keys():
            value = wanted.get(name)
            if value is None:
                os.environ.pop(name, None)
            elif os.environ.get(name) != value:  # other threads may be reading: touch only what differs
                os.environ[name] = value
        os.chdir(task.cwd)
        sys.path[:] = task.path
        pytest.register_assert_rewrite(*(task.rewrite - sys.modules.keys()))
        failpoints.reset_calls()

    def _attempt(self, task: Task) -> tuple[Outcome, str, str]:
        """Loads and calls the test. Its traceback, and all that its frames hold, dies with this call."""
        loading = pytest.CallInfo.from_call(partial(body.load, self.config, task), when="setup")
        if loading.excinfo is not None:
            return self._tell(loading.excinfo, task)
        call = pytest.CallInfo.from_call(loading.result, when="call")
        if call.excinfo is not None:
            return self._tell(call.excinfo, task)
        return "passed", "", ""

    def _tell(self, excinfo: pytest.ExceptionInfo[BaseException], task: Task) -> tuple[Outcome, str, str]:
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
        os.chdir(self.config.invocation_params.dir)  # pytest names files as seen from where it was started
        trim = partial(_trim, Path(task.module_file))
        told = excinfo.getrepr(
            funcargs=True,
            showlocals=self.config.option.showlocals,
            style=style if trim(excinfo) else "value",
            tbfilter=False if self.config.option.fulltrace else trim,
            truncate_locals=self.config.get_verbosity() <= 1,
        )
        text = StringIO()
        told.toterminal(TerminalWriter(text))
        return "failed", excinfo.exconly(tryshort=True).partition("\n")[0], text.getvalue()


def _trim(test_file: Path, excinfo: pytest.ExceptionInfo[BaseException]) -> Traceback:
    """From the test on, without pytest's frames and ours; what lies between first and last in short, as pytest does."""
    entries = excinfo.traceback.cut(path=test_file).filter(excinfo).filter(filter_traceback)
    between = (entry.with_repr_style("short") for entry in entries[1:-1])
    return Traceback((entries[0], *between, entries[-1])) if len(entries) > 2 else entries


def _collectives() -> int:
    """How many collectives this rank has taken part in, or -1 if it is in no group any more."""
    import torch.distributed as c10d

    group = c10d.group.WORLD if c10d.is_initialized() else None
    return int(group._get_sequence_number_for_group()) if group else -1  # type: ignore[attr-defined]
