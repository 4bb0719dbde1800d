"""Trains with 300 metrics and many saves, and prints the memory of all its processes at four of them.

saves.py ROOT STEPS SAVES: once save 10, 20, the tenth from last or the last is on disk, the next step makes a system
call that a tracer sees.
"""

import gc
import json
import os
import sys
import time
from typing import Any

import psutil
import torch

import headway as hw

ROOT, STEPS, SAVES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
EVERY = STEPS // SAVES
MARKS = {10, 20, SAVES - 10, SAVES}


class Batches:
    def __len__(self) -> int:
        return 10 * EVERY

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield torch.ones(4, 8)


def memory() -> int:
    """The bytes of all processes of this run, once they have started."""
    before = 0
    while True:
        gc.collect()
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        now = sum(each.memory_info().rss for each in processes)
        if abs(now - before) < now / 500:
            return now
        before = now
        time.sleep(1)


class Soak(hw.Stage):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.found: list[dict[str, float]] = []

    def run_epoch(self) -> None:
        weight, sgd = self.models["net"].weight, self.pipe.optimizers["sgd"]
        for batch in self.batches("train"):
            done = self.pipe.steps_done
            if done % EVERY == 1 and done // EVERY in MARKS:
                self.mark(done // EVERY)
            self.models["net"](batch).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
            if (done + 1) % EVERY == 0:
                values = weight.detach().flatten().tolist()
                for number in range(300):
                    self.log(f"group/metric-{number:03d}", values[number % len(values)] + number)

    def mark(self, save: int) -> None:
        final = self.pipe.directory.checkpoint_dir(save * EVERY)
        while not final.exists():
            time.sleep(0.05)
        time.sleep(0.3)  # for the link to it, which follows
        os.access(f"/mark/{save}", os.F_OK)
        self.found.append({"save": save, "memory": memory(), "time": time.monotonic()})


torch.manual_seed(0)
pipe = hw.Pipeline(name="soak")
pipe.register_model("net", torch.nn.Linear(8, 40))
pipe.register_optimizer("sgd", lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
pipe.register_dataset("train", Batches())
stage = Soak(log_every=EVERY)
pipe.append_stage(stage, max_steps=STEPS + 2)
pipe.enable_checkpointing(ROOT, every=EVERY)
run = pipe.run()
print(json.dumps({"run": str(run.path), "every": EVERY, "marks": stage.found}))
