"""What the ranks of a run ask of its directory, which all of them share, at each log point."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headway.run import Run

RANKS, LOG_POINTS = 64, 20

RANK = f"""if True:
    import os, sys
    from headway.run import Run

    run = Run.open(sys.argv[1]).held_as(1)
    ranks = []
    for rank in range({RANKS}):
        if (pid := os.fork()) == 0:
            with run.open_rows(run.metrics_file(rank), content="metric rows") as rows:
                for step in range({LOG_POINTS}):
                    rows.write({{"kind": "train", "step": step}})
            os._exit(0)
        ranks.append(pid)
    assert not any(os.waitpid(pid, 0)[1] for pid in ranks)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_log_point_costs_each_rank_one_lookup_and_one_write(tmp_path: Path) -> None:
    run, log = Run.create(tmp_path / "runs", name="digits"), tmp_path / "calls"
    with run.lock():
        command = [
            "strace",
            "-f",
            "-y",
            "-e",
            "trace=%file,%desc",
            "-o",
            log,
            sys.executable,
            "-c",
            RANK,
            run.path,
        ]
        subprocess.run(command, check=True)
    calls = [line.split(" ", 1)[1].lstrip() for line in log.read_text().splitlines() if str(run.path) in line]
    shared = [call for call in calls if str(run.lock_dir) in call]
    own = [call for call in calls if re.match(r"write\(\d+<.*/metrics/rank-", call)]
    points = RANKS * LOG_POINTS
    print(f"{RANKS} ranks: {len(shared) / LOG_POINTS:g} system calls on lock/ per log point")
    assert len(own) == points
    assert 0 < len(shared) <= points
