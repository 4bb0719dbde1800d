"""Diagnostics: the facts are there, whatever the machine lacks, and no secret is among them."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from headway.dist import World
from headway.dist.topology import nvml
from headway.errors import StorageError
from headway.record import collect, diagnostics
from headway.run import Run

WORLD = World(
    rank=0,
    world_size=8,
    local_rank=0,
    local_world_size=4,
    node_rank=0,
    nodes=2,
    host="cn-l084",
    launcher="srun",
    device=torch.device("cpu"),
)


def test_the_facts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("CONDA_PREFIX", "/opt/conda/envs/train")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)  # another test may have imported it
    facts = collect(WORLD, run)
    assert facts["host"] == socket.gethostname()
    assert facts["pid"] == os.getpid()
    assert facts["cwd"] == str(Path.cwd())
    assert facts["argv"] == sys.orig_argv
    assert facts["run"] == str(run.path)
    assert facts["world"]["world_size"] == 8 and facts["world"]["device"] == "cpu"
    assert facts["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["python"]["conda"] == "/opt/conda/envs/train"
    assert facts["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert "numpy" in facts["packages"] and "wandb" not in facts["packages"]
    assert facts["machine"]["memory"] == psutil.virtual_memory().total
    assert 1 <= facts["machine"]["cpus_allowed"] <= facts["machine"]["cpus"]
    assert facts["slurm"] == {"SLURM_JOB_ID": "4711"}
    assert facts["environment"]["NCCL_DEBUG"] == "WARN"
    assert len(facts["gpus"]) == len(nvml.read_gpus())
    assert (facts["driver"] is None) == (nvml.read_driver() is None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpus(run: Run) -> None:
    facts = collect(replace(WORLD, device=torch.device("cuda:0")), run)
    assert facts["device"] == torch.cuda.get_device_name(0)
    assert facts["device"] in [gpu["name"] for gpu in facts["gpus"]]
    assert facts["driver"]["version"] and facts["torch"]["cuda"]


def test_without_world_and_run() -> None:
    facts = collect()
    assert facts["world"] is facts["run"] is facts["device"] is None


def test_one_line_per_attempt(run: Run) -> None:
    for attempt in (1, 2):
        diagnostics.write(run, {"attempt": attempt, **collect(WORLD, run)})
    rows = [json.loads(line) for line in run.diagnostics_file.read_text().splitlines()]
    assert [row["attempt"] for row in rows] == [1, 2]
    assert run.diagnostics_file.stat().st_mode & 0o777 == 0o600


def test_a_disk_that_fails_is_named(run: Run) -> None:
    run.diagnostics_file.mkdir()
    with pytest.raises(StorageError, match=r"diagnostics\.jsonl"):
        diagnostics.write(run, {})


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2_000_000_123)
    assert collect()["user"] == "2000000123"


def test_no_secret_is_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-in-the-environment")
    monkeypatch.setenv("SLURM_JWT", "canary-of-slurm")
    monkeypatch.setenv("NCCL_FOO", "http://me:canary-in-a-url@proxy")
    monkeypatch.setenv("MY_OWN_VARIABLE", "canary-not-on-the-list")
    arguments = [
        "--api-key",
        "canary-in-argv",
        "--url=https://me:canary-in-argv-url@host",
        "canary-in-the-environment",
    ]
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", *arguments])
    facts = collect(replace(WORLD, host="canary-in-the-environment"), run)
    assert "canary" not in json.dumps(facts)
    diagnostics.write(run, {"attempt": 1, **facts, "note": "canary-in-the-environment"})
    assert run.diagnostics_file.read_text().count("canary") == 0
    assert "[redacted]" in run.diagnostics_file.read_text(), "the arguments themselves are there"
