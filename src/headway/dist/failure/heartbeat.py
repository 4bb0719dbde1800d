"""A rank's heartbeat: what it is doing, since when, and how long that may take. No torch, since node agents read it.

The training loop calls `move` at every step, so it must cost next to nothing: it reads a clock and stores some bytes.
The bytes are in memory shared with the node agent (a mapped file in the directory that HEADWAY_HEARTBEAT names), which
can read them even if the rank is stopped. Without an agent, the rank sets a timer of faulthandler from time to time,
which writes the stacks of all threads to stderr if the hub has not detected the hang before.
"""

from __future__ import annotations

import errno
import faulthandler
import math
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.system import files
from headway.system.running_clock import RUNNING_CLOCK

WARM_UP_MOVES = 3  # until the pace of a phase is known
UNKNOWN_PACE_S = 300.0  # how long a step may take in a phase whose pace is not known: it may be compiling
_ALARM_FACTOR = 2.25  # late, so that the hub, which determines which rank holds up the others, reports first
SLACK = 10.0  # a step may take this many times its usual time, if that is more than the period

_FILE_BYTES = 4096
_FIXED = struct.Struct("<4q2d")  # version, pid, 1 if there is a step, step; moved, limit
# Step and moved are packed before they are stored: pack_into clears the memory first, so the agent would now and then
# read that a rank has not moved since the machine was started.
_STEP_AND_TIME, _PACK_STEP_AND_TIME = slice(24, 40), struct.Struct("<qd").pack
_TEXTS = (_FIXED.size, *(_FIXED.size + at for at in (64, 80, 96)), _FILE_BYTES)
_PHASE, _OWNER, _ENDED_EPOCH, _RUN = range(4)  # of these texts
_VERSION = 1


@final
@dataclass(frozen=True, kw_only=True)
class HeartbeatReading:
    """A heartbeat as read by another process; times are on this machine's monotonic clock."""

    pid: int
    phase: str
    step: int | None
    moved: float
    limit: float
    run: str
    owner: int | None
    """the number of the lock that the attempt holds on the run, if any"""
    ended_epoch: int | None = None
    """see `Heartbeat.ended_epoch`"""


@final
class Heartbeat:
    """The heartbeat of this process.

    >>> heartbeat = Heartbeat()
    >>> heartbeat.watch(1800.0)
    >>> heartbeat.move("train", 37)
    >>> heartbeat.limit  # seconds until the next move is due: the pace is not known yet
    1800.0
    """

    def __init__(self) -> None:
        self.phase = "setup"
        self.step: int | None = None
        self.ended_epoch: int | None = None
        """the epoch, counted from 1, that this rank has ended while others may still train in it"""
        self.moved = time.monotonic()
        self.limit = math.inf
        self.period = 0.0
        self._paces: dict[str, tuple[int, float]] = {}  # phase -> moves seen, usual seconds of one
        self._moves, self._since = 0, self.moved  # since the pace was last measured
        self._review = math.inf  # when it is measured again
        self._unchecked = 0  # nested blocks of `no_hang_check`
        self._memory: mmap.mmap | None = None
        self._stack = -1

    @property
    def age(self) -> float:
        """Seconds for which this rank has run since it last made progress."""
        return RUNNING_CLOCK.since(self.moved)

    def watch(self, period: float, *, rank: int = 0, directory: Path | None = None) -> None:
        """Sets how many seconds this rank may go without progress; 0 switches the check off.

        The agent reads the heartbeat in `directory` in any case, to know what the ranks do, and in which run.
        """
        self.period = period
        if directory is not None:
            self._stack = files.open_private(
                stack_file(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND
            )
            # before the file can be read
            faulthandler.register(signal.SIGQUIT, file=self._stack, all_threads=True)
            self._memory = _mapped(heartbeat_file(directory, rank))
        self.move(self.phase, self.step)

    def stop(self) -> None:
        """Ends the check for hangs."""
        self.move("done", None)
        self.period = 0.0
        if self._memory is not None:
            faulthandler.unregister(signal.SIGQUIT)
            os.close(self._stack)
            self._memory.close()
            self._memory = None

    def move(self, phase: str, step: int | None) -> None:
        """Records progress. Without a step, the phase that follows has no time limit."""
        now = time.monotonic()
        self._moves += 1
        if phase != self.phase or now >= self._review or step is None or self.step is None:
            self._review_pace(phase, step, now)
            return
        self.step, self.moved = step, now
        if self._memory is not None:
            self._memory[_STEP_AND_TIME] = _PACK_STEP_AND_TIME(step, now)

    def _review_pace(self, phase: str, step: int | None, now: float) -> None:
        """Measures the pace of the phase so far, and sets the limit of what comes next."""
        if self.step is not None:
            seen, usual = self._paces.get(self.phase, (0, 0.0))
            took = RUNNING_CLOCK.since(self._since) / self._moves
            old = 0.9**self._moves if seen >= WARM_UP_MOVES else 0.0
            self._paces[self.phase] = seen + self._moves, old * usual + (1 - old) * took
        self.phase, self.step, self.moved = phase, step, now
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Starts to measure, and sets the limit."""
        self._moves, self._since = 0, now
        seen, usual = self._paces.get(self.phase, (0, 0.0))
        known = seen >= WARM_UP_MOVES
        limit = max(self.period, SLACK * usual if known else UNKNOWN_PACE_S)
        watched = self.period and self.step is not None and not self._unchecked
        self._set_limit(limit if watched else math.inf)
        self._review = now + self.limit / 4 if known else now if self.period else math.inf

    @contextmanager
    def no_hang_check(self) -> Iterator[None]:
        """Sets no time limit for the block, such as a download."""
        self._unchecked += 1
        self._set_limit(math.inf)
        try:
            yield
        finally:
            self._unchecked -= 1
            self.moved = time.monotonic()
            self._begin(self.moved)

    def set_run(self, run: Path | None, *, owner: int | None = None) -> None:
        """Stores the run's directory, for the agent that may have to record this rank's failure there."""
        if self._memory is not None:
            _put(self._memory, _OWNER, "" if owner is None else str(owner))
            _put(self._memory, _RUN, "" if run is None else str(run))

    def set_ended_epoch(self, epoch: int | None) -> None:
        """Stores that this rank has no more batches in an epoch; None once all ranks have met after it."""
        changed, self.ended_epoch = epoch != self.ended_epoch, epoch
        if changed and self._memory is not None:
            _put(self._memory, _ENDED_EPOCH, "" if epoch is None else str(epoch))

    def _set_limit(self, limit: float) -> None:
        self.limit = limit
        if self._memory is not None:
            there = self.step is not None
            fixed = _FIXED.pack(_VERSION, os.getpid(), there, self.step or 0, self.moved, limit)
            self._memory[: _FIXED.size] = fixed
            _put(self._memory, _PHASE, self.phase)
        if self._memory is None:  # an agent would report a hang
            _ALARM.set(_ALARM_FACTOR * limit)


@final
class _Alarm:
    """The timer of faulthandler, which writes the stacks of all threads to stderr even if no thread of Python runs.

    Its thread does not exist in a forked child, which would wait for it at its exit: so it does not run during a fork.
    """

    def __init__(self) -> None:
        self._due = math.inf
        os.register_at_fork(before=self._cancel, after_in_parent=self._start, after_in_child=self._forget)

    def set(self, seconds: float) -> None:
        self._cancel()
        self._due = time.monotonic() + seconds
        self._start()

    def _start(self) -> None:
        if self._due != math.inf:
            faulthandler.dump_traceback_later(max(0.001, self._due - time.monotonic()), file=2)

    def _cancel(self) -> None:
        if self._due != math.inf:
            faulthandler.cancel_dump_traceback_later()

    def _forget(self) -> None:
        self._due = math.inf


_ALARM = _Alarm()


def read(directory: Path, rank: int) -> HeartbeatReading | None:
    """Reads the heartbeat of a rank; None while it has none, or while this process cannot open another file."""
    try:
        data = heartbeat_file(directory, rank).read_bytes()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EMFILE, errno.ENFILE):
            raise
        return None
    version, pid, there, step, moved, limit = _FIXED.unpack_from(data.ljust(_FILE_BYTES, b"\0"))
    if version != _VERSION:
        return None
    phase, owner, epoch = (_get(data, number) for number in (_PHASE, _OWNER, _ENDED_EPOCH))
    return HeartbeatReading(
        pid=pid,
        phase=phase,
        step=step if there else None,
        moved=moved,
        limit=limit,
        run=_get(data, _RUN, errors="surrogateescape"),
        owner=int(owner) if owner else None,
        ended_epoch=int(epoch) if epoch else None,
    )


def heartbeat_file(directory: Path, rank: int) -> Path:
    """Returns the file of a rank's heartbeat."""
    return directory / f"heartbeat-{rank:05d}"


def stack_file(directory: Path, rank: int) -> Path:
    """Returns the file in which a rank writes its stacks when it gets SIGQUIT."""
    return directory / f"stack-{rank:05d}.txt"


def _mapped(path: Path) -> mmap.mmap:
    fd = files.open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, _FILE_BYTES)
        return mmap.mmap(fd, _FILE_BYTES)
    finally:
        os.close(fd)


def _put(memory: mmap.mmap, number: int, text: str) -> None:
    start, end = _TEXTS[number : number + 2]
    # a path may have bytes that are not UTF-8
    memory[start:end] = text.encode(errors="surrogateescape")[: end - start - 1].ljust(end - start, b"\0")


def _get(data: bytes, number: int, *, errors: str = "replace") -> str:
    start, end = _TEXTS[number : number + 2]
    return data[start:end].partition(b"\0")[0].decode(errors=errors)
