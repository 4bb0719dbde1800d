"""Sends Python objects to a job and back: a function with its arguments, and what it returned.

Loading a pickle can run code, and headway reads pickle files only here. That gives nobody more rights: the files are in
the run directory, 0700, writable by their owner only (`unpack` checks that), next to the code that the same job runs.
Whoever could put a pickle there could change that code as well. Checkpoints, metrics, records and other files that may
come from other people are never read here.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from types import FunctionType
from typing import Any

from headway.errors import HeadwayError, MissingExtra, UsageError
from headway.system import files, ownership


def pack(value: object, *, what: str) -> bytes:
    """Pickles a value. Functions and classes that can be imported are sent by name; others need cloudpickle.

    >>> pack((max, (1, 2)), what="max and its arguments")[:1]
    b'\\x80'
    """
    try:
        return _dumps(value)
    except UsageError:
        raise
    except Exception as error:  # the classes are the user's, and so is what they raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(
            f"{what} cannot be sent to another process ({reason:.200}); leave out what belongs to this process, "
            "such as open files, locks and generators"
        ) from error


def unpack(path: Path, *, what: str) -> Any:
    """Reads a pickle that belongs to this user and that nobody else could have written."""
    with files.storage(f"read {what} from {path}"):
        data = ownership.read_private(path)
    return _open(data, what=what)


def pack_and_open(value: object, *, what: str) -> tuple[bytes, Any]:
    """Pickles a value and loads it again, so that the caller can compare the two.

    >>> pack_and_open([1, 2], what="a list")[1]
    [1, 2]
    """
    data = pack(value, what=what)
    return data, _open(data, what=what)


def _open(data: bytes, *, what: str) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:  # as above, and what is damaged may look like anything
        raise HeadwayError(
            f"{what} cannot be opened here ({type(error).__name__}: {error}); send what both sides can import"
        ) from error


def _dumps(value: object) -> bytes:
    try:
        import cloudpickle
    except ModuleNotFoundError:
        buffer = io.BytesIO()
        _ByNamePickler(buffer).dump(value)
        return buffer.getvalue()
    data: bytes = cloudpickle.dumps(value)
    return data


class _ByNamePickler(pickle.Pickler):
    """Refuses functions and classes that another process could not import."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, FunctionType | type) and (
            value.__module__ == "__main__" or "<" in value.__qualname__  # <locals>, <lambda>
        ):
            purpose = f"to send {value.__qualname__}, which other processes cannot import,"
            raise MissingExtra("cloudpickle", extra="launch", purpose=purpose)
        return NotImplemented
