"""One rank comes to grief: all are down, the first cause is named once and last, the exit code is right."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import warm
from waiting import EXIT_LIMIT_S, check_duration, has_ended, wait_until

from headway.dist.control import channel, signals
from headway.dist.control.failure_handler import FailureHandler
from headway.dist.environment import LaunchEnvironment
from headway.dist.failure import capture
from headway.launcher.agent.outcome import summary
from headway.run import Run

FULL = os.environ.get("HEADWAY_FAULTS") == "full"
SCRIPTS = Path(__file__).parents[1] / "scripts"
FAIL = str(SCRIPTS / "fail.py")
BIN = Path(sys.executable).parent
RUN = [str(BIN / "headway"), "run", "--nproc", "4"]
TORCHRUN = [str(BIN / "torchrun"), "--nproc-per-node", "2"]


def run(command: list[str], *args: str, how: str, rank: int = 2) -> tuple[int, str]:
    environ = os.environ | {"FAIL": how, "FAIL_RANK": str(rank)}
    done = warm.run([*command, FAIL, *args], env=environ, capture_output=True, text=True, timeout=180)
    return done.returncode, done.stderr


CAUSES = {
    "raise": (1, "ValueError: the third step is cursed"),
    "usage": (2, "headway: lr=-1 is negative; set lr to a positive number"),
    "kill9": (1, "was killed by SIGKILL"),
    "exit0": (1, "exited with code 0 while the others still worked"),
    "segfault": (1, "crashed in native code (SIGSEGV)"),
    "ctrl-c": (130, "interrupted by Ctrl-C"),
}


FAILURES = [*((how, 2) for how in CAUSES), *((how, 0) for how in ("raise", "kill9", "exit0"))]
TIMED = [("raise", 2), ("kill9", 0), ("exit0", 2)]


@pytest.mark.parametrize(("how", "rank"), [each for each in FAILURES if each not in TIMED])
def test_headway_run_names_the_cause_last(
    how: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_end(how, rank, tmp_path, monkeypatch, limit_s=EXIT_LIMIT_S)


@pytest.mark.alone
@pytest.mark.parametrize(("how", "rank"), TIMED)
def test_headway_run_names_the_cause_within_five_seconds(
    how: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_end(how, rank, tmp_path, monkeypatch, limit_s=5)


def check_end(how: str, rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    monkeypatch.setenv("FAIL_MARK", str(folder / "mark"))
    code, words = CAUSES[how]
    status, text = run(RUN, how=how, rank=rank)
    began = float((folder / "mark").read_text())
    check_duration(time.time() - began, limit_s, "all ranks were down after the fault")
    assert status == code, text
    last = text.rindex("headway: ")  # the last block
    assert words in text[last:], text
    if how != "ctrl-c":
        assert f"rank {rank} of 4" in text[last:], text
        late = "did not exit in time after another rank had ended: sending SIGTERM" in text  # starved of CPU
        for other in {0, 1, 2, 3} - {0, rank}:
            assert late or f"rank {other} stops because rank {rank} failed" in text[:last], text
    assert text.count("Traceback") == (1 if how == "raise" else 0), "printed once, and nobody else's"
    assert "onnection" not in text, "a lost connection is not a cause"


def test_a_busy_disk_does_not_delay_the_end(tmp_path: Path) -> None:
    """The agent ends ranks that have not heard of the cause after two seconds."""
    _, text = run(RUN, "--slow-disk", "--record", "--run", str(tmp_path / "runs"), how="kill9")
    text += "".join(log.read_text() for log in tmp_path.glob("runs/*/log/*.txt"))
    assert "ranks 0" not in text, text  # rank 0 alone may be ended by the agent, while it waits for the disk
    assert "rank 1 stops because rank 2 failed" in text and "rank 3 stops because rank 2 failed" in text, text
    (failure,) = tmp_path.glob("runs/*/failure.json")
    assert json.loads(failure.read_text())["rank"] == 2


@pytest.mark.parametrize("rank", [0, 2])
def test_sys_exit_of_one_rank_is_told(rank: int) -> None:
    status, text = run(RUN, how="sysexit", rank=rank)
    assert status == 1
    assert f"rank {rank} of 4" in text[text.rindex("headway: ") :], text
    assert "ended early" in text
    assert text.count("in all_reduce") == 1, "where the rank that still needed it was"


UPLOADS = """
import time
import headway as hw
from headway.dist.group import current
world = hw.init()
def upload():
    while len(current().hub._left) < 1: time.sleep(0.01)
    raise ConnectionRefusedError(111, "Connection refused")
if world.is_root:
    upload()
"""


def test_an_error_at_the_end_of_the_script_is_its_ranks_own(tmp_path: Path) -> None:
    """The others have left, and it looks like a lost connection; but no collective has raised it."""
    (tmp_path / "uploads.py").write_text(UPLOADS)
    command = [*RUN[:-1], "2", str(tmp_path / "uploads.py")]
    done = warm.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("headway: ") :]
    assert "rank 0 of 2" in last and "in upload" in last, done.stderr
    assert "ConnectionRefusedError: [Errno 111] Connection refused" in last, done.stderr


ENDS = """
import atexit, pathlib, sys, threading, time
import headway as hw
world = hw.init()
has_ended = pathlib.Path(sys.argv[1])
def refuse_threads():  # from here on, Python 3.12 starts none
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = refuse
    has_ended.touch()
if world.is_root:
    atexit.register(refuse_threads)  # called before rank 0 waits for the others
else:
    while not has_ended.exists(): time.sleep(0.01)
    raise ValueError("the last rank's own")
"""


def test_a_rank_that_fails_while_rank_0_exits_is_the_cause(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    command = [*RUN[:-1], "2", str(tmp_path / "ends.py"), str(tmp_path / "has-ended")]
    done = warm.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("headway: ") :]
    assert "rank 1 of 2" in last and "ValueError: the last rank's own" in last, done.stderr
    assert "create new thread" not in done.stderr, done.stderr


def test_the_cause_is_recorded_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A limit of processes is often the cause itself; the hub must live on, and broadcast it."""

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(signals, "ignore_termination", lambda: None)  # of this process
    monkeypatch.delenv("HEADWAY_RENDEZVOUS", raising=False)
    handler = FailureHandler(LaunchEnvironment(launcher="srun", rank=0, world_size=2, node="n1"), print)
    seen: list[str] = []
    handler.callbacks.append(lambda record: seen.append(record["error"]))
    record = capture.exception_record(ValueError("the cause"), None, 1)
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        handler.on_first_failure(record)
    assert seen == ["ValueError: the cause"]


@pytest.mark.parametrize("how", ["raise", "kill9", "exit0"])
def test_ranks_that_never_meet_in_a_collective_notice_too(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others sleep: no gloo error tells them, the wire does. Alone they would go on for a minute."""
    monkeypatch.setenv("FAIL_MARK", str(tmp_path / "mark"))
    status, text = run(RUN, "--busy", how=how)
    assert status == 1
    assert "rank 2 of 4" in text[text.rindex("headway: ") :]
    began = float((tmp_path / "mark").read_text())
    check_duration(time.time() - began, EXIT_LIMIT_S, "the others had noticed")


@pytest.mark.parametrize("how", ["raise", "exit0"] if FULL else ["raise"])
def test_under_torchrun(how: str) -> None:
    status, text = run(TORCHRUN, how=how, rank=1)
    assert status == 1
    assert "rank 1 of 2" in text
    assert ("ValueError: the third step is cursed" in text) == (how == "raise")


def test_the_record_in_the_run_directory(tmp_path: Path) -> None:
    _, text = run(RUN, "--run", str(tmp_path / "runs"), how="raise")
    (path,) = tmp_path.glob("runs/fail-*/failure.json")
    record = json.loads(path.read_text())
    assert (record["rank"], record["step"], record["phase"], record["exit_code"]) == (2, 3, "train", 1)
    assert record["error"] == "ValueError: the third step is cursed"
    assert "in grief" in record["traceback"]
    assert f"record: {path}" in text
    assert f"rank 1 stops because rank 2 failed (ValueError: the third step is cursed); see {path}" in text


def test_the_record_of_a_killed_rank_says_how_it_died(tmp_path: Path) -> None:
    run(RUN, "--run", str(tmp_path / "runs"), how="kill9")
    (path,) = tmp_path.glob("runs/fail-*/failure.json")
    record = json.loads(path.read_text())
    assert (record["rank"], record["kind"]) == (2, "vanished")
    assert "SIGKILL" in record["error"]


def test_the_attempt_of_a_run_in_which_another_rank_failed(tmp_path: Path) -> None:
    run(RUN, "--run", str(tmp_path / "runs"), "--record", how="raise")
    (path,) = tmp_path.glob("runs/fail-*")
    (attempt,) = json.loads((path / "run.json").read_text())["attempts"]
    assert (attempt["status"], attempt["exit_code"]) == ("failed", 1)
    log = (path / "log" / "rank-00002.txt").read_text()
    assert "ValueError: the third step is cursed" in log, "the failing rank's own log has its story"
    assert "rank 1 stops because rank 2 failed" in (path / "log" / "rank-00001.txt").read_text()


@pytest.mark.parametrize("letter", ["x", "\n", "ü", "\U0001f600"])
def test_the_record_of_an_endless_error_fits_into_a_message(letter: str) -> None:
    """As of a state dict with a hundred thousand missing keys. The hub would drop the rank, and call it killed."""
    record = capture.exception_record(ValueError(f"begin {letter * (3 << 20)} end"), None, 0)
    assert len(json.dumps(record)) < channel._MAX_LINE_BYTES - 1000
    for text in (record["error"], record["traceback"].rstrip()):
        assert text.startswith("ValueError: begin") and text.endswith("end")
        assert "characters are left out" in text


class Unprintable(RuntimeError):
    """As an error whose `__init__` was skipped when it came from another process."""

    def __str__(self) -> str:
        raise AttributeError("path")


def test_an_error_that_cannot_be_printed_is_recorded() -> None:
    """Otherwise the hook fails, the rank leaves as if its script had returned, and the others say so."""
    record = capture.exception_record(Unprintable(), None, 0)
    assert (record["kind"], record["echo"], record["exit_code"]) == ("exception", False, 1)
    assert record["error"].startswith("Unprintable") and "Unprintable" in record["traceback"]


@pytest.mark.parametrize("full", ["agent", "run"])
def test_a_record_that_cannot_be_written_hides_no_other(
    full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that is not there stands for a disk that takes nothing."""
    monkeypatch.setattr("headway.dist.control.signals.ignore_termination", lambda: None)
    monkeypatch.setenv("HEADWAY_RENDEZVOUS", str(tmp_path / "agent" / "rendezvous.json"))
    (tmp_path / "agent").mkdir()
    handler = FailureHandler(LaunchEnvironment(launcher="headway", rank=0, world_size=1, node="n1"), print)
    handler.run = Run.create(tmp_path / "runs")
    shutil.rmtree(tmp_path / "agent" if full == "agent" else handler.run.path)
    record = capture.exception_record(ValueError("the cause"), None, 0)
    handler.on_first_failure(record)
    if full == "agent":
        assert json.loads(handler.run.failure_file.read_text())["error"] == "ValueError: the cause"
        assert record["failure_file"] == str(handler.run.failure_file)
    else:
        known = json.loads((tmp_path / "agent" / "failure.json").read_text())
        assert "record:" not in summary({"exit_code": 1, "record": known}, 1)
        assert record["failure_file"] is None, "it is not there"


def test_one_process_fails_as_python_does_but_with_the_right_code(tmp_path: Path) -> None:
    status, text = run([sys.executable], "--run", str(tmp_path / "runs"), how="raise", rank=0)
    assert status == 1
    assert text.count("ValueError: the third step is cursed") == 1
    assert list(tmp_path.glob("runs/fail-*/failure.json"))
    status, text = run([sys.executable], how="usage", rank=0)
    assert status == 2
    assert "Traceback" not in text


def test_ctrl_c_reaches_the_ranks_and_a_second_one_ends_them() -> None:
    environ = os.environ | {"FAIL": "never"}
    with warm.Popen(
        [*RUN[:-1], "2", FAIL, "--busy"], env=environ, stderr=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stderr is not None
        assert "launched by: headway" in agent.stderr.readline()
        agent.send_signal(signal.SIGINT)
        assert agent.wait(EXIT_LIMIT_S) == 130
        assert agent.stderr.read().splitlines()[-1] == "headway: interrupted by Ctrl-C"


PIDS = """
import os, sys, time
import headway as hw
hw.init()
pids = hw.gather_object(os.getpid())
if pids:
    print(pids, flush=True)
time.sleep(60)
"""


def test_ranks_die_with_a_killed_agent(tmp_path: Path) -> None:
    (tmp_path / "pids.py").write_text(PIDS)
    with warm.Popen([*RUN[:-1], "2", str(tmp_path / "pids.py")], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pids = json.loads(agent.stdout.readline())
        agent.kill()
        agent.wait(EXIT_LIMIT_S)
        wait_until(lambda: not any(map(_is_alive, pids)), "no rank outlives it", timeout_s=EXIT_LIMIT_S)


def _is_alive(pid: int) -> bool:
    try:
        return not has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


FORKS = """
import os, signal, time
import headway as hw
if hw.init().rank == 1:
    if os.fork() == 0:
        time.sleep(12)  # a data worker that outlives its rank, with copies of all of the rank's sockets
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(10)
open("slept-well", "w")
"""


def test_a_forked_child_does_not_hide_its_parents_death(tmp_path: Path) -> None:
    """Without an agent, who would see it by other means."""
    (tmp_path / "forks.py").write_text(FORKS)
    processes = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        environ = os.environ | place | {"HEADWAY_RENDEZVOUS": str(tmp_path / "rendezvous.json")}
        processes.append(warm.Popen([sys.executable, "forks.py"], env=environ, cwd=tmp_path))
    assert processes[0].wait(30) == 1
    assert not (tmp_path / "slept-well").exists(), "it was woken at once"
    assert processes[1].wait(30) == -signal.SIGKILL
    assert json.loads((tmp_path / "failure.json").read_text())["rank"] == 1


def test_who_has_the_last_word_does_not_hear_that_it_should_end() -> None:
    program = """
import os, signal, threading
from headway.dist.control.signals import ignore_termination
thread = threading.Thread(target=ignore_termination)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
print("last words")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout) == (0, "last words\n")


class Unread:
    """A standard error whose reader is gone, as when slurmstepd was ended, or whose disk is full."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe", text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("event", ["on_abort", "on_all_down", "_exit_without_hub"])
def test_a_rank_whose_output_nobody_reads_ends_with_the_others(
    event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These run in a thread: an error there would end the thread, and the rank would live on."""
    ended: list[int] = []
    monkeypatch.setattr(capture, "exit_within", lambda *_: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.delenv("HEADWAY_RENDEZVOUS", raising=False)
    monkeypatch.setattr(signals, "ignore_termination", lambda: None)  # of this process
    monkeypatch.setattr(sys, "stderr", Unread())
    handler = FailureHandler(LaunchEnvironment(launcher="srun", rank=2, world_size=3, node="n1"), print)
    record = capture.exception_record(ValueError("the cause"), None, 0) | {"exit_code": 7}
    getattr(handler, event)(record | {"failure_file": None})
    if not isinstance(sys.stderr, Unread):
        sys.stderr.close()
    assert ended == [7]


def test_the_rank_whose_record_is_the_first_prints_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 is silent. torchrun ends the others when the first of them exits, whichever that is."""
    monkeypatch.setattr(capture, "hard_exit", lambda _, words="": print(words, file=sys.stderr))
    monkeypatch.setattr(signals, "ignore_termination", lambda: None)  # of this process
    monkeypatch.delenv("HEADWAY_RENDEZVOUS", raising=False)
    run = Run.create(tmp_path)
    for rank in (2, 1):
        handler = FailureHandler(
            LaunchEnvironment(launcher="torchrun", rank=rank, world_size=3, node="n1"), print
        )
        handler.run = run
        handler._exit_without_hub(capture.exception_record(ValueError("the cause"), None, 0))
        said = capfd.readouterr().err
        assert ("failed" in said and f"record: {run.failure_file}" in said) is (rank == 2), said
        assert ("rank 1 stops because" in said) is (rank == 1), said
