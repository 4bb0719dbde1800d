"""Who may train in a run directory. The processes are real; another host is one whose file locks, process ids and
name are not those of this one, which a single machine without a network file system can only play."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.errors import RunLocked, StorageError
from headway.run import Run, lock as runlock
from headway.run.lock import Owner, hold
from headway.schedulers import is_earlier_start
from headway.schedulers.base import JobIds
from headway.system.locks import ProcessIdentity

TRAINER = """if True:
    import errno, fcntl, multiprocessing, os, sys, time
    from pathlib import Path
    from headway.run import lock as runlock
    from headway.system import locks
    from headway.errors import RunLocked

    def work(pipe):
        pipe.send(os.getpid())
        time.sleep(60)

    directory, host, patience = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    runlock._LOST_S = 1.0
    if host == "no-flock":
        def flock(fd, operation):
            raise OSError(errno.ENOSYS, "Function not implemented")
        fcntl.flock = flock
    elif host != "here":
        locks._machine = lambda: host
        locks.socket.gethostname = lambda: host
        if host != "container":
            runlock._try_flock = lambda fd: True
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        with runlock.hold(directory, attempt=1, silence_s=patience, heartbeat_s=0.2) as lock:
            print("held", lock.note, flush=True)
            for command in sys.stdin:
                match command.strip():
                    case "check":
                        lock.check()
                        print("mine", flush=True)
                    case "worker":
                        ours, theirs = multiprocessing.Pipe()
                        multiprocessing.get_context("fork").Process(target=work, args=(theirs,)).start()
                        print(ours.recv(), flush=True)
                    case "fork":
                        if os.fork() == 0:
                            raise SystemExit(0)      # leaves the with block, as a child that fails would
                        os.wait()
                        print("forked", flush=True)
        print("released", flush=True)
    except RunLocked as error:
        print(error, flush=True)
"""


class Trainer:
    """A process that takes the run when told to, and holds it until told otherwise."""

    def __init__(self, directory: Path, host: str, patience: float, environ: dict[str, str]) -> None:
        command = [sys.executable, "-c", TRAINER, str(directory), host, str(patience)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, env=os.environ | environ)
        assert self._answer() == "ready"

    def tell(self, command: str) -> str:
        self.send(command)
        return self._answer()

    def send(self, command: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def leave(self) -> None:
        assert self.process.communicate(timeout=180)[0] == "released\n"

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(timeout=180)

    def _answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()


Start = Callable[..., Trainer]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "digits-x7k2").mkdir()
    return tmp_path / "digits-x7k2" / "lock"


@pytest.fixture
def start(directory: Path) -> Iterator[Start]:
    trainers: list[Trainer] = []

    def start(host: str = "here", *, patience: float = 60, **environ: str) -> Trainer:
        trainers.append(Trainer(directory, host, patience, environ))
        return trainers[-1]

    yield start
    for trainer in trainers:
        with trainer.process:
            trainer.process.kill()


@pytest.mark.parametrize("host", ["here", "no-flock"])
def test_one_at_a_time(host: str, start: Start) -> None:
    first, second, third = start(host), start(host), start(host)
    assert first.tell("take") == "held None"
    refusal = second.tell("take")
    assert refusal.startswith(f"run digits-x7k2 is in use by pid {first.process.pid} on ")
    first.leave()
    assert third.tell("take") == "held None"


@pytest.mark.parametrize("host", ["here", "no-flock"])
def test_free_at_once_when_the_owner_is_killed(host: str, start: Start) -> None:
    first, second = start(host), start(host)
    assert first.tell("take") == "held None"
    first.kill()
    assert second.tell("take") == "held None"


def test_free_at_once_while_a_data_worker_of_the_dead_owner_lives(start: Start) -> None:
    first, second = start(), start()
    first.tell("take")
    worker = int(first.tell("worker"))
    try:
        first.kill()
        assert second.tell("take") == "held None"
        os.kill(worker, 0)  # it did live
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_killed_owner_that_nobody_has_reaped_is_dead(start: Start) -> None:
    first, second = start("no-flock"), start("no-flock")
    first.tell("take")
    first.process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, first.process.pid, os.WEXITED | os.WNOWAIT)
    assert second.tell("take") == "held None"


def test_a_stopped_owner_in_a_container_of_this_machine_keeps_its_run(start: Start) -> None:
    """Its pid means nothing here and its heart stands still, but the kernel knows that it holds the lock."""
    there, here = start("container"), start(patience=0.5)
    there.tell("take")
    there.kill(signal.SIGSTOP)
    assert "in use by" in here.tell("take")


@pytest.mark.parametrize("host", ["here", "no-flock"])
def test_a_stopped_owner_on_this_machine_keeps_its_run(host: str, start: Start) -> None:
    first, second = start(host), start(host, patience=0.5)
    first.tell("take")
    first.kill(signal.SIGSTOP)
    assert "in use by" in second.tell("take")


@pytest.mark.parametrize("host", ["here", "no-flock"])
def test_a_forked_child_does_not_release(host: str, start: Start) -> None:
    first, second = start(host), start(host)
    first.tell("take")
    assert first.tell("fork") == "forked"
    assert "in use by" in second.tell("take")
    assert first.tell("check") == "mine"


def test_owner_on_another_host_is_seen_by_its_heartbeat(start: Start) -> None:
    there, here = start("node7", SLURM_JOB_ID="42"), start(patience=30)
    assert there.tell("take") == "held None"
    assert here.tell("take") == (
        f"run digits-x7k2 is in use by pid {there.process.pid} on node7 (attempt 1, SLURM job 42); "
        "wait for it to end, stop it (scancel 42), or start a new run"
    )


def test_dead_owner_on_another_host_is_taken_over_with_a_note(start: Start) -> None:
    there, here = start("node7"), start(patience=1)
    there.tell("take")
    there.kill()
    assert here.tell("take") == (
        f"held took the run over from pid {there.process.pid} on node7 (attempt 1): no heartbeat for 1 s"
    )


def test_released_on_another_host(start: Start) -> None:
    there, here = start("node7"), start()
    there.tell("take")
    there.leave()
    assert here.tell("take") == "held None"


def test_owner_that_stood_still_learns_that_it_lost_the_run(start: Start) -> None:
    there, here = start("node7"), start(patience=1)
    there.tell("take")
    assert there.tell("check") == "mine"
    there.kill(signal.SIGSTOP)
    assert here.tell("take").startswith("held took the run over")
    there.kill(signal.SIGCONT)
    assert f"was taken over by pid {here.process.pid} on" in there.tell("check")
    assert here.tell("check") == "mine"


def test_an_earlier_start_of_the_same_job_is_replaced_though_it_lives_and_holds_the_flock(
    start: Start,
) -> None:
    """As on a node that SLURM has given up, and that does not know it: here, in another space of process ids."""
    job = {"SLURM_CLUSTER_NAME": "big", "SLURM_JOB_ID": "7"}
    there = start("container", **job)
    there.tell("take")
    assert "in use" in start("here", **job).tell("take"), "another process of the same start"
    assert "in use" in start("here", **(job | {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"})).tell("take")
    here = start("here", **(job | {"SLURM_RESTART_COUNT": "1"}))
    assert here.tell("take") == "held None"
    assert there.process.wait(timeout=180) == RunLocked.exit_code, "it ends by itself, without being asked"
    assert here.tell("check") == "mine"


def test_an_owner_whose_run_is_removed_ends_by_itself(
    start: Start, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    owner = start()
    owner.tell("take")
    directory.parent.rename(directory.parent.with_name("away"))
    assert owner.process.wait(timeout=180) == RunLocked.exit_code
    assert (
        "headway: run digits-x7k2 was removed or moved while this process trained" in capfd.readouterr().err
    )


def test_a_run_that_was_away_for_a_moment_is_kept(start: Start, directory: Path) -> None:
    owner, away = start(), directory.parent.with_name("away")
    owner.tell("take")
    directory.parent.rename(away)
    time.sleep(0.7)  # three heartbeats
    away.rename(directory.parent)
    time.sleep(1.5)
    assert owner.tell("check") == "mine"


def test_a_job_that_is_over_is_replaced_though_a_file_server_keeps_its_flock(
    start: Start, tmp_path: Path
) -> None:
    """As on NFS: the lock of a node that has crashed stays for a while, or until the node is back."""
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\necho NODE_FAIL\n")
    squeue.chmod(0o755)
    path = {"PATH": f"{squeue.parent}:{os.environ['PATH']}", "SLURM_CLUSTER_NAME": "big"}
    there = start("container", **path, SLURM_JOB_ID="7")
    early, here = (start("here", patience=2, **path, SLURM_JOB_ID=job) for job in ("8", "9"))
    there.tell("take")
    assert "is in use by" in early.tell("take"), "a shell may outlive the job whose variables it has"
    there.kill(signal.SIGSTOP)
    assert here.tell("take") == "held None"
    there.kill(signal.SIGCONT)
    assert there.process.wait(timeout=180) == RunLocked.exit_code, "should it live after all"


def test_only_a_smaller_count_of_the_same_job_is_an_earlier_start() -> None:
    ours = JobIds(scheduler="slurm", cluster_name="big", job_id="7", restart_count="10")
    assert is_earlier_start(dataclasses.replace(ours, restart_count="9"), ours)
    for other in (
        {},
        {"restart_count": "10"},
        {"restart_count": "11"},
        {"job_id": "6", "restart_count": "0"},
    ):
        assert not is_earlier_start(dataclasses.replace(ours, **other), ours)
    assert not is_earlier_start(None, ours) and not is_earlier_start(ours, None)


def test_of_many_hosts_that_come_at_once_one_wins(start: Start) -> None:
    trainers = [start(f"node{number}", patience=30) for number in range(5)]
    for trainer in trainers:
        trainer.send("take")
    answers = [trainer._answer() for trainer in trainers]
    assert answers.count("held None") == 1
    winner = answers.index("held None")
    assert all(f"in use by pid {trainers[winner].process.pid} on node{winner}" in answer
               for answer in answers if answer != "held None")  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "free"),
    [
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        (
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "9"},
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "10"},
            True,
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"},
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"},
            False,
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "7"}, False),
        (
            {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "b"},
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"},
            False,
        ),
    ],
)
def test_an_earlier_start_of_our_own_job(
    before: dict[str, str], after: dict[str, str], free: bool, start: Start
) -> None:
    cluster = {"SLURM_CLUSTER_NAME": "a"}
    there, here = start("node7", **(cluster | before)), start(patience=1, **(cluster | after))
    there.tell("take")
    there.kill()
    assert (here.tell("take") == "held None") == free


def _owner(**changes: Any) -> Owner:
    facts = ProcessIdentity.of().to_dict() | {"host": "n1", "attempt": 1, "job": None}
    return Owner(**(facts | changes))


def _record(**values: Any) -> bytes:
    """As another version may have written it."""
    return json.dumps(json.loads(_owner().record()) | values).encode()


def test_a_pid_that_was_given_to_another_process(directory: Path) -> None:
    directory.mkdir()
    (directory / "owner-00001.json").write_bytes(_owner(born="1").record())
    with hold(directory, attempt=2) as lock:
        assert lock.note is None
    (directory / "owner-00003.json").write_bytes(_owner().record())
    with pytest.raises(RunLocked), hold(directory, attempt=2):
        pass


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b"3", b'{"pid": 1}', b"\xff", _owner(pid="x").record(),
                                    _record(slurm={"job_id": 7}), _record(ids=3), _record(ids={"x": "7"})])  # fmt: skip
def test_a_damaged_record_is_watched_then_replaced(record: bytes, directory: Path) -> None:
    directory.mkdir()
    (directory / "owner-00001.json").write_bytes(record)
    with hold(directory, attempt=2, silence_s=0.1) as lock:
        assert lock.note == "took the run over from an unknown owner: no heartbeat for 0.1 s"
        assert (directory / "owner-00002.json").exists()


def test_a_record_that_is_still_being_written_is_an_owner(directory: Path) -> None:
    directory.mkdir()
    file = directory / "owner-00001.json"
    file.touch()
    timer = threading.Timer(0.3, file.write_bytes, [_owner(machine="elsewhere").record()])
    timer.start()
    with pytest.raises(RunLocked, match="in use by pid"), hold(directory, attempt=2, silence_s=20):
        pass
    timer.join()


def test_a_release_is_noticed_while_waiting(directory: Path) -> None:
    directory.mkdir()
    file = directory / "owner-00001.json"
    file.write_bytes(_owner(machine="elsewhere").record())
    timer = threading.Timer(0.3, file.write_bytes, [_owner(machine="elsewhere", released=True).record()])
    timer.start()
    with hold(directory, attempt=2, silence_s=60) as lock:
        assert lock.note is None
    timer.join()


def test_the_heart_beats_and_the_record_says_who(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    file = directory / "owner-00001.json"
    with hold(directory, attempt=4, heartbeat_s=0.05):
        deadline = time.monotonic() + 30
        while json.loads(file.read_bytes())["beat"] < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        record = json.loads(file.read_bytes())
    assert record.pop("beat") >= 3
    assert record == ProcessIdentity.of().to_dict() | {
        "attempt": 4, "scheduler": "slurm", "ids": {"job_id": "7", "restart_count": "0"}, "released": False,
    }  # fmt: skip
    assert json.loads(file.read_bytes())["released"]


def test_nothing_is_left_after_release(directory: Path) -> None:
    def state() -> tuple[int, int, int]:
        registry = len(multiprocessing.util._afterfork_registry)  # type: ignore[attr-defined]
        return sum(1 for _ in Path("/proc/self/fd").iterdir()), threading.active_count(), registry

    with hold(directory, attempt=1):
        pass
    before = state()
    for attempt in range(2, 30):
        with hold(directory, attempt=attempt):
            pass
        with pytest.raises(ZeroDivisionError), hold(directory, attempt=attempt):
            raise ZeroDivisionError
        with hold(directory, attempt=attempt), pytest.raises(RunLocked), hold(directory, attempt=attempt):
            pass
    assert state() == before
    assert not [path for path in directory.iterdir() if path.name.startswith(".")]


def test_release_waits_for_a_beat_under_way(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat after the files are closed would go to whatever has their numbers by then."""
    beating, sync = threading.Event(), os.fsync

    def slow_sync(fd: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            beating.set()
            time.sleep(0.5)
        sync(fd)

    monkeypatch.setattr(os, "fsync", slow_sync)
    with hold(directory, attempt=1, heartbeat_s=0.01):
        assert beating.wait(30)
    assert "headway-run-lock" not in {thread.name for thread in threading.enumerate()}


def test_a_run_locks_itself_for_its_next_attempt(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    run.begin_attempt(world={})
    with (
        run.lock() as lock,
        pytest.raises(RunLocked, match=rf"run {run.id} is in use by pid {os.getpid()} .*attempt 2"),
    ):
        lock.check()
        with Run.open(run.path).lock():
            pass


def test_a_run_that_cannot_be_locked(directory: Path) -> None:
    directory.write_text("in the way")
    with pytest.raises(StorageError, match="could not lock"), hold(directory, attempt=1):
        pass


def test_a_lock_that_was_released_closes_nobody_elses_files_in_a_forked_child(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with runlock.hold(tmp_path / "lock", attempt=1) as lock:
        numbers = {lock._file, lock._flock}
    ours = os.pipe()  # takes the numbers that have become free
    assert numbers & set(ours)
    child = multiprocessing.get_context("fork").Process(target=os.write, args=(ours[1], b"word"))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert os.read(ours[0], 4) == b"word"
    for end in ours:
        os.close(end)
