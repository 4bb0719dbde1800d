"""run.json: reading, writing and checking it."""

from __future__ import annotations

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
"""of run.json; to be raised when readers of the old form would misunderstand the new one"""

DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""what reading a value of another kind than expected may raise: a file of another user may hold anything"""

Info = dict[str, Any]


def has_info(path: Path) -> bool:
    """Returns whether a directory is a run directory; also if it may not be looked into, and nothing tells."""
    try:
        return RunPaths(path=path).info_file.exists()
    except PermissionError:
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
            problem = (
                f"has format {form}, and this version of headway reads {FORMAT}: a newer one has written it"
            )
            raise _unreadable(path, problem, remedy="upgrade headway to use it")
        case {"format": 1, "id": str(id_), "name": str(name), "created": str(), "attempts": list()}:
            if id_.startswith(f"{name}-") and all(map(_is_attempt, info["attempts"])):
                return dict(info)
    raise _unreadable(
        path, f"is damaged: it is not the record of a run, of which format {FORMAT} is expected"
    )


def _is_attempt(attempt: object) -> bool:
    """Returns whether this may be an attempt in run.json: others show its status and compute with its times."""
    match attempt:
        case {"number": int(number), "started": str(started), "status": str(status)}:
            try:
                datetime.fromisoformat(started)
            except ValueError:
                return False
            return number > 0 and status.isalpha()
    return False


def newest_step(path: Path) -> int | None:
    """Returns the step of the newest checkpoint in a run directory, valid or not; None if none is seen.

    It does not fail: callers describe a run whose storage may be what failed. `checkpoint.format.directory.list_steps`
    is for those that resume from what they find.
    """
    found = (step_of(each.name) for each in RunPaths(path=path).checkpoints_dir.glob("step-*"))
    return max((step for step in found if step is not None), default=None)


def _unreadable(path: Path, problem: str, *, remedy: str = "") -> UsageError:
    """Returns the error for a run.json that cannot be used: another one if work would be lost by starting over."""
    file, step = RunPaths(path=path).info_file, newest_step(path)
    if step is None:
        return UsageError(f"{file} {problem}" + (f"; {remedy}" if remedy else ""))
    remedy = remedy or f"write it again with: headway runs rebuild {shlex.quote(str(path))}"
    return UnreadableRun(f"{file} {problem}, and the run has checkpoints up to step {step:,}; {remedy}")


def write_info(path: Path, info: Info) -> None:
    """Replaces the run.json of a run directory as a whole."""
    files.write_atomic(RunPaths(path=path).info_file, to_json(info))


def to_json(value: object) -> bytes:
    """A file of facts as people can read it, too."""
    return json.dumps(value, indent=2, default=str).encode() + b"\n"


def format_time(moment: datetime) -> str:
    """A moment as run.json writes it: in UTC, so that texts sort as moments do."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object; None if the file is missing or not whole."""
    try:
        facts = parse_json(files.read_regular(path))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def read_end(path: Path) -> dict[str, Any] | None:
    """Reads ended.json: when a job ended, with which exit code, and why; None if it does not say."""
    facts = read_json(path) or {}
    match facts:
        case {"time": str(), "exit_code": int()}:
            error = facts.get("error")
            return facts | {"error": error if isinstance(error, str) else None}
    return None


def is_end_of(ended: Mapping[str, Any], attempt: Mapping[str, Any]) -> bool:
    """Returns whether ended.json is about the newest attempt of its run, and not about an earlier one.

    It says how many attempts there were; those may be more than a run.json has that was rebuilt since. One of an older
    version has only its time, by the clock of another node.
    """
    if isinstance(count := ended.get("attempts"), int):
        return bool(count == attempt["number"])
    return bool(ended["time"] >= attempt["started"])
