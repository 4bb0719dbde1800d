"""`ShardFile`: the file of a shard, read in pieces while other programs may change it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import final

from headway.errors import BadShard, StorageError, UsageError
from headway.system.retries import retry

_COMPRESSED = {
    b"\x1f\x8b": "gzip -d",
    b"\x28\xb5\x2f\xfd": "zstd -d",
    b"BZh": "bzip2 -d",
    b"\xfd7zXZ": "xz -d",
}
Version = tuple[int, ...]


@final
class ShardFile:
    """A file that other programs may change: `file[512:1024]` returns bytes or raises `BadShard`.

    Reads that fail are retried; if that does not help, they raise `StorageError`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._fd = path, -1
        try:
            self._fd, self.status = retry(f"open the shard {path}", lambda: _open(path))
        except OSError as error:
            raise UsageError(
                f"cannot read the shard {path}: {error.strerror}; check its path and permissions"
            ) from error
        if not stat.S_ISREG(self.status.st_mode):
            raise BadShard(f"{path} is not a regular file; give tar files only")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit, os may be gone
        if self._fd >= 0:
            close(self._fd)

    def __len__(self) -> int:
        return self.status.st_size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        return self.read(start, stop)

    def read(self, start: int, stop: int) -> bytes:
        """Reads the bytes from `start` to `stop`, which must lie within the file as it was opened."""
        try:
            return self._read(start, stop)
        except OSError as error:
            return self._read_again(start, stop, error)

    def read_into(self, start: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `start` on, which must lie within the file as it was opened."""
        try:
            whole = os.preadv(self._fd, [target], start) == len(target)
        except OSError:
            whole = False
        if not whole:  # `read` retries, and raises the reason if that does not help
            target[:] = self.read(start, start + len(target))

    def _read_again(self, start: int, stop: int, failed: OSError) -> bytes:
        doing = f"read {self.path} at byte {start}"
        try:
            return retry(doing, lambda: self._read(start, stop), failed)
        except OSError as error:
            raise StorageError(f"could not {doing}: {error.strerror}; check that file system") from error

    def _read(self, start: int, stop: int) -> bytes:
        try:
            data = os.pread(self._fd, stop - start, start)
            while len(data) < stop - start:  # interrupted by a signal, or larger than one read may be
                more = os.pread(self._fd, stop - start - len(data), start + len(data))
                if not more:
                    raise BadShard(
                        f"{self.path} had {len(self)} bytes when it was opened, and now ends at byte "
                        f"{start + len(data)}: it was truncated or rewritten while in use; copy it again"
                    )
                data += more
        except OSError as error:
            if error.errno == errno.ESTALE:
                self._open_again()  # before the next try
            raise
        return data

    def _open_again(self) -> None:
        """Replaces a stale file handle by a new one of the same file, for all threads."""
        fd, status = _open(self.path)
        try:
            # without the device, which a new mount may change
            if file_version(status)[1:] != self.version[1:]:
                raise BadShard(f"{self.path} was replaced while in use; give a changed shard another name")
            os.dup2(fd, self._fd, inheritable=False)
        finally:
            os.close(fd)

    def fileno(self) -> int:
        return self._fd

    @property
    def version(self) -> Version:
        return file_version(self.status)


def _open(path: Path) -> tuple[int, os.stat_result]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    try:
        return fd, os.fstat(fd)
    except OSError:
        os.close(fd)
        raise


def file_version(status: os.stat_result) -> Version:
    """Returns a value that changes when a file is written or replaced."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def open_file(path: Path) -> ShardFile:
    """Opens a shard; refuses compressed and empty files."""
    file = ShardFile(path)
    head = file[:6]
    for magic, command in _COMPRESSED.items():
        if head.startswith(magic):
            raise UsageError(f"{path} is compressed, and does not allow random access: run {command} {path}")
    if not head:
        raise BadShard(f"{path} is empty; copy it again")
    return file
