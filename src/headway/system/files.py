"""Durable files that belong to one user: explicit modes, exclusive names, replacement by rename.

Modes do not depend on the umask: directories 0700, files 0600. Writers never follow a link in the last part of a path.
Data is on disk before a name points to it: a reader sees the old contents or the new, never a part.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import BinaryIO, TypeVar

from headway.errors import StorageError

T = TypeVar("T")

_VISIBLE_S = 10.0  # until a network file system shows what another host has written
LARGEST_BYTES = 1 << 26
"""of a JSON or settings file, which is read as a whole"""
_SEARCH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC  # needs no permission to list
_NOT_VISIBLE = (errno.ENOENT, errno.ESTALE)
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)


@contextmanager
def storage(doing: str, *, passing: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Turns an `OSError`, unless it is of type `passing`, into a `StorageError` that says what failed, and why."""
    try:
        yield
    except passing:
        raise
    except OSError as error:
        remedy = "check space, quota and mount of that file system"
        if error.errno == errno.ENOMEM:
            remedy = "check the memory of this machine, and the limit of this job"
        raise StorageError(f"could not {doing}: {error.strerror or error}; {remedy}") from error


def is_listed(path: Path) -> bool:
    """Whether a file exists, even if another node has just made it.

    A network file system may remember for a while that a file did not exist; listing the directory shows it.
    """
    try:
        if any(each.name == path.name for each in path.parent.iterdir()):
            return True
    except FileNotFoundError:
        return False
    return path.exists()  # where listings are cached, and lookups are not


def make_dir(path: Path) -> None:
    """Creates a directory that only its owner may use; an existing one is an error."""
    path.mkdir(mode=0o700)
    mode = path.lstat().st_mode
    if mode & 0o777 != 0o700:  # the umask may have removed bits of the owner
        path.chmod(0o700 | mode & stat.S_ISGID)  # a project directory passes on its group with this bit


def open_private(path: Path, flags: int) -> int:
    """Opens a file that only its owner may use, as `os.open` does; never through a link, never blocking on a pipe."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if flags & os.O_CREAT:
            os.fchmod(fd, 0o600)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Opens a file in a directory that others may write to; `OSError` if it is not a regular file.

    A pipe would block, a device may never end, and another user's link may point anywhere. With `follow`, such a link
    is followed, too: for files that the user names, and those beside them, as in a shared cache of Hugging Face.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        if not follow and path.lstat().st_uid not in (os.geteuid(), 0):
            raise OSError(errno.ELOOP, "it is a link of another user", str(path)) from error
        fd = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(fd, "rb")


def read_regular(path: Path, *, follow: bool = False, most_bytes: int = LARGEST_BYTES) -> bytes:
    """Reads all of a file that `open_regular` opens; `OSError` if it is too large for a JSON or settings file."""
    with open_regular(path, follow=follow) as file:
        # a sparse file of terabytes takes no space; one that grows, or of /proc, has more than its size
        is_large = os.fstat(file.fileno()).st_size > most_bytes
        data = b"" if is_large else file.read(most_bytes + 1)
    if is_large or len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))
    return data


@contextmanager
def open_tree(root: Path | int, name: str = ".", *, make: bool = False) -> Iterator[int]:
    """Opens a directory, or one of this name below another; yields its descriptor. Below `root`, no link is followed.

    `make` makes the directories that are missing, for their owner only.

    >>> with open_tree(Path("project")) as project, open_tree(project, "data/images") as images:  # doctest: +SKIP
    ...     os.stat("0.jpg", dir_fd=images)
    """
    fd = os.open(root, _SEARCH) if isinstance(root, Path) else os.dup(root)
    try:
        for part in PurePath(name).parts:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
            inner = os.open(part, _SEARCH | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def open_inside(tree: int, name: str) -> BinaryIO:
    """Opens a regular file below an open directory without following links; `OSError` if there is none."""
    path = PurePath(name)
    with open_tree(tree, str(path.parent)) as directory:
        fd = os.open(path.name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", name)
    return os.fdopen(fd, "rb")


def open_unnamed(name: str) -> int:
    """Opens a file in memory that no other process can find; lists of open files show it as `name`.

    Python builds for old versions of glibc, and systems other than Linux, get a temporary file instead.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    memory = "/dev/shm"
    with tempfile.TemporaryFile(dir=memory if os.access(memory, os.W_OK) else None) as file:
        return os.dup(file.fileno())


def write_new(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Writes a file that must not exist yet; with `durable`, waits until it is on disk."""
    fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_fully(fd, data)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def write_fully(fd: int, data: bytes | memoryview) -> None:
    """Writes all bytes; a single `os.write` may write fewer."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces a file atomically: after a crash at any time it has the old contents or the new."""
    with _staged(path, data) as staged:
        staged.replace(path)
        sync_dir(path.parent)


def publish(path: Path, data: bytes, *, durable: bool = True) -> bool:
    """Writes a file unless it exists; of several writers, on any host, exactly one gets True.

    Without `durable`, a power cut may lose it: for what others wait for, since a busy disk may take seconds.
    """
    with _staged(path, data, durable=durable) as staged:
        return publish_file(staged, path, durable=durable)


def publish_file(staged: Path, path: Path, *, durable: bool = True) -> bool:
    """Links a finished file of the same directory to `path` unless that exists; returns as `publish` does.

    The caller removes the staged name.
    """
    try:
        path.hardlink_to(staged)
    except FileExistsError:
        if staged.stat().st_nlink < 2:  # else the link is ours, and only the server's first reply was lost
            return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        try:
            # also exclusive, but a crash here leaves a partial file
            write_new(path, staged.read_bytes(), durable=durable)
        except FileExistsError:
            return False
    if durable:
        sync_dir(path.parent)
    return True


def sync_dir(path: Path) -> None:
    """Makes the names in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync directories, and need no sync
            raise
    finally:
        os.close(fd)


def retry_until_visible(work: Callable[[], T], timeout_s: float = _VISIBLE_S) -> T:
    """Calls `work` until the network file system shows the file of another host that it needs; returns its result."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return work()
        except OSError as error:
            if error.errno not in _NOT_VISIBLE or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


@contextmanager
def _staged(path: Path, data: bytes, *, durable: bool = True) -> Iterator[Path]:
    """Writes data to a hidden file beside `path`, which is removed afterwards."""
    staged = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_new(staged, data, durable=durable)
        yield staged
    finally:
        staged.unlink(missing_ok=True)
