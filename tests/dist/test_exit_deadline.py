"""The end of a process: in bounded time, with its exit code, whatever it still has."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import util
from pathlib import Path

import pytest
import torch
import warm
from torch.utils.data import TensorDataset
from waiting import EXIT_LIMIT_S, wait_until

import headway as hw
from headway.dist.control import STOP_REQUESTS, block_signals, end_by_own_signal, ignore_signals, stop
from headway.dist.control.signals import STOP_SIGNALS
from headway.dist.failure.exit_deadline import (
    EXIT_S,
    ExitCode,
    end_daemonic_children,
    exit_within,
    limit_exit,
)
from headway.dist.group import current

Child = Callable[[Callable[[], object]], tuple[int, str]]


@pytest.fixture
def child(tmp_path: Path) -> Child:
    """Runs a function in a forked process; returns its exit code and what it wrote to stderr."""

    def run(body: Callable[[], object]) -> tuple[int, str]:
        said = tmp_path / "stderr"
        if not (pid := os.fork()):
            os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
            try:
                body()
            finally:
                os._exit(99)  # it was not ended
        ended = wait_until(lambda: [s for p, s in [os.waitpid(pid, os.WNOHANG)] if p], "the child ends")
        return os.waitstatus_to_exitcode(ended[0]), said.read_text()

    return run


def test_what_is_still_alive_is_named(child: Child) -> None:
    def body() -> None:
        stuck = threading.Thread(target=time.sleep, args=(60,), name="upload")
        stuck.start()
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
        os.write(2, f"{worker.pid}\n".encode())
        limit_exit(75, "rank 3 has stopped", seconds=0.2)
        stuck.join()

    ours = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    ours.start()  # the child is forked, and lists it, too
    code, said = child(body)
    worker, line = said.splitlines()
    assert code == 75
    assert ours.is_alive()
    ours.kill()
    ours.join()
    assert line.startswith(
        "headway: rank 3 has stopped, but the process did not exit within 0.2 s; still alive: thread 'upload'; "
        f"process {worker} ("
    )
    assert "; the main thread in " in line and line.endswith(". It is ended with exit code 75")
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), "its worker is gone")


ENDS = """
import atexit, sys, threading, time
from headway.dist.failure.exit_deadline import EXIT_CODE, limit_normal_exit
EXIT_CODE.watch()
limit_normal_exit("the script of rank 0 has ended", {limit_s})
time.sleep(0.5)  # training, which takes as long as it takes
{hang}
{end}
"""


UPLOAD = "threading.Thread(target=time.sleep, args=(60,), name='upload').start()"


@pytest.mark.parametrize(
    ("hang", "end", "code", "said"),
    [
        (UPLOAD, "sys.exit(3)", 3, "still alive: thread 'upload'; "),
        (UPLOAD, "sys.exit()", 1, "still alive: thread 'upload'; "),
        (
            "atexit.register(time.sleep, 60)",
            "sys.exit('no space')",
            1,
            "still alive: the main thread in native code. It is ended with exit code 1",
        ),
        ("", "sys.exit(3)", 3, None),
    ],
)
def test_a_script_that_has_ended_exits(hang: str, end: str, code: int, said: str | None) -> None:
    """With its own code, where Python code can know it; else with 1."""
    limit_s = 0.3 if hang else 60.0  # a busy machine takes longer than 0.3 s to end what does not hang
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(hang=hang, end=end, limit_s=limit_s)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    start = "headway: the script of rank 0 has ended, but the process did not exit within 0.3 s; "
    assert done.returncode == code, done.stderr
    assert done.stderr == "" if said is None else start + said in done.stderr


LATE = """
import atexit, sys, time
import headway as hw
world = hw.init(device="cpu")
hw.dist.set_phase("export", step=9)
if world.rank and sys.argv[1] == "script":
    time.sleep(60)
elif world.rank:
    atexit.register(time.sleep, 60)
"""


def test_rank_0_that_waits_for_others_at_its_end_names_them(tmp_path: Path) -> None:
    """Whether they are still in their script, or end themselves because their exit takes too long."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    said = {}
    for where in ("script", "exit"):
        command = [sys.executable, "-m", "headway", "run", "--nproc", "2", str(script), where]
        environ = os.environ | {"HEADWAY_WATCHDOG": "2"}
        ended = warm.run(command, capture_output=True, text=True, timeout=100, env=environ)
        said[where] = ended.stderr
        assert ended.returncode == 1 and "of rank 0 has ended, but" not in ended.stderr, ended.stderr
        assert "rank 0 of 2" not in ended.stderr and "rank 1 of 2 on " in ended.stderr, ended.stderr
    late = r"and rank 1 of 2 on \S+ \(pid \d+\) has not left within 2 s, in export at step 9"
    assert re.search(f"the script of rank 0 has ended, {late}", said["script"]), said["script"]
    assert f'File "{script}", line 7 in <module>' in said["script"], "where it is"


def test_rank_0_that_leaves_by_itself_names_those_that_do_not(tmp_path: Path) -> None:
    """As in a script that calls `hw.dist.leave()` in a `finally`, long before its end."""
    script = tmp_path / "leave.py"
    script.write_text(LATE.partition("if world.rank")[0] + "time.sleep(60 * world.rank)\nhw.dist.leave()\n")
    command = [sys.executable, "-m", "headway", "run", "--nproc", "2", str(script)]
    environ = os.environ | {"HEADWAY_WATCHDOG": "2"}
    ended = warm.run(command, capture_output=True, text=True, timeout=100, env=environ)
    assert ended.returncode == 1, ended.stderr
    late = r"rank 0 has left, and rank 1 of 2 on \S+ \(pid \d+\) has not left within 2 s, in export at step 9"
    assert re.search(late, ended.stderr), ended.stderr


def test_a_code_that_the_script_catches_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a command line that is parsed, or called, within the script; a thread ends by it alone."""
    monkeypatch.setattr(sys, "exit", sys.exit)
    code = ExitCode()
    code.watch()
    for status in (2, "no space", None):
        with pytest.raises(SystemExit) as caught:
            sys.exit(status)
        assert (caught.value.code, caught.value.args, str(caught.value)) == (status, (status,), str(status))
        assert code.given == 0
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(sys.exit, 2).exception()
    assert type(error) is SystemExit, "threads end in silence by this very class alone"
    code.restore()
    assert code.given == 0


def test_os_exit_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done before it may fail, such as to write that the script has ended: that is reported."""
    ended: list[int] = []
    reported: list[BaseException] = []
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "excepthook", lambda _, error, __: reported.append(error))
    code = ExitCode()
    for status, fails, wanted in ((0, False, 0), (0, True, 1), (3, True, 3)):
        code.watch(lambda fails=fails: 1 / 0 if fails else None)
        os._exit(status)
        assert ended.pop() == wanted and not ended
    code.restore()
    assert [type(error) for error in reported] == [ZeroDivisionError], "one that fails is not called at all"


def test_a_process_that_os_exit_did_not_end_can_still_have_data_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a test of one's own that replaces `os._exit`: torch's workers would wait for the directory forever."""
    directory, code = Path(util.get_temp_dir()), ExitCode()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "exit", sys.exit)
        patched.setattr(os, "_exit", lambda _: None)
        code.watch()
        os._exit(0)
        code.restore()
    assert not directory.exists()
    loader = hw.data.DataLoader(TensorDataset(torch.arange(4)), batch_size=2, num_workers=1)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1], [2, 3]]
    assert Path(util.get_temp_dir()).is_dir()


def test_an_interpreter_that_is_stuck_exits_too(
    child: Child,
) -> None:
    """Native code that holds the interpreter lock, as a destructor may: no thread of Python runs."""

    def body() -> None:
        exit_within(0.2, 74)
        ctypes.PyDLL(None).sleep(60)

    assert child(body) == (74, "")


def test_children_that_ignore_termination_are_killed(
    child: Child,
) -> None:
    def body() -> None:
        ready, far = multiprocessing.Pipe()

        def run() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            far.send("deaf")
            time.sleep(60)

        deaf = multiprocessing.get_context("fork").Process(target=run, daemon=True)
        deaf.start()
        ready.recv()
        end_daemonic_children(timeout_s=0.1)
        deaf.join(60)  # a busy machine takes longer than that to end what was killed
        os._exit(deaf.exitcode != -signal.SIGKILL)

    ours = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    ours.start()  # the child is forked, and lists it, too
    assert child(body)[0] == 0
    assert ours.is_alive()
    ours.kill()
    ours.join()


def test_a_worker_ends_for_its_rank_and_for_nobody_else() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work() -> None:
        ignore_signals()
        while True:
            there.send(there.recv())

    worker = context.Process(target=work, daemon=True)
    with block_signals():
        worker.start()
    end_by_own_signal(worker)
    here.send("ready")
    assert here.recv() == "ready"
    for number in ("TERM", "USR1", "USR2", "INT"):  # from a scheduler
        subprocess.run(["kill", f"-{number}", str(worker.pid)], check=True)
        here.send(number)
        assert here.recv() == number
    worker.terminate()  # from its rank, which exits
    worker.join(20)
    assert worker.exitcode == 0


def test_a_worker_that_has_ended_keeps_no_file_open_until_garbage_is_collected() -> None:
    """Each pass over a loader starts new workers, and a full collection may not come for hours."""
    worker = multiprocessing.get_context("fork").Process(target=int, daemon=True)
    worker.start()
    end_by_own_signal(worker)
    worker.join(20)
    assert worker.exitcode == 0
    sentinel = worker.sentinel
    gc.disable()
    try:
        del worker
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(sentinel)
    finally:
        gc.enable()


def test_what_a_worker_starts_has_the_signals_of_any_process() -> None:
    """A dataset ends its ffmpeg by SIGTERM, or by SIGINT, and waits for it."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work() -> None:
        ignore_signals()
        status = subprocess.check_output(["cat", "/proc/self/status"], text=True)
        ends = []
        for number in (signal.SIGTERM, signal.SIGINT, *STOP_REQUESTS):
            program = subprocess.Popen(["sleep", "60"])
            program.send_signal(number)
            try:
                ends.append(program.wait(10))
            except subprocess.TimeoutExpired:
                program.kill()
                ends.append(0)
        if not (fork := os.fork()):
            signal.signal(signal.SIGALRM, lambda *_: os._exit(99))
            signal.alarm(10)
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        ends.append(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))
        there.send((dict(line.split(":\t") for line in status.splitlines() if "Sig" in line), ends))

    worker = context.Process(target=work, daemon=True)
    with block_signals():
        worker.start()
    end_by_own_signal(worker)
    masks, ends = here.recv()
    worker.join(20)
    assert ends == [-15, -2, -signal.SIGUSR1, -signal.SIGUSR2, -15]
    assert int(masks["SigBlk"], 16) == 0
    ignored = int(masks["SigIgn"], 16)
    assert not [each for each in STOP_SIGNALS if ignored >> (each - 1) & 1]


def test_a_forked_child_does_not_keep_the_handler_of_its_rank(
    child: Child,
) -> None:
    hw.init(device="cpu")
    try:
        with stop.handle_stop_signals(current().request_stop):
            code, _ = child(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(10)))
    finally:
        hw.dist.leave()
    assert code == -signal.SIGTERM


def test_the_limits_fit_together() -> None:
    """A rank that hangs at its exit is gone before the end of its job, and before a test that kills it gives up."""
    assert EXIT_S < stop.MARGIN_S and EXIT_S < EXIT_LIMIT_S
