"""Sends a sink from the training process to its own, as the name of its class and its settings in JSON.

No object is pickled. The feeding process imports the class: from its module, or, for a class of the training script,
from the script's file, which is imported under another name than `__main__`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import sys
from importlib.machinery import SourceFileLoader
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.errors import UsageError
from headway.record.sinks.base import Sink

_SCRIPT_MODULE = "__headway_main__"


def describe(sink: Sink) -> dict[str, Any]:
    """Returns a description from which another process makes the same sink. `UsageError` if that is not possible."""
    module, file = _module_of(type(sink))
    return {
        "module": module,
        "file": file,
        "class": type(sink).__qualname__,
        "settings": _settings(sink),
        "sys_path": sys.path,
    }


def make(description: dict[str, Any]) -> Sink:
    """Makes a sink from the description that `describe` returned in another process."""
    sys.path[:] = description["sys_path"]
    file = description["file"]
    module = _import_file(file) if file else importlib.import_module(description["module"])
    sink = attrgetter(description["class"])(module)(**description["settings"])
    assert isinstance(sink, Sink), sink
    return sink


def _module_of(cls: type[Sink]) -> tuple[str, str | None]:
    """Returns the module of the class, and its file if it is the script. Checks that the module has the class."""
    module = sys.modules.get(cls.__module__)
    try:
        found = attrgetter(cls.__qualname__)(module)
    except AttributeError:
        found = None
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    is_script = cls.__module__ == "__main__" and spec is None
    if found is not cls or (is_script and file is None):
        raise UsageError(
            f"sink {cls.__qualname__} cannot be imported from {cls.__module__}: define it at the top level of a file, "
            "so that the feeding process can import it"
        )
    if is_script:
        return _SCRIPT_MODULE, str(Path(file or "").absolute())
    return spec.name if spec else cls.__module__, None


def _settings(sink: Sink) -> dict[str, Any]:
    """Returns the fields of the dataclass. Paths become text, tuples lists."""
    cls = type(sink)
    definer = next(each for each in cls.__mro__ if "__init__" in each.__dict__)
    if definer is not object and "__dataclass_fields__" not in definer.__dict__:
        raise UsageError(
            f"sink {cls.__qualname__} has an __init__ of its own: make it a dataclass, whose fields the feeding "
            "process gets as JSON"
        )
    if definer is object:
        return {}
    fields = [field.name for field in dataclasses.fields(sink) if field.init]  # type: ignore[arg-type]
    settings = {}
    for name in fields:
        try:
            settings[name] = json.loads(json.dumps(getattr(sink, name), default=os.fspath))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{name}={getattr(sink, name)!r:.80} of sink {cls.__qualname__} cannot be written as JSON: use text, "
                "numbers, True, False, None, lists and dicts"
            ) from error
    return settings


def _import_file(file: str) -> ModuleType:
    loader = SourceFileLoader(_SCRIPT_MODULE, file)
    spec = importlib.util.spec_from_file_location(_SCRIPT_MODULE, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_SCRIPT_MODULE] = module  # dataclasses look up their module there
    loader.exec_module(module)
    return module
