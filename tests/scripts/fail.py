"""All ranks work in step; at the third step one of them, FAIL_RANK, comes to grief in the way that FAIL names."""

import ctypes
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed

import headway as hw
from headway.errors import UsageError


def grief(how: str) -> None:
    if mark := os.environ.get("FAIL_MARK"):
        Path(mark).write_text(str(time.time()))
    if how == "raise":
        raise ValueError("the third step is cursed")
    if how == "usage":
        raise UsageError("lr=-1 is negative; set lr to a positive number")
    if how == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit0":
        os._exit(0)
    if how == "sysexit":
        sys.exit(3)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "ctrl-c":
        raise KeyboardInterrupt


def main() -> None:
    world = hw.init(device="cuda" if "--cuda" in sys.argv else "cpu")
    with ExitStack() as stack:
        if "--run" in sys.argv:
            run = hw.dist.open_run(sys.argv[sys.argv.index("--run") + 1], name="fail")
            if "--record" in sys.argv:
                stack.enter_context(hw.record.recording(run, world))
        work(world)


def work(world: hw.World) -> None:
    if "--slow-disk" in sys.argv:
        os.fsync = lambda _: time.sleep(5)
    for step in range(1, 1000):
        hw.dist.set_phase("train", step)
        if step == 3 and world.rank == int(os.environ.get("FAIL_RANK", "2")):
            grief(os.environ["FAIL"])
        if "--busy" in sys.argv:  # ranks that never meet in a collective
            time.sleep(0.05)
        else:
            torch.distributed.all_reduce(torch.ones(1000, device=world.device))


if __name__ == "__main__":
    main()
