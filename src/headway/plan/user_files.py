"""Reads untrusted files: bounded size, no waiting for a pipe, and errors of one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from stat import S_ISFIFO

from headway.errors import UsageError

_MAX_BYTES = 1 << 20
MAX_DIGITS = 100
"""Characters of a whole number. A longer one is not a valid number of a plan, and takes long to convert."""


def read_text(path: str | Path, *, what: str, max_bytes: int = _MAX_BYTES) -> str:
    """Returns the text of a file; `what` is the kind of file that is expected, for messages."""
    file = Path(path)
    try:
        with open(file, "rb", opener=_open_without_waiting) as stream:
            # the pipes of a shell, <(command) and /dev/stdin, have a writer
            if S_ISFIFO(os.fstat(stream.fileno()).st_mode) and file.parts[:2] not in (
                ("/", "dev"),
                ("/", "proc"),
            ):
                raise UsageError(f"{file} is a named pipe; give the path of {what}")
            os.set_blocking(stream.fileno(), True)
            content = stream.read(max_bytes + 1)  # a device or a pipe has no size, and may be endless
        if len(content) > max_bytes:
            raise UsageError(f"{file} has more than {max_bytes:,} bytes; give the path of {what}")
        return content.decode()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}; give the path of {what}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except UsageError:
        raise
    except ValueError as error:  # not a valid path: it has a null byte or half a character
        raise UsageError(f"cannot read {file}: {error}; give the path of {what}") from error


def read_json(path: str | Path, *, what: str, max_bytes: int = _MAX_BYTES) -> object:
    """Returns the content of a JSON file."""
    text = read_text(path, what=what, max_bytes=max_bytes)
    try:
        return json.loads(text, parse_int=_parse_int)
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply; give the path of {what}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}; give the path of {what}") from error


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a named pipe would wait for its writer, perhaps forever


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(digits):,} digits")
    return int(digits)
