"""A hundred launches of two ranks at once, forked from one interpreter so that torch is imported only once."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed

import headway as hw


def rank(launch: int, number: int, folder: str) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"HEADWAY_RENDEZVOUS": f"{folder}/rendezvous.json"}
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - a hundred times "launched by"
    hw.init(device="cpu")
    mine = torch.tensor([float(launch)])
    torch.distributed.all_reduce(mine)
    good = mine.item() == 2 * launch and not Path(folder, "rendezvous.json").exists()
    hw.dist.leave()
    os._exit(0 if good else 1)


def main(launches: int) -> None:
    torch.set_num_threads(1)
    hw.dist.is_initialized()  # imports the package before the forks
    folders = [tempfile.TemporaryDirectory() for _ in range(launches)]
    children = []
    for launch, folder in enumerate(folders):
        for number in range(2):
            child = os.fork()
            if child == 0:
                rank(launch, number, folder.name)
            children.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for folder in folders:
        folder.cleanup()
    print(f"{ended.count(0)} of {len(ended)} ranks joined their own launch")


if __name__ == "__main__":
    main(int(sys.argv[1]))
