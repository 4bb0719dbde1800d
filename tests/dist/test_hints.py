"""Data workers that run out of memory: the last lines name the signal and the limit."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import warm

from headway.dist.failure.hints import memory_hint

TRAIN = """
import os, signal, torch
import headway as hw

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        {item}

if __name__ == "__main__":
    hw.init(device="cpu")
    for batch in hw.data.DataLoader(Samples(), batch_size=8, num_workers=1):
        pass
"""
OOM = "os.kill(os.getpid(), signal.SIGKILL)"
LARGE = "return torch.zeros(1 << 20)"


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_data_worker_that_is_killed_is_named_with_its_signal_and_the_limit(
    nproc: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(item=OOM))
    command = [sys.executable, "-m", "headway", "run", "--nproc", str(nproc), "train.py"]
    done = warm.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert re.search(
        r"\ndata worker with pid \d+ was killed by SIGKILL \(kill -9, or the out-of-memory killer: see dmesg\); the "
        r"memory limit here is \d[\d.]* .B: use fewer workers, or ask for more memory\n$",
        done.stderr,
    ), done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a mount needs root")
def test_a_full_dev_shm_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(item=LARGE))
    setup = f"mount -t tmpfs -o size=4m tmpfs /dev/shm; exec {sys.executable} -m headway run train.py"
    done = warm.run(
        ["unshare", "--mount", "bash", "-c", setup], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.search(
        r"/dev/shm \(.* of 4.2 MB are free\) is too small for the batches of data workers", last
    ), done.stderr


def test_no_other_error_gets_such_a_hint() -> None:
    for text in ("out of memory", "No space left on device", "DataLoader worker (pid 7) exited unexpectedly"):
        assert memory_hint(text) is None
    text = "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that ..."
    assert (hint := memory_hint(text)) is not None and "crashed in native code (SIGBUS); /dev/shm" in hint
    assert signal.strsignal(signal.SIGBUS) == "Bus error"
