"""Waiting in tests: a test that runs out of time says so, with the load of the machine, and nothing else."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

T = TypeVar("T")

EXIT_LIMIT_S = 40.0
"""how long ranks that were killed, have failed or were told to stop may take to be gone, on a busy machine"""


def describe_load() -> str:
    """How busy the machine is.

    >>> describe_load()
    'load average 0.4 on 2 CPUs'
    """
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"


def wait_until(
    condition: Callable[[], T],
    what: str,
    *,
    timeout_s: float = 150.0,
    interval_s: float = 0.05,
    explain: Callable[[], object] = str,
) -> T:
    """Returns what the condition gives once that is true; fails with `explain()` when the time is over.

    >>> wait_until(ready.exists, "the job is ready", explain=lambda: cluster.output(job))
    """
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(
                f"ran out of time after {timeout_s:g} s ({describe_load()}), waiting until {what}\n{explain()}"
            )
        time.sleep(interval_s)
    return found


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or a zombie. It may end between two looks, so one call must ask and catch.

    >>> has_ended(psutil.Process())
    False
    """
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def check_duration(seconds: float, limit_s: float, what: str) -> None:
    """Fails if something took longer than it may.

    >>> check_duration(6.1, 5, "all ranks were down")
    Failed: ran out of time: 6.1 s until all ranks were down, at most 5 s expected (load average 9.2 on 2 CPUs)
    """
    __tracebackhide__ = True
    if seconds >= limit_s:
        pytest.fail(
            f"ran out of time: {seconds:.1f} s until {what}, at most {limit_s:g} s expected ({describe_load()})"
        )


def exit_in_time(process: subprocess.Popen[str], *, limit_s: float = EXIT_LIMIT_S) -> str:
    """Returns what a process that was told to end has printed; kills it, and fails, if it lives on.

    >>> process.send_signal(signal.SIGTERM)
    >>> text = exit_in_time(process)
    """
    __tracebackhide__ = True
    family = psutil.Process(process.pid).children(recursive=True)
    try:
        return process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        for each in family:
            with suppress(psutil.Error):
                each.kill()
        process.kill()
        text = process.communicate()[0]
        pytest.fail(
            f"ran out of time: alive {limit_s:g} s after it should have ended ({describe_load()})\n{text}"
        )


def check_exit(directory: Path, ended: float, *, limit_s: float = EXIT_LIMIT_S) -> None:
    """Fails if a launch took too long from its first failure, recorded in a run below `directory`, to its end.

    >>> check_exit(tmp_path, time.time())
    """
    __tracebackhide__ = True
    recorded = [path.stat().st_mtime for path in directory.rglob("failure*.json")]
    if recorded:
        check_duration(ended - max(recorded), limit_s, "all ranks were gone after the first failure")
