"""From the command line to a target, and SLURM's answers to sentences. SLURM itself is asked in tests/cluster."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.cli import main, submit as verb
from headway.cli.target_options import read_options
from headway.doctor import job as doctor_job
from headway.errors import HeadwayError, IncompleteSubmission, SchedulerUnreachable, UsageError
from headway.launcher import enqueue, submit_script
from headway.launcher.enqueue import check_target, note_job
from headway.launcher.program import JobFile, Program, python_command
from headway.launcher.submit_script import Script
from headway.launcher.targets import ClusterTarget, Slurm
from headway.run import Run
from headway.run.job_record import record_end
from headway.schedulers.base import JobIds, Queue
from headway.schedulers.slurm.client import SlurmAnswer, SlurmClient
from headway.system import files
from headway.system.git import Repository
from headway.watch.housekeeping import remove


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
    own = replace(program, env={"PYTHONPATH": "/own"})
    assert own.environment({"PYTHONPATH": "/mine"}) == {"PYTHONPATH": "/code:/own"}, (
        "the copy of the code is first"
    )
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


# ---- what sbatch answers, and what it does not


class Sbatch:
    """In place of SLURM's programs, all of which answer; sbatch as `answer` says, which may be an exception."""

    def __init__(self) -> None:
        self.answer: tuple[int, str, str] | BaseException = (0, "7\n", "")
        self.squeue = (0, "", "")
        self.submitted: list[tuple[str, ...]] = []

    def run(self, *command: str, **_: Any) -> SlurmAnswer:
        if command[0] != "sbatch" or "--test-only" in command:
            code, out, err = self.squeue if command[0] == "squeue" else (0, "", "")
            return SlurmAnswer(code=code, out=out, err=err)
        self.submitted.append(command)
        if isinstance(self.answer, BaseException):
            raise self.answer
        code, out, err = self.answer
        return SlurmAnswer(code=code, out=out, err=err)


@pytest.fixture
def sbatch(monkeypatch: pytest.MonkeyPatch, project: Path) -> Sbatch:  # noqa: ARG001 - we stand in it
    """SLURM's programs for a user who stands in a project."""
    answers = Sbatch()
    monkeypatch.setattr(SlurmClient, "run", lambda _, *command, **options: answers.run(*command, **options))
    return answers


SUBMISSIONS: dict[str, Callable[[], object]] = {
    "script": lambda: submit_script.submit(Script(name="train.py"), Slurm(), root=Path("runs")),
    "array": lambda: submit_script.submit(
        Script(name="train.py"), Slurm(array=("lr=1,2",)), root=Path("runs")
    ),
    "function": lambda: hw.launch(os.getpid, on=Slurm()),
    "functions": lambda: hw.launch(os.getpgid, array=[0, 0], on=Slurm()),
    "examination": lambda: doctor_job.submit(Slurm(), root=Path("runs")),
}
LOST = "Batch job submission failed: Socket timed out on send/recv operation"
ANSWERS: list[tuple[tuple[int, str, str] | BaseException, str]] = [
    (
        (124, "", "sbatch did not answer within 120 s"),
        "did not answer within 120 s: SLURM's controller is busy",
    ),
    (
        (1, "", f"sbatch: error: {LOST}"),
        f"{LOST}', so the job may be in the queue; if it is not there: headway resume",
    ),
    ((-9, "", ""), "so the job may be in the queue"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
]


@pytest.mark.parametrize("how", SUBMISSIONS)
def test_a_job_whose_answer_is_lost_keeps_its_runs(how: str, sbatch: Sbatch) -> None:
    """It may be in the queue: a job without its run directory would fail when it starts, days later."""
    for number, (answer, said) in enumerate(ANSWERS, start=1):
        sbatch.answer = answer
        with pytest.raises(IncompleteSubmission) as error:
            SUBMISSIONS[how]()
        runs = sorted(Path("runs").glob("[a-z]*"))
        assert len(runs) == number * (2 if how in ("array", "functions") else 1)
        newest = [run for run in runs if str(run.absolute()) in str(error.value)]
        assert said in str(error.value) and len(newest) == 1
        assert f"headway resume {newest[0].absolute()}" in str(error.value)
        script = Path(sbatch.submitted[-1][-1])
        assert script.exists() and all((run / "job.json").exists() for run in runs)
        for run in runs:
            now = hw.Job.open(run).status()
            assert (now.state, now.over) == ("queued", False)
            assert "has not confirmed the job; if it is not in the queue: headway resume" in now.why


@pytest.mark.parametrize("how", SUBMISSIONS)
def test_a_job_whose_number_cannot_be_noted_keeps_its_runs(
    how: str, sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = files.write_atomic

    def full(path: Path, data: bytes, **options: Any) -> None:
        if path.name == "submitted.json" and b'"job_id"' in data:
            raise OSError(28, "No space left on device")
        written(path, data, **options)

    monkeypatch.setattr(files, "write_atomic", full)
    with pytest.raises(
        IncompleteSubmission, match=r"^job 7 is in the queue, but .* No space left .* (is|are) kept"
    ):
        SUBMISSIONS[how]()
    assert list(Path("runs").glob("[a-z]*/job.sh")) and len(sbatch.submitted) == 1


@pytest.mark.parametrize("how", SUBMISSIONS)
def test_a_job_that_is_refused_leaves_nothing(
    how: str, sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch.answer = (1, "", "sbatch: error: no more jobs for you")
    with pytest.raises(UsageError, match="no more jobs for you"):
        SUBMISSIONS[how]()
    assert not list(Path().glob("runs/*")) and not list(Path().glob("runs/.*"))
    monkeypatch.setattr(enqueue, "_write_script", lambda *_: Path("/no/such").stat())
    with pytest.raises(OSError, match="/no/such"):
        SUBMISSIONS[how]()
    assert not list(Path().glob("runs/*")) and len(sbatch.submitted) == 1


@pytest.mark.parametrize("how", ["array", "function"])
def test_a_controller_that_could_not_be_asked_leaves_nothing(how: str, sbatch: Sbatch) -> None:
    """It never got the request, so there is no job that could need its runs."""
    down = "Unable to contact slurm controller (connect failure)"
    sbatch.answer = (1, "", f"sbatch: error: Batch job submission failed: {down}")
    with pytest.raises(SchedulerUnreachable, match="SLURM's controller does not answer"):
        SUBMISSIONS[how]()
    assert not list(Path().glob("runs/*")) and not list(Path().glob("runs/.*")) and sbatch.submitted


def test_what_cannot_be_noted_is_not_submitted(sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "_write_submission", lambda *_, **__: no_space())
    with pytest.raises(OSError, match="No space left"):
        SUBMISSIONS["array"]()
    assert not list(Path().glob("runs/*")) and not sbatch.submitted


def test_lines_of_setup_may_have_any_bytes(sbatch: Sbatch) -> None:
    """As the path of a module on an old disk: the shell reads bytes."""
    line = os.fsdecode(b"source /opt/caf\xe9/env.sh")
    for array in ((), ("lr=1,2",)):
        submit_script.submit(Script(name="train.py"), Slurm(setup=(line,), array=array), root=Path("runs"))
        assert b"\nsource /opt/caf\xe9/env.sh\n" in Path(sbatch.submitted[-1][-1]).read_bytes()


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_job_whose_answer_was_lost_is_found_when_it_starts_or_is_submitted_again(
    sbatch: Sbatch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in (None, 1):
        sbatch.answer = (124, "", "sbatch did not answer within 120 s")
        with pytest.raises(HeadwayError):
            SUBMISSIONS["script"]()
        run = hw.run.runs_under("runs")[0]
        array = {} if task is None else {"array_job_id": "5", "array_task_id": str(task)}
        ids = JobIds(scheduler="slurm", job_id="7", **array)
        assert main(["runs", "rm", "--yes", str(run.path)]) == 2, "its job would fail when it starts"
        assert "may be in the queue" in capsys.readouterr().err
        with pytest.raises(UsageError, match=r"the number of the job of .* is not known"):
            hw.Job.open(run).cancel()
        asked = run.submission_file.read_bytes()
        note_job(run, ids)
        found = JobIds.from_submission(json.loads(run.submission_file.read_text()))
        assert found is not None and found.number == ids.number
        run.submission_file.write_bytes(asked)
    with monkeypatch.context() as full:
        full.setattr(files, "write_atomic", no_space)
        note_job(run, ids)  # and it trains
    assert "lists of runs do not show job 5_1" in capsys.readouterr().err
    sbatch.answer = (0, "9\n", "")
    assert main(["resume", str(run.path)]) == 0
    assert capsys.readouterr().out.startswith(f"job 9 in {run.path}")
    assert json.loads(run.submission_file.read_text())["job_id"] == "9"


# ---- arrays


@pytest.mark.parametrize("how", ["array", "functions"])
def test_git_is_asked_once_for_all_runs(how: str, sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system it takes seconds to say what has changed, and a sweep has a thousand runs."""
    asked: list[tuple[str, ...]] = []
    ask = Repository.ask
    monkeypatch.setattr(
        Repository, "ask", lambda self, *words, **more: asked.append(words) or ask(self, *words, **more)
    )
    SUBMISSIONS[how]()
    assert [words[0] for words in asked].count("status") == 1 and sbatch.submitted
    states = [run.info()["code"] for run in hw.run.runs_under("runs")]
    assert len(states) == 2 and all(state["commit"] and state["branch"] == "main" for state in states)


def test_links_that_are_being_made_are_not_dead(sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may remove a run of the same root at any moment."""
    make, link = files.make_dir, Path.symlink_to

    def made(path: Path) -> None:
        make(path)
        enqueue.remove_dead_links(Path("runs"))

    def linked(path: Path, *words: Any) -> None:
        link(path, *words)
        enqueue.remove_dead_links(Path("runs"))

    monkeypatch.setattr(files, "make_dir", made)
    monkeypatch.setattr(Path, "symlink_to", linked)
    done = submit_script.submit(Script(name="train.py"), Slurm(array=("lr=1,2",)), root=Path("runs"))
    links = Path(sbatch.submitted[-1][-1]).parent
    assert [(links / str(index)).samefile(run.path) for index, run in enumerate(done.runs)] == [True] * 2
    assert [path.name for path in Path("runs").glob(".*")] == [links.name]


def test_each_run_of_an_array_has_a_script_that_may_be_submitted_by_hand(
    sbatch: Sbatch, tmp_path: Path
) -> None:
    """The scripts are run with programs of ours for srun and python, which write down their arguments."""
    done = submit_script.submit(
        Script(name="train.py"), Slurm(array=("lr=1,2",), doctor=True), root=Path("runs")
    )
    shared = Path(sbatch.submitted[0][-1])
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@" >> "$SEEN"\n')
    (tmp_path / "srun").chmod(0o755)
    for index, run in enumerate(done.runs):
        for script, given, path in (
            (run.job_script, {}, run.path),
            (shared, {"SLURM_ARRAY_TASK_ID": str(index)}, shared.parent / str(index)),
        ):
            seen = tmp_path / "seen"
            seen.unlink(missing_ok=True)
            environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(seen)} | given
            text = script.read_text().replace("\nexec ", "\nwait; true ")  # what comes last is the epilogue
            subprocess.run(
                ["bash"], input=text, text=True, env=environ, check=True, stdout=subprocess.DEVNULL
            )
            assert seen.read_text().splitlines()[-1] == str(path) and path.samefile(run.path)
        assert "--array" not in run.job_script.read_text()


def test_the_links_of_an_array_go_with_its_last_run(sbatch: Sbatch) -> None:
    for _ in range(2):
        done = submit_script.submit(Script(name="train.py"), Slurm(array=("lr=1,2",)), root=Path("runs"))
    links = Path(sbatch.submitted[-1][-1]).parent
    for run, count in zip(reversed(done.runs), (2, 1), strict=True):  # the first has the code of both
        record_end(run, 1)
        remove(run)
        assert len(list(Path("runs").glob(".array-*"))) == count
    assert not links.exists()


def test_whoever_watches_an_array_sees_all_its_runs(
    sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = enqueue._record

    def end(run: Run, ids: JobIds, **facts: Any) -> None:
        write(run, ids, **facts)
        run.job_log.write_text(f"the output of {ids.array_task_id}\n")
        record_end(run, (0, 93, 74)[int(ids.array_task_id or 0)])

    monkeypatch.setattr(enqueue, "_record", end)
    assert main(["submit", "--watch", "--array", "lr=1,2,3", "train.py"]) == 93
    out = capsys.readouterr().out
    assert [f"the output of {index}\n" in out for index in range(3)] == [True] * 3
    assert sbatch.submitted


# ---- starting again


def test_a_run_whose_scheduler_does_not_answer_may_be_in_the_queue(
    sbatch: Sbatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = submit_script.submit(Script(name="train.py"), Slurm(), root=Path("runs")).runs
    record_end(run, 1)
    sbatch.squeue = (1, "", "slurm_load_jobs error: Unable to contact slurm controller")
    assert main(["resume", str(run.path)]) == 2
    said = capsys.readouterr().err
    assert f"{run.id} may be queued or running (" in said and "Unable to contact slurm controller" in said
    with pytest.raises(UsageError, match="may be queued or running"):
        hw.Job.open(run).resume()
    assert len(sbatch.submitted) == 1
    run.write_failure(
        {"kind": "lost", "error": "cn000 is lost"}, overwrite=True
    )  # it was queued again for that
    for code in (75, 143, 1):
        record_end(run, code)
        assert main(["runs", "rm", "--yes", str(run.path)]) == 2 and run.path.exists()
        said = capsys.readouterr().err
        assert f"{run.id} may be in the queue (" in said and f": rm -r {run.path}" in said
        assert main(["runs", "archive", "--yes", str(run.path)]) == 2 and run.path.exists()
        said = capsys.readouterr().err
        assert said.endswith("; try again when the scheduler answers\n") and "rm -r" not in said
    run.failure_file.unlink()
    assert main(["runs", "archive", "--yes", str(run.path)]) == 0, "a job that has failed is not queued again"
    assert not run.path.exists()


def test_a_run_is_not_removed_where_its_scheduler_cannot_be_asked(
    sbatch: Sbatch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without SLURM that shares the file system: the job has stopped, and waits in the queue again."""
    (run,) = submit_script.submit(Script(name="train.py"), Slurm(), root=Path("runs")).runs
    monkeypatch.setattr(sbatch, "run", lambda *_, **__: SlurmAnswer(code=127, err="squeue is not installed"))
    for code in (75, 143):
        record_end(run, code)
        for word in ("rm", "archive"):
            assert main(["runs", word, "--yes", str(run.path)]) == 2 and run.path.exists()
            assert f"{run.id} may be in the queue" in capsys.readouterr().err
    record_end(run, 1)
    assert main(["runs", "rm", "--yes", str(run.path)]) == 0, "a job that has failed is not queued again"


def test_a_start_that_is_refused_leaves_the_last_end_as_it_was(
    sbatch: Sbatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = submit_script.submit(Script(name="train.py"), Slurm(), root=Path("runs")).runs
    run.write_failure({"kind": "exception", "rank": 1, "step": 7, "error": "ValueError: too hot"})
    record_end(run, 1)

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.path.glob("*.*")}

    before = content()
    for answer, code in (
        ((1, "", "sbatch: error: no more jobs for you"), 2),
        ((1, "", "sbatch: error: Unable to contact slurm controller (connect failure)"), 1),
    ):
        sbatch.answer = answer
        assert main(["resume", str(run.path), "--nodes", "2"]) == code
        assert content() == before
    assert hw.Job.open(run).status().why == "rank 1 at step 7: ValueError: too hot"
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.usefixtures("sbatch")
def test_a_damaged_run_is_neither_started_again_nor_removed(capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = submit_script.submit(Script(name="train.py"), Slurm(), root=Path("runs")).runs
    run.info_file.write_text(json.dumps(run.info() | {"created": "yesterday"}))
    for command in (["resume", str(run.path)], ["runs", "rm", "--yes", str(run.path)]):
        assert main(command) == 2
        assert f"{run.path} cannot be read: its files are damaged (" in capsys.readouterr().err


def test_a_run_is_started_again_after_one_question_to_the_scheduler(
    sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = submit_script.submit(Script(name="train.py"), Slurm(), root=Path("runs")).runs
    record_end(run, 1)
    asked: list[object] = []
    monkeypatch.setattr(hw.run.status.schedulers, "queue", lambda jobs: asked.append(list(jobs)) or Queue())
    assert main(["resume", str(run.path)]) == 0
    assert len(sbatch.submitted) == 2 and len(asked) == 2, "before it, and for its new number"
