"""Waiting in tests: a test that runs out of time says so, with the load of the machine, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


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
    timeout_s: float = 60.0,
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
