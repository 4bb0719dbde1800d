"""The limits of this process: those of its control groups, its CPUs and open files; and the types of file systems.

Control groups of version 1 and 2 are read, at every level from this process's own group to the outermost visible one.
Functions with a `root` read the kernel's files under that directory.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

_NO_LIMIT = 1 << 60
"""control groups of version 1 write "no limit" as a number beyond this"""
_ROOT = Path("/")
_MANY_FILES = 1 << 16


@final
@dataclass(frozen=True, kw_only=True)
class ResourceLimits:
    """The tightest limits that apply to this process. None means no limit."""

    memory: int | None
    """bytes"""
    cpus: float | None
    """how many this process may keep busy, on average"""


class MemoryLimit(NamedTuple):
    """One limit on memory, and how much of it is free, in bytes. The page cache counts as free: it is reclaimed."""

    limit: int
    free: int


def raise_open_files(least: int = 0) -> None:
    """Raises the soft limit on open files to the hard limit, for this process and those that it starts.

    But at most to 65,536 or `least`, if that is more: some programs iterate over all descriptors that they may have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(least, _MANY_FILES)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def resource_limits(root: Path = _ROOT) -> ResourceLimits:
    """Returns the tightest limits of the control groups that this process is in.

    >>> resource_limits()  # doctest: +SKIP
    ResourceLimits(memory=68719476736, cpus=8.0)
    """
    memory = (
        _number(group / name) for group, name in _levels(root, "memory", "memory.max", _MEMORY_LIMIT_V1)
    )
    cpus = (_quota(group / name) for group, name in _levels(root, "cpu", "cpu.max", _CPU_QUOTA_V1))
    return ResourceLimits(
        memory=min((size for size in memory if size is not None), default=None),
        cpus=min((count for count in cpus if count is not None), default=None),
    )


def memory_limits(root: Path = _ROOT) -> Iterator[MemoryLimit]:
    """Yields every limit that applies to the memory of this process: the machine's, and that of each control group."""
    facts = _pairs(root / "proc/meminfo")
    if "MemTotal:" in facts and "MemAvailable:" in facts:
        yield MemoryLimit(int(facts["MemTotal:"]) * 1024, int(facts["MemAvailable:"]) * 1024)
    for group, name in _levels(root, "memory", "memory.max", _MEMORY_LIMIT_V1):
        version_1 = name == _MEMORY_LIMIT_V1
        limit = _number(group / name)
        used = _number(group / ("memory.usage_in_bytes" if version_1 else "memory.current"))
        if limit is not None and used is not None:
            facts = _pairs(group / "memory.stat")
            prefix = "total_" if version_1 else ""
            cached = sum(int(facts.get(f"{prefix}{kind}_file", "0")) for kind in ("active", "inactive"))
            yield MemoryLimit(limit, limit - used + cached)


def usable_cpus(limits: ResourceLimits | None = None) -> int:
    """Returns the number of CPUs that this process may use, often fewer than the machine has."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = (limits or resource_limits()).cpus
    return allowed if quota is None else min(allowed, max(1, int(quota)))


def boot_id() -> str:
    """Returns the id of this boot of the machine; an empty string if the kernel has none."""
    lines = _lines(_ROOT / "proc/sys/kernel/random/boot_id")
    return lines[0].strip() if lines else ""


def process_age_s(root: Path = _ROOT) -> float:
    """Returns the age of this process, including programs that it ran before an `exec`, by a clock that is never set.

    0 if the kernel does not report it.
    """
    words = " ".join(_words(root / "proc" / "self" / "stat")).rpartition(") ")[2].split()
    if len(words) < 20:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(words[19]) / os.sysconf("SC_CLK_TCK")


def filesystem_type(path: Path, root: Path = _ROOT) -> str | None:
    """Returns the type of the file system that a path is on, like "ext4" or "lustre"; None if it is unknown.

    >>> filesystem_type(Path("/proc"))
    'proc'
    """
    mounts = list(_mounts(root))
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    by_device = next((mount.type for mount in mounts if mount.device == number), None)
    if by_device is not None or root != _ROOT:
        return by_device
    # files on btrfs have another device than its mount; macOS has no list of mounts in /proc
    points = {mount.point: mount.type for mount in mounts} or _partitions()
    resolved = path.resolve()
    above = map(str, (resolved, *resolved.parents))
    return next((points[point] for point in above if point in points), None)


# --- control groups

_MEMORY_LIMIT_V1 = "memory.limit_in_bytes"
_CPU_QUOTA_V1 = "cpu.cfs_quota_us"


class _Mount(NamedTuple):
    device: str
    root: str
    point: str
    type: str
    options: list[str]


def _mounts(root: Path) -> Iterator[_Mount]:
    """`36 35 98:0 /root /point options [optional ...] - type source options`"""
    for line in _lines(root / "proc/self/mountinfo"):
        left, dash, right = line.partition(" - ")
        about, kind = left.split(), right.split()
        if dash and len(about) >= 6 and kind:
            inner, point = (text.replace("\\040", " ") for text in about[3:5])
            yield _Mount(about[2], inner, point, kind[0], kind[-1].split(","))


def _partitions() -> dict[str, str]:
    import psutil

    return {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}


def _levels(root: Path, controller: str, file: str, file_v1: str) -> Iterator[tuple[Path, str]]:
    """Yields each group of this process with the name of the file that holds its limit, the innermost first."""
    names: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):  # `4:memory:/jobs/7` (version 1), `0::/jobs/7` (version 2)
        controllers, _, name = line.partition(":")[2].partition(":")
        names |= dict.fromkeys(controllers.split(","), name)
    for mount in _group_mounts(root):
        if mount.type == "cgroup" and controller in mount.options and controller in names:
            yield from ((group, file_v1) for group in _upwards(root, mount, names[controller]))
        elif mount.type == "cgroup2" and "" in names:
            yield from ((group, file) for group in _upwards(root, mount, names[""]))


def _group_mounts(root: Path) -> list[_Mount]:
    """Returns the mounted control group trees; the usual ones if the kernel lists none."""
    usual = [("cgroup2", "", "")] + [("cgroup", f"/{name}", name) for name in ("memory", "cpu")]
    return [mount for mount in _mounts(root) if mount.type in ("cgroup", "cgroup2")] or [
        _Mount("", "/", f"/sys/fs/cgroup{where}", kind, [name]) for kind, where, name in usual
    ]


def _upwards(root: Path, mount: _Mount, name: str) -> Iterator[Path]:
    top = root / mount.point.lstrip("/")
    inner = name.removeprefix(mount.root.rstrip("/")).strip("/")  # a container sees only part of the tree
    group = top / inner if ".." not in inner.split("/") else top
    for level in (group, *group.parents):
        yield level
        if level == top:
            return


def _quota(file: Path) -> float | None:
    if file.name == _CPU_QUOTA_V1:
        quota, period = _number(file), _number(file.with_name("cpu.cfs_period_us"))
        return quota / period if quota is not None and period else None
    words = _words(file)
    return int(words[0]) / int(words[1]) if len(words) == 2 and all(map(str.isdecimal, words)) else None


def _number(file: Path) -> int | None:
    """Returns the number in a file, if it is a limit."""
    words = _words(file)
    return int(words[0]) if len(words) == 1 and words[0].isdecimal() and int(words[0]) < _NO_LIMIT else None


def _pairs(file: Path) -> dict[str, str]:
    return {words[0]: words[1] for line in _lines(file) if len(words := line.split()) >= 2}


def _words(file: Path) -> list[str]:
    return [word for line in _lines(file) for word in line.split()]


def _lines(file: Path) -> list[str]:
    """Returns the lines of a kernel file; none if it does not exist or may not be read."""
    try:
        return file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
