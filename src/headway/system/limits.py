"""What the scheduler or container lets this process use: the limits of its control groups. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

_NO_LIMIT = 1 << 60
"""version 1 of control groups writes "no limit" as a number beyond this"""


@final
@dataclass(frozen=True, kw_only=True)
class Limits:
    """None is no limit."""

    memory: int | None
    """bytes"""
    cpus: float | None
    """how many may be busy at once, on average"""


def control_group_limits(root: Path = Path("/")) -> Limits:
    """The tightest limits on the way up from this process's control group.

    >>> control_group_limits()  # doctest: +SKIP
    Limits(memory=68719476736, cpus=8.0)
    """
    memory: list[int | None] = []
    cpus: list[float | None] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        tree = root / "sys/fs/cgroup"
        if number == "0":  # version 2: one tree for everything
            memory += (_bytes(folder / "memory.max") for folder in _upwards(tree, group))
            cpus += (_quota(folder / "cpu.max") for folder in _upwards(tree, group))
        elif "memory" in controllers.split(","):
            memory += (
                _bytes(folder / "memory.limit_in_bytes") for folder in _upwards(tree / "memory", group)
            )
    return Limits(
        memory=min((size for size in memory if size is not None), default=None),
        cpus=min((count for count in cpus if count is not None), default=None),
    )


def _upwards(tree: Path, group: str) -> Iterator[Path]:
    folder = tree / group.lstrip("/")
    yield folder
    while folder != tree and tree in folder.parents:
        folder = folder.parent
        yield folder


def _bytes(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


def _quota(file: Path) -> float | None:
    quota, _, period = _text(file).partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the group has no such controller, the container does not show it, or this is not Linux
        return ""
