"""What scripts register: equal on all ranks, or one of each rank, whose state only that rank gets back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from toys import Batches, Classify, make_net, sgd

import headway as hw
from headway.errors import UsageError
from headway.testing import ranks
from headway.train import Pipeline

SCRIPT = Path(__file__).with_name("keeps_ranks.py")


class Kept:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def make(folder: Path) -> Pipeline:
    pipe = Pipeline(name="toy", root=folder)
    pipe.register_model("net", make_net())
    pipe.register_optimizer("sgd", sgd, model="net")
    pipe.register_dataset("train", Batches(4))
    pipe.append_stage(Classify(), max_epochs=1)
    pipe.enable_checkpointing(every=2, background=False)
    return pipe


@ranks(2)
@pytest.mark.parametrize("kind", ["tensor", "value", "order"])
def test_a_state_that_differs_between_ranks_is_refused(kind: str, tmp_path: Path) -> None:
    state = {
        "tensor": torch.tensor([0.0, float(hw.rank())]),
        "value": hw.rank(),
        "order": torch.tensor([1.0, 2.0]).roll(hw.rank()),
    }[kind]
    pipe = make(tmp_path)
    pipe.register_state("kept", Kept(state))
    with pytest.raises(
        UsageError,
        match=r"'kept' is not the same on rank 0 and rank 1: make it equal .*pipe.register_rank_state",
    ):
        pipe.run()


@ranks(2)
def test_equal_states_are_saved(tmp_path: Path) -> None:
    pipe = make(tmp_path)
    pipe.register_state("kept", Kept({"a": torch.arange(3), "b": (1, torch.ones(2).to_sparse().to_dense())}))
    pipe.run()
    loaded = hw.checkpoint.load_latest(pipe.directory)
    assert loaded is not None
    assert torch.equal(loaded.state["registered"]["kept"]["state"]["a"], torch.arange(3))


def start(folder: Path, nproc: int, *words: str, fault: str = "") -> tuple[int, dict[str, str], str]:
    """Trains on so many ranks; returns the exit code, the losses by rank and step, and what was printed."""
    for old in folder.glob("losses-*"):
        old.unlink()
    done = warm.run(
        [sys.executable, "-m", "headway", "run", "--nproc", str(nproc), str(SCRIPT), str(folder), *words],
        env={**os.environ, "HEADWAY_WATCHDOG": "60"} | ({"HEADWAY_FAILPOINT": fault} if fault else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        cwd=folder,
    )
    text = "".join(file.read_text() for file in folder.glob("losses-*"))
    return done.returncode, dict(re.findall(r"(rank \d step \d+) (\S+)", text)), done.stdout


def test_each_rank_keeps_its_own_state(tmp_path: Path) -> None:
    """Resumed on the same ranks, exactly; on another number, refused, unless the object merges the states."""
    for name in ("whole", "killed", "merged"):
        (tmp_path / name).mkdir()
    code, truth, text = start(tmp_path / "whole", 2)
    assert code == 0, text
    assert truth["rank 0 step 3"] != truth["rank 1 step 3"]
    code, _, _ = start(tmp_path / "killed", 2, fault="train.step:nth=3:kill9")
    assert code != 0
    code, _, text = start(tmp_path / "killed", 1)
    assert code == 2, text
    assert "each of 2 ranks has saved its own state walker, and there are 1 ranks now: resume on 2" in text
    code, resumed, text = start(tmp_path / "killed", 2)
    assert code == 0, text
    assert min(resumed) == "rank 0 step 3"
    assert resumed == {key: truth[key] for key in resumed}

    assert start(tmp_path / "merged", 2, "merges", fault="train.step:nth=3:kill9")[0] != 0
    code, merged, text = start(tmp_path / "merged", 1, "merges")
    assert code == 0, text
    assert {"rank 0 step 3", "rank 0 step 6"} <= set(merged)
