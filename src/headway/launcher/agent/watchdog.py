"""The agent's check for hangs: it reads the heartbeats of its ranks from shared memory, without their help.

Rank 0 watches all ranks of a run and reports first (see `headway.dist.control.hang_watch`). The agent covers the case
in which rank 0 itself cannot: it is stopped, or its interpreter lock is held. SIGQUIT makes ranks write their stacks
even then.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import final

from headway.dist.failure import hang, heartbeat
from headway.dist.failure.hang import RankStatus
from headway.dist.failure.heartbeat import HeartbeatReading
from headway.dist.failure.record import FailureRecord
from headway.run import Run
from headway.system.running_clock import RunningClock

_POLL_S = 0.25
_STACKS_S = 1.0
"""how long ranks have to write their stacks"""
_LIMIT_FACTOR = 1.5
"""the age of each rank's heartbeat must exceed its limit by this factor, so that rank 0 reports first"""
_LONGEST_S = 2.0
"""an agent that did not look for longer was stopped, and its ranks with it"""


@final
class Watchdog:
    """Watches the ranks of one node.

    >>> watchdog = Watchdog(directory, ranks=[0, 1, 2, 3], world_size=4)
    >>> watchdog.tick()  # often; the record of a hang if there is one
    """

    def __init__(self, directory: Path, *, ranks: Collection[int], world_size: int) -> None:
        self._directory, self._ranks, self._world_size = directory, sorted(ranks), world_size
        self._looked = 0.0
        self._clock = RunningClock(longest_s=_LONGEST_S)

    def tick(self) -> FailureRecord | None:
        """Checks the heartbeats, if a check is due; if all ranks are stalled, collects their stacks into a record."""
        now = time.monotonic()
        if now - self._looked < _POLL_S:
            return None
        self._looked = now
        beats = self.beats()
        stalled = {rank: beat for rank, beat in beats.items() if beat is not None}
        if len(stalled) == len(beats) and all(
            hang.condition(beat.pid) == "stopped" for beat in stalled.values()
        ):
            return None  # somebody has suspended all of them: the clock stands still until they go on
        self._clock.tick()
        ages = {rank: self._clock.since(beat.moved) for rank, beat in stalled.items()}
        if len(stalled) < len(beats) or any(
            ages[rank] < _LIMIT_FACTOR * beat.limit for rank, beat in stalled.items()
        ):
            return None
        conditions = {rank: hang.condition(beat.pid) for rank, beat in stalled.items()}
        stacks = self._stacks({r: b for r, b in stalled.items() if conditions[r] != "stopped"})
        record = hang.make_record(
            [
                _status(rank, beat, ages[rank], conditions[rank], stacks.get(rank, ""))
                for rank, beat in stalled.items()
            ],
            self._world_size,
        )
        return with_run(record, stalled.values())

    def beats(self) -> dict[int, HeartbeatReading | None]:
        """Reads the heartbeats of all ranks of this node."""
        return {rank: heartbeat.read(self._directory, rank) for rank in self._ranks}

    def _stacks(self, beats: dict[int, HeartbeatReading]) -> dict[int, str]:
        files = {rank: heartbeat.stack_file(self._directory, rank) for rank in beats}
        before = {rank: file.stat().st_size for rank, file in files.items()}
        for beat in beats.values():
            with suppress(ProcessLookupError):  # it has just exited
                os.kill(beat.pid, signal.SIGQUIT)
        time.sleep(_STACKS_S)
        return {
            rank: file.read_bytes()[before[rank] :].decode(errors="replace") for rank, file in files.items()
        }


def with_run(record: FailureRecord, beats: Iterable[HeartbeatReading | None]) -> FailureRecord:
    """Adds to a record where the run keeps it, which the heartbeats of the ranks show."""
    beat = next((beat for beat in beats if beat is not None and beat.run), None)
    if beat is None:
        return record | {"failure_file": None}
    return record | {"failure_file": str(Run.open(beat.run).failure_file), "owner": beat.owner}


def _status(
    rank: int, beat: HeartbeatReading, age: float, condition: hang.Condition, stack: str
) -> RankStatus:
    return RankStatus(
        rank=rank,
        host=socket.gethostname(),
        pid=beat.pid,
        phase=beat.phase,
        step=beat.step,
        ended_epoch=beat.ended_epoch,
        age=age,
        condition=condition,
        stack=stack,
    )
