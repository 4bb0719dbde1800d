"""The group this process belongs to, and what it does when one of its ranks fails.

One cause, printed once, as the last thing on the screen; everybody down within moments.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import final

import torch
import torch.distributed as c10d

from headway.dist.control import signals
from headway.dist.control.agreement import Agreement
from headway.dist.control.hang_watch import myself, silent
from headway.dist.control.hub import Hub, vanished
from headway.dist.control.peer import Peer
from headway.dist.environment import LaunchEnvironment
from headway.dist.failure import capture, hang
from headway.dist.failure.record import FailureRecord, format_cause, format_pointer
from headway.dist.roster import RankInfo
from headway.errors import HeadwayError, Stopped, StorageError, UsageError
from headway.run import Run
from headway.system import files

_VERDICT_TIMEOUT = 4.0
"""seconds a failing rank gives the hub to say who was first; the hub itself takes at most two"""


@dataclass(frozen=True, kw_only=True)
class World:
    """Who I am and who we are. Equal on all ranks but for this rank's own place and device."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    host: str
    launcher: str
    """headway, torchrun, mpi, srun or none"""
    device: torch.device

    @property
    def is_root(self) -> bool:
        return self.rank == 0


@final
class RankGroup:
    """The process group of this process, and what must be put back when it leaves."""

    def __init__(self, place: LaunchEnvironment) -> None:
        self.place = place
        self.pid = os.getpid()
        self.world: World | None = None
        self.store: c10d.Store = c10d.HashStore()
        self.root: RankInfo | None = None
        self.hub: Hub | None = None
        self.peer: Peer | None = None
        self.alone = Agreement()
        self.run: Run | None = None
        self.opened: set[Path] = set()  # run directories, by now
        self.calls: dict[str, int] = {}
        self.terminal: int | None = None
        self.at_failure: list[Callable[[FailureRecord], None]] = []
        self.previous_hook = sys.__excepthook__ if sys.excepthook is _excepthook else sys.excepthook
        self.environ: dict[str, str | None] = {}

    def export(self, name: str, value: str, *, override: bool = True) -> None:
        """Sets an environment variable for this process and its children, to be put back on leaving."""
        if name not in os.environ or override:
            self.environ.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    @property
    def agreement(self) -> Agreement:
        return self.alone if self.peer is None else self.peer.agreement

    def request_stop(self, why: str) -> None:
        """Asks all ranks to stop together: see `agreement`. From any thread; once is enough."""
        if self.agreement.decided:
            return
        if self.peer is None:
            self.alone.decide(self.alone.promise(), why)
        else:
            self.peer.ask_to_stop(why)

    # --- what happens when a rank fails

    def failed(self, error: BaseException, trace: TracebackType | None) -> None:
        """This rank's main thread is about to die of an exception."""
        if isinstance(error, Stopped):  # on all ranks alike, and nothing has failed
            sys.stderr.write(f"headway: {error}\n" if self.place.rank == 0 else "")
            raise SystemExit(error.exit_code)
        record = capture.record_of(error, trace, self.place.rank)
        if self.peer is None:
            self._failed_alone(record, error, trace)
            return
        if self.terminal is not None:  # our stderr is a log file: it keeps this rank's own story
            sys.stderr.write(record["traceback"])
        self.peer.report(record)
        # the answer ends this process from another thread: see the functions below
        time.sleep(_VERDICT_TIMEOUT)
        capture.hard_exit(record["exit_code"])

    def _failed_alone(self, record: FailureRecord, error: BaseException, trace: TracebackType | None) -> None:
        where = self.keep(record)
        if (beside := _for_the_agent()) is not None and beside.exists():
            raise SystemExit(record["exit_code"])  # the agent has the last word, and has read what it is
        if record["sentence"] is None and record["kind"] != "interrupted":
            self.previous_hook(type(error), error, trace)
            sys.stderr.write(f"record: {where}\n" if where else "")
        else:
            sys.stderr.write(format_cause(record, self.place.world_size, where))
        raise SystemExit(record["exit_code"])

    def keep(self, record: FailureRecord) -> Path | None:
        """Writes failure.json, if nobody has yet. Returns where people find it."""
        where = self.run.failure_file if self.run else None
        try:
            if (beside := _for_the_agent()) is not None:
                files.publish(beside, json.dumps(record | {"failure_file": where and str(where)}).encode())
            if self.run:
                self.run.write_failure(record)
        except (OSError, StorageError) as error:  # the disk may be the very thing that failed
            sys.stderr.write(f"headway: the failure could not be recorded: {error}\n")
        return where

    def verdict(self, record: FailureRecord) -> None:
        """Rank 0 only: the first cause is known, and nobody has been told yet."""
        signals.ignore_termination()
        self.keep(record)
        for callback in self.at_failure:
            try:
                callback(record)
            except (OSError, HeadwayError) as error:  # the cause must get out, whatever cannot be written
                sys.stderr.write(f"headway: {error}\n")

    def others_failed(self, record: FailureRecord) -> None:
        """The hub says that some rank, perhaps this one, failed first."""
        if record["rank"] != self.place.rank and record["kind"] != "interrupted":
            where = self.run.failure_file if self.run else None
            sys.stderr.write(format_pointer(self.place.rank, record, where))
        capture.hard_exit(record["exit_code"])

    def hub_silent(self) -> None:
        """Rank 0 has a connection but no voice, and nobody moves: it is stopped, or its interpreter is held."""
        assert self.root is not None
        seen = [silent(capture.HEARTBEAT, self.root), myself(capture.HEARTBEAT, self.place.rank)]
        self._leave_alone(hang.record(seen, self.place.world_size))

    def everybody_is_down(self, record: FailureRecord) -> None:
        """Rank 0 only: the others are gone, so what is printed now is the last thing on the screen."""
        where = self.run.failure_file if self.run else None
        if "HEADWAY_RENDEZVOUS" not in os.environ:  # else the agent says it
            sys.stderr.write(format_cause(record, self.place.world_size, where))
        capture.hard_exit(record["exit_code"])

    def hub_lost(self) -> None:
        """Rank 0 is gone, and with it the one who would have told us: every rank acts alone."""
        assert self.root is not None
        self._leave_alone(vanished(self.root))

    def _leave_alone(self, record: FailureRecord) -> None:
        where = self.keep(record)
        if self.place.rank == 1 and "HEADWAY_RENDEZVOUS" not in os.environ:  # somebody must, and only one
            text = format_cause(record, self.place.world_size, where)
            os.write(self.terminal if self.terminal is not None else 2, text.encode())
        else:
            sys.stderr.write(format_pointer(self.place.rank, record, where))
        capture.hard_exit(record["exit_code"])


def _for_the_agent() -> Path | None:
    """Where an agent looks for the record: beside the meeting point."""
    meeting = os.environ.get("HEADWAY_RENDEZVOUS")
    return Path(meeting).with_name("failure.json") if meeting else None


_group: RankGroup | None = None


def current() -> RankGroup:
    """The group of this process. Everything in this room asks here."""
    if _group is None or _group.world is None:
        raise UsageError("this process has not joined a group yet: call headway.init() first")
    return _group


def is_initialized() -> bool:
    """Whether `init` was called, and `leave` was not."""
    return _group is not None and _group.world is not None


def world() -> World:
    """This process's place among all ranks. Raises UsageError before `init`."""
    found = current().world
    assert found is not None
    return found


def enter(group: RankGroup) -> None:
    """Makes `group` the group of this process: from now on its failures are ours, and ours its."""
    global _group
    _group = group
    hook_exceptions()
    _watch_forks()


def hook_exceptions() -> None:
    """Puts our hook in front: torch brings one of its own, which holds back what is written to stderr."""
    sys.excepthook = _excepthook


def exit_group(group: RankGroup) -> None:
    """Puts back what joining has changed in this process."""
    forget(group)
    sys.excepthook = group.previous_hook


def forget(group: RankGroup) -> None:
    """Ends a group that nobody knows of yet. The hook stays: it turns the error into its sentence and exit code."""
    global _group
    for name, value in group.environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _group = None


def mine() -> RankGroup | None:
    """The group of this very process; None in a forked child, which is not the rank."""
    return _group if _group is not None and _group.pid == os.getpid() else None


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    group = mine()
    if group is not None:
        group.failed(error, trace)
    elif isinstance(error, HeadwayError):  # joining failed before anybody knew of this rank
        sys.stderr.write(f"headway: {error}\n")
        raise SystemExit(error.exit_code)
    else:
        sys.__excepthook__(kind, error, trace)


_fork_watch = threading.Lock()
_watching_forks = False


def _watch_forks() -> None:
    """Registers once: such hooks cannot be taken back, so the hook itself looks whether there is a group."""
    global _watching_forks
    with _fork_watch:
        if not _watching_forks:
            os.register_at_fork(after_in_child=_in_forked_child)
            _watching_forks = True


def _in_forked_child() -> None:
    """A forked data worker is not the rank: its copies of the rank's connections would hide the rank's death."""
    if _group is not None:
        signals.ignore_stop_requests()
        if _group.peer is not None:
            _group.peer.close()
        if _group.hub is not None:
            _group.hub.close()
