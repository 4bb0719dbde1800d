"""What the text of an exception leaves out: which limit the memory of data workers has reached. No torch."""

from __future__ import annotations

import os
import re
import shutil
import signal
from contextlib import suppress

from headway.dist.failure.record import describe_exit_status
from headway.system.limits import resource_limits
from headway.system.text import format_bytes

_WORKER = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([^.]+)\.")
_SHM_FULL = re.compile(
    r"(shared memory|</torch_).*(No space left|Cannot allocate memory)", re.IGNORECASE | re.DOTALL
)
_SHM = "/dev/shm"


def memory_hint(text: str) -> str | None:
    """Returns which limit explains an error of torch's data workers; None for any other error.

    >>> memory_hint("DataLoader worker (pid 7) is killed by signal: Killed. ")
    'data worker with pid 7 was killed by SIGKILL (kill -9, or the out-of-memory killer: see dmesg); ...'
    """
    if found := _WORKER.search(text):
        number = next((each for each in signal.Signals if signal.strsignal(each) == found[2]), None)
        if number is None:
            return None
        how = f"data worker with pid {found[1]} {describe_exit_status(-number)}"
        return f"{how}; {_shared_memory() if number == signal.SIGBUS else _memory()}"
    return _shared_memory() if _SHM_FULL.search(text) else None


def _memory() -> str:
    limit = resource_limits().memory
    if limit is None:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"the memory limit here is {format_bytes(limit)}: use fewer workers, or ask for more memory"


def _shared_memory() -> str:
    free = ""
    with suppress(OSError):
        usage = shutil.disk_usage(_SHM)
        free = f" ({format_bytes(usage.free)} of {format_bytes(usage.total)} are free)"
    return (
        f"{_SHM}{free} is too small for the batches of data workers: "
        "make it larger (docker run --shm-size), or use fewer workers or smaller batches"
    )
