"""How long a save takes, until it is on disk: torch.save, torch's DCP, headway, and the disk itself.

    python benchmarks/checkpoint.py [--gigabytes 0.1 1] [--repeat 5] [--folder PATH]

One process, a state of equal float32 tensors on the CPU. `disk` is one sequential write of as many bytes and one fsync:
no save can be faster. `torch.save` syncs nothing by itself; `+ fsync` adds the sync of the file and of its folder
that a checkpoint needs to survive a power cut. Rounds are interleaved; medians; the machine may be shared.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from headway import checkpoint

State = dict[str, torch.Tensor]
PIECE = 8 << 20


def disk(folder: Path, state: State) -> None:
    with (folder / "raw").open("wb", buffering=0) as file:
        for tensor in state.values():
            view = tensor.view(-1).view(torch.uint8).numpy().data
            for begin in range(0, len(view), PIECE):
                file.write(view[begin : begin + PIECE])
        os.fsync(file.fileno())


def torch_save(folder: Path, state: State) -> None:
    torch.save(state, folder / "state.pt")


def torch_save_synced(folder: Path, state: State) -> None:
    torch_save(folder, state)
    for path in (folder / "state.pt", folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def dcp_save(folder: Path, state: State) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is alone
        dcp.save(state, checkpoint_id=folder / "dcp")


def headway_save(folder: Path, state: State) -> None:
    checkpoint.save(folder, {"net": state}, step=1)


WAYS: dict[str, Callable[[Path, State], None]] = {
    "disk": disk,
    "torch.save": torch_save,
    "torch.save + fsync": torch_save_synced,
    "DCP save": dcp_save,
    "headway save": headway_save,
}


def seconds(way: Callable[[Path, State], None], root: Path, state: State) -> float:
    folder = Path(tempfile.mkdtemp(dir=root))
    os.sync()  # nobody pays for what another left in memory
    begin = time.perf_counter()
    way(folder, state)
    taken = time.perf_counter() - begin
    shutil.rmtree(folder)
    return taken


def verify_seconds(root: Path, state: State) -> float:
    path = checkpoint.save(root / "verified", {"net": state}, step=1)
    begin = time.perf_counter()
    assert checkpoint.verify(path) == []
    taken = time.perf_counter() - begin
    shutil.rmtree(root / "verified")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.1, 0.3, 1.0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the file system to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for gigabytes in options.gigabytes:
            state = {f"layer{n}.weight": torch.rand(int(gigabytes * 1e9 / 4 / 20)) for n in range(20)}
            taken: dict[str, list[float]] = {name: [] for name in WAYS}
            for _ in range(options.repeat):
                for name, way in WAYS.items():
                    taken[name].append(seconds(way, Path(folder), state))
            print(f"{gigabytes:g} GB in 20 tensors, median of {options.repeat} (smallest to largest)")
            floor = statistics.median(taken["disk"])
            for name, times in taken.items():
                middle = statistics.median(times)
                spread = f"({min(times):.2f} to {max(times):.2f})"
                rate = gigabytes / middle
                print(
                    f"  {name:20} {middle:6.2f} s  {spread:17} {rate:6.2f} GB/s  {middle / floor:5.2f} x disk"
                )
            data = b"\0" * (1 << 28)
            begin = time.perf_counter()
            zlib.crc32(data)
            crc = (1 << 28) / 1e9 / (time.perf_counter() - begin)
            print(
                f"  verify, from memory  {verify_seconds(Path(folder), state):6.2f} s; CRC32 alone {crc:.1f} GB/s"
            )


if __name__ == "__main__":
    main()
