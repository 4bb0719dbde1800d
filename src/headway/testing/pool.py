"""Groups of processes that run tests as ranks: started once per size, reused by test after test, replaced if spoilt."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import final

from headway.errors import RankFailure
from headway.system import environment
from headway.testing.process import Process, Result
from headway.testing.protocol import Start, Task

_MAX_POOLS = 3
"""groups kept alive at the same time: an idle rank costs a quarter of a gigabyte"""
_START_TIMEOUT = 120.0
_CLOSE_TIMEOUT = 5.0
_GRACE = 2.0
"""seconds the others get to end by themselves once a rank did not pass: they may be waiting for it in vain"""
_ABORT_TIMEOUT = 2.0


@final
class Pool:
    """`n` processes in one group. After `run`, ask `spoilt` whether they may be used again."""

    def __init__(self, n: int, pytest_args: Sequence[str], cwd: Path) -> None:
        self.spoilt = False
        self._in_step = True
        self._members: list[Process] = []
        meeting = Path(tempfile.mkdtemp(prefix="headway-ranks-"))
        try:
            for rank in range(n):
                member = Process(rank, cwd)
                self._members.append(member)
                member.send(
                    Start(
                        variables=_variables(rank, n, meeting),
                        pytest_args=pytest_args,
                        stack_fd=member.stack.file.fileno(),
                    )
                )
            self._check_started(self._collect(_START_TIMEOUT))
        except BaseException:
            self.kill()
            raise
        finally:
            shutil.rmtree(meeting)

    def is_whole(self) -> bool:
        """Are all ranks alive? Between tests they say nothing, so what is to be read is an end."""
        return not wait([member.connection for member in self._members], 0)

    def run(self, task: Task, timeout: float) -> list[Result]:
        """Runs one test on all ranks. Returns at most a few seconds after `timeout`, with a result for each."""
        self.spoilt = True  # until all is known to be well
        self._in_step = False
        for member in self._members:
            member.send(task)
        results = self._collect(timeout)
        self._in_step = _in_step(results)
        self.spoilt = not self._in_step or not all(r.report and r.report.reusable for r in results)
        return results

    def close(self) -> None:
        """Lets the ranks leave in good order, so that what they started can end in good order, too."""
        if not self._in_step:  # one may wait for another in vain
            self.kill()
            return
        for member in self._members:
            member.send(None)
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        for member in self._members:
            with suppress(subprocess.TimeoutExpired):
                member.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends all ranks now, with all that they started."""
        for member in self._members:
            member.hang_up()
        for member in self._members:
            member.close()

    def _collect(self, timeout: float) -> list[Result]:
        """Waits for a report of each rank, or for its end; but not long once one of them did not pass."""
        results: dict[int, Result] = {}
        first: Result | None = None
        deadline = time.monotonic() + timeout
        waiting = {member.connection: member for member in self._members}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                member = waiting.pop(connection)  # type: ignore[call-overload]
                result = results[member.rank] = member.hear()
                if first is None and not result.passed:
                    first = result
                    deadline = min(deadline, time.monotonic() + _GRACE)
        late = f"did not end within {timeout:g} s"
        if first is not None:
            late = f"still at work {_GRACE:g} s after rank {first.rank} had ended"
        stopped = [member for member in waiting.values() if member.is_stopped()]
        self._abort(list(waiting.values()))
        for member in waiting.values():
            problem = f"{late}: a signal had stopped it" if member in stopped else late
            results[member.rank] = member.result(problem=problem, released=first is not None)
        return [results[member.rank] for member in self._members]

    def _abort(self, stuck: list[Process]) -> None:
        """Ends ranks in a way that makes them write their stack first; a stopped one cannot."""
        for member in stuck:
            member.signal(signal.SIGKILL if member.is_stopped() else signal.SIGABRT)
        deadline = time.monotonic() + _ABORT_TIMEOUT
        for member in stuck:
            wait([member.connection], max(0.0, deadline - time.monotonic()))
            member.reap()

    def _check_started(self, results: list[Result]) -> None:
        failed = [result for result in results if result.report is None and not result.released]
        if failed:
            words = (f"rank {r.rank} {r.problem}\n{r.stdout}{r.stderr}{r.stack}" for r in failed)
            raise RankFailure("the processes of this test could not be started\n" + "\n".join(words))


def _in_step(results: list[Result]) -> bool:
    """Did all ranks come to the same end, after the same collectives? If not, one may still owe another an answer."""
    reports = [result.report for result in results]
    return None not in reports and len({(r.outcome, r.text, r.collectives) for r in reports if r}) == 1


def _variables(rank: int, n: int, meeting: Path) -> Mapping[str, str]:
    """A place in the group, as the node agent would give it."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": "0",
        environment.RENDEZVOUS: str(meeting / "address"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


@final
class Pools:
    """The groups of one pytest session, by size; the one unused for longest goes when there are too many."""

    def __init__(self) -> None:
        self._by_size: dict[int, Pool] = {}

    def get(self, n: int, pytest_args: Sequence[str], cwd: Path) -> Pool:
        pool = self._by_size.pop(n, None)
        if pool is None or not pool.is_whole():
            if pool is not None:
                pool.kill()
            if len(self._by_size) == _MAX_POOLS:
                self._by_size.pop(next(iter(self._by_size))).close()
            pool = Pool(n, pytest_args, cwd)
        self._by_size[n] = pool  # last: used most recently
        return pool

    def discard(self, pool: Pool) -> None:
        self._by_size = {n: kept for n, kept in self._by_size.items() if kept is not pool}
        pool.close()

    def close(self) -> None:
        while self._by_size:
            self._by_size.popitem()[1].close()
