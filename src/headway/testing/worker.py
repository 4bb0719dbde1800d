"""A rank that runs tests: a fresh interpreter that joins the group once and serves pytest's process until it ends."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import re
import resource
import signal
import sys
import threading
import unittest
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from io import BytesIO, StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, final

import pytest
from _pytest import assertion
from _pytest._code.code import Traceback
from _pytest._io import TerminalWriter
from _pytest.config import _prepareconfig
from _pytest.pathlib import import_path

from headway import failpoints
from headway.testing import leaks
from headway.testing.protocol import Outcome, Report, Start, Task


def main(fd: int) -> None:
    """Serves tests that come through `fd` until told to stop, or until pytest's process is gone."""
    connection: Connection[Any, Any] = Connection(fd)
    os.register_at_fork(after_in_child=connection.close)  # else a child of ours would hide our death
    start: Start = connection.recv()
    faulthandler.enable(file=start.stack_fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    tasks: SimpleQueue[Task | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, tasks), name="headway tasks", daemon=True).start()
    inherited = dict(os.environ)
    os.environ.update(start.variables)
    config = _configure(list(start.pytest_args))
    _join()
    own = {name: value for name, value in os.environ.items() if inherited.get(name) != value}
    rank = _Rank(config=config, own_variables=own)
    connection.send(Report(outcome="passed", reason="", text="", collectives=0, reusable=True))
    for task in iter(tasks.get, None):
        connection.send(rank.run(task))
    _leave()


def _listen(connection: Connection[Any, Any], tasks: SimpleQueue[Task | None]) -> None:
    """Pytest may be killed at any moment; then nobody wants this rank, or anything it started."""
    while True:
        try:
            tasks.put(connection.recv())
        except EOFError:
            os.killpg(0, signal.SIGKILL)


def _join() -> None:
    from headway import dist

    dist.init(device="cpu", setup_timeout=100.0)
    del os.environ["HEADWAY_RENDEZVOUS"]  # the meeting is over and its folder will be gone


def _leave() -> None:
    from headway import dist

    dist.leave()


def _collectives() -> int:
    """How many collectives this rank took part in, or -1 if there is no group any more."""
    import torch.distributed as c10d

    if not c10d.is_initialized():
        return -1
    group = c10d.group.WORLD
    assert group is not None
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def _configure(args: list[str]) -> pytest.Config:
    """A pytest of our own: none of its tests, all of its assertion rewriting and its way of telling failures."""
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
    own_variables: Mapping[str, str]

    def run(self, task: Task) -> Report:
        self._prepare(task)
        report = self._attempt(task)
        sys.stdout.flush()
        sys.stderr.flush()
        return report

    def _prepare(self, task: Task) -> None:
        """Gives the test the surroundings that its fixtures made in pytest's process."""
        failpoints.forget_calls()
        wanted = {**task.environ, **self.own_variables}
        for name in os.environ.keys() - wanted.keys():
            del os.environ[name]
        for name, value in wanted.items():
            if os.environ.get(name) != value:  # other threads may be reading: touch only what differs
                os.environ[name] = value
        os.chdir(task.cwd)
        sys.path[:] = task.path
        pytest.register_assert_rewrite(*(task.rewrite - sys.modules.keys()))

    def _attempt(self, task: Task) -> Report:
        before: list[leaks.Snapshot] = []
        call = pytest.CallInfo.from_call(partial(_call, self.config, task, before), when="call")
        outcome: Outcome = "passed"
        reason = text = ""
        if call.excinfo is not None:
            outcome, reason = _outcome(call.excinfo)
            text = self._tell(call.excinfo, task)
        del call  # a traceback keeps the frames of the test, and all they hold, alive
        gc.collect()
        left = leaks.since(before[0]) if before and task.leaks else []
        if left and outcome == "passed":
            outcome, reason, text = "failed", f"left {left[0]} behind", leaks.describe(left)
        collectives = _collectives()
        return Report(
            outcome=outcome,
            reason=reason,
            text=text,
            collectives=collectives,
            reusable=not left and collectives >= 0,
        )

    def _tell(self, excinfo: pytest.ExceptionInfo[BaseException], task: Task) -> str:
        value = excinfo.value
        os.chdir(self.config.invocation_params.dir)  # pytest names files as seen from where it was started
        option = self.config.option
        style: Any = (
            "value" if isinstance(value, pytest.fail.Exception) and not value.pytrace else option.tbstyle
        )
        representation = excinfo.getrepr(
            funcargs=True,
            abspath=False,
            showlocals=option.showlocals,
            style="long" if style == "auto" else style,
            tbfilter=False if option.fulltrace else partial(_trim, Path(task.module_file)),
            truncate_locals=self.config.get_verbosity() <= 1,
        )
        text = StringIO()
        representation.toterminal(TerminalWriter(text))
        return text.getvalue()


def _outcome(excinfo: pytest.ExceptionInfo[BaseException]) -> tuple[Outcome, str]:
    match excinfo.value:
        case pytest.skip.Exception() | unittest.SkipTest():
            return "skip", str(excinfo.value)
        case pytest.xfail.Exception():
            return "xfail", str(excinfo.value)
        case pytest.exit.Exception():
            return "exit", str(excinfo.value)
    return "failed", excinfo.exconly(tryshort=True).partition("\n")[0]


def _trim(test_file: Path, excinfo: pytest.ExceptionInfo[BaseException]) -> Traceback:
    """From the test on, without pytest's frames and ours; what lies between first and last in short, as pytest does."""
    entries = excinfo.traceback.cut(path=test_file).filter(excinfo)
    between = (entry.with_repr_style("short") for entry in entries[1:-1])
    return Traceback((entries[0], *between, entries[-1])) if len(entries) > 2 else entries


def _call(config: pytest.Config, task: Task, before: list[leaks.Snapshot]) -> None:
    __tracebackhide__ = True
    module = sys.modules.get(task.module_name) or _import(config, task.module_file)
    arguments = {name: _unpickle(config, task, value) for name, value in task.arguments.items()}
    *parents, name = task.qualname.split(".")
    owner: Any = reduce(getattr, parents, module)
    if task.attributes is not None:
        owner = owner()
        vars(owner).update({key: _unpickle(config, task, value) for key, value in task.attributes.items()})
    before.append(leaks.snapshot(shared_memory=False))
    with _warnings_as(config, task), _own_monkeypatch(arguments):
        getattr(owner, name)(**arguments)


def _import(config: pytest.Config, file: str) -> Any:
    __tracebackhide__ = True
    return import_path(
        file,
        mode=config.getoption("importmode"),
        root=config.rootpath,
        consider_namespace_packages=config.getini("consider_namespace_packages"),
    )


@final
class _Unpickler(pickle.Unpickler):
    """Reads bytes that pytest's process wrote; finds classes of a conftest.py, which cannot be imported by name."""

    def __init__(self, config: pytest.Config, task: Task, data: bytes) -> None:
        super().__init__(BytesIO(data))
        self._config = config
        self._conftests = task.conftests

    def find_class(self, module: str, name: str) -> Any:
        if module in self._conftests and module not in sys.modules:
            _import(self._config, self._conftests[module])
        return super().find_class(module, name)


def _unpickle(config: pytest.Config, task: Task, data: bytes) -> Any:
    __tracebackhide__ = True
    return _Unpickler(config, task, data).load()


@contextmanager
def _own_monkeypatch(arguments: dict[str, Any]) -> Iterator[None]:
    """A `monkeypatch` that patches this process and undoes it here."""
    __tracebackhide__ = True
    if "monkeypatch" not in arguments:
        yield
        return
    with pytest.MonkeyPatch.context() as arguments["monkeypatch"]:
        yield


@contextmanager
def _warnings_as(config: pytest.Config, task: Task) -> Iterator[None]:
    """The warning filters that pytest had in force for this test."""
    __tracebackhide__ = True
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(_unpickle(config, task, task.warnings)):
            warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line)
        yield


def _pattern(part: re.Pattern[str] | str | None) -> str:
    return "" if part is None else part if isinstance(part, str) else part.pattern
