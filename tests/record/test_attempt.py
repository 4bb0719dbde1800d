"""One door: an attempt is numbered, recorded and ended with the right word, on one rank and on several."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import warm

from headway import dist, schedulers
from headway.dist import World, group
from headway.errors import NoValidCheckpoint, RunLocked, Stopped, StorageError
from headway.record import recording
from headway.run import Run, runs_under
from headway.run.status import status
from headway.system import files

Lines = Callable[..., list[str]]


@pytest.fixture
def world() -> Iterator[World]:
    yield dist.init(device="cpu")
    dist.leave()


def test_an_attempt_that_is_done(
    run: Run, world: World, lines: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    streams = (sys.stdout, sys.stderr)
    for number in (1, 2):
        with recording(run, world, config={"lr": 3e-4}) as attempt:
            assert attempt.attempt == number
            assert attempt.log.path == run.log_file(0)
            print("training", number)
    assert (sys.stdout, sys.stderr) == streams
    assert [(each["status"], each["exit_code"]) for each in run.info()["attempts"]] == [("done", 0)] * 2
    shown = capsys.readouterr()
    assert shown.out == "training 1\ntraining 2\n"
    assert "log/rank-00000.txt" in shown.err and "lr=0.0003" in shown.err
    assert "digits  attempt 1" in lines()[0] and "training 2" in lines(), "the screen is in the log as well"
    rows = [json.loads(line) for line in run.diagnostics_file.read_text().splitlines()]
    assert [row["attempt"] for row in rows] == [1, 2]


def test_whoever_ends_the_process_waits_until_the_end_is_written(
    run: Run, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost peer is seen by the main thread, in its collective, and by the one that ends all ranks, at once."""
    noted, writing, end = threading.Event(), threading.Event(), Run.end_attempt

    def slowly(*args: Any, **facts: Any) -> None:
        writing.set()
        assert not noted.wait(0.3), "the verdict overtook it"
        end(*args, **facts)

    def verdict() -> None:
        assert writing.wait(30)
        group.current().failure_handler.on_first_failure({"kind": "vanished", "exit_code": 1})
        noted.set()

    monkeypatch.setattr(Run, "end_attempt", slowly)
    monkeypatch.setattr("headway.dist.control.signals.ignore_termination", lambda: None)
    other = threading.Thread(target=verdict)
    other.start()
    with pytest.raises(SystemExit), recording(run, world):
        raise SystemExit(7)
    other.join()
    assert noted.is_set()
    (attempt,) = run.info()["attempts"]
    assert (attempt["status"], attempt["exit_code"]) == ("failed", 7)


def test_a_run_that_hangs_is_not_said_to_be_a_ranks_failure(
    run: Run, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.dist.control.signals.ignore_termination", lambda: None)
    hang = {
        "kind": "hang",
        "rank": None,
        "step": 7,
        "error": "for 30 s no rank has made progress",
        "exit_code": 1,
    }
    with recording(run, world):
        group.current().failure_handler.on_first_failure(hang)
    (attempt,) = run.info()["attempts"]
    assert (attempt["status"], attempt["why"]) == ("failed", "for 30 s no rank has made progress")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (SystemExit(), "done", 0),
        (SystemExit(0), "done", 0),
        (SystemExit(3), "failed", 3),
        (SystemExit("a sentence"), "failed", 1),
        (ValueError("loss is nan"), "failed", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (Stopped("time is up"), "stopped", 75),
        (NoValidCheckpoint("all torn"), "failed", 86),
    ],
)
def test_how_it_ended(run: Run, world: World, error: BaseException, status: str, code: int) -> None:
    with pytest.raises(type(error)) as caught, recording(run, world):
        raise error
    assert caught.value is error
    attempt = run.info()["attempts"][0]
    assert (attempt["status"], attempt["exit_code"]) == (status, code)


@pytest.mark.parametrize(
    "error", [StorageError("the save failed"), Stopped("with a checkpoint"), ValueError("x")]
)
def test_an_end_that_cannot_be_written_does_not_replace_its_cause(
    run: Run, world: World, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(type(error)) as caught, recording(run, world):
        monkeypatch.setattr(files, "write_atomic", no_space)
        raise error
    assert caught.value is error
    monkeypatch.undo()
    with pytest.raises(StorageError, match="could not end attempt 2"), recording(run, world):
        monkeypatch.setattr(files, "write_atomic", no_space)


@pytest.mark.parametrize("error", [Stopped("with a checkpoint"), ValueError("x")])
def test_an_end_for_which_the_run_cannot_be_read_does_not_replace_its_cause(
    run: Run, world: World, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that fails for a moment must not turn a stop into a run that is not queued again."""
    usual = files.read_regular

    def fail(path: Path) -> bytes:
        if path == run.info_file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return usual(path)

    with pytest.raises(type(error)) as caught, recording(run, world):
        monkeypatch.setattr(files, "read_regular", fail)
        raise error
    assert caught.value is error


def test_a_forked_child_does_not_end_the_attempt(run: Run, world: World) -> None:
    class InTheChild(Exception):
        pass

    try:
        with recording(run, world):
            if (pid := os.fork()) == 0:
                raise InTheChild
            assert os.waitpid(pid, 0)[1] == 0
            assert run.info()["attempts"][0]["status"] == "running"
            with pytest.raises(RunLocked), run.lock():
                pass
    except InTheChild:
        os._exit(0)
    assert run.info()["attempts"][0]["status"] == "done"


def test_the_root_holds_the_lock(run: Run, world: World) -> None:
    with recording(run, world) as attempt:
        assert attempt.lock is not None
        attempt.lock.check()
        with pytest.raises(RunLocked), recording(run, world):
            raise AssertionError("not reached")
    assert [each["status"] for each in run.info()["attempts"]] == ["done"]
    with run.lock():
        pass


def test_storage_that_fails_at_the_start_is_an_attempt_that_failed(run: Run, world: World) -> None:
    run.diagnostics_file.mkdir()
    with pytest.raises(StorageError), recording(run, world):
        raise AssertionError("not reached")
    assert [(each["status"], each["exit_code"]) for each in run.info()["attempts"]] == [("failed", 74)]


SCRIPT = """
import sys
import headway as hw
from headway import record
from headway.dist.group import current
from headway.run import Run
from headway.system import files
world = hw.init(device="cpu")
run = Run.open(sys.argv[1])
config = {"tracker": {"api_key": "canary-config", "url": "https://me:canary-url@host"}}
with record.recording(run, world, config=config) as attempt:
    if world.rank:
        assert current().failure_handler.terminal == attempt.log.original_stderr_fd, "where people look"
    print("hello from", world.rank)
    if len(sys.argv) > 2 and sys.argv[2] == "fail" and world.rank == 1:
        raise RuntimeError("canary-environment at https://me:canary-url@host")
    hw.barrier()
"""


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
AGENT = ("headway", "run", "--nproc", "2")


def launch(run: Run, launcher: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    script = run.path.parent / "train.py"
    script.write_text(SCRIPT)
    start = warm.run if launcher is AGENT else subprocess.run
    return start(
        [sys.executable, "-m", *launcher, str(script), str(run.path), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "MY_TOKEN": "canary-environment", "OMP_NUM_THREADS": "1"},
    )


OWN_LOOP = """
import atexit, os, pathlib, signal, sys, time
import headway as hw
def end_late():
    late.unlink()
    os.kill(os.getpid(), signal.SIGKILL)
if (late := pathlib.Path(sys.argv[2])).exists() and os.environ["RANK"] == "1":
    atexit.register(end_late)  # called after that of hw.init
world = hw.init(device="cpu")
run = hw.dist.open_run(sys.argv[1], name="own", resume="auto")
with hw.record.recording(run, world) as attempt:
    if world.rank and attempt.attempt == 1:
        latest = time.monotonic() + 1.0
        while run.info()["attempts"][0]["status"] == "running" and time.monotonic() < latest:
            time.sleep(0.01)
        raise RuntimeError("one batch more than rank 0 has")
if attempt.attempt == 2:
    hw.barrier()  # rank 0 has left the block, too
    raise RuntimeError("no space for the export")
"""


def test_an_attempt_is_done_when_all_ranks_and_resumed_until_the_script_has_ended(tmp_path: Path) -> None:
    """The same command: a rank fails when rank 0 is done; the script fails; one is killed at its end; all is well."""
    script = tmp_path / "own.py"
    script.write_text(OWN_LOOP)
    ends = []
    for start in range(4):
        if start == 2:
            (tmp_path / "late").touch()
        command = [sys.executable, "-m", *AGENT, str(script), str(tmp_path / "runs"), str(tmp_path / "late")]
        ended = warm.run(command, capture_output=True, text=True, timeout=100)
        (run,) = runs_under(tmp_path / "runs")
        last = run.info()["attempts"][-1]
        shown = status(run, schedulers.queue([])).state
        ends.append((ended.returncode, last["status"], last.get("script_ended"), shown))
        if len(ends) == 1:
            assert last["why"] == "rank 1: RuntimeError: one batch more than rank 0 has", ended.stderr
    assert ends == [
        (1, "failed", None, "failed"),
        (1, "done", False, "failed"),
        (1, "done", False, "done"),  # it had nothing left to do, but its exit code says otherwise
        (0, "done", True, "done"),
    ]


def every_file(run: Run) -> str:
    return "\n".join(path.read_text(errors="replace") for path in run.path.rglob("*") if path.is_file())


def test_two_ranks_and_no_secret_anywhere(run: Run, lines: Lines) -> None:
    done = launch(run, TORCHRUN, "train", "--api-key", "canary-argv", "https://me:canary-url@host")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hello from 0\n"
    assert "hello from 0" in lines(0)
    assert lines(1) == ["hello from 1"]
    assert done.stderr.count("attempt 1, headway") == 1, "one screen"
    assert "torchrun, 2 ranks on cpu" in done.stderr
    assert [(each["status"], each["exit_code"]) for each in run.info()["attempts"]] == [("done", 0)]
    for secret in ("canary-environment", "canary-argv", "canary-url", "canary-config"):
        assert secret not in done.stderr + done.stdout
        assert secret not in every_file(run)


def test_a_rank_that_fails_ends_its_log_with_the_cause(run: Run, lines: Lines) -> None:
    done = launch(run, AGENT, "fail")
    assert done.returncode != 0
    assert lines(1)[:2] == ["hello from 1", "Traceback (most recent call last):"]
    assert "train.py" in lines(1)[2], "the traceback begins with the user's code"
    assert any(line.startswith("RuntimeError: [redacted] at https://[redacted]@host") for line in lines(1))
    assert "RuntimeError" in done.stderr, "the cause reaches the terminal"
    assert "canary" not in every_file(run)
