"""run.json: reading, writing and checking it."""

from __future__ import annotations

import errno
import json
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway.errors import UnreadableRun, UsageError
from headway.run.paths import RunPaths, step_of
from headway.system import files
from headway.system.jsonlines import parse_json

FORMAT = 1
"""of run.json; raise it when readers of the old format would misread the new one"""

DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""what code may raise for a value of an unexpected type: another user's file may hold anything"""

Info = dict[str, Any]


def has_info(path: Path) -> bool:
    """Returns whether a directory is a run directory; also True if this user may not look into it."""
    try:
        return RunPaths(path=path).info_file.exists()
    except OSError as error:  # also another user's link to a name that no file can have
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):
            raise
        return True


def read_info(path: Path) -> Info:
    """Reads the run.json of a run directory; `UsageError` says why it cannot be used."""
    file = RunPaths(path=path).info_file
    try:
        info = parse_json(files.read_regular(file))
    except (FileNotFoundError, NotADirectoryError) as error:
        if newest_step(path) is None:
            raise UsageError(
                f"{path} is not a run directory: it has no {file.name}; headway runs lists those under runs"
            ) from error
        raise _unreadable(path, "is missing") from error
    except OSError as error:
        if isinstance(error, PermissionError):
            raise UsageError(f"{file} cannot be read: {error.strerror}") from error
        raise _unreadable(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _unreadable(path, f"is damaged: {error}") from error
    match info:
        case {"format": int(form)} if form > FORMAT:
            problem = f"has format {form}, written by a newer headway; this version reads format {FORMAT}"
            raise _unreadable(path, problem, remedy="upgrade headway to use it")
        case {"format": 1, "id": str(id_), "name": str(name), "created": str(), "attempts": list()}:
            if id_.startswith(f"{name}-") and all(map(_is_attempt, info["attempts"])):
                return dict(info)
    raise _unreadable(path, f"is damaged: it is not the record of a run in format {FORMAT}")


def _is_attempt(attempt: object) -> bool:
    """Returns whether a value is an attempt: readers of run.json display its status and compute with its times."""
    match attempt:
        case {"number": int(number), "started": str(started), "status": str(status)}:
            try:
                datetime.fromisoformat(started)
            except ValueError:
                return False
            return number > 0 and status.isalpha()
    return False


def newest_step(path: Path) -> int | None:
    """Returns the step of the newest checkpoint in a run directory, valid or not; None if there is none.

    A directory that does not exist has none. To resume, use `checkpoint.format.directory.list_steps`.
    """
    parent = RunPaths(path=path).checkpoints_dir
    with files.storage(f"list {parent}"):
        steps = [step_of(directory.name) for directory in parent.glob("step-*")]
    return max((step for step in steps if step is not None), default=None)


def _unreadable(path: Path, problem: str, *, remedy: str = "") -> UsageError:
    """Returns the error for an unusable run.json: `UnreadableRun` if starting over would discard checkpoints."""
    file, step = RunPaths(path=path).info_file, newest_step(path)
    if step is None:
        return UsageError(f"{file} {problem}" + (f"; {remedy}" if remedy else ""))
    remedy = remedy or f"restore it with: headway runs rebuild {shlex.quote(str(path))}"
    return UnreadableRun(f"{file} {problem}, and the run has checkpoints up to step {step:,}; {remedy}")


def write_info(path: Path, info: Info) -> None:
    """Replaces the run.json of a run directory atomically."""
    files.write_atomic(RunPaths(path=path).info_file, to_json(info))


def to_json(value: object) -> bytes:
    """Encodes a value as JSON that people can read, too."""
    return json.dumps(value, indent=2, default=str).encode() + b"\n"


def format_time(moment: datetime) -> str:
    """Formats a time as run.json has it: in UTC, so that the strings sort by time."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object; None if the file is missing or damaged."""
    try:
        facts = parse_json(files.read_regular(path))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def read_end(path: Path) -> dict[str, Any] | None:
    """Reads ended.json: when a job ended, with which exit code, and why; None if it is missing or damaged."""
    facts = read_json(path) or {}
    match facts:
        case {"time": str(), "exit_code": int()}:
            error = facts.get("error")
            return facts | {"error": error if isinstance(error, str) else None}
    return None


def is_end_of(ended: Mapping[str, Any], attempt: Mapping[str, Any]) -> bool:
    """Returns whether ended.json describes the end of this attempt, the newest of its run, and not of an earlier one.

    The file has the number of attempts, which may exceed that in a run.json that was rebuilt since. Files of older
    versions have only a time, from the clock of another node.
    """
    if isinstance(count := ended.get("attempts"), int):
        return bool(count == attempt["number"])
    return bool(ended["time"] >= attempt["started"])
