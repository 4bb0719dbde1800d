"""Pools of processes that run tests as ranks: started once per size, reused by test after test, replaced if broken."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import final

from headway.errors import RankFailure
from headway.system import environment
from headway.testing.fork_server import ForkServer, StartRank, clean_environ, start_interpreter
from headway.testing.process import RankHandle, RankResult
from headway.testing.protocol import RankTask, WorkerSetup

_MAX_POOLS = 3
"""pools kept at the same time: an idle rank costs a quarter of a gigabyte"""
_START_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 5.0
_GRACE_S = 2.0
"""how long other ranks may run after one did not pass: they may be waiting for it"""
_ABORT_TIMEOUT_S = 2.0


@final
class RankPool:
    """`nproc` processes in one group. After `run`, `reusable` says whether they can run another test."""

    def __init__(self, nproc: int, pytest_args: Sequence[str], start: StartRank) -> None:
        self.reusable = True
        self._in_step = True
        self._processes: list[RankHandle] = []
        rendezvous = Path(tempfile.mkdtemp(prefix="headway-ranks-"))
        try:
            for rank in range(nproc):
                process = RankHandle(rank, start)
                self._processes.append(process)
                process.send(
                    WorkerSetup(
                        environ=clean_environ(),
                        variables=_variables(rank, nproc, rendezvous),
                        pytest_args=pytest_args,
                    )
                )
            self._check_started(self._collect(_START_TIMEOUT_S))
        except BaseException:
            self.kill()
            raise
        finally:
            shutil.rmtree(rendezvous)

    def is_whole(self) -> bool:
        """Returns whether all ranks are alive. Between tests they send nothing: what is readable has been closed."""
        return not wait([process.connection for process in self._processes], 0)

    def run(self, task: RankTask, timeout: float) -> list[RankResult]:
        """Runs one test on all ranks. Returns at most a few seconds after `timeout`, with a result for each."""
        self.reusable = False
        self._in_step = False
        for process in self._processes:
            process.send(task)
        results = self._collect(timeout)
        self._in_step = _in_step(results)
        self.reusable = self._in_step and all(r.report and r.report.reusable for r in results)
        return results

    def close(self) -> None:
        """Lets the ranks leave their group and exit; then kills their remaining children."""
        if not self._in_step:  # a rank may wait for one that has left
            self.kill()
            return
        for process in self._processes:
            process.send(None)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kills all ranks and their children."""
        for process in self._processes:
            process.disconnect()
        for process in self._processes:
            process.close()

    def _collect(self, timeout: float) -> list[RankResult]:
        """Waits for a report or the end of each rank; at most `_GRACE_S` longer once one of them did not pass."""
        results: dict[int, RankResult] = {}
        first: RankResult | None = None
        deadline = time.monotonic() + timeout
        waiting = {process.connection: process for process in self._processes}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                process = waiting.pop(connection)  # type: ignore[call-overload]
                result = results[process.rank] = process.receive()
                if first is None and not result.passed:
                    first = result
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        late = f"did not end within {timeout:g} s"
        if first is not None:
            late = f"still running {_GRACE_S:g} s after rank {first.rank} had ended"
        stopped = [process for process in waiting.values() if process.is_stopped()]
        abort(list(waiting.values()))
        for process in waiting.values():
            problem = f"{late}: a signal had stopped it" if process in stopped else late
            results[process.rank] = process.result(problem=problem, released=first is not None)
        return [results[process.rank] for process in self._processes]

    def _check_started(self, results: list[RankResult]) -> None:
        failed = [result for result in results if result.report is None and not result.released]
        if failed:
            reasons = (f"rank {r.rank} {r.problem}\n{r.stdout}{r.stderr}{r.stack}" for r in failed)
            raise RankFailure("the processes of this test could not be started\n" + "\n".join(reasons))


def abort(stuck: list[RankHandle]) -> None:
    """Ends ranks with SIGABRT, on which they write their stacks; one that a signal had stopped cannot, and is killed.

    A rank that sees another end exits without a stack. So all of them are held by SIGSTOP until each has its SIGABRT,
    and rank 0, which all others are connected to, ends after them.
    """
    held = [process for process in stuck if not process.is_stopped()]
    for process in stuck:
        process.signal(signal.SIGSTOP if process in held else signal.SIGKILL)
    deadline = time.monotonic() + _ABORT_TIMEOUT_S
    # SIGCONT would cancel a SIGSTOP that a busy machine has not delivered yet
    while not all(process.is_held() for process in held) and time.monotonic() < deadline:
        time.sleep(0.01)
    others, root = [each for each in held if each.rank], [each for each in held if not each.rank]
    for ending in (others, root):
        for number in (signal.SIGABRT, signal.SIGCONT):
            for process in ending:
                process.signal(number)
        deadline = time.monotonic() + _ABORT_TIMEOUT_S
        for process in ending:
            wait([process.connection], max(0.0, deadline - time.monotonic()))
            process.reap()
    for process in stuck:
        process.reap()


def _in_step(results: list[RankResult]) -> bool:
    """Returns whether all ranks ended alike, after the same collectives. If not, a rank may still wait for another."""
    reports = [result.report for result in results]
    return None not in reports and len({(r.outcome, r.text, r.collectives) for r in reports if r}) == 1


def _variables(rank: int, nproc: int, rendezvous: Path) -> Mapping[str, str]:
    """Returns the variables that the node agent gives to a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        environment.RENDEZVOUS: str(rendezvous / "address"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


@final
class RankPools:
    """The pools of one pytest process, by size; when there are too many, the least recently used is closed."""

    def __init__(self, *, fork: bool = sys.platform == "linux") -> None:
        self._by_size: dict[int, RankPool] = {}
        self._fork = fork
        self._server: ForkServer | None = None

    def get(self, nproc: int, pytest_args: Sequence[str], cwd: Path) -> RankPool:
        pool = self._by_size.pop(nproc, None)
        if pool is None or not pool.is_whole():
            if pool is not None:
                pool.kill()
            if len(self._by_size) == _MAX_POOLS:
                self._by_size.pop(next(iter(self._by_size))).close()
            pool = RankPool(nproc, pytest_args, self._starter(cwd))
        self._by_size[nproc] = pool  # last: used most recently
        return pool

    def discard(self, pool: RankPool) -> None:
        self._by_size = {nproc: kept for nproc, kept in self._by_size.items() if kept is not pool}
        pool.close()

    def close(self) -> None:
        while self._by_size:
            self._by_size.popitem()[1].close()
        self._close_server()

    def _starter(self, cwd: Path) -> StartRank:
        if not self._fork:
            return partial(start_interpreter, cwd)
        if self._server is not None and not self._server.fits():
            self._close_server()
        self._server = self._server or ForkServer(cwd)
        return self._server.fork

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
