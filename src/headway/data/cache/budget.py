"""How many bytes a node cache may hold: what the user allows, and never more than this machine can spare.

A file in /dev/shm is memory. It counts against the memory limit of the job that wrote it, and a job that exceeds its
limit is killed. So the limits of all control groups of this process are read whenever space is reserved, and a
twentieth of each is left free. They are read again while the job runs: if it needs that twentieth, copies are removed.
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
    "TIB": 2**40,
}
_RESERVED_PART = 20  # one twentieth stays free
_IN_MEMORY = {"tmpfs", "ramfs"}
_LOCAL = _IN_MEMORY.union(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "zfs", "jfs", "overlay"),
    ("squashfs", "erofs", "iso9660", "vfat", "exfat", "ntfs3", "apfs", "hfs"),
)


def parse_budget(budget: str | int, total: int) -> int:
    """Returns a budget in bytes, where 100 % is `total`.

    >>> parse_budget("50%", 1000), parse_budget("2 GB", 0), parse_budget(7, 0)
    (500, 2000000000, 7)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(%|[KMGT]i?B|)\s*", str(budget), re.IGNORECASE)
    number = float(found[1]) if found else 0.0
    if found is None or number <= 0 or (found[2] == "%" and number > 100):
        raise UsageError(f'budget={budget!r}: give a share of the memory like "50%", or a size like "256GB"')
    return int(number / 100 * total) if found[2] == "%" else int(number * _UNITS[found[2].upper()])


def total_bytes(directory: Path) -> int:
    """Returns the bytes that 100 % stands for: the file system's size; in memory, at most the memory and its limits."""
    return min(limit.limit for limit in limits_on(directory))


def spare_bytes(directory: Path) -> int:
    """Returns how many more bytes files in a directory may use now."""
    return max(0, min(map(spare_in, limits_on(directory))))


def shortage_bytes(directory: Path) -> int:
    """Returns how many bytes must be freed, because other programs use memory that was free before."""
    return max(0, -min(map(spare_in, limits_on(directory))))


def spare_in(limit: MemoryLimit) -> int:
    """Returns how many bytes of a limit may be used; negative if less than the reserved part is free."""
    return limit.free - limit.limit // _RESERVED_PART


def limits_on(directory: Path, root: Path = Path("/")) -> Iterator[MemoryLimit]:
    """Yields all limits that a file in a directory counts against."""
    system = os.statvfs(directory)
    yield MemoryLimit(system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize)
    if filesystem_type(directory, root) in _IN_MEMORY:
        yield from memory_limits(root)


def is_local(path: Path) -> bool:
    """Whether a file is on a file system of this machine, where the page cache suffices."""
    return filesystem_type(path) in _LOCAL
