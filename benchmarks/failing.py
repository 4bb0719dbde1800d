"""How long after one rank fails all four have ended, and how many lines of output one has to read for the cause.

    python benchmarks/failing.py [--repeat 3]

Compares with torchrun, and the same script without headway (init_process_group, gloo). Prints medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
{join}
for step in range(2000):
    if step == 50 and dist.get_rank() == 2:
        open(os.environ["MARK"], "w").write(str(time.time()))
        if os.environ["FAIL"] == "raise": raise ValueError("the third step is cursed")
        if os.environ["FAIL"] == "kill9": os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["FAIL"] == "exit0": os._exit(0)
    dist.all_reduce(torch.ones(1000))
    time.sleep(0.01)
"""
JOINS = {
    "torchrun": "dist.init_process_group('gloo')",
    "headway": "import headway; headway.init(device='cpu')",
}
LAUNCH = {
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=4"],
    "headway": [str(BIN / "headway"), "run", "--nproc=4"],
}


def one(name: str, how: str, directory: Path) -> tuple[float, int, int]:
    """Returns seconds from the end of rank 2 to the end of all, lines of output, and the cause's line from the end."""
    script, mark = directory / f"under_{name}.py", directory / "mark"
    script.write_text(SCRIPT.format(join=JOINS[name]))
    environ = os.environ | {"FAIL": how, "MARK": str(mark)}
    done = subprocess.run(
        [*LAUNCH[name], str(script)], env=environ, capture_output=True, text=True, timeout=120
    )
    seconds = time.time() - float(mark.read_text())
    lines = done.stderr.splitlines()
    wanted = {
        "raise": "ValueError: the third step is cursed",
        "kill9": "SIGKILL",
        "exit0": "exited with code 0",
    }[how]
    found = [number for number, line in enumerate(reversed(lines), 1) if wanted in line]
    return seconds, len(lines), found[0] if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    print(f"{'':18} {'all down':>9} {'lines':>6} {'cause, lines from the end':>26}")
    with tempfile.TemporaryDirectory() as directory:
        for how in ("raise", "kill9", "exit0"):
            runs: dict[str, list[tuple[float, int, int]]] = {name: [] for name in LAUNCH}
            for _ in range(repeat):
                for name in LAUNCH:
                    runs[name].append(one(name, how, Path(directory)))
            for name, results in runs.items():
                seconds = statistics.median(result[0] for result in results)
                _, lines, found = results[-1]
                print(f"{how:6} {name:11} {seconds:7.2f} s {lines:6} {found or 'never named':>26}")


if __name__ == "__main__":
    main()
