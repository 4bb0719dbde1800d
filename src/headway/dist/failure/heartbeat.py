"""A rank's pulse: what it is doing, since when, and for how long that is in order. No torch: the agent reads it, too.

The training loop calls `move` at every step, so it must cost nothing: a clock is read and some bytes are stored. The
bytes lie in memory shared with the node agent (a mapped file in the folder that HEADWAY_HEARTBEAT names), who can read
them whatever has become of the rank. Every now and then the rank winds up an alarm clock, faulthandler's, which writes
the stacks of all threads to stderr should nobody else have noticed that the rank stands still.
"""

from __future__ import annotations

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

WARM_UP = 3  # moves in a phase until its pace is known
PATIENCE = (
    300.0  # seconds that a rank may stand still in a phase whose pace is not known: it may be compiling
)
SLACK = 10.0  # a phase may take so many times its usual time, where that is more than the period

_SIZE = 4096
_FIXED = struct.Struct("<4q2d")  # version, pid, 1 if there is a step, step; moved, limit
_QUICK, _QUICK_AT = struct.Struct("<qd"), 24  # of these, step and moved
_TEXTS = (_FIXED.size, _FIXED.size + 64, _SIZE)  # phase, path of the run
_VERSION = 1


@final
@dataclass(frozen=True, kw_only=True)
class HeartbeatReading:
    """What a heartbeat says, seen from outside; times are those of this machine's monotonic clock."""

    pid: int
    phase: str
    step: int | None
    moved: float
    limit: float
    run: str

    @property
    def age(self) -> float:
        """Seconds since the rank has moved."""
        return time.monotonic() - self.moved


@final
class Heartbeat:
    """The pulse of this process.

    >>> heart = Heartbeat()
    >>> heart.watch(1800.0)
    >>> heart.move("train", 37)
    >>> heart.limit  # seconds that this move may take: its pace is not known yet
    1800.0
    """

    def __init__(self) -> None:
        self.phase = "setup"
        self.step: int | None = None
        self.moved = time.monotonic()
        self.limit = math.inf
        self.period = 0.0
        self._paces: dict[str, tuple[int, float]] = {}  # phase -> moves seen, usual seconds of one
        self._moves, self._since = 0, self.moved  # since the pace was last looked at
        self._review = math.inf  # when it is to be looked at again
        self._leaves = 0  # blocks of `no_hang_check` that are open
        self._memory: mmap.mmap | None = None
        self._stack = -1
        self._alarm_limit = math.inf

    @property
    def age(self) -> float:
        """Seconds since the rank has moved."""
        return time.monotonic() - self.moved

    def watch(self, period: float, *, rank: int = 0, directory: Path | None = None) -> None:
        """From now on a rank that stands still for `period` seconds is in trouble; 0 turns that off."""
        self.period = period
        if period and directory is not None:
            self._stack = files.open_private(
                stack_file(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND
            )
            faulthandler.register(signal.SIGQUIT, file=self._stack, all_threads=True)  # before anybody asks
            self._memory = _mapped(heartbeat_file(directory, rank))
        self.move(self.phase, self.step)

    def stop(self) -> None:
        """Nobody watches any more."""
        self.move("done", None)
        self.period = 0.0
        if self._memory is not None:
            faulthandler.unregister(signal.SIGQUIT)
            os.close(self._stack)
            self._memory.close()
            self._memory = None

    def move(self, phase: str, step: int | None) -> None:
        """The rank has come further. Without a step it is in nobody's way, and may take any time."""
        now = time.monotonic()
        self._moves += 1
        if phase != self.phase or now >= self._review or step is None or self.step is None:
            self._turn(phase, step, now)
            return
        self.step, self.moved = step, now
        if self._memory is not None:
            _QUICK.pack_into(self._memory, _QUICK_AT, step, now)

    def _turn(self, phase: str, step: int | None, now: float) -> None:
        """Another phase, or time to look at the pace of this one."""
        if self.step is not None:
            seen, usual = self._paces.get(self.phase, (0, 0.0))
            took, old = (now - self._since) / self._moves, 0.9**self._moves if seen >= WARM_UP else 0.0
            self._paces[self.phase] = seen + self._moves, old * usual + (1 - old) * took
        self.phase, self.step, self.moved = phase, step, now
        self._begin(now)

    def _begin(self, now: float) -> None:
        """What comes now is measured from here on."""
        self._moves, self._since = 0, now
        seen, usual = self._paces.get(self.phase, (0, 0.0))
        known = seen >= WARM_UP
        limit = max(self.period, SLACK * usual if known else PATIENCE)
        watched = self.period and self.step is not None and not self._leaves
        self._beat(limit if watched else math.inf)
        self._review = now + self.limit / 4 if known else now if self.period else math.inf

    @contextmanager
    def no_hang_check(self) -> Iterator[None]:
        """What is done in here may take any time, as a download may."""
        self._leaves += 1
        self._beat(math.inf)
        try:
            yield
        finally:
            self._leaves -= 1
            self.moved = time.monotonic()
            self._begin(self.moved)

    def set_run(self, run: Path) -> None:
        """Notes the run's directory, for whoever must write there on this rank's behalf."""
        if self._memory is not None:
            _put(self._memory, 1, str(run))

    def _beat(self, limit: float) -> None:
        self.limit = limit
        if self._memory is not None:
            there = self.step is not None
            _FIXED.pack_into(self._memory, 0, _VERSION, os.getpid(), there, self.step or 0, self.moved, limit)
            _put(self._memory, 0, self.phase)
        if limit != math.inf:
            # a little late, so that those who watch from outside, and can tell who is to blame, go first
            faulthandler.dump_traceback_later(2.25 * limit, file=2)
        elif self._alarm_limit != math.inf:
            faulthandler.cancel_dump_traceback_later()
        self._alarm_limit = limit


def read(folder: Path, rank: int) -> HeartbeatReading | None:
    """The heartbeat of a rank; None while it has none."""
    try:
        data = heartbeat_file(folder, rank).read_bytes()
    except FileNotFoundError:
        return None
    version, pid, there, step, moved, limit = _FIXED.unpack_from(data.ljust(_SIZE, b"\0"))
    if version != _VERSION:
        return None
    phase, run = (_get(data, number) for number in (0, 1))
    return HeartbeatReading(
        pid=pid, phase=phase, step=step if there else None, moved=moved, limit=limit, run=run
    )


def heartbeat_file(folder: Path, rank: int) -> Path:
    return folder / f"heartbeat-{rank:05d}"


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stacks when it gets SIGQUIT."""
    return folder / f"stack-{rank:05d}.txt"


def _mapped(path: Path) -> mmap.mmap:
    fd = files.open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, _SIZE)
        return mmap.mmap(fd, _SIZE)
    finally:
        os.close(fd)


def _put(memory: mmap.mmap, number: int, text: str) -> None:
    start, end = _TEXTS[number : number + 2]
    memory[start:end] = text.encode()[: end - start - 1].ljust(end - start, b"\0")


def _get(data: bytes, number: int) -> str:
    start, end = _TEXTS[number : number + 2]
    return data[start:end].partition(b"\0")[0].decode(errors="replace")
