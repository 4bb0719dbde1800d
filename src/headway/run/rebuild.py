"""Restores a damaged run.json from the name of the directory, the diagnostics and the settings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from headway.errors import UnreadableRun, UsageError
from headway.run import lock
from headway.run.info import FORMAT, Info, format_time, newest_step, read_info, read_json, write_info
from headway.run.paths import RunPaths
from headway.run.plain import is_yaml
from headway.system import files, jsonlines
from headway.system.log import logger

_ID = re.compile(r"(?P<name>.+)-(?P<made>\d{4}\.\d\d\.\d\d-\d\d\.\d\d)-[a-z0-9]{4}")


def named_run(path: Path) -> str | None:
    """Returns the name of a run from the name of its directory; None if that is not a run's.

    >>> named_run(Path("runs/digits-2026.11.15-14.30-x7k2"))
    'digits'
    """
    found = _ID.fullmatch(path.name)
    return found["name"] if found else None


def rebuild(path: Path) -> Info:
    """Writes a new run.json in place of one that cannot be read, kept as run.json.corrupt-N. Returns the new contents.

    It is unknown how the attempts ended: they count as interrupted. `UsageError` if run.json is not damaged, or if too
    little is left: the directory must have its original name, and a checkpoint.
    """
    path = path.absolute()
    paths = RunPaths(path=path)
    _check_damaged(paths)
    found = _ID.fullmatch(path.name)
    if found is None:
        raise UsageError(
            f"{path.name!r} is not the name that headway gave to a run, like digits-2026.11.15-14.30-x7k2"
        )
    with lock.hold(paths.lock_dir, attempt=0) as held:
        if held.note:
            logger.warning("%s", held.note)
        _check_damaged(paths)  # another process may have rebuilt it in the meantime
        info = _facts(paths, found)
        with files.storage(f"write {paths.info_file}"):
            if os.path.lexists(paths.info_file):
                paths.info_file.rename(corrupt_path(paths.info_file))
            write_info(path, info)
    return info


def _check_damaged(paths: RunPaths) -> None:
    try:
        read_info(paths.path)
    except UnreadableRun:
        if is_newer(paths.info_file):
            raise
    else:
        raise UsageError(f"{paths.info_file} is not damaged: there is nothing to rebuild")


def _facts(paths: RunPaths, found: re.Match[str]) -> Info:
    """Returns the contents of run.json that other files have, too; `found` is the name of the directory."""
    rows = list(jsonlines.read(paths.diagnostics_file))
    last: Mapping[str, Any] = rows[-1] if rows else {}
    packages = last.get("packages") or {}
    made = datetime.strptime(found["made"], "%Y.%m.%d-%H.%M").astimezone()
    return {
        "format": FORMAT,
        "id": paths.path.name,
        "name": found["name"],
        "created": format_time(made),
        "command": last.get("argv") or [],
        "cwd": last.get("cwd"),
        "code": {**(last.get("code") or {}), "diff": None, **_code(paths, last.get("cwd"))},
        "versions": {name: packages.get(name) for name in ("headway", "torch")},
        "world": last.get("world"),
        "config": _config(paths.config_file),
        "attempts": list(_attempts(rows)),
    }


def is_newer(file: Path) -> bool:
    """Returns whether a run.json was written by a newer headway, rather than damaged."""
    form = (read_json(file) or {}).get("format")
    return isinstance(form, int) and form > FORMAT


def corrupt_path(path: Path) -> Path:
    """Returns the first free path to which a damaged file or directory can be renamed, in order to keep it."""
    number = 1
    while os.path.lexists(kept := path.with_name(f"{path.name}.corrupt-{number}")):
        number += 1
    return kept


def _attempts(rows: list[jsonlines.Row]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows or [{}], start=1):
        started = datetime.fromisoformat(row["time"]) if "time" in row else datetime.now().astimezone()
        yield {
            "number": number,
            "status": "interrupted",
            "exit_code": None,
            "started": format_time(started),
            "ended": None,
            "host": row.get("host"),
            "pid": row.get("pid"),
            "scheduler": None,
            "ids": {},
            "world": row.get("world"),
            "step_started": 0,  # without it, every attempt would count as one without progress
        }


def _code(paths: RunPaths, cwd: str | None) -> dict[str, Any]:
    """Returns `code.snapshot`, from which the run is started again: its copy of the code, or where its ranks ran."""
    copy = paths.snapshot_dir
    own = copy.is_dir()
    if not own:  # the runs of a sweep share the copy of the first
        name = copy.relative_to(paths.path).parts
        shared = (path for path in _linked(paths.work_dir) if path.parts[-len(name) :] == name)
        copy = next(filter(Path.is_dir, shared), copy)
    if not copy.is_dir() and (cwd is None or not paths.call_dir.is_dir()):
        return {}  # a script that its user starts
    inside = copy.is_dir() and cwd is not None and Path(cwd).is_relative_to(paths.work_dir)
    facts: dict[str, Any] = {
        "tree": "code/tree" if own else str(copy) if copy.is_dir() else cwd,
        "from": None if copy.is_dir() else cwd,
        "directory": str(Path(cwd).relative_to(paths.work_dir)) if inside and cwd else ".",
        "script": None,
        "python_path": [],
        "added": [],
        "left_out": [],
        "note": "rebuilt: it is unknown what was copied, and from where",
    }
    return {"snapshot": facts}


def _linked(work: Path) -> Iterator[Path]:
    """Yields the directories to which links in the working directory of a job lead."""
    for directory, _, names in os.walk(work):
        for name in names:
            if (link := Path(directory, name)).is_symlink():
                yield from link.readlink().parents


def _config(path: Path) -> str | None:
    try:
        text = files.read_regular(path).decode()
    except (OSError, ValueError):
        return None
    return text if is_yaml(text) else None


def describe(path: Path, info: Info) -> str:
    """Describes a rebuilt run in one line."""
    return f"{info['id']}: {len(info['attempts'])} attempts, checkpoints up to step {newest_step(path):,}"
