"""The group of ranks that this process belongs to.

`current()` returns it to the rest of the package; `rank()` and its siblings are in `objects`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch
import torch.distributed as c10d

from headway.dist.control import signals
from headway.dist.control.agreement import SUBJECTS, Agreement
from headway.dist.control.failure_handler import FailureHandler
from headway.dist.control.hub import Hub
from headway.dist.control.peer import Peer
from headway.dist.environment import LaunchEnvironment
from headway.dist.failure.exit_deadline import EXIT_CODE
from headway.errors import HeadwayError, UsageError
from headway.system.log import print_last


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place among all ranks. Equal on all ranks except for its own ranks and device.

    world = hw.init()
    print(world.rank, world.world_size, world.host, world.device)      # 3 16 node1 cuda:3
    """

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
        """Whether this is rank 0."""
        return self.rank == 0


@final
class RankGroup:
    """The state that this process shares with the other ranks, and what it restores when it leaves them."""

    def __init__(self, launch: LaunchEnvironment) -> None:
        self.launch = launch
        self.pid = os.getpid()
        self.world: World | None = None
        self.store: c10d.Store = c10d.HashStore()
        self.key = b""
        """the key with which ranks sign their values; only the ranks of this launch have it"""
        self.hub: Hub | None = None
        self.peer: Peer | None = None
        self.root_host = "127.0.0.1"
        """the name under which this rank has reached rank 0"""
        self.failure_handler = FailureHandler(launch, _scripts_hook)
        self.opened_runs: set[Path] = set()
        self.reopened_runs: set[Path] = set()
        """runs of `open_run` that the same command opens again until its script has ended"""
        self.at_clean_exit: list[Callable[[], object]] = []
        """callbacks for when this rank leaves without an error and, on rank 0, all others have left"""
        self.raised = False  # whether the script has raised an exception that nothing caught
        self.trained = False
        """whether a run has ended and no other has begun: only the rest of the script is left"""
        self.calls: dict[str, int] = {}
        """how many exchanges of each channel this rank has made: the same on all ranks"""
        self._own_agreements = {subject: Agreement() for subject in SUBJECTS}
        self._environ: dict[str, str | None] = {}

    def export(self, name: str, value: str, *, override: bool = True) -> None:
        """Sets an environment variable for this process and its children until the group is left."""
        if name not in os.environ or override:
            self._environ.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def restore_environ(self) -> None:
        """Restores the environment variables that `export` has changed."""
        for name, value in self._environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def call_at_clean_exit(self) -> None:
        """Calls the callbacks for the end of the script, unless the script has failed."""
        callbacks, self.at_clean_exit = self.at_clean_exit, []
        for callback in callbacks if not self.raised and not EXIT_CODE.given else ():
            callback()

    @property
    def agreements(self) -> dict[str, Agreement]:
        """The agreements of all ranks on where to stop, and where to repeat a save."""
        return self._own_agreements if self.peer is None else self.peer.agreements

    @property
    def agreement(self) -> Agreement:
        """The agreement of all ranks on where to stop."""
        return self.agreements["stop"]

    def request_stop(self, why: str) -> None:
        """Asks all ranks to stop at the same point: see `agreement`. May be called from any thread, and repeatedly."""
        if not self.agreement.decided:
            self._request("stop", why)

    def request_save(self, why: str) -> None:
        """Asks all ranks to save at the same point, as `request_stop` does; requests of one round make one save."""
        self._request("save", why)

    def _request(self, subject: str, why: str) -> None:
        if self.peer is None:
            own = self._own_agreements[subject]
            own.decide(own.propose(), why)
        else:
            self.peer.request(subject, why)


_group: RankGroup | None = None


def current() -> RankGroup:
    """Returns the group of this process. Raises UsageError before `init`."""
    if _group is None or _group.world is None:
        raise UsageError("this process has not joined a group yet: call headway.init() first")
    return _group


def is_initialized() -> bool:
    """Returns whether `init` was called, and `leave` was not.

    if not hw.dist.is_initialized():
        hw.init()
    """
    return _group is not None and _group.world is not None


def world() -> World:
    """Returns this process's place among all ranks. Raises UsageError before `init`.

    device = hw.dist.world().device
    """
    found = current().world
    assert found is not None
    return found


def set_current(group: RankGroup) -> None:
    """Makes `group` the group of this process, which from now on reports its uncaught exceptions there."""
    global _group
    _group = group
    hook_exceptions()
    _watch_forks()


_scripts_hook: Callable[..., Any] = sys.__excepthook__


def keep_hook() -> None:
    """Keeps the exception hook that the script has now, such as a debugger's, to call it and to restore it."""
    global _scripts_hook
    if sys.excepthook is not _excepthook:
        _scripts_hook = sys.excepthook


def hook_exceptions() -> None:
    """Installs our exception hook in front: torch installs one that delays what is written to stderr."""
    sys.excepthook = _excepthook


def leave_current(group: RankGroup) -> None:
    """Restores what joining has changed in this process."""
    abandon(group)
    sys.excepthook = group.failure_handler.previous_hook


def abandon(group: RankGroup) -> None:
    """Ends a group that no other rank has seen. The hook stays: it turns the error into a message and an exit code."""
    global _group
    group.restore_environ()
    _group = None


def own_group() -> RankGroup | None:
    """Returns the group that this very process joined; None in a forked child, which is not a rank."""
    return _group if _group is not None and _group.pid == os.getpid() else None


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    group = own_group()
    if hasattr(sys, "ps1") and (group is None or group.peer is None):  # a prompt continues after an error
        _scripts_hook(kind, error, trace)
    elif group is not None:
        group.raised = True
        group.failure_handler.on_exception(error, trace)
    elif isinstance(error, HeadwayError):  # joining failed before other ranks saw this one
        print_last(f"headway: {error}\n")
        raise SystemExit(error.exit_code)
    else:
        _scripts_hook(kind, error, trace)


_fork_watch = threading.Lock()
_watching_forks = False


def _watch_forks() -> None:
    """Registers the fork hook once: it cannot be removed, so it checks itself whether there is a group."""
    global _watching_forks
    with _fork_watch:
        if not _watching_forks:
            os.register_at_fork(after_in_child=_in_forked_child)
            _watching_forks = True


def _in_forked_child() -> None:
    """Closes a data worker's copies of the rank's connections, which would hide that the rank has exited.

    Freeing a process group waits for its threads, which a forked child does not have: so the child never frees them.
    """
    if _group is not None:
        signals.reset_in_child()
        for group in c10d.distributed_c10d._world.pg_map if c10d.is_initialized() else ():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if _group.peer is not None:
            _group.peer.close()
        if _group.hub is not None:
            _group.hub.close()
