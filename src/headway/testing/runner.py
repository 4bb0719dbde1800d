"""Makes a task for ranks from a pytest item, and one report from their results."""

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
from headway.testing.pool import RankPools
from headway.testing.process import RankResult
from headway.testing.protocol import RankTask

_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError)


def _skip(reason: str) -> NoReturn:
    raise pytest.skip.Exception(reason, _use_item_location=True)  # pytest shows the test's line, not this one


_ENDS: Mapping[str, Callable[[str], NoReturn]] = {
    "exit": pytest.exit,
    "xfail": pytest.xfail,
    "skip": _skip,
}


def check(item: pytest.Item) -> None:
    """Fails tests that would silently run in pytest's own process instead of on ranks."""
    if not isinstance(item, pytest.Function) or (item.cls and issubclass(item.cls, unittest.TestCase)):
        pytest.fail(
            "@ranks works on plain test functions and methods, not on unittest.TestCase", pytrace=False
        )
    if inspect.iscoroutinefunction(item.obj):
        pytest.fail("@ranks works on plain functions: call asyncio.run() inside the test", pytrace=False)


def run(item: pytest.Function, pools: RankPools) -> None:
    """Runs the test on its ranks, and passes, fails or skips as they did."""
    __tracebackhide__ = True
    settings = marks.find(item)
    assert settings is not None
    before = leaks.own_shared_memory()
    try:
        task = _task(item, settings)
        pool = pools.get(settings.nproc, _pytest_args(item.config), item.config.invocation_params.dir)
    except (UsageError, RankFailure) as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    try:
        results = pool.run(task, settings.timeout)
    finally:
        if not pool.reusable:
            pools.discard(pool)
    _show_output(item, results)
    _raise_outcome(results)
    if settings.leaks and (left := leaks.shared_memory_since(before)):
        pytest.fail(leaks.describe(left), pytrace=False)


def _task(item: pytest.Function, settings: marks.RanksMark) -> RankTask:
    module = item.module
    name = item.originalname
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    if "monkeypatch" in arguments:
        arguments["monkeypatch"] = None  # each rank makes its own
    attributes = vars(item.instance) if item.cls else None
    hook = item.config.pluginmanager.rewrite_hook
    return RankTask(
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
    """Pickles each value by itself, so that an error names the one that cannot be sent."""
    sent = {}
    for name, value in values.items():
        try:
            sent[name] = pickle.dumps(value)
        except _UNPICKLABLE as error:
            raise UsageError(
                f"{kind} {name!r} cannot be sent to the ranks, because its value, a {type(value).__name__}, "
                f"cannot be pickled ({error}): make it inside the test, or pass plain data"
            ) from None
    return sent


def _conftests(config: pytest.Config) -> dict[str, str]:
    plugins = (plugin for plugin in config.pluginmanager.get_plugins() if isinstance(plugin, ModuleType))
    files = {plugin.__name__: plugin.__file__ or "" for plugin in plugins}
    return {name: file for name, file in files.items() if Path(file).name == "conftest.py"}


def _pytest_args(config: pytest.Config) -> list[str]:
    """Returns the options with which a rank's pytest imports tests and reports failures as this one does."""
    option = config.option
    ini = [f"python_files={' '.join(config.getini('python_files'))}"]
    ini.append(f"consider_namespace_packages={config.getini('consider_namespace_packages')}")
    args = ["-c", os.devnull, "--rootdir", str(config.rootpath), "--noconftest"]
    args += ["--import-mode", option.importmode, "--assert", option.assertmode, "--tb", option.tbstyle]
    args += [part for setting in ini for part in ("-o", setting)]
    args += ["--showlocals"] if option.showlocals else []
    args += ["--full-trace"] if option.fulltrace else []
    return [*args, "--verbosity", str(option.verbose)]


def _show_output(item: pytest.Item, results: list[RankResult]) -> None:
    for stream in ("stdout", "stderr"):
        for names, text in hang.group_equal((result.rank, getattr(result, stream)) for result in results):
            if not text:
                continue
            if item.config.getoption("capture") == "no":
                print(f"--- {stream} of {names}\n{text}", end="", file=getattr(sys, stream))
            else:
                item.add_report_section("call", f"{stream} of {names}", text)


def _raise_outcome(results: list[RankResult]) -> None:
    """Raises the outcome of the ranks: failed if one of them failed by itself; else exited, xfailed or skipped."""
    __tracebackhide__ = True
    released = [result for result in results if result.released]
    failed = [r for r in results if not r.released and (r.report is None or r.report.outcome == "failed")]
    if failed:
        pytest.fail(_report(failed, released, len(results)), pytrace=False)
    for outcome, end in _ENDS.items():
        reasons = ((r.rank, r.report.reason) for r in results if r.report and r.report.outcome == outcome)
        for names, reason in hang.group_equal(reasons):
            end(reason if names == hang.format_ranks(range(len(results))) else f"{reason} (on {names})")
    if released:  # ended because of a rank that reports no failure
        pytest.fail(_report(released, [], len(results)), pytrace=False)


def _report(failed: list[RankResult], released: list[RankResult], nproc: int) -> str:
    """Formats one report for all ranks; ranks with the same text share it."""
    names, reason = hang.group_equal((r.rank, r.report.reason if r.report else r.problem) for r in failed)[0]
    parts = [f"{names} of {nproc}: {reason}"]
    for results in (failed, released):
        for names, text in hang.group_equal((result.rank, _details(result)) for result in results):
            if text.strip() != reason:  # else the first line says it all
                parts.append(f"{names}:{text}")
    return "\n\n".join(parts)


def _details(result: RankResult) -> str:
    if result.report is not None:
        return "\n" + result.report.text.strip("\n")
    stack = hang.trim_stack(result.stack)
    return f" {result.problem}" + (f"; most recent call first:\n{stack}" if stack else "")
