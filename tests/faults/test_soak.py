"""A save costs the same after any number of saves: bytes, system calls and memory. Time is printed and not asserted."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.run import Run
from headway.system import jsonlines

SCRIPT = Path(__file__).parents[1] / "scripts" / "saves.py"
FULL = os.environ.get("HEADWAY_FAULTS") == "full"
STEPS, SAVES = (100_000, 1000) if FULL else (800, 40)
WINDOW = 10  # saves: an epoch


def calls_on(run: Run, log: Path) -> dict[str, int]:
    """The system calls on files of the run until each mark, but for those of the lock, which has a heartbeat."""
    found, calls = {}, 0
    with log.open(errors="replace") as lines:
        for line in lines:
            if mark := re.search(r'"/mark/(\d+)"', line):
                found[mark[1]] = calls
            calls += str(run.path) in line and f"{run.path}/lock" not in line
    return found


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.timeout(3600)
def test_the_last_saves_cost_what_the_first_ones_did(tmp_path: Path) -> None:
    tracer = [
        "strace",
        "-f",
        "-y",
        "-s",
        "9",
        "--seccomp-bpf",
        "-e",
        "trace=%file,%desc",
        "-o",
        tmp_path / "calls",
    ]
    command = [*tracer, sys.executable, SCRIPT, tmp_path, str(STEPS), str(SAVES)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    run, marks = Run.open(found["run"]), found["marks"]
    sizes = {
        row["step"] // found["every"]: row["bytes"]
        for row in jsonlines.read(run.metrics_file(0))
        if row["kind"] == "checkpoint"
    }
    assert len(sizes) >= SAVES
    calls = calls_on(run, tmp_path / "calls")
    costs = []
    for begin, end in ((marks[0], marks[1]), (marks[2], marks[3])):
        costs.append(
            {
                "bytes": sum(sizes[save] for save in range(begin["save"], end["save"])) / WINDOW,
                "calls": (calls[str(end["save"])] - calls[str(begin["save"])]) / WINDOW,
                "memory": end["memory"],
                "ms": 1000 * (end["time"] - begin["time"]) / WINDOW,
            }
        )
        print(f"saves {begin['save']} to {end['save']}:", costs[-1])
    early, late = costs
    assert early["calls"] > 10, "the tracer sees the saves"
    for what in ("bytes", "calls", "memory"):
        assert late[what] <= 1.05 * early[what], what
