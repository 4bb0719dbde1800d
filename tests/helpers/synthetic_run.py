"""Run directories of any size without a run: as many ranks and steps as are asked for."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.run import Run


def row(step: int, rank: int, now: float, *, slow: float = 1.0, host: str = "cn000") -> dict[str, Any]:
    """A row of a log point, as a rank writes it."""
    metrics = {"train/loss": 1 + 2 * math.exp(-step / 1e4), "train/grad_norm": 1.5} if rank == 0 else {}
    return {
        "kind": "train",
        "time": now,
        "stage": "fit",
        "epoch": step // 1000,
        "step": step,
        "metrics": metrics,
        "rank_metrics": {},
        "host": host,
        "seconds": {"data": 0.2 * slow, "compute": 0.7, "optimizer": 0.08, "wait": 0.02},
        "samples_per_second": 4096.0,
        "busy_seconds": 0.5 * slow,
        "data": {"train": {"samples": 64 * step, "bad": 3, "cache/hit": 9, "cache/copied": 1}},
    }


def make_run(
    root: Path,
    *,
    ranks: int = 2,
    log_points: int = 20,
    every: int = 10,
    slow_rank: int | None = None,
    waited_s: float = 0,
) -> Run:
    """Makes a run that trains on `ranks` ranks and has written `log_points` rows, the last one just now.

    It began `waited_s` seconds earlier than that takes.
    """
    run = Run.create(root, name="synthetic", config={"lr": 0.1, "model": {"depth": 12}})
    nodes = math.ceil(ranks / 8)
    run.begin_attempt(world={"world_size": ranks, "nodes": nodes, "device": "cuda"})
    info = json.loads(run.info_file.read_text())
    begin = time.time() - log_points
    started = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(begin - 5 - waited_s))
    info["attempts"][-1]["started"] = started
    run.info_file.write_text(json.dumps(info))
    for rank in range(ranks):
        points = log_points if rank == 0 else min(log_points, 6)
        with run.metrics_file(rank).open("w") as file:
            for number in range(log_points - points + 1, log_points + 1):
                slow = 2.0 if rank == slow_rank else 1.0
                host = f"cn{rank // 8:03d}"
                file.write(json.dumps(row(number * every, rank, begin + number, slow=slow, host=host)) + "\n")
    write_rows(run.events_file(0), events(begin, log_points * every))
    run.nodes_dir.mkdir()
    for node in range(nodes):
        write_rows(run.node_file(f"cn{node:03d}"), [node_sample(f"cn{node:03d}", min(8, ranks - 8 * node))])
    return run


def events(begin: float, steps: int) -> Iterator[dict[str, Any]]:
    """A start, a stage that is half done, a checkpoint and a warning."""
    base = {"attempt": 1, "rank": 0}
    yield base | {"time": begin, "kind": "start", "text": "attempt 1 starts"}
    stage = {"stage": "fit", "first_step": 0, "total_steps": 2 * steps, "max_epochs": 4, "step": 10}
    yield base | {"time": begin + 1, "kind": "stage", "text": "stage fit trains"} | stage
    saved = {"step": steps // 2, "bytes": 4_200_000_000, "stall_seconds": 0.2, "total_seconds": 12.5}
    yield base | {"time": time.time() - 90, "kind": "checkpoint", "text": "saved"} | saved
    yield base | {"time": time.time() - 5, "kind": "warning", "text": "the learning rate is high"}


def node_sample(host: str, gpus: int) -> dict[str, Any]:
    """A sample of the devices of a node."""
    gpu = {"utilization": 0.97, "memory_used": 71_000_000_000, "memory_total": 80_000_000_000, "power": 650.0}
    gpu |= {"power_limit": 700.0, "temperature": 64, "clock": 1900, "clock_max": 1980, "throttling": []}
    return {
        "time": time.time() - 3,
        "host": host,
        "cpu": 0.4,
        "load": 20.0,
        "memory_used": 300_000_000_000,
        "memory_total": 1_000_000_000_000,
        "disk_read": 120_000_000,
        "network_received": 2_000_000_000,
        "gpus": [gpu | {"index": index, "uuid": f"GPU-{host}-{index}"} for index in range(gpus)],
    }


def write_rows(path: Path, rows: Any) -> None:
    """Writes rows as JSON lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
