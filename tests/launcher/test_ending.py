"""How a launch ends: what the agents write down of it, and what the job script does about it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.dist.control.signals import STOP_REQUESTS
from headway.errors import HeadwayError
from headway.launcher import epilogue
from headway.launcher.agent import step_outcome
from headway.launcher.agent.agent import Agent
from headway.launcher.agent.launch_records import LaunchRecords
from headway.launcher.agent.outcome import first_failure, record_failure, summary
from headway.launcher.agent.step_outcome import StepEnd
from headway.launcher.agent.team import Team
from headway.launcher.program import JobFile, Program
from headway.launcher.step import Step
from headway.launcher.targets import Slurm
from headway.run import Run
from headway.run.status import status
from headway.schedulers.base import Queue
from headway.schedulers.slurm.client import SlurmAnswer, SlurmClient
from headway.system.environment import EARLIER_STARTS

Start = Callable[[int], None]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Makes this process one of a start of job 7: the first is number 0."""

    def become(number: int) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))

    become(0)
    return become


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "runs", name="x", command=["train"])


# ---- what the agents write down


def vanished(run: Run) -> dict[str, Any]:
    """What rank 0 can say of a rank that is suddenly gone."""
    record = {"kind": "vanished", "rank": 1, "host": "n1", "pid": 5, "error": "is gone", "hint": "look there"}
    return record | {"exit_code": 1, "failure_file": str(run.failure_file)}


def hang(run: Run) -> dict[str, Any]:
    """What an agent says when none of its ranks moves, rank 0 included."""
    return {
        "kind": "hang",
        "rank": 0,
        "error": "no rank has made progress",
        "failure_file": str(run.failure_file),
    }


def test_an_agent_knows_what_its_rank_died_of(run: Run, tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text(json.dumps(vanished(run)))
    run.write_failure(vanished(run))
    of_another_node = first_failure(tmp_path / "failure.json", {2: 1}, {2: 6})
    assert of_another_node == vanished(run) and run.failure_file.read_text().count("is gone") == 1
    found = first_failure(tmp_path / "failure.json", {0: 1, 1: -9}, {0: 4, 1: 5})
    assert found["error"].startswith("was killed by SIGKILL")
    assert (found["hint"], found["exit_code"]) == (None, 1)
    assert json.loads(run.failure_file.read_text()) == found
    assert "output" not in found, "a kill has no reason of its own"
    run.log_file(1).write_text(
        "".join(f"step {step}\n" for step in range(50)) + "what(): 8 vs 4. Mismatch?\n"
    )
    aborted = first_failure(tmp_path / "failure.json", {1: -6}, {1: 5})
    last = summary({"exit_code": 1, "record": aborted}, 2).splitlines()
    assert last[0].endswith("crashed in native code (SIGABRT)") and last[2] == "step 43"
    assert last[-2:] == ["what(): 8 vs 4. Mismatch?", f"record: {run.failure_file}"]
    left = first_failure(tmp_path / "failure.json", {1: 86}, {1: 5})
    assert (left["error"], left["exit_code"]) == ("exited with code 86 while the others still worked", 86)


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (-9, "was killed by SIGKILL (kill -9, or the out-of-memory killer: see dmesg)"),
        (-11, "crashed in native code (SIGSEGV): its own output, above, says why"),
        (3, "exited with code 3: its own output, above, says why"),
    ],
)
def test_only_a_process_that_ended_itself_has_said_why(status: int, cause: str, tmp_path: Path) -> None:
    found = first_failure(tmp_path / "none.json", {1: status}, {1: 5})
    assert summary({"exit_code": 1, "record": found}, 2).splitlines()[0].endswith(cause)


def test_what_an_agent_finds_counts_unless_the_ranks_were_faster(run: Run, tmp_path: Path) -> None:
    record_failure(hang(run), tmp_path / "failure.json")
    assert json.loads(run.failure_file.read_text()) == hang(run)
    record_failure(hang(run) | {"error": "later"}, tmp_path / "failure.json")
    assert json.loads(run.failure_file.read_text()) == hang(run)


def test_an_agent_whose_start_was_replaced_leaves_the_newer_ones_run_alone(
    run: Run, tmp_path: Path, start: Start
) -> None:
    """Its node was cut off from SLURM, not from the disk; what it writes there would hide how the newer one ends."""
    start(1)
    run.begin_attempt(world={})
    start(0)
    (tmp_path / "failure.json").write_text(json.dumps(vanished(run)))
    first_failure(tmp_path / "failure.json", {1: -9}, {1: 5})
    record_failure(hang(run), tmp_path / "of-another-round.json")
    assert not run.failure_file.exists()
    start(1)
    assert run.write_failure({"rank": 0, "error": "of the newer one"})


def test_a_cause_that_another_node_has_just_recorded_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of a network file system remembers that a file did not exist, until its directory is listed."""
    (tmp_path / "failure.json").write_text(json.dumps({"kind": "exception", "rank": 3, "exit_code": 1}))
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert first_failure(tmp_path / "failure.json", {1: 1}, {1: 5})["rank"] == 3
    assert first_failure(tmp_path / "gone" / "failure.json", {1: 1}, {1: 5})["rank"] == 1


def test_a_cause_is_said_though_it_cannot_be_written(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = hang(run) | {"failure_file": str(tmp_path / "gone" / "failure.json")}
    record_failure(gone, tmp_path / "failure.json")
    assert "headway: the failure could not be recorded" in capsys.readouterr().err
    assert json.loads((tmp_path / "failure.json").read_text()) == gone, "for the other agents"


KILLED = """
import os, signal, sys
from pathlib import Path
from headway.dist.failure.heartbeat import Heartbeat
from headway.run import Run
run = Run.open(sys.argv[1])
with run.lock() as lock:
    if os.environ["HEADWAY_RUN"] == "unknown":  # the agent knows it by the heartbeat
        heartbeat = Heartbeat()
        heartbeat.watch(100.0, directory=Path(os.environ["HEADWAY_HEARTBEAT"]))
        heartbeat.set_run(run.path, owner=lock.fence.number)
    number = run.begin_attempt(world={})
    if sys.argv[2] == "ended":
        run.end_attempt(number, status="done", exit_code=0)
    exec(sys.argv[3])
"""


@pytest.mark.parametrize(
    ("how", "end", "expected"),
    [
        ("unknown", "os.kill(os.getpid(), 9)", ("failed", 1)),
        ("running", "os._exit(75)", ("stopped", 75)),
        ("running", "os._exit(0)", ("running", None)),
        ("ended", "os._exit(1)", ("done", 0)),
    ],
)
def test_an_agent_records_how_an_attempt_ended_that_could_not(
    how: str, end: str, expected: tuple[str, int | None], run: Run
) -> None:
    command = [sys.executable, "-c", KILLED, str(run.path), how, end]
    environ = os.environ | {"HEADWAY_RUN": "unknown" if how == "unknown" else str(run.path)}
    code = Agent(command, nproc=1, environ=environ).run()
    (attempt,) = run.info()["attempts"]
    assert (attempt["status"], attempt["exit_code"]) == expected
    as_without_headway = 137 if how == "unknown" else expected[1] or 0
    assert code == (1 if how == "ended" else as_without_headway)


def test_an_agent_leaves_the_attempt_of_another_process_alone(run: Run) -> None:
    number = run.begin_attempt(world={})  # of this process: of none that the agent started
    Agent([sys.executable, "-c", "1 / 0"], nproc=1, environ=os.environ | {"HEADWAY_RUN": str(run.path)}).run()
    (attempt,) = run.info()["attempts"]
    assert (attempt["number"], attempt["status"]) == (number, "running")


# ---- what the job script sees of the step


class Srun:
    """A child process in place of srun, and the records of the two agents for which it waits."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(["sleep", "100"])
        self.agents = [Team(directory, number=number, size=2) for number in range(2)]
        self.step = Step(self.process.pid, LaunchRecords(directory, size=2), over_s=0.3, missing_s=0.6)
        for agent in self.agents:
            agent.begin_round(0)

    @property
    def runs(self) -> bool:
        return Path(f"/proc/{self.process.pid}").exists()


@pytest.fixture
def srun(tmp_path: Path) -> Iterator[Srun]:
    srun = Srun(tmp_path / "launch")
    yield srun
    srun.process.kill()
    srun.process.wait()


def test_a_step_that_outlives_its_agents_is_ended(srun: Srun) -> None:
    for agent in srun.agents:
        agent.mark_ended(0)
    assert srun.step.wait() == StepEnd(status=143)
    assert not srun.runs


def test_an_agent_without_a_record_is_lost_once_another_has_failed(srun: Srun) -> None:
    srun.agents[0].mark_ended(0)
    looks = iter([False] * 5)
    assert srun.step.wait(until=lambda: next(looks, True)) == StepEnd(status=None), "it may still be training"
    srun.agents[0].conclude({"exit_code": 1, "record": None})
    assert srun.step.wait() == StepEnd(status=143, lost=(1,))


@pytest.mark.parametrize(("missing", "lasts"), [(True, True), (False, False)])
def test_an_agent_on_a_slow_node_has_more_time_than_a_step_without_agents(
    missing: bool, lasts: bool, tmp_path: Path
) -> None:
    step = Step(1, LaunchRecords(tmp_path, size=2))
    lost = (1,) if missing else ()
    assert not step._outlives({"exit_code": 1, "record": None}, lost, 100.0)
    assert step._outlives({"exit_code": 1, "record": None}, lost, 150.0) != lasts
    assert step._outlives({"exit_code": 1, "record": None}, lost, 161.0)


def test_another_round_is_not_the_end(srun: Srun) -> None:
    srun.agents[0].conclude({"exit_code": 1, "record": None})
    srun.agents[1].begin_round(1)
    looks = iter([False] * 8)
    assert srun.step.wait(until=lambda: next(looks, True)) == StepEnd(status=None)


def test_a_stop_of_all_agents_waits_for_no_step(srun: Srun) -> None:
    srun.agents[0].conclude({"exit_code": 75, "record": None})
    for agent in srun.agents:
        agent.mark_ended(75)
    assert srun.step.wait() == StepEnd(status=None)
    assert srun.runs, "the scheduler ends it with the job"


# ---- the cause, where the agents could not record it


def met(run: Run, *, codes: Sequence[int | None], record: dict[str, Any] | None = None) -> None:
    """Two agents, each with a rank, that have met; those with a code have recorded their end."""
    JobFile(program=Program(command=["train"]), target=Slurm(nodes=2)).write(run)
    agents = [Team(run.launch_dir / "7-0", number=number, size=2) for number in range(2)]
    members = [{"host": f"n{number}", "nproc": 1, "port": 1} for number in range(2)]
    for agent, code in zip(agents, codes, strict=True):
        agent.begin_round(0)
        agent._write(agent._agent_file(agent.number), members[agent.number])
        if code is not None:
            agent.mark_ended(code)
    agents[0]._write(agents[0].directory / "roster.json", {"members": members})
    if record is not None:
        (agents[0].round_dir / "failure.json").write_text(json.dumps(record))
    if codes[0] == 1:
        agents[0].conclude({"exit_code": 1, "record": record})


SIGKILL = "was killed by SIGKILL (kill -9, or the out-of-memory killer: see dmesg), and its ranks with it"


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize(
    ("codes", "end", "known", "cause"),
    [
        pytest.param((143, None), StepEnd(status=137), True, f"the agent on n1 {SIGKILL}", id="killed"),
        pytest.param((143, None), StepEnd(status=143), True, f"the agent on n1 {SIGKILL}", id="srun's TERM"),
        pytest.param(
            (1, None), StepEnd(status=137), True, f"the agent on n1 {SIGKILL}", id="the other agent"
        ),
        pytest.param((None, None), StepEnd(status=137), True, f"the agent on n1 {SIGKILL}", id="all of them"),
        pytest.param((None, None), StepEnd(status=137), False, f"the agent on n0, n1 {SIGKILL}", id="early"),
        pytest.param(
            (None, None),
            StepEnd(status=1),
            False,
            "the agent on n0, n1 ended without a record; the exit status of its step is 1, and the output above",
            id="srun could not start them",
        ),
        pytest.param(
            (None, None),
            StepEnd(status=137, killed_by=9),
            False,
            "the process of the job's step (srun) was killed by SIGKILL",
            id="srun",
        ),
    ],
)
def test_a_job_whose_agents_recorded_nothing_ends_with_the_cause(
    codes: tuple[int | None, int | None],
    end: StepEnd,
    known: bool,
    cause: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(step_outcome, "_SETTLE_S", 0.0)
    monkeypatch.setattr(epilogue.Step, "wait", lambda *_, **__: end)
    record = vanished(run) if known else None
    met(run, codes=codes, record=record)
    if record:
        run.write_failure(record)
    assert epilogue.main(str(run.path), "--step", "1") == 1
    last = capsys.readouterr().err.splitlines()
    assert last[-2].startswith(f"headway: {cause}"), last
    assert last[-1] == f"record: {run.failure_file}"
    assert json.loads(run.failure_file.read_text())["error"].startswith(cause)
    assert status(run, Queue()).why.startswith(cause)


@pytest.mark.usefixtures("start")
def test_an_agent_that_was_ended_for_the_failure_of_a_rank_does_not_hide_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_outcome, "_SETTLE_S", 0.0)
    monkeypatch.setattr(epilogue.Step, "wait", lambda *_, **__: StepEnd(status=137))
    met(run, codes=(143, None), record=vanished(run) | {"kind": "exception", "traceback": "ValueError: 7"})
    assert epilogue.main(str(run.path), "--step", "1") == 1
    assert "\nValueError: 7\n" in capsys.readouterr().err


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize(
    ("target", "prepared", "said"),
    [
        (Slurm(), False, "ended without a record; the exit status of its step is 9"),
        (Slurm(pre=("/data",)), True, "ended without a record; the exit status of its step is 9"),
        (Slurm(pre=("/data",)), False, "the step that prepares the nodes exited with code 9"),
        (Slurm(doctor=True), False, "the step that prepares the nodes exited with code 9"),
    ],
)
def test_a_status_is_that_of_the_agents_unless_the_nodes_are_not_prepared(
    target: Slurm, prepared: bool, said: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a scheduler gives it whose script waits for the agents itself."""
    JobFile(program=Program(command=["train"]), target=target).write(run)
    if prepared:
        Team(run.launch_dir / "7-0", number=0, size=1).record_preparation({"host": "n1", "exit_code": 0})
    assert epilogue.main(str(run.path), "9") == 1
    assert said in capsys.readouterr().err


def test_an_agent_that_fails_says_why_to_the_job(tmp_path: Path) -> None:
    def fail() -> dict[str, str]:
        raise HeadwayError("no disk here")

    team = Team(tmp_path / "launch", number=0, size=1)
    with pytest.raises(HeadwayError, match="no disk here"):
        Agent(["true"], nproc=1, team=team, prepare=fail).run()
    outcome = epilogue.read_outcome(LaunchRecords(tmp_path / "launch", size=1), StepEnd(status=143))
    assert summary(outcome, 1).endswith(" failed: no disk here\n") and outcome["exit_code"] == 1


def test_the_process_of_a_step_that_is_killed_is_known(tmp_path: Path) -> None:
    for command, signaled in (("kill -9 $$", 9), ("exit 137", None)):
        process = subprocess.Popen(["sh", "-c", command])
        end = Step(process.pid, LaunchRecords(tmp_path, size=2)).wait()
        process.returncode = 0  # reaped
        assert end == StepEnd(status=137, killed_by=signaled)


# ---- what the job script does about it


def ended(
    run: Run,
    code: int,
    target: Slurm,
    *,
    attempt: int = 0,
    step: Sequence[str] = ("0",),
    record: dict[str, Any] | None = None,
) -> int:
    """The last line of the job script, after the first agent has ended with this code."""
    JobFile(program=Program(command=["train"]), target=target).write(run)
    team = Team(run.launch_dir / f"7-{attempt}", number=0, size=target.nodes)
    team.begin_round(0)
    if code in (1, 75):
        team.conclude({"exit_code": code, "record": record})
    team.mark_ended(code)
    return epilogue.main(str(run.path), *step)


def answering(monkeypatch: pytest.MonkeyPatch, **answers: tuple[int, str, str]) -> list[Any]:
    """Lets SLURM's programs answer with these codes, words and complaints; returns what they are asked."""
    asked: list[Any] = []

    def run(_: SlurmClient, *command: str, env: Any = None, **__: Any) -> SlurmAnswer:
        asked.append((*command, f"{EARLIER_STARTS}={(env or {}).get(EARLIER_STARTS)}"))
        code, out, err = answers[command[0]]
        return SlurmAnswer(code=code, out=out, err=err)

    monkeypatch.setattr(SlurmClient, "run", run)
    return asked


def end_of_the_job(_: Step, until: Callable[[], object]) -> StepEnd:
    """In place of `Step.wait`: the scheduler ends the job while the step runs."""
    os.kill(os.getpid(), signal.SIGTERM)
    assert until()
    return StepEnd(status=None)


@pytest.mark.usefixtures("start")
def test_a_request_to_stop_does_not_end_the_script(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scancel --full --signal=USR1` sends it to the script of a job as well as to its ranks."""

    def requested(_: Step, until: Callable[[], object]) -> StepEnd:
        for number in STOP_REQUESTS:
            assert signal.getsignal(number) != signal.SIG_DFL
            os.kill(os.getpid(), number)
        assert not until()
        return StepEnd(status=0)

    monkeypatch.setattr(epilogue.Step, "wait", requested)
    assert ended(run, 0, Slurm(), step=("--step", "1")) == 0


DONE = (0, "", "")
REFUSED = (1, "", "scontrol: error: Requested operation is presently disabled for job 7")


@pytest.mark.parametrize(
    ("code", "requeued"), [(0, False), (1, False), (75, True), (86, False), (130, False), (143, True)]
)
@pytest.mark.usefixtures("start")
def test_only_what_was_stopped_is_queued_again(
    code: int, requeued: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(monkeypatch, scontrol=DONE)
    assert ended(run, code, Slurm()) == code
    assert [command[:3] for command in asked] == ([("scontrol", "requeue", "7")] if requeued else [])
    assert json.loads(run.ended_file.read_text())["exit_code"] == code


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize(
    ("code", "kind", "requeued"),
    [
        (1, "vanished", True),
        pytest.param(1, "exception", False, id="a rank has failed, and the other node is only slow"),
        (86, "vanished", False),
    ],
)
def test_a_lost_node_does_not_end_the_run(
    code: int,
    kind: str,
    requeued: bool,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It crashed and was back before SLURM missed it: SLURM would have started the job again."""
    asked = answering(monkeypatch, scontrol=DONE)
    lost = StepEnd(status=143, lost=(1,))
    monkeypatch.setattr(epilogue.Step, "wait", lambda *_, **__: lost)
    record = vanished(run) | {"kind": kind, "traceback": "ValueError"}
    assert ended(run, code, Slurm(nodes=2), step=("--step", "1"), record=record) == code
    assert "headway: the agent on node 1 left no record" in capsys.readouterr().err
    assert [command[:3] for command in asked] == ([("scontrol", "requeue", "7")] if requeued else [])


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize(
    ("code", "reason", "requeued", "expected"),
    [
        pytest.param(None, "TimeLimit 0", True, 143, id="the time is over before the ranks have stopped"),
        pytest.param(75, "TimeLimit 0", True, 75, id="or before the job could be queued again"),
        pytest.param(0, "TimeLimit 0", False, 0, id="or when the run is done"),
        pytest.param(75, "None 0", False, 143, id="the job is cancelled"),
        pytest.param(None, "None 0", False, 143, id="the job is cancelled before the ranks have stopped"),
        pytest.param(None, "None 1", False, 143, id="the job is preempted, and SLURM queues it again"),
    ],
)
def test_the_end_of_the_time_does_not_end_the_run(
    code: int | None,
    reason: str,
    requeued: bool,
    expected: int,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = answering(monkeypatch, scontrol=DONE, squeue=(0, f"{reason}\n", ""))
    monkeypatch.setattr(epilogue.Step, "wait", end_of_the_job)
    if code is None:
        JobFile(program=Program(command=["train"]), target=Slurm()).write(run)
        assert epilogue.main(str(run.path), "--step", "1") == expected
    else:
        assert ended(run, code, Slurm(), step=("--step", "1")) == expected
    assert ("scontrol", "requeue", "7") in [command[:3] for command in asked] or not requeued
    assert run.ended_file.exists() == (reason == "TimeLimit 0")
    last = capsys.readouterr().err.splitlines()[-1:]
    resume = f"headway: not queued again: the job was cancelled; to resume: sbatch {run.job_script}"
    again = "headway: stopped by a preemption or a requeue; SLURM starts the job again"
    assert (last == [resume], last == [again]) == (reason == "None 0", reason == "None 1")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(("left_s", "requeued"), [(-1, True), (3600, False), (None, False)])
@pytest.mark.usefixtures("start")
def test_in_doubt_the_clock_says_whether_the_time_is_over(
    left_s: int | None,
    requeued: bool,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = answering(monkeypatch, scontrol=DONE, squeue=(124, "", "squeue did not answer"))
    if left_s is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + left_s))
    monkeypatch.setattr(epilogue.Step, "wait", end_of_the_job)
    assert ended(run, 75, Slurm(), step=("--step", "1")) == (75 if requeued else 143)
    assert (("scontrol", "requeue", "7") in [command[:3] for command in asked]) == requeued
    refusal = "not queued again: SLURM does not report why it ends this job, and its time limit has not been reached; "
    assert (f"{refusal}to resume: sbatch {run.job_script}" in capsys.readouterr().err) != requeued


def test_what_is_ended_three_times_without_a_newer_checkpoint_is_not_queued_again(
    run: Run, start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answering(monkeypatch, scontrol=DONE, squeue=(0, "TimeLimit 0\n", ""))
    JobFile(program=Program(command=["train"]), target=Slurm()).write(run)
    monkeypatch.setattr(epilogue.Step, "wait", end_of_the_job)
    queued = []
    for number, step in enumerate([None, None, 5, 5, 5]):
        start(number)
        if step is not None:
            (run.path / "checkpoints" / f"step-{step:012d}").mkdir(parents=True, exist_ok=True)
        asked.clear()
        assert epilogue.main(str(run.path), "--step", "1") == 143
        queued.append(("scontrol", "requeue", "7") in [command[:3] for command in asked])
    assert queued == [True, True, True, True, False]
    said = capsys.readouterr().err
    assert "resumes from the newest checkpoint" not in said, "there was none"
    assert "ended 3 times with the newest checkpoint at step 5; there are no new metric rows; save" in said
    assert f"to resume: sbatch {run.job_script}" in said


@pytest.mark.parametrize(
    ("size", "nodes", "used"), [(16, "1-4", 2), (6, "1-4", 3), (16, "3-4", 3), (None, "1-4", 3)]
)
def test_ranks_that_cannot_share_a_batch_start_again_on_fewer_nodes(
    size: int | None, nodes: str, used: int, run: Run, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest number of nodes that can, of the three that SLURM has given."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    monkeypatch.setattr(step_outcome, "_SETTLE_S", 0.0)
    job = JobFile(program=Program(command=["train"], nproc=2), target=Slurm(nodes=nodes, ntasks_per_node=2))
    job.write(run)
    start(0)
    begun: list[int] = []
    agent = ["srun", "--nodes=3", "--ntasks=3", "--wait=0", "headway", "agent"]

    def step(command: str, words: Sequence[str], _: Mapping[str, str]) -> int:
        assert command == "srun" and [words[0], *words[3:]] == [agent[0], *agent[3:]]
        begun.append(int(words[1].removeprefix("--nodes=")))
        assert words[2] == f"--ntasks={begun[-1]}"
        return 1

    def wait(step: Step, **_: object) -> StepEnd:
        on = begun[-1] if begun else 3
        fits = size is None or size % (2 * on) == 0
        for number in range(on):
            team = Team(step._records.directory, number=number, size=on)
            team.begin_round(0)
            record = {"kind": "exception", "rank": 0, "host": "n1", "pid": 5, "error": "E", "traceback": "T"}
            record |= {"exit_code": 2, "global_batch_size": size}
            if not fits or size is None:
                team.failure_file.write_text(json.dumps(record))
            team.conclude({"exit_code": 0 if fits and size else 2, "record": record})
            team.mark_ended(0 if fits and size else 2)
        return StepEnd(status=0 if fits and size else 2)

    monkeypatch.setattr(os, "posix_spawnp", step)
    monkeypatch.setattr(epilogue.Step, "wait", wait)
    code = epilogue.main(str(run.path), "--step", "1", *agent)
    assert (begun or [3])[-1] == used
    assert code == (0 if size is not None and size % (2 * used) == 0 else 2)


def test_agents_that_still_end_their_ranks_can_record_it(
    run: Run, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the time limit: every agent wrote into the log of the job that it could not write outcome.json."""
    answering(monkeypatch, scontrol=DONE, squeue=(0, "TimeLimit 0\n", ""))
    monkeypatch.setattr(epilogue, "_LAST_RECORDS_S", 0.1)
    monkeypatch.setattr(epilogue.Step, "wait", end_of_the_job)
    job = JobFile(program=Program(command=["train"]), target=Slurm())
    job.write(run)
    start(0)
    team = Team(job.launch_directory(run, os.environ), number=0, size=1)
    team.begin_round(0)
    assert epilogue.main(str(run.path), "--step", "1") == 143
    team.conclude({"exit_code": 143, "record": None})
    team.mark_ended(143)
    assert not team.record_failed and "could not" not in caplog.text
    start(1)
    Team(job.launch_directory(run, os.environ), number=0, size=1).begin_round(0)
    monkeypatch.setattr(epilogue.Step, "wait", lambda *_, **__: StepEnd(status=143))
    epilogue.main(str(run.path), "--step", "1")
    assert not run.launch_dir.exists(), "of earlier starts, too"


@pytest.mark.parametrize(
    ("shows", "queued"),
    [
        pytest.param("rows", [True] * 5, id="rows of steps that no start has reached"),
        pytest.param("same rows", [True] * 2 + [False], id="rows of the same steps again"),
        pytest.param("files", [True] * 5, id="files of another content"),
        pytest.param("same files", [True] * 2 + [False], id="files of the same content, under new names"),
        pytest.param("half a file", [True] * 2 + [False], id="files that were being written at the end"),
    ],
)
def test_a_script_with_checkpoints_of_its_own_is_queued_again_as_long_as_it_gets_further(
    shows: str,
    queued: list[bool],
    run: Run,
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    asked = answering(monkeypatch, scontrol=DONE, squeue=(0, "TimeLimit 0\n", ""))
    target = Slurm(progress="own", max_attempts=6)  # below the directory in which the script starts
    JobFile(program=Program(command=["train"], cwd=str(tmp_path)), target=target).write(run)
    monkeypatch.setattr(epilogue.Step, "wait", end_of_the_job)
    monkeypatch.setattr(epilogue, "_LAST_RECORDS_S", 0.1)
    found = []
    for number in range(7):
        start(number)
        with run.metrics_file(0).open("a") as rows:
            reached = {"rows": 10 * number, "same rows": 10}.get(shows)
            rows.write(f'{{"step": {reached}, "values": {{}}}}\n' if reached is not None else "")
        if "file" in shows:
            file = own / f"model-{number}.pt"
            file.write_bytes(b"weights" * 100_000 + (b"same" if shows == "same files" else b"%d" % number))
            if shows != "half a file":
                os.utime(file, (time.time() - 60,) * 2)
        asked.clear()
        assert epilogue.main(str(run.path), "--step", "1") == 143
        found.append(("scontrol", "requeue", "7") in [command[:3] for command in asked])
        if not found[-1]:
            break
    assert found == [*queued, False] if all(queued) else found == queued, "max_attempts holds in any case"
    said = capsys.readouterr().err
    counted = {"rows": "metric rows up to step 40", "files": f"model-4.pt in {own}"}
    if all(queued):
        assert f"no checkpoint of headway, but progress: {counted[shows]}\n" in said
        assert (
            "not queued again: it was ended 6 times without a checkpoint (max_attempts=6); save more" in said
        )
    else:
        assert (
            "ended 3 times without a checkpoint; there are no new metric rows or files in own; save more"
            in said
        )


def test_a_script_whose_end_takes_longer_than_its_job_is_not_queued_for_ever(
    run: Run, start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each start restores the finished run, begins no attempt, and is stopped in the rest of the script."""
    asked = answering(monkeypatch, scontrol=DONE, squeue=(0, "TimeLimit 0\n", ""))
    (run.path / "checkpoints" / f"step-{5:012d}").mkdir(parents=True)
    stopped = run.begin_attempt(world={})
    run.end_attempt(stopped, status="stopped", exit_code=75)
    queued = []
    for number in range(6):
        start(number)
        if number == 3:
            done = run.begin_attempt(world={})
            run.note_attempt(done, script_ended=False)
            run.end_attempt(done, status="done", exit_code=0)
        asked.clear()
        assert ended(run, 75, Slurm(), attempt=number) == 75
        queued.append(("scontrol", "requeue", "7") in [command[:3] for command in asked])
    assert queued == [True] * 5 + [False], "a stop with a checkpoint is not counted here"
    said = "not queued again: it was ended 3 times after the training was done, in the rest of its script; "
    advice = f"give it more time with --time; to resume: sbatch {run.job_script}"
    assert said + advice in capsys.readouterr().err


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize(
    ("why", "age_s", "requeued"),
    [
        pytest.param("the end of the job's time", 40.0, False, id="8 % of its time"),
        pytest.param("the end of the job's time", 60.0, True, id="after the data was copied for a while"),
        pytest.param("SIGUSR2", 10.0, True, id="an early preemption"),
    ],
)
def test_a_start_whose_time_is_over_as_it_begins_is_at_fault(
    why: str,
    age_s: float,
    requeued: bool,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The clock of its node is wrong: it would make a step or two, and be queued again for ever."""
    asked = answering(monkeypatch, scontrol=DONE)
    monkeypatch.setattr(epilogue, "process_age_s", lambda: age_s)
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1000")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1480")
    stopped = f"stopped by {why} after step 2, with a checkpoint: the same command resumes"
    run.end_attempt(run.begin_attempt(world={}), status="stopped", exit_code=75, why=stopped)
    assert ended(run, 75, Slurm()) == (75 if requeued else 1)
    assert (("scontrol", "requeue", "7") in [command[:3] for command in asked]) == requeued
    if not requeued:
        fault = f"the run was stopped by {why} 40s after its start, of 8m00s: the clock of "
        lines = capsys.readouterr().err.splitlines()
        assert lines[-2].startswith(f"headway: {fault}"), lines
        assert lines[-2].endswith(f"not queued again; to resume: sbatch {run.job_script}")
        found = status(run, Queue())
        assert found.state == "stopped" and found.why.startswith(fault)


@pytest.mark.parametrize(
    ("restarts", "earlier", "requeued"), [(0, 0, True), (1, 0, True), (2, 0, False), (1, 1, False)]
)
def test_queued_again_at_most_so_often_in_all_its_jobs(
    restarts: int, earlier: int, requeued: bool, run: Run, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(restarts)
    monkeypatch.setenv(EARLIER_STARTS, str(earlier))
    asked = answering(monkeypatch, scontrol=DONE)
    ended(run, 75, Slurm(max_requeues=2), attempt=restarts)
    assert len(asked) == requeued


def test_where_slurm_requeues_nothing_the_next_job_waits_for_this_one(
    run: Run, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(1)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    asked = answering(monkeypatch, scontrol=REFUSED, sbatch=(0, "8;big\n", ""))
    run.submission_file.write_text('{"job_id": "5", "array_task": 3, "before": ["4"]}')
    extra = {"dependency": "afterok:3"}
    ended(run, 75, Slurm(array=("lr=1,2",), array_limit=1, extra=extra), attempt=1)
    assert asked[0][:3] == ("scontrol", "requeue", "5_3")
    sbatch = asked[1]
    assert sbatch[-1] == f"{EARLIER_STARTS}=2", "the limit of starts goes on to count"
    assert [word for word in sbatch if "--dependency" in word][-1] == "--dependency=afterany:7", (
        "the last counts"
    )
    assert "--array" not in str(sbatch), "a script of the run alone"
    assert sbatch[-2] == str(run.job_script)
    submitted = json.loads(run.submission_file.read_text())
    assert (submitted["job_id"], submitted["array_task"], submitted["before"]) == ("8", None, ["4", "5_3"])
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID")
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    JobFile(program=Program(command=["train"]), target=Slurm()).write(run)
    epilogue.requeue(run, JobFile.read(run), os.environ)
    assert json.loads(run.submission_file.read_text())["before"] == ["4", "5_3", "8"]


@pytest.mark.usefixtures("start")
def test_a_next_job_that_is_refused_too_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, scontrol=REFUSED, sbatch=(1, "", "sbatch: error: no more jobs for you"))
    assert ended(run, 75, Slurm()) == HeadwayError.exit_code
    assert f"no more jobs for you; to resume: sbatch {run.job_script}" in capsys.readouterr().err


@pytest.mark.usefixtures("start")
def test_a_next_job_that_may_be_in_the_queue_is_looked_up_first(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, scontrol=REFUSED, sbatch=(124, "", "sbatch did not answer within 120 s"))
    assert ended(run, 75, Slurm()) == HeadwayError.exit_code
    said = capsys.readouterr().err
    assert f"it may be in the queue all the same; if it is not there: sbatch {run.job_script}" in said


def test_a_start_that_was_replaced_has_no_say(
    run: Run, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch node was cut off: to queue the job again would end the newer start, to note an end would belie it."""
    start(1)
    run.begin_attempt(world={})
    start(0)
    asked = answering(monkeypatch, scontrol=DONE)
    assert ended(run, 75, Slurm()) == 75
    assert not asked
    assert not run.ended_file.exists()
    start(1)
    run.end_attempt(1, status="done", exit_code=0)
    assert status(run, Queue()).state == "done"
