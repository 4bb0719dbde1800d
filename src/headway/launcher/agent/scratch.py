"""A node agent's folder in /tmp: gone with the agent, or, when that was killed, with the next one of the same user."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "headway-agent-"
_YOUNG = 60.0
"""seconds: a folder of this age may be one that its owner is just about to lock"""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that only this user can read. Those that dead agents have left are removed first.

    >>> with scratch_folder() as folder:
    ...     (folder / "heartbeat-0").mkdir()
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # no locks on this file system: then nobody can sweep, either
            fcntl.flock(fd, fcntl.LOCK_EX)  # the kernel frees it when we end, also by kill -9
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(fd)


def _sweep() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, or gone this moment
            facts = path.lstat()
            if facts.st_uid == os.geteuid() and time.time() - facts.st_mtime > _YOUNG:
                _remove_unless_held(path)


def _remove_unless_held(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(fd)
