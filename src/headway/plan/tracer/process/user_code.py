"""Loads the user's functions by name: `FILE.py:name` or `package.module:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any


class UserCodeError(Exception):
    """The user's function cannot be loaded or used; the message says why."""


def extend_import_path(paths: Iterable[str]) -> None:
    """Lets the user's code import what it imports in the process that asked for the trace.

    With `python -m project.train`, that is the current directory, in which this process does not search.
    """
    sys.path += [path for path in paths if path not in sys.path]


def load_function(reference: str) -> Callable[..., Any]:
    """Loads the function that a reference names."""
    place, _, name = reference.rpartition(":")
    try:
        found: Any = _module(place)
    except SystemExit as error:
        raise UserCodeError(
            f"{place} ended with code {error.code} before its function {name!r} could be called: loading a file "
            'executes it, so put what parses arguments and trains under if __name__ == "__main__":'
        ) from error
    for part in name.split("."):
        if part not in dir(found):
            raise UserCodeError(
                f"{place} has no function {name!r}; it has {', '.join(_functions(found)) or 'none'}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise UserCodeError(f"{reference} is not a function; expected FILE.py:function")
    function: Callable[..., Any] = found
    return function


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise UserCodeError(f"cannot import {place}: {error}") from error
    file = Path(place).resolve()
    if not file.is_file():
        raise UserCodeError(f"there is no file {place}; expected FILE.py:function")
    sys.path.insert(0, str(file.parent))
    name = file.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(file):
        name = str(file)  # another file, or a library, has this name
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserCodeError(f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _functions(module: Any) -> list[str]:
    own = vars(module).items()
    return [
        name for name, value in own if callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def call_batch_function(function: Callable[..., Any], batch_size: int | None) -> Any:
    """Calls a function that makes a batch, with the batch size if it takes one."""
    takes = [
        p
        for p in signature(function).parameters.values()
        if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    if takes and batch_size is not None:
        return function(batch_size)
    if any(p.default is Parameter.empty for p in takes):
        raise UserCodeError(f"{function.__name__} takes a batch size, and none is given; give batch_size")
    return function()
