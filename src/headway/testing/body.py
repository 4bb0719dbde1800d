"""Imports a test in a rank as pytest does, and calls it with the fixtures that pytest's process made."""

from __future__ import annotations

import pickle
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from io import BytesIO
from typing import Any, final

import pytest
from _pytest.pathlib import import_path

from headway.testing.protocol import RankTask, WarningFilter


def load(config: pytest.Config, task: RankTask) -> Callable[[], None]:
    """Finds the test and unpickles its arguments; returns a function that calls it."""
    __tracebackhide__ = True
    module = sys.modules.get(task.module_name) or _import(config, task.module_file)
    unpack = partial(_unpack, config, task)
    arguments = {name: unpack(value) for name, value in task.arguments.items()}
    *parents, name = task.qualname.split(".")
    owner: Any = reduce(getattr, parents, module)
    if task.attributes is not None:
        owner = owner()
        vars(owner).update({key: unpack(value) for key, value in task.attributes.items()})
    return partial(_call, getattr(owner, name), arguments, unpack(task.warnings))


def _call(test: Callable[..., object], arguments: dict[str, Any], filters: list[WarningFilter]) -> None:
    __tracebackhide__ = True
    failed_threads: list[threading.ExceptHookArgs] = []
    with _filtered_warnings(filters), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(threading, "excepthook", failed_threads.append)
        if "monkeypatch" in arguments:
            arguments["monkeypatch"] = monkeypatch  # one that patches this process
        test(**arguments)
        for end in failed_threads:  # pytest warns about them, too
            lines = traceback.format_exception(end.exc_type, end.exc_value, end.exc_traceback)
            text = f"in thread {end.thread.name if end.thread else '?'}\n\n{''.join(lines)}"
            warnings.warn(pytest.PytestUnhandledThreadExceptionWarning(text), stacklevel=1)


def _import(config: pytest.Config, file: str) -> Any:
    __tracebackhide__ = True
    return import_path(
        file,
        mode=config.getoption("importmode"),
        root=config.rootpath,
        consider_namespace_packages=config.getini("consider_namespace_packages"),
    )


def _unpack(config: pytest.Config, task: RankTask, data: bytes) -> Any:
    __tracebackhide__ = True
    return _Unpickler(config, task, data).load()


@final
class _Unpickler(pickle.Unpickler):
    """Unpickles values of pytest's process, even of classes in a conftest.py, which cannot be imported by name."""

    def __init__(self, config: pytest.Config, task: RankTask, data: bytes) -> None:
        super().__init__(BytesIO(data))
        self._config = config
        self._conftests = task.conftests

    def find_class(self, module: str, name: str) -> Any:
        if module in self._conftests and module not in sys.modules:
            _import(self._config, self._conftests[module])
        return super().find_class(module, name)


@contextmanager
def _filtered_warnings(filters: list[WarningFilter]) -> Iterator[None]:
    """Applies the warning filters that pytest has for this test."""
    __tracebackhide__ = True
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(filters):
            warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line)
        yield


def _pattern(part: re.Pattern[str] | str | None) -> str:
    return "" if part is None else part if isinstance(part, str) else part.pattern
