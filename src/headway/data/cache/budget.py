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

from headway.errors import UsageError
from headway.system.limits import MemoryLimit, filesystem_type, memory_limits

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
    return max(0, min(map(spare_in, spaces(directory))))


def shortage(directory: Path) -> int:
    """How many bytes must go, because others need what was free when they were taken."""
    return max(0, -min(map(spare_in, spaces(directory))))


def spare_in(space: MemoryLimit) -> int:
    """What may be taken of a limit; a part of it is left free."""
    return space.free - space.limit // _LEFT_FREE


def spaces(directory: Path, root: Path = Path("/")) -> Iterator[MemoryLimit]:
    """All limits that a file in a directory counts against."""
    system = os.statvfs(directory)
    yield MemoryLimit(system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize)
    if filesystem_type(directory, root) in _IN_MEMORY:
        yield from memory_limits(root)


def is_local(path: Path) -> bool:
    """Whether a file is on a file system of this machine, whose page cache needs no help."""
    return filesystem_type(path) in _LOCAL
