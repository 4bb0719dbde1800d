"""From the command line to a target, and SLURM's answers to sentences. SLURM itself is asked in tests/cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main, submit as verb
from headway.errors import HeadwayError, UsageError
from headway.launcher.program import JobFile, Program, python_command
from headway.launcher.submission import Script
from headway.launcher.targets import Slurm
from headway.run import Run
from headway.schedulers.slurm import client, refusals


def target(*argv: str) -> Slurm:
    return verb._target(verb._parser().parse_args([*argv, "train.py"]))


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
        (["submit", "--dry-run", "--name", "a;b", __file__], "run name 'a;b' cannot be used"),
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
        client.check(Slurm())


def test_names_for_runs() -> None:
    assert Script(name="../exp/my train.v2.py").run_name == "my-train.v2"
    assert Script(name="pkg.sub.train", module=True).run_name == "train"
    assert Script(name="--.py").run_name == "run"


def test_the_job_file_holds_what_was_meant_for_the_ranks(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "runs")
    program = Program(command=["x", "a\nb"], processes=2, cwd="/", env={"A": "'\"$"}, python_path=["/code"])
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


def test_commands_of_modules_need_no_file() -> None:
    assert python_command("pkg.train", ["-x"], module=True)[1:] == ["-m", "pkg.train", "-x"]


# ---- SLURM's answers


def answers(monkeypatch: pytest.MonkeyPatch, *given: tuple[int, str]) -> list[Any]:
    """Lets SLURM's programs answer with these codes and words, one after the other."""
    asked: list[Any] = []
    rest = list(given)

    def ask(*command: str, **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        code, words = rest.pop(0)
        return subprocess.CompletedProcess(command, code, "", words)

    monkeypatch.setattr(client, "ask", ask)
    return asked


BUSY = (1, "slurm_requeue error: Unable to contact slurm controller (connect failure)")
NEVER = (1, "Requested operation is presently disabled for job 7")


def test_sbatch_does_not_see_the_job_from_which_it_is_called() -> None:
    around = {
        "PATH": "/usr/bin:/bin",
        "A": "b",
        "SLURM_JOB_ID": "7",
        "SLURM_MEM_PER_NODE": "9",
        "SRUN_DEBUG": "3",
    }
    kept = {"SLURM_CONF": "/etc/x", "SLURM_CLUSTERS": "big", "SBATCH_ACCOUNT": "lab"}
    seen = client.ask("env", environ=around | kept).stdout.splitlines()
    assert {line for line in seen if line.startswith(("A=", "S"))} == {
        "A=b",
        *(f"{name}={value}" for name, value in kept.items()),
    }


@pytest.mark.parametrize(
    ("limits", "partition", "time", "refused"),
    [
        ("cpu 2:00:00\ngpu* 1:00:00", None, "1:00:01", True),
        ("cpu 2:00:00\ngpu* 1:00:00", None, "1:00:00", False),
        ("cpu 2:00:00\ngpu 1:00:00", "cpu,gpu", "2:00:00", False),
        ("cpu 2:00:00\ngpu infinite", "cpu,gpu", "9-0", False),
        ("", "gpu", "9-0", False),
    ],
)
def test_a_job_that_slurm_would_take_and_never_start_is_refused(
    limits: str, partition: str | None, time: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ask", lambda *words, **_: subprocess.CompletedProcess(words, 0, limits, ""))
    monkeypatch.setattr(refusals, "_ask", lambda *_: [])
    wanted = Slurm(partition=partition, time=time)
    if refused:
        with pytest.raises(UsageError, match=f"time='{time}' is not allowed here"):
            client.check(wanted)
    else:
        client.check(wanted)


def test_a_busy_controller_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, BUSY, BUSY, (0, ""))
    assert client.requeue("7_2", pause=0) is None
    assert asked == [("scontrol", "requeue", "7_2")] * 3


def test_a_controller_that_stays_busy_is_not_pressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses grow, and there is none after the last try: the job has little time left."""
    pauses: list[float] = []
    monkeypatch.setattr(client.time, "sleep", pauses.append)
    answers(monkeypatch, BUSY, BUSY, BUSY)
    assert client.requeue("7", tries=3, pause=2) == BUSY[1]
    assert pauses == [2, 4]


def test_signs_that_mean_something_to_slurm_are_plain_in_the_path_of_the_log(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    assert f"--output=/data/%%j/log/{run.job_log.name}" in client.submission(run, Path("/data/%j"), Slurm())


def test_a_refusal_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, BUSY, NEVER)
    assert client.requeue("7", pause=0) == "Requested operation is presently disabled for job 7"
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("said", "settings", "sentence"),
    [
        (
            "sbatch: error: invalid partition specified: gup",
            {"partition": "gup"},
            "there is no partition 'gup'; did you mean 'gpu'? There are: cpu, gpu",
        ),
        (
            "Invalid account or account/partition combination specified",
            {"account": "lab"},
            "account 'lab' may not be charged for this partition; there are: cpu, gpu",
        ),
        ("Invalid qos specification", {"qos": "hi"}, "there is no qos 'hi' for you; there are: cpu, gpu"),
        (
            "allocation failure: Requested time limit is invalid (missing or exceeds some limit)",
            {"time": "9-0"},
            "time='9-0' is not allowed here; limits: cpu, gpu",
        ),
        (
            "allocation failure: Requested node configuration is not available",
            {"mem": "9T"},
            "no nodes here can serve a node with 1 CPUs, 9T of memory; there are: cpu; gpu",
        ),
        (
            "allocation failure: Invalid feature specification",
            {"constraint": "x"},
            "no node has the features 'x'; there are: cpu, gpu",
        ),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            {"nodes": 2},
            "SLURM's limits for you or this partition forbid 2 nodes x 1 tasks; ask for less",
        ),
        (
            "sbatch: error: fetch_config: lookup failed\nsbatch: fatal: Could not establish a configuration source",
            {},
            "SLURM's programs are here, but belong to no cluster: submit from a login node, or set SLURM_CONF",
        ),
        ("sbatch: error: something new", {}, "SLURM refuses the job: something new"),
    ],
)
def test_refusals(said: str, settings: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_ask", lambda *_: ["cpu", "gpu"])
    error = refusals.refusal(said, Slurm(**settings))
    assert isinstance(error, UsageError)
    assert str(error).startswith(sentence)


def test_a_controller_that_is_down_is_no_mistake_of_the_user() -> None:
    error = refusals.refusal("sbatch: error: Unable to contact slurm controller", Slurm())
    assert type(error) is HeadwayError
    assert "does not answer" in str(error)
