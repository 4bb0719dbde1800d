"""What was written before the package was laid out anew still resumes, verifies and lists.

The fixtures and the scripts that made them are in `tests/fixtures/first_house`.
"""

from __future__ import annotations

import json
import math
import runpy
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import warm

from headway import checkpoint
from headway.record import ledger
from headway.run import Run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "first_house"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The directory in which the run was started, with the run in it, stopped after step 10 of 24."""
    identity = json.loads((FIXTURES / "run" / "run.json").read_text())["id"]
    shutil.copytree(FIXTURES / "run", tmp_path / "runs" / identity)
    shutil.copy(FIXTURES / "train.py", tmp_path)
    return tmp_path


def stopped_run(project: Path) -> Run:
    (path,) = (project / "runs").iterdir()
    return Run.open(path)


def headway(*arguments: str | Path, cwd: Path) -> str:
    done = warm.run(
        [sys.executable, "-m", "headway", *map(str, arguments)], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_run_resumes_to_the_weights_of_the_uninterrupted_run(project: Path) -> None:
    headway("run", "--nproc", "2", "train.py", cwd=project)
    run = stopped_run(project)
    assert [attempt["status"] for attempt in run.info()["attempts"]] == ["stopped", "done"]
    weights = json.loads((project / "weights.json").read_text())
    assert weights == json.loads((FIXTURES / "expected" / "weights.json").read_text())
    resumed = ledger.load(run)
    shutil.copy(FIXTURES / "expected" / "ledger.jsonl", run.ledger_file)
    uninterrupted = ledger.load(run)
    assert resumed.orders == uninterrupted.orders and resumed.repeated == 0
    assert [what_happened(row) for row in resumed.rows] == [what_happened(row) for row in uninterrupted.rows]
    assert [row.step for row in resumed.rows] == list(range(1, 25))


def what_happened(row: Any) -> tuple[Any, ...]:
    """A row of the ledger without the number of the attempt."""
    return (row.step, row.stage, row.epoch, row.world_size, row.loss, row.samples, row.random, row.batches)


def test_its_checkpoints_verify_and_show(project: Path) -> None:
    run = stopped_run(project)
    assert run.checkpoint_dir(10).is_dir() and run.checkpoint_dir(8).is_dir()
    for step in (8, 10):
        assert checkpoint.verify(run.checkpoint_dir(step)) == []
        headway("checkpoint", "verify", run.checkpoint_dir(step), cwd=project)
    shown = headway("checkpoint", "show", run.path, cwd=project)
    assert "models.net" in shown and ["20", "tensors", "264"] in [
        line.split()[:3] for line in shown.splitlines()
    ]
    assert checkpoint.find_valid(run) == run.checkpoint_dir(10)


def test_it_is_listed_as_stopped(project: Path) -> None:
    (listed,) = json.loads(headway("runs", "--json", cwd=project))
    assert listed["id"] == stopped_run(project).id and listed["state"] == "stopped"


def test_the_plain_checkpoint_loads_and_verifies(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "plain", tmp_path / "plain")
    path = tmp_path / "plain" / "step-000000000004"
    assert checkpoint.verify(path) == []
    headway("checkpoint", "verify", path, cwd=tmp_path)
    net = torch.nn.Linear(3, 2)
    loaded = checkpoint.load_latest(tmp_path / "plain", {"net": net.state_dict(), "values": {}, "types": {}})
    assert loaded is not None and loaded.path == path
    assert (loaded.step, loaded.world_size, dict(loaded.metrics)) == (4, 1, {"val/loss": 0.25})
    assert loaded.local == {"random": [1, 2, 3]}
    weights = {name: [value.hex() for value in w.flatten().tolist()] for name, w in net.state_dict().items()}
    assert weights == json.loads((FIXTURES / "plain.json").read_text())["weights"]
    assert loaded.state["values"] == {
        "tuple": (1, None, True),
        "by number": {3: "three"},
        "inf": math.inf,
        "hits": Counter(a=2),
    }
    types = loaded.state["types"]
    assert types["bf16"].dtype == torch.bfloat16 and types["bf16"].tolist() == [1.5, -2.0]
    assert types["none"].shape == (0, 4)


def test_the_loader_in_the_plain_checkpoint_gives_the_samples_that_came_next(tmp_path: Path) -> None:
    """Shards with their indexes, and the position in them, were written before, too."""
    script = runpy.run_path(str(FIXTURES / "plain.py"), run_name="plain")
    shutil.copytree(FIXTURES / "shards", tmp_path / "shards")
    loader = script["make_loader"](tmp_path / "shards")
    loaded = checkpoint.load(FIXTURES / "plain" / "step-000000000004", {"loader": {}, "sgd": {}})
    loader.load_state_dict(loaded.state["loader"])
    keys = script["keys"]
    assert keys(loader) + keys(loader) == json.loads((FIXTURES / "plain.json").read_text())["next_keys"]
    assert set(loaded.state["sgd"]) == {"state", "param_groups"}
    assert loaded.state["sgd"]["state"][0]["momentum_buffer"].shape == (2, 3)
