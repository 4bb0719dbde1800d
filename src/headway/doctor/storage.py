"""Measures how fast a node writes and reads files: on the disk, not in the page cache."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import final

from headway.system import files

_BLOCK_BYTES = 4 << 20
_FILES_MAX = 64
"""of a directory that are read"""


@final
@dataclass(frozen=True, kw_only=True)
class TransferRate:
    """Bytes that were written or read, and how long that took."""

    bytes: int
    seconds: float

    @property
    def megabytes_per_second(self) -> float:
        """Millions of bytes per second.

        >>> TransferRate(bytes=50_000_000, seconds=0.5).megabytes_per_second
        100.0
        """
        return self.bytes / max(self.seconds, 1e-9) / 1e6


def time_write(path: Path, size: int) -> TransferRate:
    """Times the write and fsync of a new file. Its random bytes cannot be compressed; the file stays."""
    block = os.urandom(min(size, _BLOCK_BYTES))
    written = 0
    start = time.perf_counter()
    descriptor = files.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        while written < size:
            written += os.write(descriptor, block)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return TransferRate(bytes=written, seconds=time.perf_counter() - start)


def time_read(path: Path, size: int) -> TransferRate:
    """Times reading up to `size` bytes of a file, or of the first files of a directory, without the page cache.

    Raises OSError if a file cannot be read.
    """
    done, seconds = 0, 0.0
    for file in islice(_files(path), _FILES_MAX):
        if done >= size:
            break
        descriptor = os.open(file, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):  # macOS has none
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            while done < size and (block := os.read(descriptor, min(_BLOCK_BYTES, size - done))):
                done += len(block)
            seconds += time.perf_counter() - start
        finally:
            os.close(descriptor)
    return TransferRate(bytes=done, seconds=seconds)


def _files(path: Path) -> Iterator[Path]:
    """Yields the file itself, or all files below a directory, sorted by name."""
    if not path.is_dir():
        yield path
        return
    for directory, names, found in os.walk(path):
        names.sort()
        for name in sorted(found):
            if (file := Path(directory, name)).is_file():
                yield file
