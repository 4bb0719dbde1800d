"""A rank on another node stands still: rank 0 finds out over the wire, without any agent."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

import pytest

from .bench import Cluster

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "scripts" / "hang.py"
PERIOD = 6.0


def test_a_stopped_rank_of_a_plain_srun_is_named(cluster: Cluster, tmp_path: Path) -> None:
    settings = {
        "HANG": "stop",
        "HANG_RANK": "1",
        "HANG_MARK": str(tmp_path / "mark"),
        "HANG_RUNS": str(tmp_path / "runs"),
        "HEADWAY_WATCHDOG": str(PERIOD),
    }
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    job = cluster.sbatch(
        f"{words} srun --kill-on-bad-exit=1 {sys.executable} {SCRIPT}", "-N3", "--ntasks-per-node=1"
    )
    assert cluster.wait(job) == "FAILED", cluster.output(job)
    report = cluster.output(job)
    assert "no rank has made progress: rank 1 of 3 on " in report, report
    assert "does not respond: stopped, or busy in native code" in report, "its process is on another machine"
    assert "ranks 0, 2 wait for it" in report and "in all_reduce" in report
    (path,) = tmp_path.glob("runs/hang-*/failure.json")
    record = json.loads(path.read_text())
    assert (record["suspects"], record["victims"]) == ([1], [0, 2])
    began = float((tmp_path / "mark").read_text())
    assert datetime.fromisoformat(record["time"]).timestamp() - began <= 2 * PERIOD
