"""SLURM's stop signal and the workers of a rank: with linuxproc every process gets it, with cgroup only the rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from waiting import wait_until

from .bench import Cluster

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "scripts" / "workers.py"


def send_usr1(cluster: Cluster, folder: Path, *options: str) -> tuple[str, str]:
    """Runs the script as a job step, signals the step, and returns the job's state and output."""
    ready = folder / "ready"
    job = cluster.sbatch(f"srun -n1 {sys.executable} {SCRIPT} {ready} {' '.join(options)}", "-n1")
    wait_until(ready.exists, "the script is ready", explain=lambda: cluster.output(job))
    cluster.cancel(job, "--signal=USR1")
    return cluster.wait(job), cluster.output(job)


def test_the_rank_hears_it_and_its_workers_do_not(any_cluster: Cluster, tmp_path: Path) -> None:
    state, output = send_usr1(any_cluster, tmp_path)
    assert state == "COMPLETED", output
    assert "heard 1, went on with 3 kinds of workers" in output


def test_without_the_shield_the_workers_die(cluster: Cluster, tmp_path: Path) -> None:
    """What the two functions are for: this is how it goes without them."""
    state, output = send_usr1(cluster, tmp_path, "--bare")
    assert state == "FAILED"
    assert "DataLoader worker" in output
