"""One rank, as pytest's process handles it: starts it, reads its output, and ends it with its children."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, final

import psutil

from headway.dist.failure.record import describe_exit_status
from headway.testing.fork_server import StartRank
from headway.testing.protocol import RankReport

_CLEAN_UP_S = 1.0
"""how long the children of a rank may run after its end"""
_ENDED_BECAUSE = re.compile(r"^headway: rank (\d+) (?:stops because rank (\d+) |of \d+ on )", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """The result of a test on one rank."""

    rank: int
    report: RankReport | None
    problem: str
    """why there is no report"""
    released: bool
    """whether it was ended only because another rank had ended"""
    stack: str
    """where the rank was when it crashed or was ended"""
    stdout: str
    stderr: str

    @property
    def passed(self) -> bool:
        return self.report is not None and self.report.outcome == "passed"


@final
class _OutputFile:
    """A file without a name, which vanishes with the last process that has it open."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  open for as long as the rank may write
        self._read = 0

    def read_new(self) -> str:
        """Returns what was written since the last call. `pread` keeps the position, which the writer shares."""
        data = os.pread(self.file.fileno(), os.fstat(self.file.fileno()).st_size - self._read, self._read)
        self._read += len(data)
        return data.decode(errors="replace")


@final
class RankHandle:
    """One rank: a process whose output goes to unnamed files."""

    def __init__(self, rank: int, start: StartRank) -> None:
        self.rank = rank
        self.stdout, self.stderr, self.stack = _OutputFile(), _OutputFile(), _OutputFile()
        self.connection: Connection[Any, Any]
        self.connection, far_end = Pipe()
        with far_end:
            self.process = start(
                stdout=self.stdout.file.fileno(),
                stderr=self.stderr.file.fileno(),
                connection=far_end.fileno(),
                stack=self.stack.file.fileno(),
            )

    def send(self, message: object) -> None:
        with suppress(BrokenPipeError):  # it has ended; `receive` reports that
            self.connection.send(message)

    def disconnect(self) -> None:
        """Closes the connection: the rank then kills its children and itself."""
        self.connection.close()

    def is_stopped(self) -> bool:
        return self._is(psutil.STATUS_STOPPED)

    def is_held(self) -> bool:
        """Returns whether no thread runs any more. The first that stops is enough for `is_stopped`."""
        states = (_thread_state(file) for file in Path(f"/proc/{self.process.pid}/task").glob("*/stat"))
        return all(state in "TtZX" for state in states)

    def _is(self, status: str) -> bool:
        return bool(psutil.Process(self.process.pid).status() == status)

    def signal(self, number: int) -> None:
        if self.process.returncode is None:
            os.kill(self.process.pid, number)

    def reap(self) -> int:
        """Kills the process, if it runs, and its children; returns its exit status."""
        if self.process.returncode is None:  # until it is reaped, its pid is not reused
            self.signal(signal.SIGKILL)
            # multiprocessing's resource tracker ignores SIGTERM: it removes shared memory, and then ends by itself
            self._signal_group(signal.SIGTERM)
            deadline = time.monotonic() + _CLEAN_UP_S
            while self._has_children() and time.monotonic() < deadline:
                time.sleep(0.02)
            self._signal_group(signal.SIGKILL)
        return self.process.wait()

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # no process left; PermissionError on macOS
            os.killpg(self.process.pid, number)

    def _has_children(self) -> bool:
        for pid in psutil.pids():
            with suppress(ProcessLookupError, PermissionError):
                if pid != self.process.pid and os.getpgid(pid) == self.process.pid:
                    return True
        return False

    def receive(self) -> RankResult:
        """Reads from the connection: a report, or the end of the process."""
        try:
            return self.result(report=self.connection.recv())
        except (EOFError, ConnectionResetError):
            status = self.reap()
        end = self.result(problem=describe_exit_status(status))
        culprit = find_culprit(end.stderr, self.rank) if status > 0 else None
        if culprit is None:
            return end
        problem = f"ended, with exit code {status}, because rank {culprit} was gone"
        return replace(end, problem=problem, released=True)

    def result(
        self, *, report: RankReport | None = None, problem: str = "", released: bool = False
    ) -> RankResult:
        return RankResult(
            rank=self.rank,
            report=report,
            problem=problem,
            released=released,
            stack=self.stack.read_new(),
            stdout=self.stdout.read_new(),
            stderr=self.stderr.read_new(),
        )

    def close(self) -> None:
        """Waits for the end of a disconnected process, and kills it if it does not end."""
        deadline = time.monotonic() + _CLEAN_UP_S
        while (
            self.process.returncode is None
            and not self._is(psutil.STATUS_ZOMBIE)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        self.reap()
        for capture in (self.stdout, self.stderr, self.stack):
            capture.file.close()


def _thread_state(file: Path) -> str:
    try:
        return file.read_text().rpartition(")")[2].split()[0]
    except OSError:  # the thread has ended
        return "X"


def find_culprit(stderr: str, rank: int) -> int | None:
    """Returns the rank whose failure made headway.dist end this one, from its output; None if it ended by itself."""
    ranks = [int(match[2] or match[1]) for match in _ENDED_BECAUSE.finditer(stderr)]
    return ranks[-1] if ranks and ranks[-1] != rank else None
