"""Data on a node's own disk: once, whole, and going on where the last start ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from headway.data.cache.staging import stage
from headway.dist.control.signals import STOP_REQUESTS
from headway.errors import UsageError
from headway.launcher import epilogue, prologue
from headway.launcher.program import JobFile, Program
from headway.launcher.targets import Slurm
from headway.run import Run
from headway.run.status import status
from headway.schedulers.base import Queue


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
    begin, _, end = with_data.partition("# Nodes are examined")
    assert plain == begin + end.partition('launcher.epilogue "$run" $?\n')[2]
    assert script(Slurm(nodes=2, doctor=True)) == with_data, "what the step does is in job.json, too"
    assert with_data.count("headway.launcher.prologue") == 1, "what it leaves behind is read by the epilogue"
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
        assert "headway: stopped while data was copied to the nodes; the next start continues" in told.stderr
        assert status(run, Queue()).state == "stopped"
    assert not list(run.launch_dir.glob("*"))
    assert stage([source]).files == 6 and contents(node / "data set") == contents(source)


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
                f"data could not be copied to {socket.gethostname()}: ZeroDivisionError: a bug",
            ),
            (
                None,
                None,
                137,
                1,
                "the step that copies data to the nodes was killed by SIGKILL (kill -9, or the out",
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
