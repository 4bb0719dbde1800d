"""The directories of checkpoints, and how files in one are read: never through a link. Needs no torch.

checkpoints/step-000000001000/     exists only when all of it is on disk
    manifest.json                  written last: step, world, versions, and size and CRC32 of every file below
    index.json                     every tensor: type, shape, and where its bytes are
    state.json                     everything that is not a tensor
    rank-00000.safetensors         the tensors that rank 0 wrote        rank-00000.json: what only rank 0 has
checkpoints/latest                 the newest step, for people; never read by headway
checkpoints/step-N.corrupt-1/      found damaged, renamed, kept
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import final

from headway.errors import StorageError
from headway.run import Run, step_name
from headway.system import files

CheckpointRoot = Run | str | os.PathLike[str]
"""Where checkpoints are: a run, or the directory that holds them."""

_STEP = re.compile(r"step-([0-9]{12,18})")
_SET_ASIDE = re.compile(r"step-[0-9]{12,18}\.corrupt-[0-9]+")
_LARGEST_JSON_BYTES = 1 << 30
_CHUNK_BYTES = 4 << 20
# errors that a damaged checkpoint may cause; others, like a missing permission, are not the checkpoint's fault
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EUCLEAN)


class DamagedCheckpoint(ValueError):
    """Raised inside this package when a checkpoint is not what it says; the message is one problem."""


@final
class CheckpointDirectory:
    """An open checkpoint directory. Files in it are opened only if they are regular files, never through a link.

    `announced`: another rank has seen it, so it exists, even if this host's file system does not show it yet.
    """

    def __init__(self, path: Path, *, announced: bool = False) -> None:
        self.path = path
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = (
                files.retry_until_visible(lambda: os.open(path, flags)) if announced else os.open(path, flags)
            )
        except OSError as error:
            raise _unreadable(path.name, path, error) from error

    def open(self, name: str) -> int:
        """Opens a file for reading and returns its descriptor; the caller closes it."""
        # O_NONBLOCK: a pipe in the place of a file must not block
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError as error:
            raise _unreadable(name, self.path, error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise DamagedCheckpoint(f"{name}: it is not a regular file")
        return fd

    def read(self, name: str) -> bytes:
        """Reads all of a JSON file."""
        fd = self.open(name)
        try:
            size = os.fstat(fd).st_size
            if size > _LARGEST_JSON_BYTES:
                raise DamagedCheckpoint(f"{name}: {size} bytes are too many for a JSON file")
            return b"".join(read_chunks(fd, name, self.path))
        finally:
            os.close(fd)

    def __enter__(self) -> CheckpointDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def resolve_root(where: CheckpointRoot) -> tuple[Path, str]:
    """Returns the directory of all checkpoints, and the owner whose unfinished saves may be removed in it."""
    if isinstance(where, Run):
        return where.checkpoints_dir, where.id
    return Path(where).absolute(), "path"


def list_steps(parent: Path) -> list[int]:
    """Returns the steps that have a checkpoint, valid or not, oldest first."""
    return sorted(int(found[1]) for name in _names(parent) if (found := _STEP.fullmatch(name)))


def has_checkpoints(parent: Path) -> bool:
    """Returns whether there are checkpoints, or damaged ones that were renamed."""
    return any(_STEP.fullmatch(name) or _SET_ASIDE.fullmatch(name) for name in _names(parent))


def step_dir(parent: Path, step: int) -> Path:
    return parent / step_name(step)


def read_chunks(fd: int, name: str, where: Path) -> Iterator[bytes]:
    """Yields the bytes of an open file in chunks."""
    while True:
        try:
            chunk = os.read(fd, _CHUNK_BYTES)
        except OSError as error:
            raise _unreadable(name, where, error) from error
        if not chunk:
            return
        yield chunk


def _names(parent: Path) -> list[str]:
    try:
        return [path.name for path in parent.iterdir()]
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
