"""run.json: reading, writing and checking it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway.errors import UsageError
from headway.system import files

FORMAT = 1
"""of run.json; to be raised when readers of the old form would misunderstand the new one"""
_NAME = "run.json"

Info = dict[str, Any]


def has_info(path: Path) -> bool:
    """Returns whether a directory is a run directory."""
    return (path / _NAME).exists()


def read_info(path: Path) -> Info:
    """Reads the run.json of a run directory; `UsageError` says why it cannot be used."""
    try:
        info = json.loads((path / _NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{path} is not a run directory: it has no {_NAME}") from error
    except OSError as error:
        raise UsageError(f"{path}/{_NAME} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}/{_NAME} is damaged: {error}") from error
    match info:
        case {"format": int(form), "id": str(), "name": str(), "created": str(), "attempts": list()}:
            if form == FORMAT:
                return dict(info)
    raise UsageError(
        f"{path}/{_NAME} was not written by this version of headway: format {FORMAT} is expected"
    )


def write_info(path: Path, info: Info) -> None:
    """Replaces the run.json of a run directory as a whole."""
    files.write_atomic(path / _NAME, to_json(info))


def to_json(value: object) -> bytes:
    """A file of facts as people can read it, too."""
    return json.dumps(value, indent=2, default=str).encode() + b"\n"


def format_time(moment: datetime) -> str:
    """A moment as run.json writes it: in UTC, so that texts sort as moments do."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object; None if the file is missing or not whole."""
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None
