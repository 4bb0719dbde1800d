"""`hw.launch` on a real cluster: results, exceptions and states come back through the run directory."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.cli import main
from headway.errors import HeadwayError

from .bench import Cluster

pytestmark = pytest.mark.cluster

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
    assert job.wait(timeout=60) == "cancelled"
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


def test_data_that_cannot_be_staged(work: Any, tmp_path: Path) -> None:
    nowhere = hw.launch(
        work.reads, on=hw.Slurm(partition="low", pre=[str(tmp_path / "no")], pre_to=str(tmp_path / "t"))
    )
    unset = hw.launch(
        work.reads, on=hw.Slurm(partition="low", pre=[str(tmp_path)], pre_to="/scratch/$NOT_SET_HERE")
    )
    assert nowhere.wait() == unset.wait() == "failed"
    assert f"headway: there is nothing to stage at {tmp_path / 'no'}" in nowhere.log()
    assert "not all of these variables are set on n" in unset.log() and "NOT_SET_HERE" in unset.status().why
