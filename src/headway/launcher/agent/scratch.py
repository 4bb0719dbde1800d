"""The temporary directory of a node agent: removed by the agent or, if it was killed, by the user's next agent."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.system import files
from headway.system.locks import FileLock

_PREFIX = "headway-agent-"
_UNLOCKED_S = 60.0
"""younger directories are not swept: their owner may not have locked them yet"""


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Makes a directory that only this user can read, and removes it in the end; first removes those of killed agents.

    >>> with scratch_directory() as directory:
    ...     (directory / "heartbeat-0").mkdir()
    """
    with files.storage("find a directory for temporary files"):
        parent = Path(tempfile.gettempdir())
    with files.storage(f"make a directory in {parent}"):
        _sweep(parent)
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    with FileLock.open_directory(directory) as lock:
        try:
            with suppress(OSError):  # without locks on this file system, no other agent can sweep, either
                lock.try_acquire()  # the kernel releases it when this process ends, even by kill -9
            yield directory
        finally:
            shutil.rmtree(directory)


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another agent has just removed it
            facts = path.lstat()
            if facts.st_uid == os.geteuid() and time.time() - facts.st_mtime > _UNLOCKED_S:
                _remove_unless_held(path)


def _remove_unless_held(path: Path) -> None:
    with FileLock.open_directory(path) as lock:
        if lock.try_acquire():
            shutil.rmtree(path)
