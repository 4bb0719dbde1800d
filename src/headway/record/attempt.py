"""`recording`: records one attempt of a run, from its first line of output to its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import cast, final

from headway import schedulers
from headway.dist import World
from headway.dist.collective.exchange import FOREVER, RankExchange
from headway.dist.collective.guard import from_root
from headway.dist.failure.capture import HEARTBEAT
from headway.dist.failure.record import FailureRecord
from headway.dist.group import current
from headway.dist.shared_run import at_failure, note_script, use_run, use_terminal
from headway.errors import DONE, INTERRUPTED, HeadwayError, RunLocked, Stopped, StorageError, UsageError
from headway.interpreter import module_command, module_environment
from headway.record import diagnostics, screen
from headway.record.devices import sampling_devices
from headway.record.differences import record_differences
from headway.record.events import EventKind, EventLog, recording_events
from headway.record.rank_logs import RankLog, rank_log
from headway.run import Run
from headway.run.lock import RunLock
from headway.run.status import describe_failure
from headway.system.log import logger
from headway.system.text import plural

_REPORT_AFTER_S = 60.0
"""A shorter attempt writes no report, which would take as long as the run."""
_REPORT_LIMIT_S = 60.0


@final
@dataclass(frozen=True, kw_only=True)
class Recording:
    """A running attempt: the run, the attempt's number (from 1), this rank's log, and, on rank 0, the run's lock.

    with hw.record.recording(run, world) as recording:
        print(recording.run.path, recording.attempt)
    """

    run: Run
    attempt: int
    log: RankLog
    lock: RunLock | None
    events: EventLog


@contextmanager
def recording(run: Run, world: World, *, config: object = None) -> Iterator[Recording]:
    """Records the block as the run's next attempt. Call it on all ranks.

    Rank 0 holds the run's lock, writes diagnostics, prints the start-up screen, and at the end records in `run.json`
    how the attempt ended: it is done when all ranks have left the block. The output of every rank goes to its log.
    Everything is restored afterwards.

        with recording(run, world, config={"lr": 3e-4}):
            train()
    """
    lock: RunLock | None = None
    events: EventLog | None = None  # on rank 0, `_numbered` opens it and records the end of the attempt in it
    facts: diagnostics.Facts = {}
    differing: list[str] = []
    began, group = time.monotonic(), current()
    group.trained = False
    with ExitStack() as stack:

        def begin() -> tuple[int, int]:
            nonlocal lock, events
            lock = stack.enter_context(run.lock())
            held = run.held_as(lock.fence.number)
            use_run(held)
            number, events = stack.enter_context(_numbered(held, world))
            facts.update(attempt=number, **diagnostics.collect(world, run))
            differing.extend(record_differences(held, number, facts, config))
            diagnostics.write(held, facts)
            return number, lock.fence.number

        try:
            number, owner = from_root(begin)  # if rank 0 cannot begin, all ranks raise its error
        except RunLocked:
            use_run(None)  # another process has the run, where this failure must not be recorded
            raise
        run = run.held_as(owner)
        use_run(run)
        stack.push(_root_leaves_last())
        log = stack.enter_context(rank_log(run, rank=world.rank, attempt=number))
        if world.rank == 0:
            screen.show(screen.describe(run, world, facts, config=config))
            for line in differing:
                logger.warning(line, extra={"event": "changes"})
        else:
            stack.enter_context(use_terminal(log.original_stderr_fd))
        if lock is not None and lock.note:
            print(f"headway: {lock.note}", file=sys.stderr)
        if events is None:
            events = stack.enter_context(recording_events(run, rank=world.rank, attempt=number))
        if world.local_rank == 0:
            stack.enter_context(sampling_devices(run, host=world.host))
        yield Recording(run=run, attempt=number, log=log, lock=lock, events=events)
    group.trained = True
    if world.is_root and time.monotonic() - began >= _REPORT_AFTER_S:
        run_report_command(run)


def _root_leaves_last() -> Callable[[object, BaseException | None, object], None]:
    """Returns the `__exit__` of a block that rank 0 leaves last, so that a failure of any other rank fails the attempt.

    The other ranks do not wait, so a rank that still needs one whose script has ended fails at once.
    """
    limit_s = HEARTBEAT.period or FOREVER.total_seconds()  # as for the exit of a rank
    exchange = RankExchange("leave hw.record.recording", channel="recording", timeout_s=limit_s)
    pid = os.getpid()

    def leave(_kind: object, error: BaseException | None, _trace: object) -> None:
        # a rank that failed reports it to the hub; a forked child is not a rank
        if ending(error)[0] == "done" and os.getpid() == pid:
            exchange.arrive()

    return leave


def run_report_command(run: Run) -> None:
    """Writes `report.html` of a finished run, in a separate process: reading all rows must not fail the run."""
    command = module_command("headway", "report", str(run.path))
    try:
        subprocess.run(
            command,
            env=module_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_REPORT_LIMIT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        why = last.removeprefix("headway: ") or f"the command ended with {error.returncode}"
    except subprocess.TimeoutExpired:
        why = f"it takes more than {_REPORT_LIMIT_S:.0f} s"
    except OSError as error:
        why = str(error)
    else:
        return
    logger.warning("no report was written: %s; to write it: headway report %s", why, run.shell_path)


def ending(error: BaseException | None) -> tuple[str, int]:
    """Returns the status of an attempt that ended with `error`, and its exit code.

    >>> ending(None), ending(KeyboardInterrupt()), ending(ValueError("loss is nan")), ending(SystemExit(3))
    (('done', 0), ('interrupted', 130), ('failed', 1), ('failed', 3))
    """
    match error:
        case None | SystemExit(code=None | 0):
            return "done", DONE
        case KeyboardInterrupt():
            return "interrupted", INTERRUPTED
        case Stopped():
            return "stopped", error.exit_code
        case HeadwayError():
            return "failed", error.exit_code
        case SystemExit(code=int(code)):
            return "failed", code
    return "failed", 1


@contextmanager
def _numbered(run: Run, world: World) -> Iterator[tuple[int, EventLog]]:
    """Begins the next attempt, and records how the block ends, in run.json and as an event."""
    number, pid = run.begin_attempt(world=world), os.getpid()
    reopens = run.path in current().reopened_runs  # with checkpoints, the pipeline calls `note_script` itself
    error: BaseException | None = None
    lock, ended = threading.Lock(), False

    def end(
        status: str, code: int, text: str, why: str, last_step: int | None = None, **facts: object
    ) -> None:
        """Records the end once. A second caller waits for the first, since it may end this process afterwards."""
        nonlocal ended
        with lock:
            if not ended:
                if status == "done" and reopens:
                    note_script(run, number)
                run.end_attempt(number, status=status, exit_code=code, why=why, step=last_step)
                if run.is_ours():
                    events.write(cast(EventKind, status), text, exit_code=code, **facts)
            ended = True

    def cut_short(record: FailureRecord) -> None:
        # another rank failed: this one may not reach its `finally`
        status = "interrupted" if record["kind"] == "interrupted" else "failed"
        text = describe_failure(record)
        failed = {"failed_rank": record.get("rank"), "step": record.get("step")}
        end(status, record["exit_code"], text, text, HEARTBEAT.step, **failed)

    with recording_events(run, rank=0, attempt=number) as events, at_failure(cut_short):
        where = f"{plural(world.world_size, 'rank')} on {plural(world.nodes, 'node')}"
        events.write(
            "start" if number == 1 else "restart",
            f"attempt {number} starts: {where}",
            world_size=world.world_size,
            nodes=world.nodes,
            ends=schedulers.end_time(),  # the time limit of the job
        )
        try:
            yield number, events
        except BaseException as caught:
            error = caught
            raise
        finally:
            if os.getpid() == pid:  # a forked child that leaves the block must not end the attempt
                try:
                    status, code = ending(error)
                    why = _why(error)
                    end(status, code, f"attempt {number} is {status}{why and f': {why}'}", why)
                except (StorageError, UsageError) as unwritten:  # UsageError: run.json cannot be read
                    if error is None:
                        raise
                    logger.error("%s", unwritten)  # the error that ends the attempt is the cause


def _why(error: BaseException | None) -> str:
    return "" if error is None else str(error) if isinstance(error, HeadwayError) else repr(error)
