"""The check for hangs: when rank 0 has made no progress for too long, the hub asks all ranks where they are.

While rank 0 makes progress, the hub sends nothing. Once it has made none for half of what its phase allows, the hub
sends status requests; a thread of each rank replies, whatever its main thread waits for. It is a hang when every rank
has exceeded its own limit or does not reply. Ranks report ages in seconds, so no clocks are compared.

When rank 0 has left, or its script has ended, and other ranks do not leave in time, the hub asks where they are, too.

    hub -> rank    status_request (with or without stacks), ack
    rank -> hub    status, ping, overdue
"""

from __future__ import annotations

import faulthandler
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch.distributed as c10d

from headway.dist.control.channel import Message
from headway.dist.failure import hang, heartbeat
from headway.dist.failure.hang import RankStatus
from headway.dist.failure.heartbeat import Heartbeat
from headway.dist.failure.record import FailureRecord
from headway.dist.roster import RankInfo
from headway.system import files
from headway.system.environment import HEARTBEAT as HEARTBEAT_VARIABLE, directory
from headway.system.running_clock import RUNNING_CLOCK

Present = Callable[[], Sequence[RankInfo]]
_CHECKS_PER_PERIOD = 8
_MAX_INTERVAL_S = 60.0
_STACKS_TIMEOUT_S = 2.0
"""how long ranks have to send their stacks"""


def status_message(own: Heartbeat, request: Mapping[str, Any]) -> Message:
    """Returns a rank's reply to a status request."""
    return {
        "type": "status",
        "phase": own.phase,
        "step": own.step,
        "ended_epoch": own.ended_epoch,
        "age": own.age,
        "limit": None if own.limit == math.inf else own.limit,
        "collectives": _collectives(),
        "stack": _stacks() if request["stacks"] else "",
    }


def check_interval_s(own: Heartbeat) -> float:
    """Returns how long a thread that watches its own rank may sleep."""
    return min(max(own.period / _CHECKS_PER_PERIOD, 0.05), _MAX_INTERVAL_S)


def _collectives() -> int | None:
    """Counts the collectives that this rank has begun. Any thread may call it while the main thread waits in one."""
    group = c10d.group.WORLD if c10d.is_initialized() else None
    return int(group._get_sequence_number_for_group()) if group else None  # type: ignore[attr-defined]


def _stacks() -> str:
    # in memory: an OSError from a full /tmp would look as if the connection to the hub were lost
    with os.fdopen(files.open_unnamed("headway-stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class _StatusReply:
    """A rank's last status message, and when it arrived."""

    message: Message
    arrived: float

    @property
    def age(self) -> float:
        return float(self.message["age"]) + RUNNING_CLOCK.since(self.arrived)

    @property
    def is_over_limit(self) -> bool:
        limit = self.message["limit"]
        return limit is not None and self.age >= limit


@final
@dataclass(kw_only=True)
class HangWatch:
    """The hub's state of the check for hangs; `heartbeat` belongs to rank 0, in whose process the hub runs."""

    heartbeat: Heartbeat
    request_status: Callable[[bool], object]
    """asks all ranks where they are, with stacks or without"""
    _replies: dict[int, _StatusReply] = field(default_factory=dict)
    _fresh: set[int] = field(default_factory=set)
    """the ranks that have replied since stacks were requested"""
    _since: float | None = None
    _stacks_since: float | None = None
    _asked: float = 0.0
    _overdue: tuple[float, str] | None = None
    """how long rank 0 has waited for the others to leave, and why"""

    def timeout_s(self) -> float | None:
        """Returns the seconds until `check` has something to do; None if there is nothing to watch."""
        if self._overdue is not None:
            return 0.1
        if not self.heartbeat.period:
            return None
        interval = check_interval_s(self.heartbeat)
        return min(0.1, interval) if self._stacks_since is not None else interval

    def observe(self, rank: int, message: Message) -> None:
        """Stores a status message."""
        self._replies[rank] = _StatusReply(message=message, arrived=time.monotonic())
        if self._stacks_since is not None:
            self._fresh.add(rank)

    def ask_remaining(self, limit_s: float, why: str) -> None:
        """Asks the ranks that have not left within `limit_s` where they are; `check` returns the record of it."""
        if self._overdue is None:
            self._overdue, self._stacks_since, self._fresh = (limit_s, why), time.monotonic(), set()
            self.request_status(True)

    def check(self, present: Present, count: int, world_size: int) -> FailureRecord | None:
        """Asks the ranks if there is reason to; returns the record of a hang.

        `present` returns the ranks that have not left, and `count` is their number. The hub calls this after each
        message, so it loops over the ranks only when all have replied.
        """
        if self._overdue is not None:
            return self._check_remaining(present, count, world_size)
        limit = self.heartbeat.limit
        if not self.heartbeat.period or self.heartbeat.age < limit / 2 or limit == math.inf:
            self._replies, self._since, self._stacks_since = {}, None, None
            return None
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if self._stacks_since is None and RUNNING_CLOCK.since(self._asked) >= check_interval_s(
            self.heartbeat
        ):
            stacks = self.heartbeat.age >= limit
            self._asked, self._stacks_since, self._fresh = now, now if stacks else None, set()
            self.request_status(stacks)
        if self._stacks_since is None:
            return None
        is_late = RUNNING_CLOCK.since(self._stacks_since) >= min(_STACKS_TIMEOUT_S, self.heartbeat.limit / 4)
        return (
            self._conclude(present(), world_size, is_late) if is_late or len(self._fresh) >= count else None
        )

    def _conclude(self, present: Sequence[RankInfo], world_size: int, is_late: bool) -> FailureRecord | None:
        assert self._since is not None
        silent = [info.rank for info in present if info.rank not in self._fresh]
        if silent and not is_late:
            return None
        self._stacks_since = None
        makes_progress = any(not self._replies[rank].is_over_limit for rank in self._fresh)
        if makes_progress or RUNNING_CLOCK.since(self._since) < self.heartbeat.limit / 2:
            return None  # a rank works, or none had the time to reply: ask again
        return hang.make_record([self._status(info, silent) for info in present], world_size)

    def _check_remaining(self, present: Present, count: int, world_size: int) -> FailureRecord | None:
        assert self._overdue is not None and self._stacks_since is not None
        if len(self._fresh) < count and RUNNING_CLOCK.since(self._stacks_since) < _STACKS_TIMEOUT_S:
            return None
        remaining = present()
        silent = [info.rank for info in remaining if info.rank not in self._fresh]
        statuses = [self._status(info, silent) for info in remaining]
        return hang.make_overdue_record(statuses, world_size, *self._overdue)

    def _status(self, info: RankInfo, silent: Collection[int]) -> RankStatus:
        if info.rank in silent:
            same_host = info.host == socket.gethostname()  # the hub's is that of rank 0
            return _silent_status(info, same_host=same_host, age=self.heartbeat.age)
        reply = self._replies[info.rank]
        return RankStatus(
            rank=info.rank,
            host=info.host,
            pid=info.pid,
            phase=reply.message["phase"],
            step=reply.message["step"],
            ended_epoch=reply.message["ended_epoch"],
            age=reply.age,
            collectives=reply.message["collectives"],
            stack=reply.message["stack"],
        )


def own_status(own: Heartbeat, rank: int) -> RankStatus:
    """Returns the status of this rank, for when the hub cannot ask for it."""
    message = status_message(own, {"stacks": True})
    known = {name: message[name] for name in ("phase", "step", "ended_epoch", "age", "collectives", "stack")}
    return RankStatus(rank=rank, host=socket.gethostname(), pid=os.getpid(), **known)


def silent_root_status(own: Heartbeat, root: RankInfo) -> RankStatus:
    """Returns the status of rank 0 as seen by a rank that gets no message from it."""
    return _silent_status(root, same_host=root.host == socket.gethostname(), age=own.age)


def _silent_status(info: RankInfo, *, same_host: bool, age: float) -> RankStatus:
    """Returns what the kernel and the heartbeat file show of a rank that does not reply, if it is on this machine."""
    condition = hang.condition(info.pid) if same_host else "silent"
    beats = directory(HEARTBEAT_VARIABLE)
    reading = heartbeat.read(beats, info.rank) if same_host and beats else None
    return RankStatus(
        rank=info.rank,
        host=info.host,
        pid=info.pid,
        phase=reading.phase if reading else None,
        step=reading.step if reading else None,
        ended_epoch=reading.ended_epoch if reading else None,
        age=RUNNING_CLOCK.since(reading.moved) if reading else age,
        condition="silent" if condition == "answers" else condition,
    )
