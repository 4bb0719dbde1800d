"""Checkpoint directories, and reading files in them, never through a link. Needs no torch.

checkpoints/step-000000001000/     exists only when all of it is on disk
    manifest.json                  written last: step, world, versions, and size and CRC32 of every file below
    index.json                     every tensor: type, shape, and where its bytes are
    state.json                     everything that is not a tensor
    rank-00000.safetensors         the tensors that rank 0 wrote        rank-00000.json: the `local` value of rank 0
checkpoints/latest                 the newest step, for people; never read by headway
checkpoints/step-N.corrupt-1/      a damaged checkpoint, renamed and kept
checkpoints/.old-RUN-N-TOKEN/      hidden while a later state of the same step takes its name
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, final

from headway.errors import StorageError
from headway.run import Run, has_info, step_name
from headway.run.paths import RunPaths, step_of
from headway.system import files
from headway.system.retries import retry

T = TypeVar("T")

CheckpointRoot = Run | str | os.PathLike[str]
"""Where checkpoints are: a run, the directory of one, or the directory that holds them."""

_HIDDEN = re.compile(r"step-[0-9]{12,18}\.corrupt-[0-9]+|\.old-.+-[0-9]+-[0-9a-f]{16}")
LARGEST_JSON_BYTES = 1 << 30
"""of an index: 100,000 tensors on 100 ranks each"""
_CHUNK_BYTES = 4 << 20
# errors that a damaged checkpoint may cause; others, such as a missing permission or a failing disk, are not damage
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


class DamagedCheckpoint(ValueError):
    """Raised inside this package when a checkpoint is damaged; the message is one problem."""


@final
class MovedCheckpoint(DamagedCheckpoint):
    """Raised when another directory now has the path of a checkpoint, which must then be read from the start."""


@final
class CheckpointFile:
    """An open file of a checkpoint. A read that fails temporarily is retried; it never counts as damage."""

    def __init__(self, directory: CheckpointDirectory, name: str) -> None:
        self._directory, self.name, self._fd = directory, name, directory.open_descriptor(name)

    @property
    def bytes(self) -> int:
        """The size of the file."""
        return os.fstat(self._fd).st_size

    def read_into(self, view: memoryview, begin: int) -> int:
        """Reads from byte `begin` on; returns how many bytes were read, 0 at the end of the file."""
        return self._directory.reading(self.name, lambda: self._read_into(view, begin))

    def _read_into(self, view: memoryview, begin: int) -> int:
        try:
            return os.preadv(self._fd, [view], begin)
        except OSError as error:
            # the server lost the file handle: the next try needs a new descriptor
            if error.errno == errno.ESTALE:
                os.close(self._fd)
                self._fd = -1
                self._fd = self._directory.open_descriptor(self.name)
            raise

    def chunks(self, most_bytes: int) -> Iterator[memoryview]:
        """Yields the file in chunks, each valid until the next, and stops soon after `most_bytes`: it may grow."""
        buffer, begin = memoryview(bytearray(_CHUNK_BYTES)), 0
        while begin <= most_bytes and (got := self.read_into(buffer, begin)):
            yield buffer[:got]
            begin += got

    def __enter__(self) -> CheckpointFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)


@final
class CheckpointDirectory:
    """An open checkpoint directory. Files in it are opened only if they are regular files, never through a link.

    `announced` means that another rank has seen it, so it exists even if this host's file system does not show it yet.
    """

    def __init__(self, path: Path, *, announced: bool = False) -> None:
        self.path = path

        def open_directory() -> tuple[int, int]:
            return files.retry_until_visible(self._open) if announced else self._open()

        self._fd, self._inode = self.reading(path.name, open_directory)

    def _open(self) -> tuple[int, int]:
        """Returns a descriptor of the directory, and its inode."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return fd, os.fstat(fd).st_ino
        except OSError:
            os.close(fd)
            raise

    def _reopen(self, name: str) -> None:
        """Opens the directory again; `MovedCheckpoint` if another one now has its path: two saves are never mixed."""
        fresh, inode = self._open()
        try:
            if inode != self._inode:
                raise MovedCheckpoint(f"{name}: its directory was removed, and another has its path")
            os.dup2(fresh, self._fd, inheritable=False)
        finally:
            os.close(fresh)

    def open(self, name: str) -> CheckpointFile:
        """Opens a file for reading."""
        return CheckpointFile(self, name)

    def open_descriptor(self, name: str) -> int:
        """Opens a file for reading and returns its descriptor; the caller closes it."""
        fd, status = self.reading(name, lambda: self._open_file(name))
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise DamagedCheckpoint(f"{name}: it is not a regular file")
        return fd

    def _open_file(self, name: str) -> tuple[int, os.stat_result]:
        # O_NONBLOCK: a pipe in place of a file must not block
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ESTALE:
                self._reopen(name)
            raise
        try:
            return fd, os.fstat(fd)
        except OSError:
            os.close(fd)
            raise

    def read(self, name: str, most_bytes: int = LARGEST_JSON_BYTES) -> bytes:
        """Reads all of a JSON file."""
        with self.open(name) as file:
            size = file.bytes
            if size > most_bytes:
                raise DamagedCheckpoint(f"{name}: {size} bytes are too many for this file")
            return b"".join(map(bytes, file.chunks(size)))

    def reading(self, name: str, action: Callable[[], T]) -> T:
        """Calls a read of a file and retries it if it fails temporarily; returns its result."""
        try:
            return retry(f"read {name} in {self.path}", action)
        except OSError as error:
            raise _unreadable(name, self.path, error) from error

    def __enter__(self) -> CheckpointDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def resolve_root(where: CheckpointRoot) -> tuple[Path, str]:
    """Returns the directory of all checkpoints, and the owner whose unfinished saves may be removed in it."""
    if isinstance(where, Run):
        return where.checkpoints_dir, where.id
    path = Path(where).absolute()
    return checkpoints_at(path), "path"


def checkpoints_at(path: Path) -> Path:
    """Returns the directory of checkpoints at a path: that of a run, or the path itself."""
    return RunPaths(path=path).checkpoints_dir if has_info(path) else path


def list_steps(parent: Path) -> list[int]:
    """Returns the steps that have a checkpoint, valid or not, oldest first."""
    return sorted(step for name in _names(parent) if (step := step_of(name)) is not None)


def has_checkpoints(parent: Path) -> bool:
    """Returns whether there are checkpoints, including renamed damaged ones and one that is being replaced."""
    return any(step_of(name) is not None or _HIDDEN.fullmatch(name) for name in _names(parent))


def step_dir(parent: Path, step: int) -> Path:
    return parent / step_name(step)


def _names(parent: Path) -> list[str]:
    try:
        return retry(f"list {parent}", lambda: [path.name for path in parent.iterdir()])
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(
            f"{parent} cannot be read: {error.strerror}; check its mount and permissions"
        ) from error


def _unreadable(name: str, where: Path, error: OSError) -> DamagedCheckpoint | StorageError:
    if error.errno in _DAMAGE:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        return DamagedCheckpoint(f"{name}: {reason}")
    return StorageError(
        f"{name} in {where} cannot be read: {error.strerror}; check its mount and permissions"
    )
