"""A disk that takes nothing any more: what agents and jobs say last is the cause, and their exit code is its."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from headway.errors import Stopped, StorageError
from headway.launcher import epilogue
from headway.launcher.agent.agent import Agent
from headway.launcher.agent.outcome import record_failure
from headway.launcher.agent.team import Team
from headway.launcher.program import JobFile, Program
from headway.launcher.targets import Slurm
from headway.run import Run
from headway.run.info import newest_step
from headway.system import files

FULL = f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}"
AGENT = "headway: the agent on "
STORAGE = "headway: the run's storage failed; the output above says how"


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("write_atomic", "publish"):
        monkeypatch.setattr(files, name, no_space)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = Run.create(tmp_path / "runs", name="x", command=["train"])
    JobFile(program=Program(command=["train"]), target=Slurm(requeue=False)).write(run)
    return run


@pytest.mark.parametrize("report", [True, False], ids=["alone", "in a job"])
@pytest.mark.parametrize(
    ("code", "said"), [(74, STORAGE), (93, "headway: three attempts"), (1, "headway: rank 0 of 1")]
)
def test_an_agent_says_the_cause(
    code: int, said: str, report: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Its ranks have ended, and it can leave no word for the other agents, nor for the script of the job."""
    fill(monkeypatch)
    command = [sys.executable, "-c", f"import sys; sys.exit({code})"]
    team = Team(tmp_path / "meet", number=0, size=1)
    assert Agent(command, nproc=1, team=team, report=report, max_restarts=1).run() == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(said), lines
    assert any("No space left on device" in line for line in lines[:-1])


def test_an_agent_that_finds_a_hang_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fill(monkeypatch)
    record_failure({"kind": "hang", "rank": 0}, tmp_path / "failure.json")
    assert "No space left on device" in capsys.readouterr().err


def test_an_agent_without_a_directory_for_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python tries the candidates once, and then keeps its choice: a disk that fills up later has a name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "mkdir", no_space)
    message = re.escape(f"could not make a directory in {tmp_path}: No space left on device; check space")
    with pytest.raises(StorageError, match=message):
        Agent(["true"], nproc=1).run()


def test_an_agent_without_any_directory_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has tried all candidates before, and its error lists them."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(os, "open", no_space)
    message = (
        r"could not find a directory for temporary files: No usable temporary directory found in \[.*'/tmp'"
    )
    with pytest.raises(StorageError, match=message):
        Agent(["true"], nproc=1).run()


@pytest.mark.parametrize(("status", "code"), [(74, 74), (75, 75), (86, 86), (137, 1), (0, 1)])
def test_a_job_whose_agents_could_leave_no_record(
    status: int, code: int, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fill(monkeypatch)
    assert epilogue.main(str(run.path), str(status)) == code
    lines = capsys.readouterr().err.splitlines()
    assert any("No space left on device" in line for line in lines[:-1])
    said = {75: "headway: not queued again, as requeue is off", 74: STORAGE, 1: AGENT}
    assert lines[-1].startswith(said.get(code, "headway: checkpoints exist")), lines


def test_a_stopped_job_whose_checkpoints_cannot_be_listed_may_be_queued_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def io_error(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "glob", io_error)
    with pytest.raises(StorageError, match=r"could not list .*checkpoints: Input/output error"):
        newest_step(run.path)
    assert epilogue.main(str(run.path), str(Stopped.exit_code)) == Stopped.exit_code
    assert capsys.readouterr().err.splitlines()[-1].startswith("headway: not queued again, as requeue is off")


def test_a_terminal_that_takes_nothing_does_not_change_the_exit_code(run: Run) -> None:
    """The output of a job is on the same disk as its run. Python would exit with 120 where it cannot flush."""
    commands = [
        [sys.executable, "-m", "headway.launcher.epilogue", str(run.path), "74"],
        [sys.executable, "-m", "headway", "agent", "-m", "no.such.module"],
    ]
    with Path("/dev/full").open("wb") as full:
        running = [subprocess.Popen(command, stdout=full, stderr=full) for command in commands]
        assert [process.wait(60) for process in running] == [74, 1]
