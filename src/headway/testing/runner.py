"""From a pytest item to a task for ranks, and from their results to one report."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import unittest
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from headway.dist.failure import hang
from headway.errors import RankFailure, UsageError
from headway.testing import leaks, marks
from headway.testing.pool import Pools
from headway.testing.process import Result
from headway.testing.protocol import Task

_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError)


def _skip(reason: str) -> NoReturn:
    raise pytest.skip.Exception(reason, _use_item_location=True)  # the line to blame is the test's, not ours


_ENDS: Mapping[str, Callable[[str], NoReturn]] = {
    "exit": pytest.exit,
    "xfail": pytest.xfail,
    "skip": _skip,
}


def check(item: pytest.Item) -> None:
    """Refuses tests that would silently run in pytest's own process instead of on ranks."""
    if not isinstance(item, pytest.Function) or (item.cls and issubclass(item.cls, unittest.TestCase)):
        pytest.fail(
            "@ranks works on plain test functions and methods, not on unittest.TestCase", pytrace=False
        )
    if inspect.iscoroutinefunction(item.obj):
        pytest.fail("@ranks works on plain functions: call asyncio.run() inside the test", pytrace=False)


def run(item: pytest.Function, pools: Pools) -> None:
    """Runs the test on its ranks and ends as they did."""
    __tracebackhide__ = True
    settings = marks.find(item)
    assert settings is not None
    before = leaks.own_shared_memory()
    try:
        task = _task(item, settings)
        pool = pools.get(settings.n, _pytest_args(item.config), item.config.invocation_params.dir)
    except (UsageError, RankFailure) as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    try:
        results = pool.run(task, settings.timeout)
    finally:
        if pool.spoilt:
            pools.discard(pool)
    _show_output(item, results)
    _conclude(results)
    if settings.leaks and (left := leaks.shared_memory_since(before)):
        pytest.fail(leaks.describe(left), pytrace=False)


def _task(item: pytest.Function, settings: marks.Ranks) -> Task:
    module = item.module
    name = item.originalname
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    if "monkeypatch" in arguments:
        arguments["monkeypatch"] = None  # each rank makes its own
    attributes = vars(item.instance) if item.cls else None
    hook = item.config.pluginmanager.rewrite_hook
    return Task(
        module_file=str(item.path),
        module_name=module.__name__,
        qualname=f"{item.cls.__qualname__}.{name}" if item.cls else name,
        arguments=_pickled("fixture or parameter", arguments),
        attributes=_pickled("attribute", attributes) if attributes is not None else None,
        conftests=_conftests(item.config),
        environ=dict(os.environ),
        cwd=str(Path.cwd()),
        path=list(sys.path),
        rewrite=frozenset({module.__name__, *getattr(hook, "_must_rewrite", ())}),
        warnings=pickle.dumps(list(warnings.filters)),
        leaks=settings.leaks,
    )


def _pickled(kind: str, values: Mapping[str, Any]) -> dict[str, bytes]:
    """Each value by itself, so that the one that cannot be sent is named."""
    sent = {}
    for name, value in values.items():
        try:
            sent[name] = pickle.dumps(value)
        except _UNPICKLABLE as error:
            raise UsageError(
                f"{kind} {name!r} cannot be handed to the ranks, because its value, a {type(value).__name__}, "
                f"cannot be pickled ({error}): make it inside the test, or hand over plain data"
            ) from None
    return sent


def _conftests(config: pytest.Config) -> dict[str, str]:
    plugins = (plugin for plugin in config.pluginmanager.get_plugins() if isinstance(plugin, ModuleType))
    files = {plugin.__name__: plugin.__file__ or "" for plugin in plugins}
    return {name: file for name, file in files.items() if Path(file).name == "conftest.py"}


def _pytest_args(config: pytest.Config) -> list[str]:
    """What a rank's pytest must share with ours to import tests, and tell of their failures, in the same way."""
    option = config.option
    ini = [f"python_files={' '.join(config.getini('python_files'))}"]
    ini.append(f"consider_namespace_packages={config.getini('consider_namespace_packages')}")
    args = ["-c", os.devnull, "--rootdir", str(config.rootpath), "--noconftest"]
    args += ["--import-mode", option.importmode, "--assert", option.assertmode, "--tb", option.tbstyle]
    args += [part for setting in ini for part in ("-o", setting)]
    args += ["--showlocals"] if option.showlocals else []
    args += ["--full-trace"] if option.fulltrace else []
    return [*args, "--verbosity", str(option.verbose)]


def _show_output(item: pytest.Item, results: list[Result]) -> None:
    for stream in ("stdout", "stderr"):
        for names, text in hang.group_equal((result.rank, getattr(result, stream)) for result in results):
            if not text:
                continue
            if item.config.getoption("capture") == "no":
                print(f"--- {stream} of {names}\n{text}", end="", file=getattr(sys, stream))
            else:
                item.add_report_section("call", f"{stream} of {names}", text)


def _conclude(results: list[Result]) -> None:
    """Ends as the ranks did: failed if one of them failed by itself; else exited, failed as expected, or skipped."""
    __tracebackhide__ = True
    released = [result for result in results if result.released]
    failed = [r for r in results if not r.released and (r.report is None or r.report.outcome == "failed")]
    if failed:
        pytest.fail(_tell(failed, released, len(results)), pytrace=False)
    for outcome, end in _ENDS.items():
        told = ((r.rank, r.report.reason) for r in results if r.report and r.report.outcome == outcome)
        for names, reason in hang.group_equal(told):
            end(reason if names == hang.format_ranks(range(len(results))) else f"{reason} (said by {names})")
    if released:  # ended because of a rank that says that all is well
        pytest.fail(_tell(released, [], len(results)), pytrace=False)


def _tell(failed: list[Result], released: list[Result], n: int) -> str:
    """One report for all ranks; those that say the same say it together."""
    names, reason = hang.group_equal((r.rank, r.report.reason if r.report else r.problem) for r in failed)[0]
    parts = [f"{names} of {n}: {reason}"]
    for results in (failed, released):
        for names, text in hang.group_equal((result.rank, _story(result)) for result in results):
            if text.strip() != reason:  # else the first line has said it all
                parts.append(f"{names}:{text}")
    return "\n\n".join(parts)


def _story(result: Result) -> str:
    if result.report is not None:
        return "\n" + result.report.text.strip("\n")
    stack = hang.trim_stack(result.stack)
    return f" {result.problem}" + (f"; most recent call first:\n{stack}" if stack else "")
