"""Checks of who could have written a file before headway acts on it: owners and modes of files and directories.

A user who can write to a directory can rename the files in it and put others in their place, whatever their modes. So
before headway runs a command, opens a pickle or joins a rendezvous that it finds on disk, it checks that only this
user, or root, could have put it there. Files that are only displayed, such as the runs of others, are not checked.
"""

from __future__ import annotations

import grp
import os
import pwd
import secrets
import shlex
import stat
from pathlib import Path

from headway.errors import UsageError
from headway.system import files

_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
"""files that Docker and Podman put into a container"""


def uid_in(directory: Path) -> int:
    """Returns the owner of files that this process creates in a directory: a mount may map users, as root_squash does.

    Returns this user if this process may not write there.
    """
    status = _probe(directory)
    return os.geteuid() if status is None else status.st_uid


def keeps_modes(directory: Path) -> bool:
    """Returns whether files in a directory keep their modes, as they do not on exFAT and Windows drives.

    True if this user may not write there.
    """
    status = _probe(directory)
    return status is None or not status.st_mode & 0o077


def _probe(directory: Path) -> os.stat_result | None:
    """Creates and removes a private file; returns its status, or None if that is not possible."""
    probe = directory / f".probe-{secrets.token_hex(8)}.tmp"
    try:
        fd = files.open_private(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except OSError:
        return None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)


def check_private(path: Path, *, advice: str | None = None) -> None:
    """Raises `UsageError` unless a file or directory is this user's, or root's, and nobody else can write to it.

    `advice` replaces the remedy in the message, which is otherwise to change the owner or the mode.

    >>> check_private(Path("/usr"))
    """
    _check(path, path.lstat(), sticky=False, advice=advice)


def check_owner(path: Path) -> None:
    """Raises `UsageError` unless a file, directory or link is this user's, or root's.

    >>> check_owner(Path("/usr"))
    """
    _check_owner(path, path.lstat())


def check_root(path: Path) -> None:
    """Raises `UsageError` if others could replace files that this user puts into a directory.

    Others may write to the directory, and to those above it, if these have the sticky bit: then only the owner of a
    file can rename it. The directories, and the links in the path, must belong to this user or root, since an owner can
    rename anything in a directory. If the directory does not exist yet, only those above it are checked.

    >>> check_root(Path("/tmp"))
    """
    real = path.resolve()
    if os.path.lexists(real):
        _check(real, real.lstat(), sticky=True)
    _check_way(path.absolute())


def _check_way(path: Path, followed: frozenset[Path] = frozenset()) -> None:
    """Checks the directories above a path, and above each link in it: any of them decides where the path leads."""
    here = Path(path.anchor)
    for name in path.parts[1:]:
        if not os.path.lexists(here):
            return
        _check_above(here, here.lstat())
        here = here.parent if name == ".." else here / name
        if here.is_symlink() and here not in followed:
            if not _is_mounted(here.lstat().st_uid):
                check_owner(here)
            _check_way(here.parent / here.readlink(), followed | {here})
            here = here.resolve()


def _check_above(path: Path, status: os.stat_result) -> None:
    if _is_mounted(status.st_uid):
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise _writable(path, status, "+t")
    elif not _is_unmapped(status.st_uid):
        _check(path, status, sticky=True)


def _is_mounted(uid: int) -> bool:
    """Returns whether a directory's owner counts as the user who started this container, who is its root."""
    return uid != 0 and os.geteuid() == 0 and any(mark.exists() for mark in _CONTAINER_MARKS)


def _is_unmapped(uid: int) -> bool:
    """Returns whether a user of the machine has no id in this container, which shows even root as nobody."""
    try:
        nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):  # not Linux
        return False
    return uid == nobody and not any(
        int(first) <= uid < int(first) + int(count) for first, _, count in ranges
    )


def read_private(path: Path, *, secret: bool = False) -> bytes:
    """Reads a file, never through a link; `UsageError` if another user could have written it.

    With `secret`, `UsageError` also if another user can read it.
    """
    fd = files.open_private(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is not a regular file: remove it")
        _check(path, status, sticky=False)
        if secret and status.st_mode & 0o077:
            raise UsageError(f"{path} can be read by others ({stat.filemode(status.st_mode)}): remove it")
        return file.read()


def _check(path: Path, status: os.stat_result, *, sticky: bool, advice: str | None = None) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise UsageError(f"{path} is a symbolic link, whose target can change: give the path itself")
    _check_owner(path, status, advice)
    if _others_can_write(status) and not (sticky and status.st_mode & stat.S_ISVTX):
        raise _writable(path, status, "+t" if sticky else "go-w", advice)


def _check_owner(path: Path, status: os.stat_result, advice: str | None = None) -> None:
    if status.st_uid in (os.geteuid(), 0):
        return
    if status.st_uid != uid_in(path if stat.S_ISDIR(status.st_mode) else path.parent):
        raise UsageError(
            f"{path} belongs to another user, {user(status.st_uid)}, who could have it run any code as "
            f"{user(os.geteuid())}: {advice or _own(status.st_uid)}"
        )


def _others_can_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status.st_gid)


def _is_private_group(gid: int) -> bool:
    """Returns whether only this user is in a group: many systems give each user one, with a umask of 002."""
    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:  # containers run as users without an entry
        return gid == os.getegid() == os.geteuid()
    return me.pw_gid == gid and group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}


def _writable(path: Path, status: os.stat_result, mode: str, advice: str | None = None) -> UsageError:
    remedy = f"chmod {mode} {shlex.quote(str(path))}"
    if status.st_uid != os.geteuid():
        remedy = f"use a directory of your own, or ask {user(status.st_uid)} to {remedy}"
    return UsageError(
        f"{path} can be written by others ({stat.filemode(status.st_mode)}), who could have it run any code as "
        f"{user(os.geteuid())}: {advice or remedy}"
    )


def _own(uid: int) -> str:
    """Returns the advice for a directory of another user: root in a container sees those of the user who started it."""
    return (
        "use a directory of your own"
        if os.geteuid()
        else f"use a directory of your own, or run as {user(uid)}"
    )


def user(uid: int) -> str:
    """Returns the name of a user, for messages."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def user_name() -> str:
    """Returns the name of this user, for commands; the number if there is no entry, as in many containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
