"""A rank with data workers of every kind, told by a signal to stop: the rank hears it once, the workers not at all."""

import os
import signal
import sys
import time
from pathlib import Path

from torch.utils.data import DataLoader, Dataset

import headway as hw
from headway.data.worker_init import WorkerInit, open_workers

KINDS = ("fork", "spawn", "forkserver")


class Endless(Dataset[int]):
    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return index


def main(ready: Path) -> None:
    hw.init(device="cpu")
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    shield = "--bare" not in sys.argv
    loaders = []
    for kind in KINDS:
        init = WorkerInit(None) if shield else None
        loader = DataLoader(Endless(), num_workers=2, multiprocessing_context=kind, worker_init_fn=init)
        loaders.append(open_workers(loader) if shield else iter(loader))
    for batches in loaders:
        next(batches)
    ready.touch()
    deadline = time.monotonic() + 30
    while not heard and time.monotonic() < deadline:
        time.sleep(0.05)
    for _ in range(20):  # the workers, had they died, would end this
        for batches in loaders:
            next(batches)
    print(f"heard {len(heard)}, went on with {len(loaders)} kinds of workers", flush=True)
    if not shield:
        os._exit(0)  # else the workers end with their rank


if __name__ == "__main__":
    main(Path(sys.argv[1]))
