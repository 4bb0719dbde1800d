"""The interface is enough: a run on a scheduler unknown to headway is preempted, requeued, and resumes exactly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm
from waiting import wait_until

import headway as hw
from headway import schedulers
from headway.launcher import submit_script, targets
from headway.launcher.submit_script import Script
from headway.record import ledger
from headway.system.environment import SCHEDULER

FIT = Path(__file__).parents[1] / "scripts" / "fit.py"
sys.path.insert(0, str(Path(__file__).parent))

from process_scheduler import RUNNING, ProcessCluster, ProcessScheduler  # noqa: E402

Result = tuple[dict[int, tuple[str | None, str | None, str]], str]


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty queue, whose jobs find the scheduler as those of a user would: by their import path."""
    directory = tmp_path / "queue"
    directory.mkdir()
    monkeypatch.setenv("PROCESS_QUEUE", str(directory))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("HEADWAY_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    yield directory
    while RUNNING:
        RUNNING.pop().wait(timeout=180)


def result(path: Path) -> Result:
    """What each step saw and did, by the run's ledger, and the last weights."""
    rows = ledger.load(hw.Run.open(path)).last
    return {step: (row.loss, row.samples, row.random) for step, row in rows.items()}, (
        path / "weights.txt"
    ).read_text()


def wait_for(holds: Callable[[], object], job: hw.Job, limit_s: float = 150) -> None:
    wait_until(holds, "the job is so far", timeout_s=limit_s, explain=lambda: f"{job.status()}\n{job.log()}")


@pytest.mark.usefixtures("queue")
def test_a_preempted_run_is_requeued_and_resumes_exactly(tmp_path: Path) -> None:
    local = [sys.executable, "-m", "headway", "run", "--nproc", "2", str(FIT)]
    warm.run(local, cwd=tmp_path, check=True, capture_output=True)
    (alone,) = (tmp_path / "runs").glob("fit-*")

    submitted = submit_script.submit(
        Script(name=str(FIT), args=["0.1"]), ProcessCluster(), root=tmp_path / "submitted"
    )
    (run,) = submitted.runs
    job = hw.Job.open(run.path)
    losses = run.path / "losses.txt"
    wait_for(lambda: losses.exists() and len(losses.read_text().splitlines()) >= 7, job)
    assert job.state() == "running"
    ProcessScheduler().preempt(submitted.ids)
    wait_for(lambda: len(run.info()["attempts"]) == 2, job)
    assert job.wait(timeout=150) == "done", job.log()

    first, second = run.info()["attempts"]
    assert (first["status"], second["status"]) == ("stopped", "done"), job.log()
    assert second["step_started"] >= 7, "it resumed, and did not start from scratch"
    ids = {"job_id": "1", "cluster_name": "this machine", "restart_count": "1"}
    assert (second["scheduler"], second["ids"]) == (ProcessScheduler.name, ids)
    assert "queueing job 1 again (1 of at most 5)" in job.log()
    assert result(run.path) == result(alone)


def test_a_run_whose_job_is_cancelled_says_so(queue: Path, tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import time; print('here', flush=True); time.sleep(100)")
    submitted = submit_script.submit(
        Script(name=str(script)), ProcessCluster(max_requeues=0), root=tmp_path / "runs"
    )
    job = hw.Job.open(submitted.runs[0].path)
    wait_for(lambda: job.log().count("here") == 2, job)
    job.cancel()
    assert job.wait(timeout=180) == "interrupted"
    assert f"to resume: submit {job.run.job_script}" in job.log()
    assert (queue / "1" / "state").read_text() == "failed"


@pytest.mark.usefixtures("queue")
def test_a_target_of_another_scheduler_is_described_by_its_class() -> None:
    target = ProcessCluster(nodes=3, env={"A": "b"})
    assert target.to_dict() == {"kind": "process_scheduler:ProcessCluster", "nodes": 3, "env": {"A": "b"}}
    assert targets.from_dict(target.to_dict()) == target
    assert json.loads(submit_script.dry_run(Script(name=str(FIT)), target, root=Path("runs")))["nodes"] == 3
    environ = {
        "PROCESS_JOB": "4",
        "PROCESS_RESTARTS": "2",
        "PROCESS_END": "9",
        SCHEDULER: ProcessScheduler.name,
    }
    found = schedulers.detect(environ)
    assert found and (found.scheduler, found.start) == (ProcessScheduler.name, "4-2")
    assert schedulers.end_time(environ) == 9
    assert schedulers.variables(environ) == {name: environ[name] for name in environ if name[:3] == "PRO"}
    assert schedulers.describe(found) == "process job 4"
