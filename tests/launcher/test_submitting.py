"""From the command line to a target, and SLURM's answers to sentences. SLURM itself is asked in tests/cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.cli import main, submit as verb
from headway.cli.target_options import read_options
from headway.errors import UsageError
from headway.launcher.enqueue import check_target, note_job
from headway.launcher.program import JobFile, Program, python_command
from headway.launcher.submit_script import Script
from headway.launcher.targets import ClusterTarget, Slurm
from headway.run import Run
from headway.schedulers.base import JobIds, Queue


def target(*argv: str) -> ClusterTarget:
    return read_options(verb._parser().parse_args([*argv, "train.py"]))


def test_options_are_the_settings() -> None:
    switches = ["--nodes", "2", "--gpus-per-node", "a100:4", "--exclusive", "--no-requeue"]
    repeated = ["--env", "A=b=c", "--env", "B=", "--extra", "hold", "--extra", "begin=now", "--setup", "a b"]
    found = target(*switches, *repeated, "--setup", "c")
    assert found == Slurm(
        nodes=2,
        gpus_per_node="a100:4",
        exclusive=True,
        requeue=False,
        env={"A": "b=c", "B": ""},
        extra={"hold": True, "begin": "now"},
        setup=("a b", "c"),
    )


def test_options_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "on.yaml"
    file.write_text("kind: slurm\nnodes: 4\ntime: 30\nenv: {A: a, B: b}\n")
    assert target("--on", str(file), "--nodes", "2", "--env", "B=c") == Slurm(
        nodes=2, time="30", env={"A": "a", "B": "c"}
    )
    file.write_text("kind: local\n")
    with pytest.raises(UsageError, match="describes local"):
        target("--on", str(file))


def test_options_after_the_script_are_the_scripts() -> None:
    options = verb._parser().parse_args(["--nodes", "2", "train.py", "--nodes", "3", "--help"])
    assert (options.nodes, options.args) == (2, ["--nodes", "3", "--help"])


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["submit", "--env", "A", "x.py"], "--env 'A': write NAME=VALUE"),
        (["submit", "--nodes", "0", "x.py"], "nodes=0 must be a whole number of at least 1"),
        (["submit", "--dry-run", "nowhere.py"], "there is no file 'nowhere.py'"),
        (["submit", "--dry-run", "--name", "a;b", __file__], "'a;b' is not a valid run name"),
        (["submit", "--dry-run", "--array", "lr", __file__], "--array 'lr' is neither"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UsageError, match=r"sbatch is not on this machine: submit from a login node .* headway run"
    ):
        check_target(Slurm())


def test_names_for_runs() -> None:
    assert Script(name="../exp/my train.v2.py").run_name == "my-train.v2"
    assert Script(name="pkg.sub.train", module=True).run_name == "train"
    assert Script(name="--.py").run_name == "run"


def test_the_job_file_holds_what_was_meant_for_the_ranks(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "runs")
    program = Program(command=["x", "a\nb"], nproc=2, cwd="/", env={"A": "'\"$"}, python_path=["/code"])
    JobFile(program=program, target=Slurm(nodes=2)).write(run)
    assert JobFile.read(run) == JobFile(program=program, target=Slurm(nodes=2))
    assert run.job_file.stat().st_mode & 0o077 == 0
    around = program.environment({"PYTHONPATH": "/mine", "A": "other"})
    assert around == {"PYTHONPATH": "/code:/mine", "A": "'\"$"}
    run.job_file.write_text("{")
    with pytest.raises(UsageError, match=r"job\.json cannot be read"):
        JobFile.read(run)
    run.job_file.unlink()
    with pytest.raises(UsageError, match="was not submitted"):
        JobFile.read(run)


def test_a_start_by_hand_takes_no_run_from_a_job_that_may_be_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path / "runs")
    run.submission_file.write_text('{"scheduler": "slurm", "job_id": "7", "array_task": null}')
    for queue, number in ((Queue(note="squeue failed: timed out"), "7"), (Queue(), "8")):
        monkeypatch.setattr("headway.schedulers.queue", lambda _, queue=queue: queue)
        note_job(run, JobIds(scheduler="slurm", job_id="8"))
        assert json.loads(run.submission_file.read_text())["job_id"] == number


def test_commands_of_modules_need_no_file() -> None:
    assert python_command("pkg.train", ["-x"], module=True)[1:] == ["-m", "pkg.train", "-x"]
