"""The node agent: starts the ranks of this node, and sees to it that they live and die together.

It is a plain process without torch, so it is up at once and cannot be taken down by what takes a rank down. Ranks that
use headway end each other within moments when one fails (see `headway.dist.control`); the agent is there for those
that cannot, for the exit code, and for the last words.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, final

import psutil

from headway import files
from headway.errors import INTERRUPTED, TERMINATED, UsageError
from headway.failure import Record, cause, status_in_words

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLL = 0.02
_GRACE = 2.0
"""seconds between a rank's failure, SIGTERM to the rest, and SIGKILL"""
_RANK_MEMORY = 250 << 20
"""what a process that has imported torch takes at the least"""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A running rank: its number and its process."""

    number: int
    process: subprocess.Popen[bytes]


@final
class Agent:
    """Runs a command as `processes` ranks on this machine. `run` returns the exit code of the whole.

    >>> Agent([sys.executable, "train.py"], processes=4).run()
    0
    """

    def __init__(
        self, command: Sequence[str], *, processes: int, environ: Mapping[str, str] = os.environ
    ) -> None:
        check_processes(processes)
        self._command = list(command)
        self._processes = processes
        self._environ = dict(environ)
        self._running: list[Rank] = []
        self._ended: dict[int, int] = {}  # rank -> return code, in the order in which they ended
        self._pids: dict[int, int] = {}
        self._signals: list[int] = []

    def run(self) -> int:
        folder = Path(tempfile.mkdtemp(prefix="headway-"))  # 0700: it holds the key of the control channel
        handlers = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        try:
            for number in range(self._processes):
                self._running.append(self._start(number, folder))
            self._supervise()
            return self._conclude(folder)
        finally:
            self._kill(signal.SIGKILL)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            shutil.rmtree(folder)

    def _start(self, number: int, folder: Path) -> Rank:
        environ = self._environ | rank_environment(number, self._processes, folder)
        process = subprocess.Popen(
            self._command, env=environ, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_die_with_parent
        )
        self._pids[number] = process.pid
        return Rank(number=number, process=process)

    def _supervise(self) -> None:
        """Waits for all ranks. Once one has failed, the others have a grace to leave by themselves, then none."""
        deadlines: list[tuple[float, signal.Signals]] = []
        while self._running:
            for rank in [rank for rank in self._running if _has_ended(rank.process)]:
                self._reap(rank)
            if not deadlines and any(self._ended.values()):
                now = time.monotonic()
                deadlines = [(now + _GRACE, signal.SIGTERM), (now + 2 * _GRACE, signal.SIGKILL)]
            while deadlines and time.monotonic() >= deadlines[0][0]:
                self._kill(deadlines.pop(0)[1])
            time.sleep(_POLL)

    def _reap(self, rank: Rank) -> None:
        # until it is reaped, its number cannot be taken by another process: now is the time to kill what it left behind
        _signal_group(rank.process.pid, signal.SIGKILL)
        self._ended[rank.number] = rank.process.wait()
        self._running.remove(rank)

    def _kill(self, number: signal.Signals) -> None:
        for rank in list(self._running):
            _signal_group(rank.process.pid, number)
            if number == signal.SIGKILL:
                self._reap(rank)

    def _forward(self, number: int, _: FrameType | None) -> None:
        """Passes a signal on to the ranks; a second Ctrl-C means now."""
        again = number == signal.SIGINT and signal.SIGINT in self._signals
        self._signals.append(number)
        for rank in self._running:
            if again:
                _signal_group(rank.process.pid, signal.SIGKILL)
            else:
                rank.process.send_signal(number)

    def _conclude(self, folder: Path) -> int:
        """Says what happened, once and last, and returns the exit code."""
        if signal.SIGINT in self._signals:
            print("headway: interrupted by Ctrl-C", file=sys.stderr)
            return INTERRUPTED
        if not any(self._ended.values()):
            return 0
        if signal.SIGTERM in self._signals:
            print("headway: stopped by SIGTERM", file=sys.stderr)
            return TERMINATED
        record = self._first_failure(folder / "failure.json")
        print(cause(record, self._processes, record.get("failure_file")), end="", file=sys.stderr)
        return int(record["exit_code"])

    def _first_failure(self, path: Path) -> Record:
        """What the ranks agreed on, completed by what only their parent can know: how they ended."""
        if path.exists():
            record: Record = json.loads(path.read_text())
            if record["kind"] == "vanished" and record["rank"] in self._ended:
                status = self._ended[record["rank"]]
                early = " while the others still worked" if status >= 0 else ""
                record |= {"error": status_in_words(status) + early, "hint": None}
                _complete(record)
            return record
        rank, status = next((rank, status) for rank, status in self._ended.items() if status)
        return {
            "kind": "exit",
            "rank": rank,
            "host": socket.gethostname(),
            "pid": self._pids[rank],
            "error": f"{status_in_words(status)}; its own output, above, says why",
            "exit_code": 1,
        }


def _complete(record: Record) -> None:
    """The record in the run directory was written by a rank that could only see that another was gone."""
    if record.get("failure_file"):
        files.write_atomic(Path(record["failure_file"]), json.dumps(record, indent=2).encode())


def rank_environment(number: int, processes: int, folder: Path) -> dict[str, str]:
    """What one rank is told: torchrun's names, and where the ranks meet."""
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "HEADWAY_RENDEZVOUS": str(folder / "rendezvous.json"),
        # ranks that share the cores must not each start a thread per core
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // processes))),
    }


def check_processes(processes: int) -> None:
    """Refuses what cannot work before anything is started."""
    if processes < 1:
        raise UsageError(f"--nproc {processes}: at least one process is needed")
    room = max(1, psutil.virtual_memory().available // _RANK_MEMORY)
    if processes > room:
        raise UsageError(
            f"--nproc {processes}: this machine's free memory holds about {room} processes with torch; ask for fewer"
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if "sched_getaffinity" in vars(os) else os.cpu_count() or 1


def _die_with_parent() -> None:
    """Runs in the child before the program: should the agent be killed, the kernel ends the rank."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def _has_ended(process: subprocess.Popen[Any]) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all of it is gone already
        os.killpg(group, number)
