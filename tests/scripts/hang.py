"""All ranks work in step; after ten steps one of them, HANG_RANK, hangs in the way that HANG names."""

import os
import re
import signal
import time
from pathlib import Path

import torch
import torch.distributed

import headway as hw


def trouble(how: str) -> None:
    Path(os.environ["HANG_MARK"]).write_text(str(time.time()))
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "spin":
        while True:
            pass
    elif how == "gil":
        re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter lock for longer than the sun will shine
    elif how == "wait":
        time.sleep(1000)


def main() -> None:
    world = hw.init(device="cpu")
    hw.dist.open_run(os.environ["HANG_RUNS"], name="hang")
    for step in range(1, int(os.environ.get("HANG_STEPS", "100"))):
        hw.dist.set_phase("train", step)
        if step == 10 and world.rank == int(os.environ["HANG_RANK"]):
            trouble(os.environ["HANG"])
        torch.distributed.all_reduce(torch.ones(1000))
        time.sleep(0.01)


if __name__ == "__main__":
    main()
