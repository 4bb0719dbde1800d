"""Startup times: `headway --help`, and a script on several ranks under headway and under torchrun.

    python benchmarks/startup.py [--repeat 5] [--nproc 4]

Runs are interleaved and medians printed, because machines are shared; ratios are more reliable than seconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
SCRIPT = """
import torch, torch.distributed as dist
{join}
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size() == {nproc}
dist.destroy_process_group()
"""


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=4)
    options = parser.parse_args()
    nproc = options.nproc
    with tempfile.TemporaryDirectory() as directory:
        plain, ours = Path(directory, "plain.py"), Path(directory, "ours.py")
        plain.write_text(SCRIPT.format(nproc=nproc, join="dist.init_process_group('gloo')"))
        ours.write_text(
            SCRIPT.format(nproc=nproc, join="import headway; headway.init(device='cpu')").replace(
                "dist.destroy_process_group()", ""
            )
        )
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "headway --help": [str(BIN / "headway"), "--help"],
            "python -c 'import torch'": [sys.executable, "-c", "import torch"],
            "torchrun": [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={nproc}", str(plain)],
            "headway run": [str(BIN / "headway"), "run", f"--nproc={nproc}", str(ours)],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.repeat):
            for name, command in commands.items():
                times[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name:26} {median:7.3f} s")
    ratio = medians["headway run"] / medians["torchrun"]
    print(f"headway run takes {ratio:.2f} x the time of torchrun on {nproc} ranks, joining included")


if __name__ == "__main__":
    main()
