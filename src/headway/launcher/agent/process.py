"""A rank as its agent sees it: a process and all that it starts, which ends with the agent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from headway.launcher.agent.foreground import Foreground
from headway.system.log import logger

_POLL_S = 0.01
_KILLED_S = 0.5
"""how long a killed process may take to end"""


@final
@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A running rank: its number, its process, and when it was started, by the monotonic clock."""

    number: int
    process: subprocess.Popen[bytes]
    started: float

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> int:
        """Kills the processes that the rank left running, and returns the rank's own exit status."""
        # until it is reaped, no other process can have its pid
        self.signal_group(signal.SIGKILL)
        return self.process.wait()

    def signal(self, number: int) -> None:
        """Signals only the rank; not through Popen, which would reap it."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def signal_group(self, number: int) -> None:
        """Signals the rank and all that it has started."""
        with suppress(ProcessLookupError):  # no process of the group is left
            os.killpg(self.process.pid, number)


def start_rank(
    command: Sequence[str],
    *,
    number: int,
    environ: Mapping[str, str],
    cwd: str | None = None,
    stderr: int | None = None,
    foreground: Foreground | None = None,
    cpus: set[int] | None = None,
) -> RankProcess:
    """Starts a rank in a process group of its own, on these CPUs and with this standard error if any are given.

    With `foreground`, it reads the standard input of this process.
    """

    def prepare() -> None:  # in the child, before the program
        if sys.platform == "linux":
            # PR_SET_PDEATHSIG: ends the rank if the agent is killed
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            if cpus is not None:
                os.sched_setaffinity(0, cpus)
        if foreground is not None:
            foreground.enter()
        # until the rank has its handlers, a stop request must not kill it; the agent repeats the request
        for ignored in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(ignored, signal.SIG_IGN)

    process = subprocess.Popen(
        command,
        env=environ,
        cwd=cwd,
        stdin=None if foreground is not None else subprocess.DEVNULL,
        stderr=stderr,
        process_group=0,
        preexec_fn=prepare,
    )
    return RankProcess(number=number, process=process, started=time.monotonic())


def work_in_child(work: Callable[[], object], timeout_s: float) -> bool:
    """Does work that may block in the kernel, such as a write, in a forked process; returns whether it ended in time.

    A thread is not enough: a process with a thread that is blocked by a frozen file system cannot exit.
    """
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except Exception:  # noqa: BLE001  the parent continues without it
            logger.exception("the node agent could not record what it found")
        finally:
            os._exit(1)
    if _ends_within(child, timeout_s):
        return True
    os.kill(child, signal.SIGKILL)
    _ends_within(child, _KILLED_S)  # unless it is blocked in the kernel
    return False


def _ends_within(child: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(_POLL_S)
    return False
