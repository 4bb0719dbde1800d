"""Sends exceptions back from a job: as a pickle if possible, else as class, text and traceback.

`rank-N.error.json` always describes what was raised, and `rank-N.error.pickle` beside it holds the exception with its
attributes. Pickle calls the class with `args`, which is wrong for a class whose `__init__` takes other arguments: so
the worker loads what it has pickled, and if that is not the same exception, it pickles class, arguments and attributes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headway.dist.failure import remote
from headway.errors import HeadwayError, UsageError
from headway.launcher.functions import pickled
from headway.system import files, ownership
from headway.system.jsonlines import parse_json
from headway.system.log import logger

_PICKLE, _JSON = ".error.pickle", ".error.json"


def error_files(directory: Path, rank: int) -> tuple[Path, Path]:
    """Returns the two files of a rank that raised: the pickle of the exception, and its description."""
    return directory / f"rank-{rank:05d}{_PICKLE}", directory / f"rank-{rank:05d}{_JSON}"


def write_error(directory: Path, error: BaseException, rank: int) -> None:
    """Writes what a rank raised; the description comes last, so that a reader of it finds both."""
    whole, description = error_files(directory, rank)
    described = json.dumps(remote.pack(error, rank)).encode()
    if isinstance(error, Exception) and (data := _pack(error)) is not None:
        files.write_atomic(whole, data)
    files.write_atomic(description, described)


def read_error(directory: Path, rank: int) -> BaseException:
    """Returns the exception of a rank, with its traceback as the cause. Opens only files of this user."""
    whole, description = error_files(directory, rank)
    described = parse_json(ownership.read_private(description))
    error = _unpack(whole) if whole.exists() else None
    if error is None:
        return remote.unpack(described)
    error.__cause__ = remote.RemoteTraceback(described["rank"], described["traceback"])
    return error


def _pack(error: Exception) -> bytes | None:
    """Pickles an exception in the first form that loads as the same exception; None if there is no such form."""
    for form in (lambda: error, lambda: _parts(error)):
        try:
            data, again = pickled.pack_and_open(form(), what="the exception")
            if _is_same(_whole(again), error):
                return data
        except Exception as reason:  # noqa: BLE001  the class is the user's, and so is what it raises here
            logger.debug("%s is not sent as a pickle: %r", type(error).__name__, reason)
    return None


def _is_same(again: BaseException, error: BaseException) -> bool:
    kept = vars(again).keys() == {name for name, value in vars(error).items() if _is_sendable(value)}
    return type(again).__qualname__ == type(error).__qualname__ and str(again) == str(error) and kept


def _parts(error: Exception) -> tuple[type[Exception], tuple[object, ...], dict[str, Any]]:
    """Returns the class, the arguments, and those attributes that can be pickled."""
    return (
        type(error),
        error.args,
        {name: value for name, value in vars(error).items() if _is_sendable(value)},
    )


def _is_sendable(value: object) -> bool:
    try:
        pickled.pack_and_open(value, what="an attribute")
    except Exception:  # noqa: BLE001  as above
        return False
    return True


def _whole(found: Any) -> BaseException:
    """Returns the exception of a pickle, rebuilt without a call of its `__init__` if it was pickled in parts."""
    if isinstance(found, BaseException):
        return found
    kind, args, attributes = found
    error: BaseException = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error


def _unpack(path: Path) -> BaseException | None:
    """Loads the pickled exception; None if this process cannot, for example because it does not have the class."""
    try:
        return _whole(pickled.unpack(path, what="the exception"))
    except UsageError:  # others could have written it
        raise
    except HeadwayError as error:
        logger.debug("%s", error)
    except Exception as error:  # noqa: BLE001  the class is the user's; its description says the same
        logger.debug("%s cannot be opened: %r", path, error)
    return None
