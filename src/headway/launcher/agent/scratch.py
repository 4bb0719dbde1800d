"""A node agent's directory in /tmp: removed with the agent, or, if that was killed, by the user's next agent."""

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
"""how long after its creation a directory may be one that its owner is about to lock"""


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A new directory that only this user can read. Those that killed agents have left are removed first.

    >>> with scratch_directory() as directory:
    ...     (directory / "heartbeat-0").mkdir()
    """
    with files.storage("make a directory for temporary files"):
        _sweep()
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    with FileLock.open_directory(directory) as lock:
        try:
            with suppress(OSError):  # no locks on this file system: then no other agent can sweep, either
                lock.try_acquire()  # the kernel releases it when we end, also by kill -9
            yield directory
        finally:
            shutil.rmtree(directory)


def _sweep() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, or gone this moment
            facts = path.lstat()
            if facts.st_uid == os.geteuid() and time.time() - facts.st_mtime > _UNLOCKED_S:
                _remove_unless_held(path)


def _remove_unless_held(path: Path) -> None:
    with FileLock.open_directory(path) as lock:
        if lock.try_acquire():
            shutil.rmtree(path)
