"""The job script against golden files, and what a shell makes of hostile paths in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from headway.errors import UsageError
from headway.launcher.targets import Slurm
from headway.schedulers.base import JobRequest
from headway.schedulers.slurm.script import job_script, options, step_command, submit_options

GOLDEN = Path(__file__).parent / "golden"
TARGETS = {
    "plain": Slurm(),
    "gpus": Slurm(
        nodes=2,
        gpus_per_node="a100:4",
        cpus_per_task=6,
        mem="64G",
        time="2:00:00",
        partition="gpu",
        account="lab",
        qos="high",
        constraint="nvlink",
        extra={"licenses": "fluent:1", "mail-type": "END", "contiguous": True},
        setup=["module load cuda", "source env.sh"],
        env={"SECRET": "not in the script"},
        signal_lead=300,
    ),
    "range": Slurm(nodes="1-2", ntasks_per_node=2),
    "array": Slurm(ntasks_per_node=2, array=("lr=1,2",), exclusive=True, requeue=False),
}


def request(target: Slurm, *, run: Path = Path("/x"), python: str = "/bin/python") -> JobRequest:
    return target.request(name="x", directory=run, log=Path("log/job.txt"), python=python)


@pytest.mark.parametrize("name", TARGETS)
def test_the_text_is_as_it_was(name: str) -> None:
    """After a change that is meant: HEADWAY_GOLDEN=write pytest tests/schedulers/test_slurm_script.py"""
    text = job_script(request(TARGETS[name], run=Path("/data/my runs/x-1"), python="/opt/venv/bin/python"))
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("HEADWAY_GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("name", TARGETS)
def test_directives_come_before_anything_that_runs(name: str) -> None:
    lines = job_script(request(TARGETS[name], run=Path("/runs/x"), python="/bin/python")).splitlines()
    given = [f"#SBATCH {option}" for option in options(request(TARGETS[name]))]
    assert lines[2 : 2 + len(given)] == given
    assert subprocess.run(["bash", "-n"], input="\n".join(lines), text=True).returncode == 0


def test_the_ranks_are_told_before_the_time_is_over() -> None:
    assert "--signal=USR2@300" in options(request(TARGETS["gpus"])), (
        "to the steps: B: would tell the script alone"
    )


def test_values_for_the_ranks_are_not_in_the_script() -> None:
    assert "not in the script" not in job_script(
        request(TARGETS["gpus"], run=Path("/x"), python="/bin/python")
    )


@pytest.mark.parametrize(
    "folder", ["a b", "$(touch hit)", "x;touch hit", "'", '"', "`touch hit`", "-rf", "%j", "\\"]
)
def test_a_shell_sees_hostile_paths_as_one_word(folder: str, tmp_path: Path) -> None:
    """The script is run with programs of ours for srun and python, which write down their arguments."""
    bin = tmp_path / "bin"
    bin.mkdir()
    for name in ("srun", "python"):
        (bin / name).write_text('#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" >> "$SEEN"\n')
        (bin / name).chmod(0o755)
    run = tmp_path / folder / "run"
    text = job_script(request(Slurm(), run=run, python=str(bin / "python")))
    environ = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}", "SEEN": str(tmp_path / "seen")}
    done = subprocess.run(["bash"], input=text, text=True, cwd=tmp_path, env=environ, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    words = (tmp_path / "seen").read_text().split("\0")
    assert words.count(str(run)) == 2, words
    assert not (tmp_path / "hit").exists()


def test_a_line_break_in_a_path_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be printed"):
        job_script(request(Slurm(), run=Path("/runs/a\n#SBATCH --wrap=id"), python="/bin/python"))


def test_a_task_has_the_cpus_of_all_its_ranks() -> None:
    assert "--cpus-per-task=8" in step_command(request(Slurm(ntasks_per_node=4, cpus_per_task=2)))
    whole = step_command(request(Slurm(ntasks_per_node=4)))
    assert "--cpu-bind=none" in whole
    assert not any(option.startswith("--cpus-per-task") for option in whole)


def test_signs_that_mean_something_to_slurm_are_plain_in_the_path_of_the_log() -> None:
    assert "--output=/data/%%j/log/job.txt" in submit_options(request(Slurm(), run=Path("/data/%j")))
