"""One rank, seen from pytest's process: started, listened to, and ended with all that it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, final

import psutil

from headway.dist.failure.record import describe_exit_status
from headway.system.environment import FAILPOINT
from headway.testing.protocol import Report

_CLEAN_UP = 1.0
"""seconds that the children of a dead rank get to end by themselves"""
_LAST_WORDS = re.compile(r"^headway: rank (\d+) (?:stops because rank (\d+) |of \d+ on )", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What is known about one rank when a test is over."""

    rank: int
    report: Report | None
    problem: str
    """why there is no report"""
    released: bool
    """it did nothing wrong, but was ended because another rank had ended"""
    stack: str
    """where the rank was when it crashed or was ended"""
    stdout: str
    stderr: str

    @property
    def passed(self) -> bool:
        return self.report is not None and self.report.outcome == "passed"


@final
class _Capture:
    """A file without a name, which vanishes with the last process that has it open."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the rank may write
        self._read = 0

    def news(self) -> str:
        """What was written since the last call. `pread` leaves the position alone: it is the writer's, too."""
        data = os.pread(self.file.fileno(), os.fstat(self.file.fileno()).st_size - self._read, self._read)
        self._read += len(data)
        return data.decode(errors="replace")


@final
class Process:
    """A fresh interpreter that becomes a rank. Its output goes to files without a name."""

    def __init__(self, rank: int, cwd: Path) -> None:
        self.rank = rank
        self.stdout, self.stderr, self.stack = _Capture(), _Capture(), _Capture()
        self.connection: Connection[Any, Any]
        self.connection, far_end = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from headway.testing.worker import main; main({far_end.fileno()})"
        )
        with far_end:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self.stdout.file,
                stderr=self.stderr.file,
                pass_fds=(far_end.fileno(), self.stack.file.fileno()),
                env=_environ(),
                cwd=cwd,
                start_new_session=True,  # Ctrl-C is pytest's to handle; and a rank's children can be ended with it
            )

    def send(self, message: object) -> None:
        with suppress(BrokenPipeError):  # it is dead: whoever waits for its answer will see
            self.connection.send(message)

    def hang_up(self) -> None:
        """A rank that loses its connection ends itself, and all that it started."""
        self.connection.close()

    def is_stopped(self) -> bool:
        return self._is(psutil.STATUS_STOPPED)

    def _is(self, status: str) -> bool:
        return bool(psutil.Process(self.process.pid).status() == status)

    def signal(self, number: int) -> None:
        if self.process.returncode is None:
            os.kill(self.process.pid, number)

    def reap(self) -> int:
        """Ends what is left of the process and its children, and returns how the process ended."""
        if self.process.returncode is None:  # until it is reaped, its pid is not given to anybody else
            self.signal(signal.SIGKILL)
            # multiprocessing's helper ignores this one: it removes the shared memory of the dead, and then ends itself
            self._signal_group(signal.SIGTERM)
            deadline = time.monotonic() + _CLEAN_UP
            while self._has_children() and time.monotonic() < deadline:
                time.sleep(0.02)
            self._signal_group(signal.SIGKILL)
        return self.process.wait()

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nobody left; macOS says so in the second way
            os.killpg(self.process.pid, number)

    def _has_children(self) -> bool:
        for pid in psutil.pids():
            with suppress(ProcessLookupError, PermissionError):
                if pid != self.process.pid and os.getpgid(pid) == self.process.pid:
                    return True
        return False

    def hear(self) -> Result:
        """What has come through the connection: a report, or the end."""
        try:
            return self.result(report=self.connection.recv())
        except (EOFError, ConnectionResetError):
            status = self.reap()
        end = self.result(problem=describe_exit_status(status))
        culprit = blamed(end.stderr, self.rank) if status > 0 else None
        if culprit is None:
            return end
        problem = f"ended, with exit code {status}, because rank {culprit} was gone"
        return replace(end, problem=problem, released=True)

    def result(self, *, report: Report | None = None, problem: str = "", released: bool = False) -> Result:
        return Result(
            rank=self.rank,
            report=report,
            problem=problem,
            released=released,
            stack=self.stack.news(),
            stdout=self.stdout.news(),
            stderr=self.stderr.news(),
        )

    def close(self) -> None:
        """Waits for the end that `hang_up` has brought about, or brings it about."""
        deadline = time.monotonic() + _CLEAN_UP
        while (
            self.process.returncode is None
            and not self._is(psutil.STATUS_ZOMBIE)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        self.reap()
        for capture in (self.stdout, self.stderr, self.stack):
            capture.file.close()


def blamed(stderr: str, rank: int) -> int | None:
    """The rank that made headway.dist end this one, from its last words. No rank dies alone."""
    ranks = [int(match[2] or match[1]) for match in _LAST_WORDS.finditer(stderr)]
    return ranks[-1] if ranks and ranks[-1] != rank else None


def _environ() -> dict[str, str]:
    """The ranks inherit all but what is meant for pytest itself, and a fault that is meant for a test."""
    for_pytest = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", FAILPOINT)
    kept = {name: value for name, value in os.environ.items() if name not in for_pytest}
    return kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
