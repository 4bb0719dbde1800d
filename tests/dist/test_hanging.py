"""A run that stands still is ended, with the name of the rank that holds it up; one that is only slow is not."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import waiting
import warm

from headway.dist.control.hang_watch import status_message
from headway.dist.control.hub import Hub
from headway.dist.failure import hang as hanging, heartbeat
from headway.dist.failure.hang import RankStatus
from headway.dist.failure.heartbeat import Heartbeat
from headway.dist.failure.record import FailureRecord
from headway.dist.roster import RankInfo
from headway.launcher.agent import watchdog as watchdogs
from headway.launcher.agent.watchdog import Watchdog
from headway.run.status import describe_failure
from headway.system.running_clock import RunningClock

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "hang.py")
BIN = Path(sys.executable).parent
RUN = [str(BIN / "headway"), "run", "--nproc", "3"]
TORCHRUN = [str(BIN / "torchrun"), "--nproc-per-node", "3"]
PERIOD = 6.0
FULL = os.environ.get("HEADWAY_FAULTS") == "full"

WAITING = """Thread 0x1 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 7 in all_reduce
  File "train.py", line 3 in main
"""
WORKING = """Thread 0x2 (most recent call first):
  File "/lib/threading.py", line 1 in wait
  File "/lib/headway/dist/control/peer.py", line 9 in _listen

Current thread 0x1 (most recent call first):
  File "data.py", line 5 in read
"""


def seen(rank: int, **facts: object) -> RankStatus:
    known: dict[str, object] = {"host": "node1", "pid": 100 + rank, "phase": "train", "step": 9, "age": 30.0}
    return RankStatus(rank=rank, **(known | facts))  # type: ignore[arg-type]


# --- the judgement


def test_the_functions_in_which_ranks_wait_are_where_the_judgement_looks_for_them() -> None:
    package = Path(hanging.__file__).parents[2]
    for path, names in hanging.WAITING_IN.items():
        text = (package / path).read_text()
        assert all(name == ".*" or f"def {name}(" in text for name in names.split("|")), path
    assert all((package / path).exists() for path in hanging.OWN_THREADS)


def test_a_rank_in_an_exchange_waits_unless_it_works_there() -> None:
    frames = (
        '  File "/lib/headway/dist/collective/exchange.py", line 7 in {}\n  File "train.py", line 3 in main\n'
    )
    waits, works = (
        f"Thread 0x1 (most recent call first):\n{frames.format(name)}" for name in ("_wait", "round")
    )
    assert [one.rank for one in hanging.suspects([seen(0, stack=waits), seen(1, stack=works)])] == [1]


@pytest.mark.parametrize(
    ("statuses", "guilty"),
    [
        ([seen(0), seen(1, condition="stopped"), seen(2, step=8)], [1]),
        ([seen(0), seen(1), seen(2, step=8, collectives=3)], [2]),
        ([seen(0, collectives=7), seen(1, collectives=6), seen(2, collectives=7)], [1]),
        ([seen(0, stack=WAITING), seen(1, stack=WAITING), seen(2, stack=WORKING)], [2]),
        ([seen(0, stack=WAITING), seen(1, stack=WAITING)], []),
        ([seen(0, stack=WORKING), seen(1, stack=WORKING)], []),
        ([seen(0, condition="silent"), seen(1, condition="silent")], []),
        ([seen(0, ended_epoch=1, collectives=7), seen(1, collectives=6)], [0]),
        ([seen(0, ended_epoch=1, stack=WAITING), seen(1, stack=WAITING)], [0]),
        ([seen(0, ended_epoch=1, stack=WAITING), seen(1, stack=WORKING)], [1]),
        ([seen(0, ended_epoch=1), seen(1, step=8)], [1]),
        ([seen(0, ended_epoch=1), seen(1, ended_epoch=1, stack=WORKING)], [1]),
        ([seen(0, ended_epoch=1, stack=WAITING), seen(1, ended_epoch=1, stack=WAITING)], []),
    ],
)
def test_who_is_to_blame(statuses: list[RankStatus], guilty: list[int]) -> None:
    assert [one.rank for one in hanging.suspects(statuses)] == guilty
    record = hanging.make_record(statuses, 3)
    assert record["suspects"] == guilty
    assert sorted(record["suspects"] + record["victims"]) == [one.rank for one in statuses]
    assert record["exit_code"] == 1


def test_the_words() -> None:
    record = hanging.make_record(
        [seen(0, stack=WAITING), seen(1, condition="stopped"), seen(2, stack=WAITING)], 3
    )
    assert record["error"] == (
        "for 30 s no rank has made progress: rank 1 of 3 on node1 (pid 101) is stopped (SIGSTOP): "
        "kill -CONT resumes it, in train at step 9; ranks 0, 2 wait for it"
    )
    assert record["traceback"].count("all_reduce") == 1, "equal stacks are shown once"
    assert record["traceback"].startswith("ranks 0, 2, in train at step 9; most recent call first:\n  File")
    short = hanging.make_record([seen(0), seen(1, ended_epoch=2, stack=WAITING), seen(2)], 3)
    assert short["error"] == (
        "for 30 s no rank has made progress: rank 1 of 3 on node1 (pid 101) has ended epoch 2, since its loader gave "
        "fewer batches than those of other ranks, in train at step 9; ranks 0, 2 wait for it"
    )
    assert "rank 1, in train at step 9, epoch 2 ended; most recent call first:" in short["traceback"]
    alone = hanging.make_record([seen(0)], 1)
    assert alone["error"] == "for 30 s no rank has made progress: rank 0 of 1 is in the same place"
    assert alone["rank"] is None, "nobody is to blame"
    assert describe_failure(alone) == describe_failure(alone | {"rank": 0}) == alone["error"]


def test_a_stack_without_what_is_ours() -> None:
    assert hanging.trim_stack(WORKING) == '  File "data.py", line 5 in read'


def test_the_stacks_of_a_rank_need_no_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full or missing /tmp would look as if rank 0 were gone: the thread that replies would end with an OSError."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    reply = status_message(Heartbeat(), {"stacks": True})
    assert "test_the_stacks_of_a_rank_need_no_temporary_directory" in reply["stack"]


def test_a_hang_names_the_ranks_that_had_ended_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL, the others get no error when a rank ends: they wait, all in the same place."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub = Hub(
            listener, b"k" * 32, 3, welcome={}, on_first_failure=lambda _: None, on_all_down=lambda _: None
        )
        facts: dict[str, Any] = {"host": "h", "node": "h", "pid": 1, "local_rank": None, "visible_gpus": None}
        hub._ranks = {rank: RankInfo(rank=rank, **facts) for rank in range(3)}
        hub._left = {1}
        found: list[FailureRecord] = []
        monkeypatch.setattr(hub, "_broadcast_abort", found.append)
        waiting = [seen(0, stack=WAITING), seen(2, stack=WAITING)]
        monkeypatch.setattr(hub._hang_watch, "check", lambda *_: hanging.make_record(waiting, 3))
        hub._check_for_hang()
        hub._selector.close()
    assert found[0]["error"].endswith(
        "in the same place; rank 1 ended early (it returned, or called sys.exit)"
    )


# --- the pulse


@pytest.fixture
def heart() -> Iterator[Heartbeat]:
    one = Heartbeat()
    yield one
    one.stop()


def test_limits(heart: Heartbeat, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def step(seconds: float, number: int, phase: str = "train") -> None:
        now[0] += seconds
        heart.move(phase, number)

    heart.watch(5.0)
    assert heart.limit == math.inf, "whoever has not begun a step may take any time"
    heart.move("train", 0)
    assert heart.limit == 300, "the first steps may compile"
    step(60, 1)
    for number in range(2, 5):
        step(0.1, number)
    assert heart.limit == 5, "the pace is known: a compilation at the start does not count"
    for number in range(5, 50):
        step(2, number)
    assert 15 < heart.limit <= 20, "ten times the usual step, where that is more than the period"
    step(2, 50, "validation")
    assert heart.limit == 300, "another phase has another pace"
    with heart.no_hang_check():
        assert heart.limit == math.inf, "a download may take an hour"
        with heart.no_hang_check():
            pass
        assert heart.limit == math.inf, "and the other half of it, too"
        now[0] += 3600
    assert heart.limit == 300 and heart.age == 0
    heart.move("done", None)
    assert heart.limit == math.inf


def test_without_a_period_nothing_is_watched(heart: Heartbeat, tmp_path: Path) -> None:
    heart.watch(0.0, directory=tmp_path)
    heart.set_run(Path("/runs/a"), owner=3)
    for step in range(9):
        heart.move("train", step)
    assert heart.limit == math.inf and Watchdog(tmp_path, ranks=[0], world_size=1).tick() is None
    beat = heartbeat.read(tmp_path, 0)
    assert beat is not None and (beat.run, beat.owner, beat.step) == ("/runs/a", 3, 8), "the agent needs it"


def test_the_pulse_is_seen_from_outside(heart: Heartbeat, tmp_path: Path) -> None:
    heart.watch(5.0, rank=3, directory=tmp_path)
    heart.set_run(Path("/runs/größe"))
    heart.move("validation", 12)
    heart.set_ended_epoch(4)
    beat = heartbeat.read(tmp_path, 3)
    assert beat is not None and beat.ended_epoch == 4
    heart.set_ended_epoch(None)
    assert (beat.pid, beat.phase, beat.step, beat.run) == (os.getpid(), "validation", 12, "/runs/größe")
    assert beat.limit == 300 and 0 <= time.monotonic() - beat.moved < 60
    for step in range(13, 20):  # until the pace is known, and quicker from then on
        heart.move("validation", step)
        time.sleep(0.001)
    later = heartbeat.read(tmp_path, 3)
    assert later is not None and (later.step, later.limit) == (19, 5) and later.moved > beat.moved
    assert later.ended_epoch is None
    heart.move("train" * 40, None)
    beat = heartbeat.read(tmp_path, 3)
    assert beat is not None and beat.step is None and beat.phase.startswith("traintrain")


def test_the_path_of_a_run_may_have_any_bytes(heart: Heartbeat, tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b"caf\xe9")
    heart.watch(0.0, directory=tmp_path)
    heart.set_run(run)
    beat = heartbeat.read(tmp_path, 0)
    assert beat is not None and beat.run == str(run), "the agent opens it"


def test_the_agent_reports_only_if_nobody_moves(
    heart: Heartbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watchdogs, "_LONGEST_S", math.inf)  # the clock jumps, and nobody was suspended
    other = Heartbeat()
    watchdog = Watchdog(tmp_path, ranks=[0, 1], world_size=2)
    assert watchdog.tick() is None, "nobody is there yet"
    for rank, one in enumerate((heart, other)):
        one.watch(100.0, rank=rank, directory=tmp_path)
        for number in range(1, 5):
            one.move("train", number)
    now[0] += 200
    other.move("train", 5)
    assert watchdog.tick() is None, "one of them works"
    now[0] += 200
    with other.no_hang_check():
        assert watchdog.tick() is None, "one of them has leave"
    now[0] += 290  # its last step has doubled its limit
    assert watchdog.tick() is None, "rank 0 speaks first"
    now[0] += 20
    record = watchdog.tick()
    assert record is not None
    assert (record["suspects"], record["age"]) == ([0], 310), "a step behind"
    assert "test_the_agent_reports_only_if_nobody_moves" in record["traceback"], "asked for by a signal"
    other.stop()


def test_a_suspended_job_has_its_time_again(
    heart: Heartbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watchdogs, "_STACKS_S", 0.0)
    heart.watch(100.0, rank=0, directory=tmp_path)
    for number in range(1, 5):
        heart.move("train", number)
    watchdog = Watchdog(tmp_path, ranks=[0], world_size=1)
    assert watchdog.tick() is None
    now[0] += 1000
    looks = 0
    while watchdog.tick() is None:
        now[0], looks = now[0] + 1, looks + 1
    assert looks == 148, (
        "two of the thousand seconds count, and then what it has run: one and a half times its limit"
    )


def test_a_clock_leaves_out_the_time_in_which_nothing_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = RunningClock(longest_s=2.0)
    now[0] += 50
    assert clock.since(1000.0) == 50, "nothing ticks yet"
    clock.tick()
    for gap in (1, 100, 1, 3600):
        now[0] += gap
        before = clock.since(1000.0)
        clock.tick()
        assert clock.since(1000.0) == before, "the same before the first tick after a gap and after it"
    assert clock.since(1000.0) == 50 + 1 + 2 + 1 + 2
    assert clock.since(1110.0) == 1 + 2, "within a gap"
    assert clock.since(now[0]) == 0


# --- real ranks


def hang(command: list[str], folder: Path, *, how: str, rank: int) -> tuple[float, dict[str, object], str]:
    """Seconds from the trouble to the record, the record, and what was on the screen by then."""
    environ = os.environ | {
        "HANG": how,
        "HANG_RANK": str(rank),
        "HANG_MARK": str(folder / "mark"),
        "HANG_RUNS": str(folder / "runs"),
        "HEADWAY_WATCHDOG": str(PERIOD),
    }
    with (folder / "screen").open("w") as screen:
        process = warm.Popen([*command, SCRIPT], env=environ, stderr=screen, start_new_session=True)
        try:
            while process.poll() is None and "\nrecord: " not in (folder / "screen").read_text():
                time.sleep(0.1)
            if command is RUN:  # torchrun lets a stopped rank be for half a minute
                assert process.wait(30) == 1
        finally:
            if process.poll() is None:
                for each in psutil.Process(process.pid).children(recursive=True):  # in sessions of their own
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
                process.kill()
                process.wait()
    (path,) = folder.glob("runs/hang-*/failure.json")
    record = json.loads(path.read_text())
    began = float((folder / "mark").read_text())
    return datetime.fromisoformat(record["time"]).timestamp() - began, record, (folder / "screen").read_text()


@pytest.mark.parametrize(
    ("command", "how", "rank"),
    [
        (RUN, "stop", 1),
        (RUN, "gil", 0),
        (TORCHRUN, "stop", 0),
        *([(RUN, "stop", 0), (RUN, "wait", 2), (RUN, "spin", 2), (TORCHRUN, "stop", 1)] if FULL else []),
    ],
    ids=lambda value: Path(value[0]).name if isinstance(value, list) else str(value),
)
def test_the_rank_that_holds_up_the_others_is_named(
    command: list[str], how: str, rank: int, tmp_path: Path
) -> None:
    seconds, record, screen = hang(command, tmp_path, how=how, rank=rank)
    assert (record["kind"], record["suspects"], record["exit_code"]) == ("hang", [rank], 1), record
    assert PERIOD - 1 <= seconds <= 2 * PERIOD
    if command is RUN:
        assert (record["phase"], record["step"]) == ("train", 10)
        assert record["victims"] == [other for other in range(3) if other != rank]
    report = screen[screen.index("headway: for ") :]
    assert f"rank {rank} of 3" in report
    assert ("is stopped (SIGSTOP)" in report) == (how == "stop")
    assert "in all_reduce" in report, "where the victims wait"
    by_rank_0 = rank != 0 or how == "wait"
    assert (record["traceback"].count("in collective") > 0) == (by_rank_0 or command is TORCHRUN), (
        "who found out"
    )
    if how != "stop":
        assert "in trouble" in report, "where the culprit is"


@pytest.mark.parametrize("with_agent", [True, False] if FULL else [True])
def test_a_suspended_job_goes_on(with_agent: bool, tmp_path: Path) -> None:
    """As by `scontrol suspend`, which stops the agent, too, or by a person, who stops the ranks."""
    period_s = 3.0
    environ = os.environ | {
        "HANG": "",
        "HANG_RANK": "1",
        "HANG_STEPS": "1000",
        "HANG_MARK": str(tmp_path / "mark"),
        "HANG_RUNS": str(tmp_path / "runs"),
        "HEADWAY_WATCHDOG": str(period_s),
    }
    with (tmp_path / "screen").open("w") as screen:
        process = warm.Popen([*RUN, SCRIPT], env=environ, stderr=screen, start_new_session=True)
    agent = psutil.Process(process.pid)
    try:
        waiting.wait_until((tmp_path / "mark").exists, "step 10")
        stopped = [*agent.children(), *([agent] if with_agent else [])]
        for each in stopped:
            each.suspend()
        time.sleep(3 * period_s)
        for each in reversed(stopped):
            each.resume()
        assert process.wait(60) == 0, (tmp_path / "screen").read_text()
    finally:
        for each in agent.children() if process.poll() is None else ():
            each.kill()
    assert "most recent call first" not in (tmp_path / "screen").read_text(), "nobody took it for a hang"


def test_a_child_that_a_step_forks_can_exit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "import headway as hw\n"
        "hw.init(device='cpu')\n"
        "hw.dist.set_phase('train', 1)\n"
        "hw.dist.set_phase('train', 2)\n"
        "if not os.fork():\n"
        "    sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 7\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_heartbeat_that_is_read_while_it_is_written_is_whole(tmp_path: Path) -> None:
    """The agent reads it at any moment: a step that reads as 0, of the time 0, would be a hang of many days."""
    beating = Heartbeat()
    beating.watch(1000.0, directory=tmp_path)
    for step in range(1, 11):
        beating.move("train", step)
    if not (writer := os.fork()):
        try:
            while True:
                beating.move("train", beating.step)
        finally:
            os._exit(1)
    try:
        readings = [heartbeat.read(tmp_path, 0) for _ in range(3000)]
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    beating.stop()
    assert [
        each for each in readings if each is None or each.step != 10 or time.monotonic() - each.moved > 900
    ] == []
