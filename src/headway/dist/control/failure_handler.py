"""What a rank does when it fails, when another one fails, and when rank 0 is lost or silent.

The first cause is printed once, as the last thing on the screen, and all ranks exit within moments.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, final

from headway.dist.control import signals
from headway.dist.control.hang_watch import own_status, silent_root_status
from headway.dist.control.hub import lost_rank_record
from headway.dist.control.peer import Peer
from headway.dist.environment import LaunchEnvironment
from headway.dist.failure import capture, hang
from headway.dist.failure.exit_deadline import limit_exit
from headway.dist.failure.record import FailureRecord, format_cause, format_pointer
from headway.dist.roster import RankInfo
from headway.errors import HeadwayError, Stopped, StorageError
from headway.run import Run
from headway.system import files
from headway.system.environment import RENDEZVOUS, directory
from headway.system.log import logger, print_last

_ABORT_TIMEOUT_S = 4.0
"""how long a failing rank waits for the hub's abort, which names the first cause; the hub takes at most two seconds"""

_RECORD_S = 0.5
"""how long the other ranks wait, at most, for rank 0 to record the end of the attempt; a busy disk takes seconds"""
_DISK_S = 10.0
"""how long rank 0 itself waits for that"""

_ALONE_EXIT_S = 60.0
"""how long a single rank may take to exit after a failure: no other rank waits, and it may be uploading logs"""


@final
class FailureHandler:
    """The reaction of one rank to failures, its own and those of others. Most of its methods do not return."""

    def __init__(self, launch: LaunchEnvironment, previous_hook: Callable[..., Any]) -> None:
        self._launch = launch
        self.previous_hook = previous_hook
        self.run: Run | None = None
        """where failures are recorded"""
        self.peer: Peer | None = None
        self.root: RankInfo | None = None
        self.terminal: int | None = None
        """the screen's file descriptor, while this rank's stderr goes to its log file"""
        self._agent_has_record = False  # and so prints it
        self._is_first: bool | None = None  # whether the run's record is this rank's; None if there is none
        self._recording: threading.Thread | None = None  # calls the callbacks
        self.callbacks: list[Callable[[FailureRecord], None]] = []
        """called by rank 0 with the first cause, before the ranks exit"""

    def on_exception(self, error: BaseException, trace: TracebackType | None) -> None:
        """Ends this rank, whose main thread has raised an exception that nothing caught."""
        if isinstance(error, Stopped):  # on all ranks alike, and not a failure
            self._exit_stopped(error)
        record = capture.exception_record(error, trace, self._launch.rank)
        if self.peer is None:
            self._exit_alone(record, error, trace)
            return
        limit_exit(record["exit_code"], f"rank {self._launch.rank} has failed")
        self.peer.report_failure(record)
        time.sleep(_ABORT_TIMEOUT_S)  # the hub's abort ends this process from another thread: see `on_abort`
        capture.hard_exit(record["exit_code"])

    def _exit_stopped(self, error: Stopped) -> NoReturn:
        signals.ignore_termination()  # the scheduler may repeat its signal, which would replace the exit code
        limit_exit(error.exit_code, f"rank {self._launch.rank} has stopped")
        if self.peer is not None:
            self.peer.leave(0)  # the ranks exit one by one, and none of them counts as lost
        if self._launch.rank == 0:
            logger.info("%s", error)
        raise SystemExit(error.exit_code)

    def _exit_alone(self, record: FailureRecord, error: BaseException, trace: TracebackType | None) -> None:
        where = self._write(record)
        if self._agent_file is not None and self._agent_file.exists():
            pass  # the agent prints the record
        elif record["sentence"] is None and record["kind"] != "interrupted":
            self.previous_hook(type(error), error, trace)  # this may be a debugger
            print_last(f"record: {where}\n" if where else "")
        else:
            print_last(format_cause(record, self._launch.world_size, where))
        limit_exit(record["exit_code"], "the run has failed", seconds=_ALONE_EXIT_S)
        raise SystemExit(record["exit_code"])

    def on_first_failure(self, record: FailureRecord) -> None:
        """Records the first cause on rank 0, and adds its place to the record, before the other ranks receive it."""
        signals.ignore_termination()
        where = self._write(record)
        record["failure_file"] = None if where is None else str(where)
        if not self.callbacks:
            return
        recording = threading.Thread(
            target=self._call_back, args=(record,), name="headway failure", daemon=True
        )
        try:
            recording.start()
        except RuntimeError:  # no process or thread is left to this user, or Python 3.12 is exiting
            self._call_back(record)
            return
        self._recording = recording
        recording.join(_RECORD_S)

    def _call_back(self, record: FailureRecord) -> None:
        for callback in self.callbacks:
            try:
                callback(record)
            except (OSError, HeadwayError) as error:
                # the other ranks must get the cause even if it cannot be written
                logger.error("%s", error)

    def on_abort(self, record: FailureRecord) -> None:
        """Exits because the hub reports that some rank, perhaps this one, failed first."""
        is_others = record["rank"] != self._launch.rank and record["kind"] != "interrupted"
        words = format_pointer(self._launch.rank, record, record["failure_file"]) if is_others else ""
        capture.hard_exit(record["exit_code"], words)

    def on_all_down(self, record: FailureRecord) -> None:
        """Prints the cause on rank 0, when all other ranks have exited: it is the last thing on the screen."""
        cause = format_cause(record, self._launch.world_size, record["failure_file"])
        if self._recording is not None:
            self._recording.join(_DISK_S)
        capture.hard_exit(record["exit_code"], "" if self._agent_has_record else cause)

    def on_hub_lost(self, trouble: Exception | None) -> None:
        """Exits because rank 0 is gone: every rank acts on its own."""
        assert self.root is not None
        self._exit_without_hub(lost_rank_record(self.root, trouble))

    def on_hub_silent(self) -> None:
        """Exits because rank 0 is connected but does not reply: it is stopped, or its interpreter lock is held."""
        assert self.root is not None
        statuses = [
            silent_root_status(capture.HEARTBEAT, self.root),
            own_status(capture.HEARTBEAT, self._launch.rank),
        ]
        self._exit_without_hub(hang.make_record(statuses, self._launch.world_size))

    def _exit_without_hub(self, record: FailureRecord) -> None:
        signals.ignore_termination()  # torchrun ends the other ranks as soon as one has exited
        where, words = self._write(record), ""
        # exactly one rank must print it: the one whose record is the run's
        prints = self._launch.rank == 1 if self._is_first is None else self._is_first
        if prints and not self._agent_has_record:
            text = format_cause(record, self._launch.world_size, where)
            with suppress(OSError):  # nobody reads it
                os.write(self.terminal if self.terminal is not None else 2, text.encode())
        else:
            words = format_pointer(self._launch.rank, record, where)
        capture.hard_exit(record["exit_code"], words)

    @property
    def _agent_file(self) -> Path | None:
        """Where a node agent looks for the record: beside the rendezvous. None if no agent supervises this rank.

        The variable is read when it is needed: tests on ranks use the same rendezvous, and unset it afterwards.
        """
        file = directory(RENDEZVOUS)
        return None if file is None else file.with_name("failure.json")

    def _write(self, record: FailureRecord) -> Path | None:
        """Writes failure.json for the agent and in the run, unless it exists. Returns the run's, if there is one.

        It does not wait for the disk: the other ranks wait for the cause, and the agent ends them after two seconds.
        """
        run = self.run
        if self._agent_file is not None:
            fence = run and run.fence
            known = {"failure_file": run and str(run.failure_file), "owner": fence and fence.number}
            with _logging_trouble():
                files.publish(self._agent_file, json.dumps(record | known).encode(), durable=False)
                self._agent_has_record = True
        if run is not None:
            with _logging_trouble():
                is_first = run.write_failure(record)
                if is_first or run.failure_file.exists():
                    self._is_first = is_first
                    return run.failure_file
        return None


@contextmanager
def _logging_trouble() -> Iterator[None]:
    """Logs that a record of a failure could not be written; the other record may be on a disk that works."""
    try:
        yield
    except (OSError, StorageError) as error:
        logger.error("the failure could not be recorded: %s", error)
