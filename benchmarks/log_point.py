"""What a log point, and a tracker that does not answer, cost a training step.

    python benchmarks/log_point.py [--steps 2000] [--rounds 10]

`log_us` is the CPU time of `self.log` in a step, `row_us` that of a row that is written to the metrics file at a log
point; each should be at most 20 us. Log points with a tracker behind a black hole, a server that never answers,
are interleaved with log points without one, round by round, so that a change of the machine's load meets both.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headway as hw
from headway.record.sinks import Csv, Mlflow, Sink, feeding
from headway.run import Run

LIMIT_US = 20.0


class Batches:
    """One batch, again and again."""

    def __init__(self, steps: int) -> None:
        self.steps, self.batch = steps, torch.ones(4, 8)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.steps):
            yield self.batch


class Logging(hw.Stage):
    """A loop that does nothing but log, and times it."""

    seconds = 0.0

    def run_epoch(self) -> None:
        value = torch.tensor(1.0)
        for _ in self.batches("train"):
            begin = time.thread_time()
            self.log("loss", value)
            self.seconds += time.thread_time() - begin


def log_us(root: Path, steps: int) -> float:
    """CPU microseconds of one `self.log`."""
    pipe = hw.Pipeline(name="logging", root=root)
    pipe.register_dataset("train", Batches(steps))
    stage = Logging()
    pipe.append_stage(stage, max_epochs=1)
    pipe.run()
    return 1e6 * stage.seconds / steps


def row_us(run: Run, steps: int) -> list[float]:
    """CPU microseconds of each row that is written as a log point writes it."""
    found = []
    with run.open_rows(run.metrics_file(0), content="metrics") as rows:
        for step in range(steps):
            row: dict[str, Any] = {
                "kind": "train",
                "time": time.time(),
                "stage": "fit",
                "epoch": 0,
                "step": step,
            }
            row |= {"metrics": {"train/loss": 1 / (step + 1), "train/lr": 1e-3}, "seconds": {"data": 0.1}}
            begin = time.thread_time()
            rows.write(row)
            found.append(1e6 * (time.thread_time() - begin))
    return found


def interleaved(root: Path, steps: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a row without a tracker and with one behind a black hole, in turns."""
    found: dict[str, list[float]] = {"none": [], "csv": [], "black_hole": []}
    with socket.create_server(("127.0.0.1", 0)) as black_hole:
        uri = f"http://127.0.0.1:{black_hole.getsockname()[1]}"
        for number in range(rounds):
            for name in found:
                sinks: list[Sink] = {"csv": [Csv()], "black_hole": [Mlflow(tracking_uri=uri)]}.get(name, [])
                run = Run.create(root, name=f"{name}-{number}", config={})
                run.begin_attempt(world={})
                with ExitStack() as stack:
                    stack.enter_context(feeding(run, sinks, finish_s=0.0 if name == "black_hole" else 60.0))
                    found[name] += row_us(run, steps)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        found: dict[str, Any] = {"log_us": log_us(root, options.steps)}
        found["row_us"] = interleaved(root, options.steps, options.rounds)
    found["ok"] = found["log_us"] <= LIMIT_US and found["row_us"]["none"] <= LIMIT_US
    print(json.dumps(found, indent=2))
    if not found["ok"]:
        print(f"more than {LIMIT_US:g} us: on a machine that is idle, this is a fault", file=sys.stderr)


if __name__ == "__main__":
    main()
