from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headway.checkpoint.write.writer_process import WriterProcess
from headway.record import alerts
from headway.record.devices.sampling import DeviceSampler
from headway.run import Run
from headway.system.locks import Deadline, FileLock, LockTimeout, ProcessIdentity, is_unsupported

HOLDER = """
import sys, time
from pathlib import Path
from headway.system.locks import FileLock
lock = FileLock.open(Path(sys.argv[1]))
print(lock.try_acquire(shared=len(sys.argv) > 2), flush=True)
time.sleep(600)
"""


def holder(path: Path, *shared: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), *shared], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "True\n"
    return process


def test_a_lock_excludes_others_until_its_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as other, FileLock.open(path) as lock:
        try:
            assert not lock.try_acquire() and not lock.try_acquire(shared=True)
            start = time.monotonic()
            with pytest.raises(LockTimeout, match=r"waited 0\.1 s for the other process"):
                lock.acquire(Deadline(0.1), "the other process")
            assert time.monotonic() - start >= 0.1
        finally:
            other.send_signal(signal.SIGKILL)
        lock.acquire(Deadline(30), "the kernel")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_shared_locks_exclude_only_exclusive_ones(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path, "shared") as other, FileLock.open(path) as lock:
        try:
            assert lock.try_acquire(shared=True) and not lock.try_acquire()
        finally:
            other.kill()


def test_closing_releases_and_may_be_repeated(tmp_path: Path) -> None:
    first, second = FileLock.open(tmp_path / "lock"), FileLock.open(tmp_path / "lock")
    assert first.try_acquire() and not second.try_acquire()
    first.close()
    first.close()
    assert second.try_acquire()
    second.close()


def test_a_directory_can_be_locked(tmp_path: Path) -> None:
    with FileLock.open_directory(tmp_path) as one, FileLock.open_directory(tmp_path) as other:
        assert one.try_acquire() and not other.try_acquire()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="link"):
        FileLock.open_directory(tmp_path / "link")


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = (
        "import multiprocessing, os, sys, time\n"
        "from pathlib import Path\n"
        "from headway.system.locks import FileLock\n"
        "lock = FileLock.open(Path(sys.argv[1]))\n"
        "assert lock.try_acquire()\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,))\n"
        "child.start()\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    )
    assert done.stdout
    child = int(done.stdout.readline())
    try:
        done.wait()
        with FileLock.open(tmp_path / "lock") as lock:
            lock.acquire(Deadline(30), "the child to let go")
    finally:
        os.kill(child, signal.SIGKILL)
        done.stdout.close()


def test_file_systems_without_locks_are_told_from_failures() -> None:
    assert is_unsupported(OSError(errno.ENOLCK, "x")) and not is_unsupported(OSError(errno.EIO, "x"))


def test_a_process_is_known_by_more_than_its_pid() -> None:
    me = ProcessIdentity.of()
    assert me.is_alive() and me == ProcessIdentity.from_dict(me.to_dict() | {"attempt": 3})
    assert replace(me, born="1").is_alive() is False, "the pid was given to another process"
    assert replace(me, machine="elsewhere").is_alive() is None
    assert me.to_dict() == {"host": me.host, "machine": me.machine, "pid": os.getpid(), "born": me.born}


def test_a_process_that_ended_or_is_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(process.pid)
    assert identity.is_alive()
    process.kill()
    deadline = time.monotonic() + 30
    while identity.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert identity.is_alive() is False, "a zombie"
    process.communicate()
    assert identity.is_alive() is False and ProcessIdentity.of(process.pid).born is None


def start_writer(_run: Run) -> None:
    writer = WriterProcess(memory=0)
    writer._process = writer._start()
    writer.close()


def start_sampler(run: Run) -> None:
    sampler = DeviceSampler(run, host="cn1", every_s=60)
    sampler.start()
    sampler.stop()


def send_alert(run: Run) -> None:
    alert = alerts.Alert.of(run, "failed", attempts=1)
    assert alerts._call(("true",), alert) is None


@pytest.mark.parametrize("start", [start_writer, start_sampler, send_alert])
def test_a_worker_forked_while_a_thread_starts_a_program_does_not_delay_it(
    start: Callable[[Run], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path)
    starting, forked, started = threading.Event(), threading.Event(), threading.Event()
    fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]

    def interrupted(*args: object) -> int:
        pid: int = fork_exec(*args)
        if threading.current_thread() is thread:
            starting.set()  # from here on the program runs, and its pipes are open in this process, too
            forked.wait(0.5)
        return pid

    def work() -> None:
        start(run)
        started.set()

    thread = threading.Thread(target=work, daemon=True)
    monkeypatch.setattr(subprocess, "_fork_exec", interrupted)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    thread.start()
    assert starting.wait(60)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    worker = context.Process(target=theirs.poll, args=(None,), daemon=True)
    worker.start()
    forked.set()
    try:
        assert started.wait(60), "the thread waits for the worker"
    finally:
        worker.kill()
        worker.join()
        thread.join()
        ours.close()
        theirs.close()
