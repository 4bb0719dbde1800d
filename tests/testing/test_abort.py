"""How ranks that hang are ended: each writes its stack, however late a busy machine delivers the signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from multiprocessing.connection import Pipe
from typing import Any, cast

import psutil
from waiting import wait_until

from headway.testing import pool
from headway.testing.process import RankHandle


class LateRank:
    """A rank that stops three looks after its SIGSTOP, and records what happens in the test's list."""

    def __init__(self, rank: int, events: list[tuple[int, str]]) -> None:
        self.rank, self.events = rank, events
        self.looks = 0
        self.connection, self.far_end = Pipe()

    def is_stopped(self) -> bool:
        return False

    def is_held(self) -> bool:
        self.looks += 1
        if self.looks == 3:
            self.events.append((self.rank, "held"))
        return self.looks >= 3

    def signal(self, number: int) -> None:
        self.events.append((self.rank, signal.Signals(number).name))
        if number == signal.SIGCONT:
            self.far_end.close()

    def reap(self) -> int:
        self.events.append((self.rank, "reaped"))
        return -signal.SIGABRT


def test_no_rank_ends_before_all_are_held_and_rank_0_last() -> None:
    events: list[tuple[int, str]] = []
    pool.abort(cast(list[RankHandle], [LateRank(rank, events) for rank in range(3)]))
    first_abort = next(at for at, (_, what) in enumerate(events) if what == "SIGABRT")
    assert {rank for rank, what in events[:first_abort] if what == "held"} == {0, 1, 2}, events
    root_abort = events.index((0, "SIGABRT"))
    assert {(1, "reaped"), (2, "reaped")} <= set(events[:root_abort]), events
    assert all((rank, "reaped") in events for rank in range(3))


def test_a_process_is_held_when_none_of_its_threads_runs() -> None:
    spin = "threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()"
    busy = f"import threading; [{spin} for _ in range(3)]"

    def start(**descriptors: int) -> Any:
        given = {name: descriptors[name] for name in ("stdout", "stderr")}
        return subprocess.Popen([sys.executable, "-c", busy], start_new_session=True, **given)

    rank = RankHandle(0, start)
    try:
        process = psutil.Process(rank.process.pid)
        wait_until(lambda: process.num_threads() == 4, "its threads run")
        assert not rank.is_held()
        rank.signal(signal.SIGSTOP)
        wait_until(rank.is_held, "all of them have stopped")
        rank.signal(signal.SIGCONT)
        wait_until(lambda: not rank.is_held(), "they run again")
    finally:
        rank.disconnect()
        rank.reap()
        rank.close()
