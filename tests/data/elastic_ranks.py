"""A program for `test_elastic`: some steps of a training loop on N ranks, each a process of its own.

    python elastic_ranks.py SHARDS OUT < jobs.json

A job is {"name", "world_size", "first", "stop", "state"}. Rank R leaves OUT/NAME-R.json: its batches, its last state.
The ranks are forks of one process, which has imported torch once for all of them.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from headway.data import Mix, ShardLoader

CHANGE = 3  # the step before which weights change


def train(shards: Path, job: dict[str, Any], rank: int) -> dict[str, Any]:
    mix = Mix({"a": 3, "b": 2, "c": 1}, shards={name: shards / name for name in "abc"})
    loader = ShardLoader(
        mix, global_batch_size=12, lanes=6, window=5, threads=2, rank=rank, world_size=job["world_size"]
    )
    if job["state"] is not None:
        loader.load_state_dict(job["state"])
    step, batches = job["first"], []
    while step < job["stop"]:
        loader.set_epoch(loader.epoch)  # as loops do; it must not undo the restoring
        for batch in loader:
            batches.append(batch["txt"])
            step += 1
            if step == CHANGE:
                loader.set_weights({"a": 1, "b": 0, "c": 4})
            if step == job["stop"]:
                break
    return {"batches": batches, "state": loader.state_dict()}


def leave(shards: Path, out: Path, job: dict[str, Any], rank: int) -> None:
    (out / f"{job['name']}-{rank}.json").write_text(json.dumps(train(shards, job, rank)))


def main(shards: Path, out: Path) -> int:
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=leave, args=(shards, out, job, rank))
        for job in json.load(sys.stdin)
        for rank in range(job["world_size"])
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return sum(rank.exitcode != 0 for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
