"""What a job has achieved that the scheduler ended before it could save: whether another start may get further.

A newer checkpoint of headway always counts. A script with checkpoints of its own shows progress by metric rows of a
step that no start has reached, and by files that it has completed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, final

from headway.run.directory import Run
from headway.run.info import newest_step, read_json
from headway.system import files, jsonlines

_UNFINISHED_S = 5.0
"""a file that was written this shortly before the end may be half of one"""
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 16
_FILES = 64
"""how many of the newest files are read at the end of a job"""


@final
@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """How far the starts of a job have come, in ended.json; counted at each end by the scheduler."""

    newest_step: int | None
    """of the checkpoints of headway"""
    row_step: int
    """the highest step of a metric row so far; -1 if there is none"""
    contents: tuple[str, ...]
    """of the files of the script so far: half a file does not count at the next end either"""
    same_step_ends: int
    """ends in a row without a newer checkpoint of headway"""
    idle_ends: int
    """ends in a row without any progress, the first one included"""
    counted: str
    """what the last start has achieved, in words; empty if that is nothing, or a checkpoint of headway"""

    @classmethod
    def after(cls, run: Run, path: str) -> Self:
        """Returns the progress when a start of the job has ended; `path` is where the script keeps its own files."""
        before = cls.read(run)
        step, row = newest_step(run.path), _last_row_step(run)
        seen = before.contents if before else ()
        found = list(_own_files(Path(path))) if path else []
        counted = []
        if row > (before.row_step if before else -1):
            counted.append(f"metric rows up to step {row:,}")
        if new := [each.name for each in found if each.complete and each.content not in seen]:
            counted.append(f"{new[0]} in {path}" + (f" and {len(new) - 1} more" if len(new) > 1 else ""))
        same = before is not None and before.newest_step == step
        return cls(
            newest_step=step,
            row_step=max(row, before.row_step if before else -1),
            contents=tuple(dict.fromkeys((*seen, *(each.content for each in found)))),
            same_step_ends=before.same_step_ends + 1 if before and same else 1,
            idle_ends=before.idle_ends + 1 if before and same and not counted else 1,
            counted=" and ".join(counted),
        )

    @classmethod
    def read(cls, run: Run) -> Self | None:
        """Returns the progress at the last end; None if it was not one by the scheduler."""
        facts: Mapping[str, Any] = (read_json(run.ended_file) or {}).get("progress") or {}
        return cls(**facts) if facts else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _last_row_step(run: Run) -> int:
    rows = jsonlines.read_reversed(run.metrics_file(0))
    return max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=-1)


@final
@dataclass(frozen=True, kw_only=True)
class _OwnFile:
    name: str
    content: str
    """a hash of the size and of parts"""
    complete: bool


def _own_files(path: Path) -> Iterator[_OwnFile]:
    """Yields the newest files."""
    found: list[tuple[float, Path]] = []
    for each in [path] if path.is_file() else _walk(path):
        with suppress(OSError):  # it was removed
            facts = each.lstat()
            if facts.st_size:
                found.append((facts.st_mtime, each))
    now = time.time()
    for written, each in sorted(found, reverse=True)[:_FILES]:
        with suppress(OSError), files.open_regular(each) as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(str(size).encode())
            for number in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
            yield _OwnFile(
                name=each.name if each == path else str(each.relative_to(path)),
                content=digest.hexdigest()[:16],
                complete=now - written > _UNFINISHED_S,
            )


def _walk(path: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(path):
        yield from (Path(directory, name) for name in names)
