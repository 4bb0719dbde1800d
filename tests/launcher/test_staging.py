"""Data on a node's own disk: once, whole, and going on where the last start ended."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from headway.data.cache.staging import stage
from headway.dist.control.signals import STOP_REQUESTS
from headway.errors import UsageError
from headway.launcher import epilogue, prologue
from headway.launcher.agent.launch_records import LaunchRecords
from headway.launcher.agent.step_outcome import StepEnd
from headway.launcher.agent.team import Team
from headway.launcher.program import JobFile, Program
from headway.launcher.step import Step
from headway.launcher.targets import Slurm
from headway.run import Run
from headway.run.status import status
from headway.schedulers.base import Queue
from headway.schedulers.slurm.scheduler import SlurmScheduler


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "data set"
    (folder / "a" / "b").mkdir(parents=True)
    for number in range(5):
        (folder / "a" / f"{number}.tar").write_bytes(os.urandom(2500 + number))
    (folder / "a" / "b" / "empty").touch()
    return folder


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "node"))
    return tmp_path / "node"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_in_a_job_script_it_is_a_step_before_the_ranks() -> None:
    def script(target: Slurm) -> str:
        request = target.request(name="x", directory=Path("/runs/x"), log=Path("log/job.txt"))
        return target.scheduler.script(request)

    plain, with_data = script(Slurm(nodes=2)), script(Slurm(nodes=2, pre=("/data/$(id) set",)))
    assert "prologue" not in plain and "/data" not in with_data, (
        "paths wait in job.json, out of reach of the shell"
    )
    begin, _, end = with_data.partition("# The nodes are prepared first")
    assert plain.startswith(begin) and with_data.count("headway.launcher.prologue") == 1
    last = end.partition("exec ")[2]
    assert last.split('"$run" --prologue $! ')[0] in plain, (
        "the last command has the job's status, as without data"
    )
    assert end.count("srun ") == 2 and last.count("srun ") == 1 and "agent --run" in last
    assert script(Slurm(nodes=2, doctor=True)) == with_data, "what the step does is in job.json, too"
    with pytest.raises(UsageError, match="pre: 'data' must be an absolute path"):
        Slurm(pre=("data",))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR2, 75), (signal.SIGTERM, 143)])
def test_a_job_that_is_stopped_while_it_copies_may_come_back(
    number: int, code: int, source: Path, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path / "runs", name="x", command=["train"])
    target = Slurm(pre=(str(source),), requeue=False)
    JobFile(program=Program(command=["train"]), target=target).write(run)
    signalled = """if True:
        import os, sys
        from functools import partial
        from headway.launcher import prologue
        from headway.launcher.agent.team import Team
        kill = lambda done, _: done and os.kill(os.getpid(), int(sys.argv[2]))
        prologue.stage = partial(prologue.stage, progress=kill)
        write = Team.mark_ended
        def ended(team, code):
            os.kill(os.getpid(), int(sys.argv[2]))  # SLURM and srun may both tell it
            write(team, code)
        Team.mark_ended = ended
        sys.exit(prologue.main(sys.argv[1]))
    """
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    done = subprocess.run([sys.executable, "-c", signalled, str(run.path), str(number)], capture_output=True)
    assert (done.returncode, done.stderr) == (code, b"")
    after = [sys.executable, "-m", "headway.launcher.epilogue", str(run.path), str(code)]
    told = subprocess.run(after, capture_output=True, text=True)
    assert told.returncode == code
    assert f"not queued again, as requeue is off; to resume: sbatch {run.job_script}" in told.stderr
    if number == signal.SIGUSR2:
        assert "headway: stopped while the nodes were prepared; the next start continues" in told.stderr
        assert status(run, Queue()).state == "stopped"
    assert not list(run.launch_dir.glob("*"))
    assert stage([source]).files == 6 and contents(node / "data set") == contents(source)


class Clock:
    """In place of `time` where a step is waited for: a sleep takes no time, whatever else the machine does."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        time.sleep(0)


class Prologues:
    """A child process in place of srun, and what the two nodes write for which it waits."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.clock = clock
        self.srun = subprocess.Popen(["sleep", "1000"])
        self.nodes = [Team(directory, number=number, size=2) for number in range(2)]
        self.step = Step(self.srun.pid, LaunchRecords(directory, size=2))

    def beating(self, number: int, *, for_s: float = math.inf) -> Callable[[], bool]:
        """Lets a node show life every five seconds, whenever the waiting script looks whether it has to end."""
        count, begin_s = itertools.count(), self.clock.now_s
        next_s = begin_s

        def beat() -> bool:
            nonlocal next_s
            if self.clock.now_s >= next_s:
                next_s = self.clock.now_s + 5
                self.nodes[number].record_preparation({"host": f"n{number}", "count": next(count)})
            return self.clock.now_s - begin_s > for_s

        return beat


@pytest.fixture
def prologues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prologues]:
    clock = Clock()
    monkeypatch.setattr("headway.launcher.step.time", clock)
    monkeypatch.setattr("headway.system.running_clock.time", clock)
    monkeypatch.setattr("headway.launcher.step._SRUN_S", math.inf)  # srun's end does take time
    found = Prologues(tmp_path / "runs" / "launch" / "7-0", clock)
    yield found
    found.srun.kill()
    found.srun.wait()


@pytest.mark.parametrize(("was_there", "patience_s"), [(True, 60), (False, 300)])
def test_a_node_that_is_lost_while_data_is_copied_ends_the_step(
    prologues: Prologues, was_there: bool, patience_s: float
) -> None:
    if was_there:
        prologues.nodes[1].record_preparation({"host": "n1", "count": 0})
    begin_s, signalled_s = prologues.clock.now_s, []
    beat = prologues.beating(0)

    def note_end(pid: int, number: int) -> None:
        signalled_s.append(prologues.clock.now_s - begin_s)
        os.kill(pid, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headway.launcher.step.os", SimpleNamespace(**vars(os) | {"kill": note_end}))
        end = prologues.step.wait_prepared(until=beat)
    assert end == StepEnd(status=143, lost=(1,))
    assert signalled_s == [pytest.approx(patience_s + 1, abs=1.5)]


def test_nodes_that_are_slow_or_done_are_not_lost(prologues: Prologues) -> None:
    prologues.nodes[1].record_preparation({"host": "n1", "exit_code": 0})
    beat = prologues.beating(0, for_s=1400)
    suspended = iter([1000])

    def for_a_while() -> bool:
        is_over = beat()
        if prologues.clock.now_s > 1200:
            prologues.clock.now_s += next(suspended, 0)  # the whole job is
        return is_over

    assert prologues.step.wait_prepared(until=for_a_while) == StepEnd(status=None)
    assert next(suspended, None) is None
    prologues.nodes[0].record_preparation({"host": "n0", "exit_code": 0})
    assert prologues.step.wait_prepared() == StepEnd(status=0), "srun outlives them, and is ended"


def test_a_node_whose_copy_fails_is_not_lost_however_long_srun_takes(prologues: Prologues) -> None:
    records = LaunchRecords(prologues.nodes[0].directory, size=2)
    failed = prologues.nodes[1]
    failed.record_preparation({"host": "n1", "count": 0})
    failed.begin_round(0)
    failed.conclude({"exit_code": 1, "record": {"kind": "staging", "sentence": "no space left on n1"}})
    failed.mark_ended(1)
    for lost in ((0,), (0, 1)):  # srun has killed the other one, which then is silent
        outcome = epilogue.read_outcome(records, StepEnd(status=1, lost=lost), is_prologue=True)
        assert outcome["record"]["sentence"] == "no space left on n1"
    for number, code in enumerate((0, 1)):
        prologues.nodes[number].record_preparation({"host": f"n{number}", "exit_code": code})
    assert prologues.step.wait_prepared() == StepEnd(status=1), "no agents are to follow"


@pytest.mark.usefixtures("node")
def test_a_copy_that_fails_is_the_last_sign_of_life(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own handlers
    for error, code in ((OSError("no space left"), 1), (SystemExit(143), 143)):
        run = Run.create(tmp_path / "runs", name="x", command=["train"])
        JobFile(program=Program(command=["train"]), target=Slurm(pre=(str(source),))).write(run)

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(prologue, "stage", fail)
        with suppress(SystemExit):
            assert prologue.main(str(run.path)) == code
        last = LaunchRecords(run.launch_dir / "7-0", size=1).preparations()
        assert last == {0: {"host": socket.gethostname(), "exit_code": code}}


def test_a_job_whose_node_is_lost_while_data_is_copied_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "runs", name="x", command=["train"])
    JobFile(program=Program(command=["train"]), target=Slurm(nodes=2, pre=(str(tmp_path),))).write(run)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    requeued: list[str] = []
    monkeypatch.setattr(SlurmScheduler, "requeue", lambda _, ids: requeued.append(ids.number))
    Team(run.launch_dir / "7-0", number=1, size=2).record_preparation({"host": "n1", "count": 3})
    monkeypatch.setattr(epilogue.Step, "wait_prepared", lambda *_, **__: StepEnd(status=143, lost=(1,)))
    assert epilogue.main(str(run.path), "--prologue", "1", "true") == 1
    assert requeued == ["7"]
    cause = "n1 is lost: it was silent while the nodes were prepared for the ranks"
    assert f"headway: {cause}\nrecord: {run.failure_file}\n" in capsys.readouterr().err
    assert status(run, Queue()).why == cause


def test_a_job_whose_time_ends_as_its_nodes_are_prepared_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "runs", name="x", command=["train"])
    JobFile(program=Program(command=["train"]), target=Slurm(pre=(str(tmp_path),))).write(run)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    requeued: list[str] = []
    monkeypatch.setattr(SlurmScheduler, "requeue", lambda _, ids: requeued.append(ids.number))
    monkeypatch.setattr(SlurmScheduler, "ended_by", lambda *_: "time limit")

    def end_with_the_job(_: Step, until: Callable[[], object]) -> StepEnd:
        os.kill(os.getpid(), signal.SIGTERM)
        assert until()
        return StepEnd(status=0)

    monkeypatch.setattr(epilogue.Step, "wait_prepared", end_with_the_job)
    assert epilogue.main(str(run.path), "--prologue", "1", "false") == 143
    assert requeued == ["7"]
    assert "headway: stopped before the ranks had started" in capsys.readouterr().err


@pytest.mark.usefixtures("node")
def test_the_agents_follow_when_the_nodes_are_prepared(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = Run.create(tmp_path / "runs", name="x", command=["train"])
    JobFile(program=Program(command=["train"]), target=Slurm(pre=(str(source),))).write(run)
    handlers = {number: signal.getsignal(number) for number in (*STOP_REQUESTS, signal.SIGTERM)}
    try:
        assert prologue.main(str(run.path)) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    records = LaunchRecords(run.launch_dir / "7-0", size=1)
    assert records.preparations() == {0: {"host": socket.gethostname(), "exit_code": 0}}
    prepared = subprocess.Popen(["true"])
    mark = f"import sys; from headway.launcher.agent.team import Team; from pathlib import Path; \
        Team(Path({str(records.directory)!r}), number=0, size=1).mark_ended(0)"
    assert epilogue.main(str(run.path), "--prologue", str(prepared.pid), sys.executable, "-c", mark) == 0
    prepared.returncode = 0  # reaped by the epilogue
    assert status(run, Queue()).state == "done"


def test_where_data_goes_is_known_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISK", "/scratch")

    def staged(target: Slurm) -> dict[str, str]:
        return JobFile(program=Program(command=["train"]), target=target).staged_environment()

    assert staged(Slurm(pre=("/data",), pre_to="$DISK/me")) == {"HEADWAY_STAGED": "/scratch/me"}
    assert staged(Slurm(pre_to="$NOWHERE")) == {}, "nothing is staged"
    with pytest.raises(UsageError, match=r"pre_to='\$NOWHERE/me': not all of these variables are set on "):
        staged(Slurm(pre=("/data",), pre_to="$NOWHERE/me"))


@pytest.mark.usefixtures("node")
def test_data_that_is_not_there_ends_the_job(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "runs", name="x", command=["train"])
    JobFile(program=Program(command=["train"]), target=Slurm(pre=(str(tmp_path / "no"),))).write(run)
    environ = {**os.environ, "SLURM_JOB_ID": "7"}
    for line in (["prologue", str(run.path)], ["epilogue", str(run.path), "2"]):
        command = [sys.executable, "-m", f"headway.launcher.{line[0]}", *line[1:]]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert done.returncode == 2
    assert done.stderr == f"headway: there is nothing to stage at {tmp_path / 'no'}\n"
    assert status(run, Queue()).why == f"there is nothing to stage at {tmp_path / 'no'}"


@pytest.mark.usefixtures("node")
def test_a_copy_that_fails_as_nobody_expected_says_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A bug, a kill -9 or the out-of-memory killer, and a stop before anything is known."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    handlers = {number: signal.getsignal(number) for number in (*STOP_REQUESTS, signal.SIGTERM)}

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    def stop(_: str) -> None:
        os.kill(os.getpid(), signal.SIGUSR2)

    try:
        for patched, by, status, code, said in (
            (
                "stage",
                fail,
                None,
                1,
                f"{socket.gethostname()} could not be prepared for the ranks: ZeroDivisionError: a bug",
            ),
            (
                None,
                None,
                137,
                1,
                "the step that prepares the nodes was killed by SIGKILL (kill -9, or the out",
            ),
            ("Run.open_private", stop, None, 75, "stopped before the ranks had started"),
        ):
            run = Run.create(tmp_path / "runs", name="x", command=["train"])
            target = Slurm(pre=(str(source),), requeue=False)
            JobFile(program=Program(command=["train"]), target=target).write(run)
            with monkeypatch.context() as patch:
                if patched:
                    patch.setattr(f"headway.launcher.prologue.{patched}", by)
                    status = prologue.main(str(run.path))
            assert epilogue.main(str(run.path), str(status)) == code
            last = [line for line in capfd.readouterr().err.splitlines() if line.startswith("headway: ")]
            assert any(line.startswith(f"headway: {said}") for line in last), last
            assert ("not queued again, as requeue is off" in str(last)) == (code == 75)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Examiner:
    """In place of an agent whose ranks examine nodes: leaves a report, and ends as it says."""

    codes: ClassVar[list[int]] = []
    ran: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, command: list[str], **settings: Any) -> None:
        self.command = command
        self.ran.append({"command": command, **settings})

    def run(self) -> int:
        code = self.codes.pop(0)
        if code == 1:
            checks = [{"name": "GPU health", "verdict": "bad"}, {"name": "CPUs", "verdict": "warn"}]
            Path(self.command[4]).write_text(json.dumps({"checks": checks}))
        return code


@pytest.mark.usefixtures("node")
def test_nodes_that_fail_their_examination_do_not_start_the_script(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(prologue, "Agent", Examiner)
    handlers = {number: signal.getsignal(number) for number in (*STOP_REQUESTS, signal.SIGTERM)}
    Examiner.codes[:], Examiner.ran[:] = [1, 9, 75, 143, 0], []
    failed = "the script was not started: the nodes fail"
    try:
        for status, code, said in (
            (1, 1, f"{failed} these checks: GPU health; the lines above say how"),
            (1, 1, f"{failed} the examination itself; the lines above say how"),
            (75, 75, "stopped while the nodes were examined"),
            (143, 143, ""),
            (0, None, ""),
        ):
            run = Run.create(tmp_path / "runs", name="x", command=["train"])
            target = Slurm(pre=(str(source),), doctor=True, requeue=False, ntasks_per_node=3)
            JobFile(program=Program(command=["train"], nproc=3), target=target).write(run)
            try:
                assert prologue.main(str(run.path)) == status
            except SystemExit as end:
                assert end.code == status
            if code is not None:
                assert epilogue.main(str(run.path), str(status)) == code
            assert said in capfd.readouterr().err
            assert (tmp_path / "node" / "data set").exists() == (status == 0), "data is copied afterwards"
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    [*_, last] = Examiner.ran
    assert last["command"][3:] == ["headway.doctor.examination", str(run.doctor_file), str(source)]
    assert (last["nproc"], last["report"]) == (3, False)
    assert "HEADWAY_RUN" not in last["environ"], "what it finds is not a failure of the run's own ranks"
