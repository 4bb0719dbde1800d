"""A started job, here or on a cluster: its state, its result, and how to wait for it, stop it and resume it.

Everything about a job is in its run directory, so any process that can read the directory can open it:

    job = hw.launch(train, on=hw.Slurm(nodes=2))          # today, in a notebook
    job = hw.Job.open("runs/train-2026.11.15-14.30-x7k2")  # tomorrow, elsewhere
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, final

from headway import schedulers
from headway.dist.failure.record import format_cause
from headway.errors import HeadwayError, RankFailure, Stopped, UsageError
from headway.launcher.functions import pickled
from headway.launcher.functions.exceptions import error_files, read_error
from headway.launcher.functions.worker import Call
from headway.launcher.job_start import BACKGROUND, restart
from headway.run import Run
from headway.run.info import newest_step, read_json
from headway.run.lock import newest_owner
from headway.run.status import State, Status, check_over, exit_code, is_unanswered, status
from headway.schedulers.base import JobIds
from headway.system import files
from headway.system.locks import ProcessIdentity

_WAIT_MIN_S, _WAIT_MAX_S, _WAIT_MAX_HERE_S = 0.05, 5.0, 0.5
"""seconds between two checks while waiting for a job; the last is the maximum for a job of this process"""
_FOLLOW_S = 1.0
_LAST_LINES = 20


@final
class Job:
    """A started job.

    >>> job = hw.launch(train, 3e-4, on=hw.Local(nproc=4))
    >>> job.state()
    'running'
    >>> job.result()
    {'accuracy': 0.98}
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @classmethod
    def open(cls, path: str | os.PathLike[str] | Run) -> Job:
        """The job of an existing run directory: its path, or a `Run`."""
        run = path if isinstance(path, Run) else Run.open(path)
        if read_json(run.submission_file) is None:
            raise UsageError(
                f"{run.path} was neither launched nor submitted by headway, so it has no job"
                "; hw.launch and headway submit make one"
            )
        return cls(run)

    @property
    def id(self) -> str:
        return self.run.id

    def __repr__(self) -> str:
        return f"Job({self.id!r}: {self.state()})"

    def status(self) -> Status:
        """State and reason, as `headway runs` shows them."""
        return _statuses([self])[0]

    def state(self) -> State:
        """One word: queued, running, done, failed, stopped, interrupted, cancelled or lost."""
        return self.status().state

    def done(self) -> bool:
        """Whether the job is over, with or without a failure; does not wait."""
        return self.status().over

    def wait(self, timeout: float | None = None) -> State:
        """Waits until the job is over and returns its state; `TimeoutError` after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _WAIT_MIN_S
        while not (now := self.status()).over:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.id} is still {now.state} after {timeout:g} s")
            left = pause if deadline is None else min(pause, max(0.0, deadline - time.monotonic()))
            time.sleep(left)
            pause = self._next(pause)
        return now.state

    def result(self) -> Any:
        """What the function returned on rank 0, once the job is over; if it raised, the exception is raised here.

        The exception is of its own class, and carries the traceback of the rank that failed first.
        """
        return self._results(ranks=1)[0]

    def results(self) -> list[Any]:
        """What the function returned on each rank."""
        return self._results(ranks=None)

    def exception(self) -> BaseException | None:
        """What `result` would raise, once the job is over; None if the function returned."""
        try:
            self.result()
        except Exception as error:
            if self.done():
                return error
            raise
        return None

    def __await__(self) -> Generator[Any, None, Any]:
        """`await job` is `job.result()`, and leaves the event loop to others meanwhile."""
        return self._await().__await__()

    async def _await(self) -> Any:
        pause = _WAIT_MIN_S
        while not (await asyncio.to_thread(self.status)).over:
            await asyncio.sleep(pause)
            pause = self._next(pause)
        return self.result()

    def cancel(self) -> None:
        """Asks the job to stop. One that saves its state does so first; `wait` to see it end."""
        submitted = read_json(self.run.submission_file) or {}
        ids = JobIds.from_submission(submitted)
        if ids is not None:
            schedulers.load(ids.scheduler).cancel(ids)
        elif is_unanswered(submitted):
            raise UsageError(f"the number of the job of {self.id} is not known: look for it in the queue")
        else:
            # first: if it ends now, the status below shows that
            alive = ProcessIdentity.from_dict(submitted).is_alive()
            if self.status().over:
                return
            if alive is None:
                raise UsageError(f"{self.id} runs on {submitted['host']}, not here: cancel it there")
            if not alive:
                owner = newest_owner(self.run.lock_dir)
                raise UsageError(f"{self.id} was started again by hand: end {owner or 'that process'}")
            with suppress(ProcessLookupError):  # it ended by itself, this moment
                os.kill(submitted["pid"], signal.SIGTERM)

    def resume(self, *, nodes: int | str | None = None) -> None:
        """Restarts a job that is over, in its run directory: a `Pipeline` resumes from its newest checkpoint.

        `nodes` is another number of nodes, or a range such as "1-2", for a script on a cluster.
        """
        check_over(self.run, self.status())
        restart(self.run, nodes=nodes)

    def log(self) -> str:
        """The job's output so far, of all attempts."""
        return self._read_log().decode(errors="backslashreplace")

    def follow(self, out: TextIO, *, begin: int = 0) -> int:
        """Copies the job's output to `out`, from byte `begin`, until the job is over.

        Returns its exit code, or 1 if it recorded none. Ctrl-C ends the copying, not the job.
        """
        shown = begin
        while True:
            now = self.status()
            new = self._read_log(shown)
            shown += len(new)
            out.write(new.decode(errors="backslashreplace"))
            out.flush()
            if now.over:
                out.write(f"headway: {self.id} is {now.state}{f': {now.why}' if now.why else ''}\n")
                return exit_code(self.run, now)
            time.sleep(_FOLLOW_S)

    def _next(self, pause: float) -> float:
        """Returns the seconds to wait before the next check, after a wait of `pause` seconds."""
        return min(pause * 1.5, _WAIT_MAX_HERE_S if self.id in BACKGROUND else _WAIT_MAX_S)

    def _read_log(self, begin: int = 0) -> bytes:
        """Reads the log from byte `begin`; empty if the job has not started yet."""
        with suppress(FileNotFoundError), files.open_regular(self.run.job_log) as file:
            file.seek(begin)
            return file.read()
        return b""

    def _results(self, ranks: int | None) -> list[Any]:
        if not self.run.call_dir.is_dir():
            raise UsageError(
                f"{self.id} runs a script, and scripts return nothing; read what it wrote in {self.run.path}"
            )
        call = Call.read(self.run)
        results = [self.run.call_dir / f"rank-{rank:05d}.pickle" for rank in range(ranks or call.world_size)]
        if self.wait() != "done" or not all(map(self._sees, results)):
            raise self._error()
        self.run.check_private()  # a pickle that others could have put there is not opened
        return [
            pickled.unpack(path, what=f"what {call.function} returned on rank {rank}")
            for rank, path in enumerate(results)
        ]

    def _sees(self, path: Path) -> bool:
        """Whether a file exists; one that was written on another host may become visible a little later."""
        with suppress(OSError):
            path.stat() if self.id in BACKGROUND else files.retry_until_visible(path.stat)
            return True
        return False

    def _error(self) -> BaseException:
        """Returns why there is no result: the exception of the first failing rank, if it was recorded."""
        now = self.status()
        if now.state == "stopped":
            return Stopped(f"{self.id} was stopped, with a checkpoint; job.resume() resumes from it")
        if now.state in ("interrupted", "cancelled"):
            return HeadwayError(
                f"{self.id} was {now.state}; there is no result: job.resume() starts it again"
            )
        record = read_json(self.run.failure_file)
        if record is None:
            tail = "\n".join(self.log().splitlines()[-_LAST_LINES:])
            what = now.why if now.state != "done" else "a rank left before the function returned"
            return RankFailure(f"{self.id} left no result: {what}\n{tail}".rstrip() + self._resume_hint())
        if record["kind"] == "exception" and self._sees(error_files(self.run.call_dir, record["rank"])[1]):
            self.run.check_private()  # a pickle that others could have put there is not opened
            return read_error(self.run.call_dir, record["rank"])
        cause = format_cause(record, Call.read(self.run).world_size, self.run.failure_file)
        return RankFailure(cause.strip() + self._resume_hint())

    def _resume_hint(self) -> str:
        """Returns how to resume a failed job that has checkpoints: launching the function again begins a new run."""
        step = newest_step(self.run.path)
        if step is None:
            return ""
        return f"\nresume it from step {step:,} with job.resume() or: headway resume {self.run.shell_name}"


def as_completed(jobs: Iterable[Job], timeout: float | None = None) -> Iterator[Job]:
    """Yields jobs as they end, in the order of their ends; `TimeoutError` after `timeout` seconds.

    A job that failed is yielded as well, and its `result` raises. The scheduler is asked once for all of them.

    >>> for job in hw.as_completed(hw.launch(train, array=[1e-3, 3e-4], on=hw.Slurm())):
    ...     print(job.id, job.exception() or job.result())
    """
    given = list(jobs)
    for job in given:
        if not isinstance(job, Job):
            raise UsageError(f"as_completed needs jobs, not {job!r:.80}; give it what hw.launch returned")
    return _as_completed({job.run.path: job for job in given}, timeout)


def _as_completed(waiting: dict[Path, Job], timeout: float | None) -> Iterator[Job]:
    deadline = None if timeout is None else time.monotonic() + timeout
    count, pause = len(waiting), _WAIT_MIN_S
    while waiting:
        statuses = zip(waiting.values(), _statuses(list(waiting.values())), strict=True)
        over = sorted((job for job, now in statuses if now.over), key=_end_time)
        for job in over:
            del waiting[job.run.path]
        yield from over
        if not waiting:
            return
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"{len(waiting)} of {count} jobs are not over after {timeout:g} s")
        if not over:
            left = pause if deadline is None else min(pause, max(0.0, deadline - time.monotonic()))
            time.sleep(left)
            pause = max(job._next(pause) for job in waiting.values())


def _statuses(jobs: Sequence[Job]) -> list[Status]:
    """Returns the statuses of jobs; each scheduler is asked once."""
    for job in jobs:
        if process := BACKGROUND.get(job.id):
            process.poll()  # reaps a child that has ended
    submitted = (read_json(job.run.submission_file) or {} for job in jobs)
    queue = schedulers.queue(list(map(JobIds.from_submission, submitted)))
    return [status(job.run, queue) for job in jobs]


def _end_time(job: Job) -> float:
    """Returns when the end of a job was recorded, in seconds since 1970; now, if it was not."""
    ended = read_json(job.run.ended_file)
    return datetime.fromisoformat(ended["time"]).timestamp() if ended else time.time()
