"""An agent and its ranks: who is told what, how long they have, and that nobody stays behind.

The ranks are a few lines of Python without torch; they signal their agent, which is this process, themselves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from headway.dist.control.signals import STOP_REQUESTS
from headway.errors import UsageError
from headway.launcher.agent import agent as agent_module
from headway.launcher.agent.agent import Agent, check_nproc
from headway.launcher.agent.environment import AgentPlacement, rank_environment
from headway.launcher.agent.outcome import summary
from headway.launcher.agent.process import RankProcess
from headway.launcher.agent.team import Team
from headway.run import Run

TOP = """
import os, signal, sys, time
from pathlib import Path
rank, agent = int(os.environ["RANK"]), os.getppid()
told = []
def hear(*numbers):
    for number in numbers:
        signal.signal(number, lambda number, _: told.append(number))
def wait_for(condition):
    limit = time.monotonic() + 20
    while not condition() and time.monotonic() < limit: time.sleep(0.02)
"""


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Runs these lines as ranks in `tmp_path`, by an agent with little patience, and returns the exit code."""
    quick = {"grace_s": 0.3, "team_poll_s": 0.05, "repeat_s": 0.05}

    def run(lines: str, *, nproc: int = 1, **options: Any) -> int:
        command = [sys.executable, "-c", TOP + lines]
        return Agent(command, nproc=nproc, cwd=str(tmp_path), **(quick | options)).run()

    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, *STOP_REQUESTS)
    }
    yield run
    for number, handler in handlers.items():  # a process that was told to stop keeps ignoring the signal
        signal.signal(number, handler)


Supervised = Callable[..., int]


# ---- signals


def test_a_second_ctrl_c_means_now(supervised: Supervised, tmp_path: Path) -> None:
    code = supervised("""
hear(signal.SIGINT)
os.kill(agent, signal.SIGINT)
wait_for(lambda: told)
Path("told").touch()
os.kill(agent, signal.SIGINT)
wait_for(lambda: len(told) > 1)
Path("lived-on").touch()
""")
    assert code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["told"]


def test_a_second_ctrl_c_does_not_wait_for_a_file_system(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rank cannot be killed, and every write of the agent blocks, as on a frozen file system: both are imitated."""
    block = lambda *_, **__: time.sleep(60)  # noqa: E731
    for name in ("_end_attempt", "_outcome", "_conclude"):
        monkeypatch.setattr(Agent, name, block)
    monkeypatch.setattr(RankProcess, "has_ended", lambda _: False)
    began = time.monotonic()
    code = supervised("""
hear(signal.SIGINT)
os.kill(agent, signal.SIGINT)
wait_for(lambda: told)
os.kill(agent, signal.SIGINT)
time.sleep(60)
""")
    assert code == 130
    assert time.monotonic() - began < 40, "it takes four seconds beside the start of Python"
    said = capfd.readouterr().err
    left = re.search(
        r"rank 0 \(pid (\d+)\) was killed but cannot end: it waits in the kernel, for a file", said
    )
    assert left is not None, said
    os.waitpid(int(left[1]), 0)
    assert "how the run ended could not be recorded: its file system does not answer" in said
    assert said.rstrip().endswith("headway: interrupted by Ctrl-C")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_rank_that_died_of_what_it_was_told_has_not_failed(
    number: int, code: int, supervised: Supervised, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervised(f"os.kill(agent, {number}); time.sleep(20)") == code
    assert "failed" not in capfd.readouterr().err


def test_a_rank_that_nobody_told_to_stop_has_failed(supervised: Supervised) -> None:
    """Else SLURM would start the job again and again."""
    own = "signal.signal(signal.SIGUSR2, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGUSR2)"
    assert supervised(own) == 128 + signal.SIGUSR2, "as without headway"


def test_a_stop_request_does_not_kill_a_rank_that_cannot_hear_yet(supervised: Supervised) -> None:
    assert supervised("os.kill(agent, signal.SIGUSR2); time.sleep(0.5)") == 0


def test_a_stop_request_that_comes_before_the_ranks_reaches_them(supervised: Supervised) -> None:
    def stop() -> Mapping[str, str]:
        os.kill(os.getpid(), signal.SIGUSR2)
        return {}

    lines = "hear(signal.SIGUSR2); wait_for(lambda: told); sys.exit(75 if told else 1)"
    assert supervised(lines, prepare=stop) == 75


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_a_shell_has_ignored_ends_nothing(number: int, supervised: Supervised) -> None:
    """nohup has SIGHUP ignored, and a script SIGINT for what it starts with `&`."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        lines = f"os.kill(agent, {number}); sys.exit(signal.getsignal({number}) != signal.SIG_IGN)"
        assert supervised(lines) == 0, "a rank ignores what its agent ignores"
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_agent_that_still_waits_for_others_can_be_ended(
    number: int, code: int, supervised: Supervised, tmp_path: Path
) -> None:
    def end() -> Mapping[str, str]:
        os.kill(os.getpid(), number)
        return {}

    with pytest.raises(SystemExit) as left:
        supervised("", prepare=end, team=Team(tmp_path / "meet" / "team", number=0, size=2))
    assert left.value.code == code
    assert json.loads((tmp_path / "meet/team/round-0/ended-00000.json").read_text()) == {"exit_code": code}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- the others


def test_one_that_has_stopped_leaves_the_others_time_to_save(supervised: Supervised, tmp_path: Path) -> None:
    """More than when a rank has crashed."""
    assert supervised("if rank:\n    time.sleep(1.0); Path('saved').touch()\nsys.exit(75)", nproc=2) == 75
    assert (tmp_path / "saved").exists()


def test_one_that_has_crashed_takes_the_others_down_in_two_steps(
    supervised: Supervised, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    code = supervised(
        """
if rank == 0:
    wait_for(lambda: Path("here").exists())
    sys.exit(3)
hear(signal.SIGTERM)
Path("here").touch()
wait_for(lambda: told)
Path("told").touch()
wait_for(lambda: False)
Path("lived-on").touch()
""",
        nproc=2,
        grace_s=2.0,  # also what the rank has to hear and to tell, which 0.3 s may not be enough for
    )
    assert code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "told"]
    late = "rank 1 did not exit in time after another rank had ended: sending"
    assert [each.message for each in caplog.records] == [f"{late} SIGTERM", f"{late} SIGKILL"]


@pytest.mark.parametrize("killed", ["agent", "rank"])
def test_nobody_stays_behind(killed: str, tmp_path: Path) -> None:
    """All of them hold our pipe: its end is the end of the last one."""
    leaves = """
if os.fork() == 0:
    print("here", flush=True)
    wait_for(lambda: False)
    print("lived on", flush=True)
    os._exit(0)
wait_for(lambda: Path("enough").exists())
"""
    rank = (
        leaves
        if killed == "rank"
        else "print('here', flush=True)\nwait_for(lambda: False)\nprint('lived on')"
    )
    (tmp_path / "rank.py").write_text(TOP + rank)
    command = [sys.executable, "-m", "headway", "run", "rank.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None and agent.stdout.readline() == "here\n"
        if killed == "agent":
            agent.kill()
        (tmp_path / "enough").touch()
        assert agent.stdout.read() == ""


# ---- other agents


@pytest.fixture
def other(tmp_path: Path) -> Team:
    """The agent of another node, which has come already, with one rank."""
    team = Team(tmp_path / "meet" / "team", number=1, size=2)
    team.begin_round(0)
    facts = {"token": "", "host": "n2", "nproc": 1, "port": 7}
    (team.directory / "agent-00001.json").write_text(json.dumps(facts))
    return team


def beside(other: Team) -> Team:
    """This agent's own view."""
    return Team(other.directory, number=0, size=2)


def test_a_failure_on_another_node_ends_the_ranks_here(supervised: Supervised, other: Team) -> None:
    other.conclude({"exit_code": 74, "record": None})
    other.mark_ended(74)
    assert supervised("wait_for(lambda: False)", team=beside(other), report=False) == 74


def test_the_agent_of_a_rank_that_vanished_knows_better(
    supervised: Supervised, other: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 only saw that rank 1 was gone; its agent says what it died of, a moment later."""
    record = {"kind": "vanished", "rank": 1, "host": "n2", "pid": 5, "error": "is gone", "exit_code": 1}
    (other.round_dir / "failure.json").write_text(json.dumps(record))

    def speak(*_: object) -> None:
        other.conclude({"exit_code": 86, "record": None})
        other.mark_ended(86)

    monkeypatch.setattr(Team, "wait_outcome", speak)
    assert supervised("sys.exit(1)", team=beside(other), report=False) == 86


def test_restarts_are_agreed_on(tmp_path: Path) -> None:
    first, second = (Team(tmp_path, number=number, size=2) for number in range(2))
    for number, decision in enumerate((True, False)):
        for team in (first, second):
            team.begin_round(number)
        assert not second.agree_on_restart(lambda: True, timeout_s=0), "who hears nothing ends"
        assert first.agree_on_restart(lambda decision=decision: decision) is decision  # type: ignore[misc]
        assert second.agree_on_restart(lambda: True) is decision


def test_the_last_to_leave_takes_the_meeting_point_away(tmp_path: Path) -> None:
    teams = [Team(tmp_path / "meet", number=number, size=2) for number in range(2)]
    teams[1].leave()
    assert teams[1].directory.exists()
    teams[0].leave()
    assert not teams[0].directory.exists()


# ---- restarts

CRASHES = """
run = Path("run-0")
starts = len(list(Path().glob("start-*")))
Path(f"start-{starts}").touch()
step = run / "checkpoints" / f"step-{starts + 1:012d}"
step.mkdir(parents=True)
(step / "manifest.json").touch()
"""
BEATS = """
from headway.dist.failure.heartbeat import Heartbeat
heart = Heartbeat()
heart.watch(60.0, rank=rank, directory=Path(os.environ["HEADWAY_HEARTBEAT"]))
heart.set_run(Path("run-0").absolute())
"""


def test_what_was_told_to_stop_is_not_started_again(supervised: Supervised, tmp_path: Path) -> None:
    stops = f"hear(signal.SIGUSR2); os.kill(agent, signal.SIGUSR2); wait_for(lambda: told)\n{CRASHES}\nos._exit(1)"
    around = os.environ | {"HEADWAY_RUN": str(tmp_path / "run-0")}
    assert supervised(stops, environ=around, max_restarts=2) == 1
    assert len(list(tmp_path.glob("start-*"))) == 1


@pytest.mark.parametrize("period_s", ["60.0", "0.0"])
def test_a_restart_goes_on_in_the_run_that_the_ranks_have_made(
    period_s: str, supervised: Supervised, tmp_path: Path
) -> None:
    """The agent knows of it by their heartbeat alone, also where that is not checked for hangs."""
    says = 'Path(f"start-{starts}").write_text(os.environ.get("HEADWAY_RUN", "none"))\nsys.exit(starts < 1)'
    around = {name: value for name, value in os.environ.items() if name != "HEADWAY_RUN"}
    beats = BEATS.replace("60.0", period_s)
    assert supervised(CRASHES + beats + says, environ=around, max_restarts=3) == 0
    said = [(tmp_path / f"start-{number}").read_text() for number in range(2)]
    assert said == ["none", str(tmp_path / "run-0")]


RESUMES = """
from headway.run import Run
run = Run.open("run-0")
Path(f"start-{len(list(Path().glob('start-*')))}").touch()
def save(step):
    path = run.checkpoints_dir / f"step-{step:012d}"
    path.mkdir(parents=True)
    (path / "manifest.json").touch()
def begin(**facts):
    run.note_attempt(run.begin_attempt(world={}), **facts)
"""


@pytest.mark.parametrize(
    ("lines", "starts"),
    [
        pytest.param("begin(step_started=500)", 1, id="resumed, and crashed at once"),
        pytest.param("begin(step_started=500); save(501)", 2, id="resumed, and saved"),
        pytest.param("begin()", 1, id="a loop of the user's own, which crashed at once"),
        pytest.param("begin(); save(501)", 2, id="a loop of the user's own, which saved"),
        pytest.param("", 1, id="crashed before its attempt began"),
    ],
)
def test_a_checkpoint_of_an_earlier_command_is_no_progress(
    lines: str, starts: int, supervised: Supervised, tmp_path: Path
) -> None:
    """Which run the script resumes is not known before its first round."""
    run = Run.create(tmp_path).path.rename(tmp_path / "run-0")
    (run / "checkpoints" / "step-000000000500").mkdir(parents=True)
    (run / "checkpoints" / "step-000000000500" / "manifest.json").touch()
    Run.open(run).begin_attempt(world={})
    around = {name: value for name, value in os.environ.items() if name != "HEADWAY_RUN"}
    assert supervised(f"{RESUMES}\n{BEATS}\n{lines}\nsys.exit(1)", environ=around, max_restarts=1) == 1
    assert len(list(tmp_path.glob("start-*"))) == starts


def test_the_checkpoint_of_step_0_is_no_progress(supervised: Supervised, tmp_path: Path) -> None:
    around = os.environ | {"HEADWAY_RUN": str(tmp_path / "run-0")}
    crashes = CRASHES.replace("starts + 1", "starts")
    assert supervised(f"{crashes}\nsys.exit(1)", environ=around, max_restarts=1) == 1
    assert len(list(tmp_path.glob("start-*"))) == 1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_a_signal_between_two_rounds_is_not_lost(
    number: int, code: int, supervised: Supervised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "handled_signals", list)  # the tests may run under nohup

    def agree(_: Team, decide: Callable[[], bool]) -> bool:
        assert decide()
        os.kill(os.getpid(), number)
        return True

    monkeypatch.setattr(Team, "agree_on_restart", agree)
    around = os.environ | {"HEADWAY_RUN": str(tmp_path / "run-0")}
    team = Team(tmp_path / "meet" / "team", number=0, size=1)
    with pytest.raises(SystemExit) as left:
        supervised(f"{CRASHES}\nsys.exit(1)", environ=around, team=team, max_restarts=1)
    assert left.value.code == code and len(list(tmp_path.glob("start-*"))) == 1
    said = json.loads((team.directory / "round-1" / "outcome.json").read_text())
    assert said["exit_code"] == code, "else the ranks of other agents would wait for those of this one"


def test_ranks_that_ended_well_start_again_with_those_that_crash_elsewhere(
    supervised: Supervised, other: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def meanwhile(_: Team, timeout_s: float, **__: object) -> None:
        waits.append(timeout_s)
        if timeout_s and len(waits) == 1:
            other.conclude({"exit_code": 1, "record": None})

    monkeypatch.setattr(Team, "wait_ended", meanwhile)
    around = os.environ | {"HEADWAY_RUN": str(tmp_path / "run-0")}
    assert supervised(CRASHES, team=beside(other), environ=around, max_restarts=1) == 0
    assert len(list(tmp_path.glob("start-*"))) == 2


def test_ranks_are_not_started_again_without_the_agent_of_another_node(
    supervised: Supervised, other: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(_: Team, timeout_s: float, **__: object) -> None:
        if timeout_s and not (other.round_dir / "outcome.json").exists():
            other.fail(RuntimeError("a bug"))

    monkeypatch.setattr(Team, "wait_ended", meanwhile)
    around = os.environ | {"HEADWAY_RUN": str(tmp_path / "run-0")}
    assert supervised(CRASHES, team=beside(other), environ=around, max_restarts=1) == 1
    assert len(list(tmp_path.glob("start-*"))) == 1


# ---- the last words


@pytest.mark.parametrize(("kind", "words"), [(BEATS, 0), ("", 1)], ids=["headway's ranks", "others"])
def test_that_they_have_stopped_is_said_once(
    kind: str, words: int, supervised: Supervised, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the ranks themselves, if they are headway's, for they know where; else by the agent."""
    assert supervised(kind + "sys.exit(75)") == 75
    assert capfd.readouterr().err.count("stopped with a checkpoint") == words


# ---- what cannot work, and what ranks find


def test_more_ranks_than_the_memory_holds_are_refused() -> None:
    check_nproc(1)
    with pytest.raises(
        UsageError, match=r"free memory is enough for about .* processes with torch; use fewer"
    ):
        check_nproc(10**6)
    with pytest.raises(UsageError, match="at least one process"):
        check_nproc(0)


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    placement = AgentPlacement(
        first_rank=4,
        nproc=2,
        world_size=8,
        first_local_rank=2,
        local_world_size=4,
        node=1,
        nodes=2,
        master="n1",
        port=7,
    )
    found = rank_environment(placement, 1, {})
    assert (found["RANK"], found["LOCAL_RANK"], found["OMP_NUM_THREADS"]) == ("5", "3", "2")
    assert rank_environment(placement, 1, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


STORAGE = {"kind": "exception", "exit_code": 74, "sentence": "stopped, without a checkpoint", "error": "E"}
ERROR = {"kind": "exception", "exit_code": 1, "sentence": None, "error": "E", "traceback": "KeyError: 'ema'"}
INTERRUPTED = {"kind": "interrupted", "exit_code": 130, "sentence": None, "error": "KeyboardInterrupt"}
SIGNALED, LATER = "2026-11-16T09:00:00.000+00:00", "2026-11-16T09:00:00.010+00:00"
VANISHED = {"kind": "vanished", "exit_code": 1, "error": "exited"}


@pytest.mark.parametrize(
    ("number", "record", "code", "words"),
    [
        (signal.SIGTERM, STORAGE, 143, "headway: stopped, without a checkpoint\n"),
        (signal.SIGINT, STORAGE, 74, "headway: stopped, without a checkpoint\n"),
        (signal.SIGTERM, ERROR, 1, "KeyError: 'ema'"),
        (signal.SIGTERM, ERROR | {"time": LATER}, 143, "headway: stopped by SIGTERM; then rank 0: E\n"),
        (signal.SIGINT, ERROR | {"time": LATER}, 1, "KeyError: 'ema'"),
        (signal.SIGINT, ERROR, 1, "KeyError: 'ema'"),
        (signal.SIGINT, INTERRUPTED, 130, "interrupted by Ctrl-C"),
        (signal.SIGINT, VANISHED, 130, "interrupted by Ctrl-C"),
        (signal.SIGTERM, VANISHED, 143, "stopped by SIGTERM"),
        (signal.SIGTERM, VANISHED | {"exit_code": 75}, 75, "stopped with a checkpoint"),
    ],
)
def test_what_ranks_have_found_is_not_hidden_by_the_signal_that_was_to_end_them(
    number: int, record: dict[str, Any], code: int, words: str, tmp_path: Path
) -> None:
    agent, team = Agent(["true"], nproc=1), Team(tmp_path, number=0, size=1)
    agent._signals, agent._terminated, agent._ended = [number], SIGNALED, {0: -number}
    team.round_dir.mkdir(parents=True, exist_ok=True)
    place = {"rank": 0, "host": "n1", "pid": 7}
    (team.round_dir / "failure.json").write_text(json.dumps(record | place))
    outcome = agent._outcome(team, tmp_path)
    assert outcome["exit_code"] == code and words in summary(outcome, 1)


STOPPED = """
attempt = run.begin_attempt(world={})
run.end_attempt(attempt, status="stopped", exit_code=75)
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # while the rest of the script ends
os.kill(agent, signal.SIGTERM)
time.sleep(20)
"""


def test_a_signal_that_is_repeated_after_a_stop_leaves_a_stop(
    supervised: Supervised, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Run.create(tmp_path).path.rename(tmp_path / "run-0")
    around = {name: value for name, value in os.environ.items() if name != "HEADWAY_RUN"}
    assert supervised(f"{RESUMES}\n{BEATS}\n{STOPPED}", environ=around) == 75
    assert "had stopped before SIGTERM ended its script" in capfd.readouterr().err


def test_a_signal_that_is_repeated_until_the_process_has_ended_leaves_its_code() -> None:
    """SLURM, and users, repeat SIGTERM while the interpreter exits."""
    rank = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); os.kill(agent, signal.SIGTERM); time.sleep(20)"
    launch = f"""
import os, signal, sys
from headway.launcher.agent.agent import Agent
code = Agent([sys.executable, "-c", {TOP + rank!r}], nproc=1).run()
class Last:
    def __del__(self, numbers=(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2), kill=os.kill, pid=os.getpid()):
        for number in numbers:
            kill(pid, number)
last = Last()  # removed at the very end, when Python has removed its handlers
last.__del__()
sys.exit(code)
"""
    assert subprocess.run([sys.executable, "-c", launch], check=False, timeout=60).returncode == 75


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_the_first_rank_is_forked_is_not_lost(
    number: int, code: int, supervised: Supervised
) -> None:
    """Python ignores exceptions in what it calls after a fork, such as that of logging, and so of signal handlers."""
    forks: list[int] = []

    def signal_once() -> None:
        if not forks and os.getpid() == agent:
            forks.append(1)
            os.kill(agent, number)

    agent = os.getpid()
    os.register_at_fork(after_in_parent=signal_once)
    assert supervised("time.sleep(30)") == code
    assert forks == [1]


def test_a_stop_of_an_earlier_launch_is_not_that_of_this_one(supervised: Supervised, tmp_path: Path) -> None:
    """Ranks name the run before they train. Such ends are counted, and after three the job is not queued again."""
    run = Run.create(tmp_path)
    run.end_attempt(run.begin_attempt(world={}), status="stopped", exit_code=75)
    run.path.rename(tmp_path / "run-0")
    around = {name: value for name, value in os.environ.items() if name != "HEADWAY_RUN"}
    assert supervised(f"{BEATS}\nos.kill(agent, signal.SIGTERM)\ntime.sleep(20)", environ=around) == 143


def test_a_signal_while_the_agent_clears_up_changes_nothing(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM repeats SIGTERM until all processes have ended."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    remove = shutil.rmtree
    try:
        for place in ("scratch", "cache"):
            if place == "scratch":
                monkeypatch.setattr(shutil, "rmtree", lambda path: (terminate(), remove(path)))
            else:
                monkeypatch.setattr(agent_module, "_clear_cache", terminate)
            assert supervised("sys.exit(75)") == 75
        assert heard == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM], "the handler of before is back"
    finally:
        signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
