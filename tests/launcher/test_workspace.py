"""Relative paths of a job: what was copied comes from the copy, what was not leads to where it was submitted from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.launcher.conftest import git

from headway.launcher import submit_script
from headway.launcher.code import snapshot, workspace
from headway.launcher.fork import fork
from headway.launcher.submit_script import Script
from headway.run import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "schedulers"))

import process_scheduler

SCRIPT = """
import json, os, subprocess, sys
from pathlib import Path
import model
import torch

said = {
    "size": model.size,
    "lr": open("config.yaml").read(),
    "nested": open("configs/a.yaml").read(),
    "data": open("data/x").read(),
    "beside": __spec__ is None and Path(__file__).with_name("data").joinpath("x").read_text(),
    "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
    "diff": subprocess.check_output(["git", "diff", "--stat", "HEAD"], text=True),
    "path": [os.path.realpath(entry) for entry in sys.path],
}
try:
    import ignored_package
except ImportError:
    said["ignored"] = "not found"
torch.save(torch.ones(1), "model.pt")
os.makedirs("out", exist_ok=True)
Path("out/said.json").write_text(json.dumps(said))
"""


@pytest.fixture
def started(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with data that git ignores, and a queue."""
    (tmp_path / "queue").mkdir()
    monkeypatch.setenv("PROCESS_QUEUE", str(tmp_path / "queue"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "schedulers"))
    (project / "train.py").write_text(SCRIPT)
    (project / "config.yaml").write_text("submitted")
    (project / "configs").mkdir()
    (project / "configs" / "a.yaml").write_text("submitted")
    (project / ".gitignore").write_text("data/\nout/\nignored_package/\n*.pt\nruns/\n")
    for name in ("data", "ignored_package"):
        (project / name).mkdir()
    (project / "data" / "x").write_text("before")
    (project / "ignored_package" / "__init__.py").write_text("")
    git(project, "add", ".")
    git(project, "commit", "-qm", "second")
    (project / "model.py").write_text("size = 2\n")  # not committed
    return project


def run_job(script: Script, project: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Submits a script, edits the project, and only then lets the job start."""
    waiting: list[list[str]] = []
    with monkeypatch.context() as patch:
        held = SimpleNamespace(Popen=lambda command, **_: waiting.append(command), DEVNULL=None)
        patch.setattr(process_scheduler, "subprocess", held)
        done = submit_script.submit(script, process_scheduler.ProcessCluster(nodes=2), root=project / "runs")
    for name in ("model.py", "config.yaml", "configs/a.yaml", "train.py"):
        (project / name).write_text("size = 'edited'")
    (project / "data" / "x").write_text("at the start")
    subprocess.run(waiting[0], check=True, timeout=60)
    return done.runs[0]


@pytest.mark.parametrize("module", [False, True])
def test_a_plain_script_finds_its_code_and_its_data(
    module: bool, started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_job(Script(name="train" if module else "train.py", module=module), started, monkeypatch)
    log = run.job_log.read_text()
    assert (run.work_dir / "out" / "said.json").exists(), log
    said = json.loads((run.work_dir / "out" / "said.json").read_text())
    path = said.pop("path")
    assert "1 file changed" in said.pop("diff")
    assert said == {
        "size": 2,
        "lr": "submitted",
        "nested": "submitted",
        "data": "at the start",
        "beside": not module and "at the start",
        "commit": git(started, "rev-parse", "HEAD"),
        "ignored": "not found",
    }
    assert path[0] == str(run.snapshot_dir) and str(started) not in path and str(run.work_dir) not in path
    assert (run.work_dir / "model.pt").is_file() and not (run.work_dir / "model.pt").is_symlink()
    assert not (started / "model.pt").exists() and not (run.snapshot_dir / "model.pt").exists()


def test_results_and_new_data_at_the_next_start(started: Path) -> None:
    run = Run.create(started / "runs", name="digits")
    snapshot.take(run, "train.py")
    workspace.prepare(run)
    (run.work_dir / "model.pt").write_text("from this job")
    (run.work_dir / "configs" / "new.yaml").write_text("from this job")
    (started / "model.pt").write_text("from another")
    (started / "more").mkdir()
    workspace.prepare(run)
    assert (run.work_dir / "model.pt").read_text() == "from this job"
    assert (run.work_dir / "more").readlink() == started / "more"
    assert not (run.work_dir / "runs").exists(), "a search for files would never end"
    assert not (run.snapshot_dir / "configs" / "new.yaml").exists()


def test_each_run_of_a_sweep_writes_in_its_own_directory(started: Path) -> None:
    runs = [Run.create(started / "runs", name="digits") for _ in range(2)]
    snapshot.take(runs[0], "train.py")
    snapshot.adopt(runs[1], runs[0])
    for run in runs:
        workspace.prepare(run)
        (run.work_dir / "model.pt").write_text(run.id)
    assert [(run.work_dir / "model.pt").read_text() for run in runs] == [run.id for run in runs]
    assert (runs[1].work_dir / "train.py").resolve() == runs[0].snapshot_dir / "train.py"


def test_a_fork_starts_in_a_directory_of_its_own(started: Path) -> None:
    run = Run.create(started / "runs", name="digits", command=["train.py"])
    snapshot.take(run, "train.py")
    run.checkpoint_dir(5).mkdir()
    program = submit_script.make_program(run, Script(name="train.py", args=["--out", str(run.work_dir)]), {})
    made, own = fork(run, program)
    assert own.cwd == str(made.work_dir) and own.python_path == program.python_path
    assert own.command[1:] == [str(made.work_dir / "train.py"), "--out", str(run.work_dir)]


def test_modules_beside_the_directory_of_the_script_are_recorded(started: Path) -> None:
    (started / "jobs").mkdir()
    (started / "jobs" / "fit.py").write_text(
        "import sys; sys.path.append(sys.path[0] + '/..'); import model\n"
        "from headway.record import sources; print(*sorted(sources.collect()))\n"
    )
    run = Run.create(started / "runs", name="digits")
    snapshot.take(run, "jobs/fit.py")
    workspace.prepare(run)
    program = submit_script.make_program(run, Script(name="jobs/fit.py"), {})
    said = subprocess.run(program.command, cwd=program.cwd, check=True, capture_output=True, text=True)
    assert said.stdout.split() == ["fit.py", "model.py"]


def test_a_directory_below_and_links(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (started / "jobs").mkdir()
    (started / "jobs" / "fit.py").write_text("")
    (started / "jobs" / "newest").symlink_to("../out/newest")
    (started / "out" / "newest").mkdir(parents=True)
    (started / "out" / "newest" / "x").write_text("found")
    git(started, "add", ".")
    monkeypatch.chdir(started / "jobs")
    run = Run.create(started / "runs", name="digits")
    snapshot.take(run, "fit.py")
    workspace.prepare(run)
    start = snapshot.load(run).start
    assert start == run.work_dir / "jobs"
    assert (start / "../data/x").read_text() == "before" and (start / "newest" / "x").read_text() == "found"


def test_a_directory_with_very_many_files_is_linked_as_a_whole(
    started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (started / "data" / "README").write_text("about the data")
    git(started, "add", "-f", "data/README")
    monkeypatch.setattr(workspace, "_MAX_LINKS", 0)
    run = Run.create(started / "runs", name="digits")
    snapshot.take(run, "train.py")
    workspace.prepare(run)
    assert (run.work_dir / "data").readlink() == started / "data"
    assert (run.work_dir / "config.yaml").readlink() == run.snapshot_dir / "config.yaml"


def test_an_origin_that_is_gone_leaves_the_copy(started: Path) -> None:
    run = Run.create(started.parent / "runs", name="digits")
    snapshot.take(run, "train.py")
    os.chdir("/")
    shutil.rmtree(started)
    workspace.prepare(run)
    assert sorted(path.name for path in run.work_dir.iterdir()) == [
        ".git",
        ".gitignore",
        "config.yaml",
        "configs",
        "model.py",
        "train.py",
    ]
