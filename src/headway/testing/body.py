"""A test as a rank sees it: imported as pytest does it, and called with what pytest's process made for it."""

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

from headway.testing.protocol import Task, WarningFilter


def load(config: pytest.Config, task: Task) -> Callable[[], None]:
    """Finds the test and unpacks its arguments; returns what is left to do: to call it."""
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
    died: list[threading.ExceptHookArgs] = []
    with _filtered_warnings(filters), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(threading, "excepthook", died.append)
        if "monkeypatch" in arguments:
            arguments["monkeypatch"] = monkeypatch  # one that patches this process, and undoes it here
        test(**arguments)
        for end in died:  # a warning, as in any other test
            story = traceback.format_exception(end.exc_type, end.exc_value, end.exc_traceback)
            text = f"in thread {end.thread.name if end.thread else '?'}\n\n{''.join(story)}"
            warnings.warn(pytest.PytestUnhandledThreadExceptionWarning(text), stacklevel=1)


def _import(config: pytest.Config, file: str) -> Any:
    __tracebackhide__ = True
    return import_path(
        file,
        mode=config.getoption("importmode"),
        root=config.rootpath,
        consider_namespace_packages=config.getini("consider_namespace_packages"),
    )


def _unpack(config: pytest.Config, task: Task, data: bytes) -> Any:
    __tracebackhide__ = True
    return _Unpickler(config, task, data).load()


@final
class _Unpickler(pickle.Unpickler):
    """Reads what pytest's process wrote. Knows the classes of a conftest.py, which cannot be imported by name."""

    def __init__(self, config: pytest.Config, task: Task, data: bytes) -> None:
        super().__init__(BytesIO(data))
        self._config = config
        self._conftests = task.conftests

    def find_class(self, module: str, name: str) -> Any:
        if module in self._conftests and module not in sys.modules:
            _import(self._config, self._conftests[module])
        return super().find_class(module, name)


@contextmanager
def _filtered_warnings(filters: list[WarningFilter]) -> Iterator[None]:
    """The warning filters that pytest had in force for this test."""
    __tracebackhide__ = True
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(filters):
            warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line)
        yield


def _pattern(part: re.Pattern[str] | str | None) -> str:
    return "" if part is None else part if isinstance(part, str) else part.pattern
