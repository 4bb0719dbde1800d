"""How many bytes a node cache may hold: what the user gave, and never more than this machine can spare.

A file in /dev/shm is memory. It counts against the memory limit of the job that wrote it, and a job beyond its limit
is killed; so limits of control groups (v1 and v2, at every level above this process) are read each time that space is
taken, and a twentieth of each is left free. They are read again while the job runs: if it has come to need that
twentieth, copies go.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headway.errors import UsageError

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
_UNITS["TIB"] = 2**40
_LEFT_FREE = 20  # one part in so many
_IN_MEMORY = {"tmpfs", "ramfs"}
_LOCAL = _IN_MEMORY | {"ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "zfs", "jfs", "overlay"}
_LOCAL |= {"squashfs", "erofs", "iso9660", "vfat", "exfat", "ntfs3", "apfs", "hfs"}


class Space(NamedTuple):
    """A limit, and how much of it is not in use."""

    limit: int
    free: int

    def spare(self) -> int:
        return self.free - self.limit // _LEFT_FREE


def parse(budget: str | int, whole: int) -> int:
    """Bytes of a budget, where 100 % is `whole`.

    >>> parse("50%", 1000), parse("2 GB", 0), parse(7, 0)
    (500, 2000000000, 7)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(%|[KMGT]i?B|)\s*", str(budget), re.IGNORECASE)
    number = float(found[1]) if found else 0.0
    if found is None or number <= 0 or (found[2] == "%" and number > 100):
        raise UsageError(f'budget={budget!r}: give a part of the memory like "50%", or a size like "256GB"')
    return int(number / 100 * whole) if found[2] == "%" else int(number * _UNITS[found[2].upper()])


def whole(directory: Path) -> int:
    """What 100 % is: the file system of a directory; if it is memory, no more than memory and its limits."""
    return min(space.limit for space in spaces(directory))


def spare(directory: Path) -> int:
    """How many bytes more may be taken in a directory now."""
    return max(0, min(space.spare() for space in spaces(directory)))


def shortage(directory: Path) -> int:
    """How many bytes must go, because others need what was free when they were taken."""
    return max(0, -min(space.spare() for space in spaces(directory)))


def spaces(directory: Path, root: Path = Path("/")) -> Iterator[Space]:
    """All limits that a file in a directory counts against."""
    system = os.statvfs(directory)
    yield Space(system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize)
    if file_system(directory, root) in _IN_MEMORY:
        yield from _memory(root)
        yield from _groups(root)


def is_local(path: Path) -> bool:
    """Whether a file is on a file system of this machine, whose page cache needs no help."""
    return file_system(path) in _LOCAL


def file_system(path: Path, root: Path = Path("/")) -> str | None:
    """The type of the file system that a file is on, like ext4 or lustre; None where nobody says."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.type for mount in _mounts(root) if mount.device == number), None)


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
            point = about[4].replace("\\040", " ")
            yield _Mount(about[2], about[3].replace("\\040", " "), point, kind[0], kind[-1].split(","))


def _memory(root: Path) -> Iterator[Space]:
    facts = dict(line.split()[:2] for line in _lines(root / "proc/meminfo") if len(line.split()) >= 2)
    if "MemTotal:" in facts and "MemAvailable:" in facts:
        yield Space(int(facts["MemTotal:"]) * 1024, int(facts["MemAvailable:"]) * 1024)


def _groups(root: Path) -> Iterator[Space]:
    """The memory limits of the control groups that this process is in, from its own to the outermost that is seen."""
    names: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):  # `4:memory:/jobs/7` (v1), `0::/jobs/7` (v2)
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        names |= dict.fromkeys(controllers.split(","), name)
    for mount in _mounts(root):
        if mount.type == "cgroup" and "memory" in mount.options and "memory" in names:
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield from _levels(root, mount, names["memory"], *files)
        elif mount.type == "cgroup2" and "" in names:
            yield from _levels(root, mount, names[""], "memory.max", "memory.current", "")


def _levels(root: Path, mount: _Mount, name: str, limit: str, usage: str, prefix: str) -> Iterator[Space]:
    top = root / mount.point.lstrip("/")
    inner = name.removeprefix(mount.root.rstrip("/")).strip("/")  # a container sees a part of the tree only
    group = top / inner if ".." not in inner.split("/") else top
    for level in (group, *group.parents):
        most, taken = _number(level / limit), _number(level / usage)
        if most is not None and taken is not None:
            facts = dict(line.split() for line in _lines(level / "memory.stat") if len(line.split()) == 2)
            cached = sum(int(facts.get(f"{prefix}{kind}_file", "0")) for kind in ("active", "inactive"))
            yield Space(most, most - taken + cached)  # pages of files give way
        if level == top:
            return


def _number(file: Path) -> int | None:
    """What a file says, if it says a number; "max" and v1's enormous one are no limit."""
    words = [word for line in _lines(file) for word in line.split()]
    return int(words[0]) if len(words) == 1 and words[0].isdigit() and int(words[0]) < 2**60 else None


def _lines(file: Path) -> list[str]:
    """A file of the kernel's; nothing where it does not exist, or is not for us."""
    try:
        return file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
