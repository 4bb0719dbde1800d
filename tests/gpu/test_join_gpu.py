"""Joining with NCCL. One GPU is enough: ranks that seem to be on different hosts may share it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPTS = Path(__file__).parents[1] / "scripts"
RUN = [sys.executable, "-m", "headway", "run"]
# each rank says that it is a host of its own, and NCCL talks over sockets
SHARE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
PRELUDE = """
import os, runpy, sys
os.environ["NCCL_HOSTID"] = "host" + os.environ["RANK"]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
BOTH = """
import torch, torch.distributed, headway as hw
world = hw.init()
assert world.device == torch.device("cuda:0"), world
for where in ("cpu", world.device):
    ones = torch.ones(2, device=where)
    torch.distributed.all_reduce(ones)
    print(ones.sum().item())
"""


def run(nproc: int, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, "--nproc", str(nproc), *command],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_both_kinds_of_tensors_are_reduced(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(BOTH)
    done = run(1, str(tmp_path / "both.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["2.0", "2.0"]


def test_two_ranks_on_one_gpu_are_told() -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("there is a GPU for each")
    done = run(2, str(SCRIPTS / "fail.py"), "--cuda", FAIL="never")
    assert done.returncode == 2, done.stderr
    assert "ranks 0 and 1 on" in done.stderr
    assert "have the same GPU (cuda:0); start at most one rank per GPU" in done.stderr


@pytest.mark.parametrize("how", ["raise", "kill9", "exit0"])
def test_peers_stuck_in_nccl_are_down_at_once(how: str, tmp_path: Path) -> None:
    (tmp_path / "prelude.py").write_text(PRELUDE)
    done = run(
        3, str(tmp_path / "prelude.py"), str(SCRIPTS / "fail.py"), "--cuda", FAIL=how, FAIL_RANK="1", **SHARE
    )
    assert done.returncode == 1, done.stderr
    last = done.stderr[done.stderr.rindex("headway: ") :]
    assert "rank 1 of 3" in last
    assert ("ValueError: the third step is cursed" in last) == (how == "raise")
