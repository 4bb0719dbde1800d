"""Sample-exact resume, real shards and processes: from 4 ranks to 1, 2, 3 and 6, across a change of weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.data import pack

PROGRAM = Path(__file__).with_name("elastic_ranks.py")
STEPS = 11


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    for name, sizes in {"a": [7, 13, 1, 9], "b": [20, 5], "c": [3]}.items():
        for shard, size in enumerate(sizes):
            samples = [{"__key__": f"{n}", "txt": f"{name}{shard}.{n}"} for n in range(size)]
            pack(samples, root / name, name=f"shard{shard}")
    return root


def train(shards: Path, out: Path, jobs: list[dict[str, Any]]) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, shards, out],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def gathered(out: Path, name: str, world_size: int) -> tuple[list[list[str]], dict[str, Any]]:
    """The batches of all ranks put together, step by step, and their state, which is one and the same."""
    ranks = [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(world_size)]
    assert len({json.dumps(rank["state"]) for rank in ranks}) == 1
    steps = zip(*(rank["batches"] for rank in ranks), strict=True)
    return [[text for part in parts for text in part] for parts in steps], ranks[0]["state"]


def test_four_ranks_are_followed_by_1_2_3_and_6(shards: Path, tmp_path: Path) -> None:
    """Stopped before the change of weights, in the batch after it, and in a later epoch."""

    def job(name: str, world_size: int, first: int, stop: int, state: object = None) -> dict[str, Any]:
        return {"name": name, "world_size": world_size, "first": first, "stop": stop, "state": state}

    cuts = [2, 4, 7]
    train(shards, tmp_path, [job("whole", 1, 0, STEPS), *(job(f"until{cut}", 4, 0, cut) for cut in cuts)])
    whole, last = gathered(tmp_path, "whole", 1)
    assert len({text for batch in whole for text in batch if text[0] == "c"}) == 3 and len(whole) == STEPS
    assert not any(text[0] == "b" for batch in whole[3:] for text in batch)
    states = {cut: gathered(tmp_path, f"until{cut}", 4) for cut in cuts}
    later = [
        job(f"from{cut}on{size}", size, cut, STEPS, states[cut][1]) for cut in cuts for size in (1, 2, 3, 6)
    ]
    train(shards, tmp_path, later)
    for cut in cuts:
        assert states[cut][0] == whole[:cut]
        for size in (1, 2, 3, 6):
            assert gathered(tmp_path, f"from{cut}on{size}", size) == (whole[cut:], last), (cut, size)
