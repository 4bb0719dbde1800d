"""Sends exceptions between ranks, as JSON and never as pickle."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from types import NoneType
from typing import Any

from headway.errors import RankFailure


class RemoteTraceback(Exception):
    """Carries the other rank's traceback, so that it is printed with the exception it belongs to."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"\n\non rank {rank}:\n{text}")


def pack(error: BaseException, rank: int) -> dict[str, Any]:
    """Turns an exception into JSON."""
    return {
        "rank": rank,
        "module": type(error).__module__,
        "name": type(error).__qualname__,
        "args": [arg if isinstance(arg, (str, int, float, NoneType)) else repr(arg) for arg in _args(error)],
        "text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def _args(error: BaseException) -> tuple[object, ...]:
    if isinstance(error, OSError) and error.filename is not None:
        return (*error.args, error.filename)  # Python keeps the name of the file out of the arguments
    return error.args


def unpack(packed: dict[str, Any]) -> BaseException:
    """Rebuilds an exception, of the same class if this process has it, with the original traceback as its cause.

    Only classes that this process has imported are looked up, and their __init__ is not run: a message can name an
    exception, but not execute anything.
    """
    found: Any = sys.modules.get(packed["module"])
    for part in packed["name"].split("."):
        found = getattr(found, part, None)
    error: BaseException = RankFailure(f"rank {packed['rank']} raised {packed['name']}: {packed['text']}")
    if isinstance(found, type) and issubclass(found, Exception):
        with suppress(TypeError):  # its __new__ takes other arguments: the RankFailure has its text
            error = _with_text(found.__new__(found, *packed["args"])) or error
    error.__cause__ = RemoteTraceback(packed["rank"], packed["traceback"])
    return error


def _with_text(error: BaseException) -> BaseException | None:
    """Returns the exception; None if it cannot be printed, because its text needs what `__init__` would have set."""
    try:
        str(error)
    except Exception:  # noqa: BLE001  whatever the class's own code raises
        return None
    return error
