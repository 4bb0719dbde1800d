"""`hw.launch` on a real cluster: results, exceptions and states come back through the run directory."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_until

import headway as hw
from headway.cli import main
from headway.errors import HeadwayError, UsageError
from headway.watch.runs import summarize

from .bench import Cluster

pytestmark = pytest.mark.cluster

_ARRAY = 16 if os.environ.get("HEADWAY_FAULTS") == "full" else 4
"""jobs of the array, each of which starts a process with torch; together they have all 16 CPUs"""

WORK = """
import socket, time
import headway as hw
import helper

def total(word):
    import torch
    value = torch.tensor([hw.rank() + 1.0])
    torch.distributed.all_reduce(value)
    return hw.rank(), value.item(), socket.gethostname(), word, helper.version

def fails():
    if hw.rank() == 1:
        raise LookupError("no such thing")
    hw.barrier()

def reads():
    import os, pathlib
    return os.environ["HEADWAY_STAGED"], pathlib.Path(os.environ["HEADWAY_STAGED"], "set", "x").read_text()

def sleeps():
    time.sleep(300)

def left(errors_s):
    from headway import schedulers
    found, real = [], time.time
    for error_s in errors_s:
        time.time = lambda: real() + error_s
        found.append(schedulers.end_time() - time.time())
    return found

class TooHot(ValueError):
    def __init__(self, degrees, *, where):
        super().__init__(f"{degrees} degrees in {where}")
        self.degrees, self.where = degrees, where

def gated(directory, number, *, fails=False):
    with open(directory / f"starts-{number}", "a") as file:
        file.write("start\\n")
    while not (directory / str(number)).exists():
        time.sleep(0.05)
    if fails:
        raise TooHot(451, where=("engine", number))
    return number
"""


@pytest.fixture
def work(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "cluster_work.py").write_text(WORK)
    (tmp_path / "helper.py").write_text("version = 'submitted'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import cluster_work  # type: ignore[import-not-found]

    yield cluster_work
    for name in ("cluster_work", "helper"):
        sys.modules.pop(name)


def test_launch(work: Any, tmp_path: Path) -> None:
    job = hw.launch(work.total, "a 'word'", on=hw.Slurm(nodes=2, ntasks_per_node=2, partition="low"))
    (tmp_path / "helper.py").write_text("version = 'edited later'\n")
    assert job.state() in ("queued", "running")
    results = job.results()
    assert [result[:2] for result in results] == [(rank, 10.0) for rank in range(4)]
    assert len({result[2] for result in results}) == 2, "two hosts"
    assert {result[3:] for result in results} == {("a 'word'", "submitted")}
    assert hw.Job.open(job.run.path).state() == "done"
    assert "launched by" in job.log()


def test_an_exception_comes_back_from_another_node(work: Any) -> None:
    bad = hw.launch(work.fails, on=hw.Slurm(nodes=2, partition="low"))
    with pytest.raises(LookupError, match="no such thing") as caught:
        bad.result()
    assert "on rank 1" in str(caught.value.__cause__)
    assert bad.state() == "failed" and "LookupError" in bad.status().why


def test_waiting_in_the_queue_and_taken_back(
    work: Any, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.wait(cluster.sbatch("sleep 100", "-N4", "--exclusive"), "RUNNING")
    job = hw.launch(work.sleeps, on=hw.Slurm(nodes=4, partition="low", exclusive=True))
    while not (now := job.status()).why:  # the scheduler takes a moment to know the reason
        assert now.state == "queued"
        time.sleep(0.2)
    assert now.why in ("Resources", "Priority")
    assert main(["runs", "--state", "queued"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[:2] == [job.id, "queued"] and shown[2].strip() == now.why
    job.cancel()
    assert job.wait(timeout=180) == "cancelled"
    with pytest.raises(HeadwayError, match="was cancelled; there is no result"):
        job.result()


def test_data_is_staged_once_per_node_before_the_ranks_start(work: Any, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "x").write_text("data")
    target = hw.Slurm(
        nodes=2,
        partition="low",
        pre=[str(tmp_path / "set")],
        pre_to=f"{tmp_path}/disk-of-$SLURMD_NODENAME",
    )
    results = hw.launch(work.reads, on=target).results()
    assert [result[1] for result in results] == ["data"] * 2
    assert {result[0] for result in results} == {str(path) for path in tmp_path.glob("disk-of-n*")}
    assert len(list(tmp_path.glob("disk-of-n*"))) == 2


def prologue_on(node: int, run: Path) -> psutil.Process | None:
    """The process that prepares a node of a run's job, once it has shown life."""
    for process in psutil.process_iter() if [*run.glob(f"launch/*/prologue-{node:05d}.json")] else ():
        with suppress(psutil.Error):  # it ends this moment
            command = process.cmdline()
            is_prologue = "headway.launcher.prologue" in command and str(run) in command[-1]
            if is_prologue and process.environ().get("SLURM_NODEID") == str(node):
                return process
    return None


@pytest.mark.skipif(os.environ.get("HEADWAY_FAULTS") != "full", reason="needs HEADWAY_FAULTS=full")
def test_a_node_that_is_stopped_while_it_copies_is_lost_and_the_job_starts_again(
    work: Any, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "set").mkdir()
    for number in range(3000):  # each is synced to the disk, so that copying takes a while
        (tmp_path / "set" / str(number)).write_text(str(number))
    (tmp_path / "set" / "x").write_text("data")
    disk = f"{tmp_path}/disk-of-$SLURMD_NODENAME"
    job = hw.launch(
        work.reads, on=hw.Slurm(nodes=2, partition="low", pre=[str(tmp_path / "set")], pre_to=disk)
    )
    process = wait_until(partial(prologue_on, 1, job.run.path), "the second node copies", interval_s=0.01)
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "its process is stopped")
    assert len(list(tmp_path.glob("disk-of-*/set/*"))) < 6000, "it had copied everything"
    number = int(summarize([job.run])[0].job or 0)
    wait_until(
        lambda: cluster.restarts(number) == 1, "the job is queued again", timeout_s=300, explain=job.log
    )
    assert not process.is_running()
    assert [result[1] for result in job.results()] == ["data"] * 2
    assert "is lost: it was silent while the nodes were prepared for the ranks" in job.log()


def test_data_that_cannot_be_staged(work: Any, tmp_path: Path) -> None:
    target = hw.Slurm(partition="low", pre=[str(tmp_path / "no")], pre_to=str(tmp_path / "t"))
    with pytest.raises(UsageError, match="there is nothing to copy at"):
        hw.launch(work.reads, on=target)
    (tmp_path / "no").mkdir()
    nowhere = hw.launch(work.reads, on=target)
    (tmp_path / "no").rmdir()  # after it was submitted
    unset = hw.launch(
        work.reads, on=hw.Slurm(partition="low", pre=[str(tmp_path)], pre_to="/scratch/$NOT_SET_HERE")
    )
    assert nowhere.wait() == unset.wait() == "failed"
    assert f"headway: there is nothing to stage at {tmp_path / 'no'}" in nowhere.log()
    assert "not all of these variables are set on n" in unset.log() and "NOT_SET_HERE" in unset.status().why


@pytest.mark.skipif(os.environ.get("HEADWAY_FAULTS") != "full", reason="needs HEADWAY_FAULTS=full")
def test_a_job_on_a_node_with_a_wrong_clock_knows_its_end(work: Any) -> None:
    """The controller's clock is the real one; only the node's is imitated."""
    job = hw.launch(work.left, [0, 3600, -3600], on=hw.Slurm(partition="low", time="0:20:00"))
    assert all(900 < left <= 1200 + 30 for left in job.result()), job.result()
    assert job.log().count("the clock of this node is") == 2


@pytest.mark.timeout(400)
def test_an_array_of_which_one_fails_and_one_is_preempted(
    work: Any, cluster: Cluster, tmp_path: Path
) -> None:
    """The jobs end one by one, as the test lets them, and come in that order.

    A job of higher priority wants a whole node: those that run there are preempted, and no other. Four jobs have a node
    each; sixteen share the nodes.
    """
    failing = _ARRAY - 2
    target = hw.Slurm(partition="low", cpus_per_task=16 // _ARRAY)
    elements = [{"number": number, "fails": number == failing} for number in range(_ARRAY)]
    jobs = hw.launch(work.gated, tmp_path, array=elements, on=target)
    rows = summarize([job.run for job in jobs])
    array, _, _ = (rows[0].job or "").partition("_")
    assert [row.job for row in rows] == [f"{array}_{number}" for number in range(_ARRAY)], "one array"

    def starts(number: int) -> int:
        file = tmp_path / f"starts-{number}"
        return len(file.read_text().splitlines()) if file.exists() else 0

    everyone = range(_ARRAY)
    wait_until(lambda: all(map(starts, everyone)), "all jobs run", timeout_s=200)
    listed = cluster.run(["squeue", "-h", "-r", "-j", array, "-o", "%K %N"], check=True).stdout.split()
    preempted = sorted(
        int(number) for number, node in zip(listed[::2], listed[1::2], strict=True) if node == "n1"
    )
    assert len(preempted) == _ARRAY // 4
    high = cluster.sbatch("hostname", "-N1", "--exclusive", "-w", "n1", "-p", "high")
    assert cluster.wait(high, timeout=100) == "COMPLETED"
    wait_until(lambda: all(starts(each) == 2 for each in preempted), "they run again", timeout_s=100)
    order = [*reversed(everyone)]
    (tmp_path / str(order[0])).touch()
    ends = []
    for job in hw.as_completed(jobs, timeout=200):
        ends.append(jobs.index(job))
        if len(ends) < _ARRAY:
            (tmp_path / str(order[len(ends)])).touch()
    assert ends == order
    assert [starts(number) for number in everyone] == [1 + (number in preempted) for number in everyone]
    assert [job.result() for job in jobs if job.state() == "done"] == [n for n in everyone if n != failing]
    error = jobs[failing].exception()
    assert type(error) is work.TooHot and (error.degrees, error.where) == (451, ("engine", failing))
    assert "raise TooHot(451" in str(error.__cause__)


def test_a_failed_job_is_submitted_again_on_more_nodes(
    work: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work  # a project, and the cluster's variables
    flag = tmp_path / "second"
    (tmp_path / "train.py").write_text(
        f"import os, sys\nprint('ranks', os.environ['WORLD_SIZE'])\nsys.exit(not os.path.exists({str(flag)!r}))\n"
    )
    assert main(["submit", "--partition", "low", "train.py"]) == 0
    (path,) = (tmp_path / "runs").glob("train-*")
    job = hw.Job.open(path)
    assert job.wait(timeout=180) == "failed" and job.status().why
    first = summarize([job.run])[0].job
    flag.touch()
    assert main(["resume", job.id[-4:], "--nodes", "2"]) == 0
    second = summarize([job.run])[0].job
    assert f"job {second} in {path}" in capsys.readouterr().out and second != first
    assert json.loads(job.run.submission_file.read_text())["before"] == [first]
    assert job.wait(timeout=180) == "done"
    assert "ranks 1\n" in job.log() and job.log().count("ranks 2\n") == 2
    assert main(["resume", job.id]) == 2 and "is done" in capsys.readouterr().err
