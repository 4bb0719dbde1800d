"""The power fails at a random moment of a series of saves, on a real ext4: every acknowledged checkpoint is whole.

The file system is shut down without writing its journal out (FS_IOC_SHUTDOWN), unmounted, and mounted again, as after
a power cut. 3 cuts for each way of saving here, 30 with `HEADWAY_FAULTS=full`.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from checker import judge
from waiting import wait_until

from headway import checkpoint

CUTS = 30 if os.environ.get("HEADWAY_FAULTS") == "full" else 3
SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2
SAVER = """
import sys, torch
from headway import checkpoint
from headway.errors import StorageError
torch.set_num_threads(1)
print("ready", flush=True)
for command in sys.stdin:      # "folder how number-of-saves"
    folder, how, number = command.split()
    try:
        with checkpoint.Saver(folder, background=how == "background") as saver:
            for step in range(1, int(number) + 1):
                state = {"net": {str(n): torch.full((20_000,), float(step + n)) for n in range(4)}, "epoch": step}
                saver.save(state, step=step)
                for saved in saver.finished():
                    print(saved.step, flush=True)
            saver.wait()
            for saved in saver.finished():
                print(saved.step, flush=True)
    except StorageError:
        failed = True
    else:
        failed = False
    if failed:
        print("failed", flush=True)
"""


class Disk:
    """An ext4 in a file. Its journal is written every 5 s, as usual: what is not synced is lost."""

    def __init__(self, folder: Path) -> None:
        self.image, self.mount_point = folder / "image", folder / "disk"
        self.mount_point.mkdir()
        with self.image.open("wb") as file:
            file.truncate(96 << 20)
        subprocess.run(["mkfs.ext4", "-q", self.image], check=True)

    def mount(self) -> str:
        command = ["mount", "-o", "loop,commit=5", self.image, self.mount_point]
        return subprocess.run(command, capture_output=True, text=True).stderr

    def unmount(self) -> None:
        """Unmounts it as soon as nobody uses it any more: a process that was killed may still have files open."""
        command = ["umount", self.mount_point]
        wait_until(lambda: subprocess.run(command).returncode == 0, "nobody uses the disk")

    def restart(self) -> None:
        """What is found when the power is back.

        The image is copied: if another process has made a mount namespace of its own meanwhile, the old file system
        lives on in that one, and would be found as it was left.
        """
        self.unmount()
        copy = self.image.with_name(f"{self.image.name}-")
        subprocess.run(["cp", "--sparse=always", self.image, copy], check=True)
        self.image.unlink()
        self.image = copy
        assert self.mount() == ""

    def cut_power(self) -> None:
        fd = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        made = Disk(tmp_path)
    except FileNotFoundError:
        pytest.skip("mkfs.ext4 is not here")
    if refused := made.mount():
        pytest.skip(f"may not mount here: {refused.strip()}")
    yield made
    made.unmount()


@pytest.fixture
def saver() -> Iterator[subprocess.Popen[str]]:
    """A process that saves, step after step, into the folder that it is told, until that fails."""
    command = [sys.executable, "-c", SAVER]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


WAYS = pytest.mark.parametrize("how", ["foreground", "background"])


@WAYS
def test_a_checkpoint_survives_a_power_cut_right_after_it_was_acknowledged(
    disk: Disk, saver: subprocess.Popen[str], how: str
) -> None:
    """Nothing comes after it that would carry it to the disk."""
    assert saver.stdin is not None and saver.stdout is not None
    folder = disk.mount_point / "once"
    saver.stdin.write(f"{folder} {how} 1\n")
    saver.stdin.flush()
    assert saver.stdout.readline() == "1\n"
    disk.cut_power()
    disk.restart()
    whole, problems = judge(str(folder))
    assert list(whole) == [1] and not problems
    assert (folder / "latest").read_text() == "step-000000000001\n"


@pytest.mark.timeout(600)
@WAYS
def test_every_acknowledged_checkpoint_survives_a_power_cut(
    disk: Disk, saver: subprocess.Popen[str], how: str
) -> None:
    rng = random.Random(0)
    assert saver.stdin is not None and saver.stdout is not None
    acknowledged = total = interrupted = 0
    for cut in range(CUTS):
        folder = disk.mount_point / f"cut-{cut}"
        saver.stdin.write(f"{folder} {how} 1000000\n")
        saver.stdin.flush()
        acknowledged = int(saver.stdout.readline())  # at least one
        time.sleep(rng.uniform(0, 0.4))
        disk.cut_power()
        while (line := saver.stdout.readline()) != "failed\n":
            acknowledged = int(line)
        disk.restart()
        whole, problems = judge(str(folder))
        assert not problems, problems
        assert set(range(1, acknowledged + 1)) <= whole.keys(), (
            f"cut {cut}: {acknowledged} saves were acknowledged"
        )
        assert (
            len(whole) <= acknowledged + 2
        )  # one was on its way, and one may be whole that nobody had asked about
        newest = checkpoint.load_latest(folder)
        assert newest is not None and newest.step >= acknowledged and newest.state["epoch"] == newest.step
        total += acknowledged
        interrupted += any(path.name.startswith(".tmp-") for path in folder.iterdir())
        subprocess.run(["rm", "-rf", folder], check=True)
    print(f"{CUTS} cuts, {total} acknowledged saves, none lost; {interrupted} cuts hit a save in its files")
