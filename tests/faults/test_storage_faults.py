"""A disk that is full, read-only or broken: the save fails as a whole, says so, and the next one works."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checker import judge
from waiting import wait_until

import headway
from headway import checkpoint
from headway.checkpoint import Saver
from headway.checkpoint.write.disk import SaveTarget
from headway.checkpoint.write.writer_process import WriterProcess, _WriterServer
from headway.errors import StorageError
from headway.testing import faults, ranks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"may not mount here: {done.stderr.strip()}")
    yield mount
    unmount(mount)


def unmount(mount: Path) -> None:
    """As soon as nobody uses it any more: a writer that was killed may still have files open."""
    wait_until(lambda: subprocess.run(["umount", mount]).returncode == 0, "nobody uses the disk")


def assert_only(folder: Path, *steps: int) -> None:
    whole, problems = judge(str(folder))
    assert not problems and sorted(whole) == list(steps)
    names = {path.name for path in folder.iterdir()} - {"latest", "ballast"}
    assert names == {f"step-{step:012d}" for step in steps}, names


WAYS = pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])


@WAYS
def test_a_full_disk(small_disk: Path, background: bool) -> None:
    state = {"x": torch.ones(50_000)}  # 200 kB
    with Saver(small_disk, background=background) as saver:
        for step in (1, 2):
            saver.save(state, step=step)
        saver.wait()
        (small_disk / "ballast").write_bytes(b"\0" * 500_000)
        for _ in range(2):
            with pytest.raises(StorageError, match="No space left") as caught:
                saver.save(state, step=3)
                saver.wait()
            assert caught.value.exit_code == 74
            assert_only(small_disk, 1, 2)
        (small_disk / "ballast").unlink()
        saver.save(state, step=3)
    assert_only(small_disk, 1, 2, 3)


@ranks(2)
@WAYS
def test_a_full_disk_under_two_ranks(small_disk: Path, background: bool) -> None:
    state = {"x": torch.ones(50_000), "y": torch.ones(50_000)}
    with Saver(small_disk, background=background) as saver:
        saver.save(state, step=1)
        saver.wait()
        if headway.is_root():
            (small_disk / "ballast").write_bytes(b"\0" * 350_000)
        headway.barrier()
        with pytest.raises(StorageError, match="No space left"):
            saver.save(state, step=2)
            saver.wait()
        assert_only(small_disk, 1)  # on every rank, at once
        headway.barrier()
        if headway.is_root():
            (small_disk / "ballast").unlink()
        saver.save(state, step=2)
    assert_only(small_disk, 1, 2)


@WAYS
def test_a_file_system_that_became_read_only(small_disk: Path, background: bool) -> None:
    with Saver(small_disk, background=background) as saver:
        saver.save({"x": 1}, step=1)
        saver.wait()
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        with pytest.raises(StorageError, match="Read-only"):
            saver.save({"x": 2}, step=2)
            saver.wait()
        assert_only(small_disk, 1)
        assert checkpoint.load_latest(small_disk).state == {"x": 1}  # type: ignore[union-attr]
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        saver.save({"x": 2}, step=2)
    assert_only(small_disk, 1, 2)


def test_a_directory_that_may_not_be_written() -> None:
    somebody = os.geteuid() or 65534  # root may write everywhere
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer, "checkpoints")
        checkpoint.save(folder, {"x": 1}, step=1)
        checkpoint.load_latest(folder)  # imports what the other user may not be able to read
        for path in (Path(outer), folder, *folder.rglob("*")):
            os.chown(path, somebody, -1)
        folder.chmod(0o500)
        os.seteuid(somebody)
        try:
            with pytest.raises(StorageError, match="Permission denied"):
                checkpoint.save(folder, {"x": 2}, step=2)
            assert checkpoint.load_latest(folder).state == {"x": 1}  # type: ignore[union-attr]
        finally:
            os.seteuid(os.getuid())
        assert_only(folder, 1)


@pytest.fixture
def freezer(tmp_path: Path) -> Iterator[Path]:
    """A file system that can be frozen; it is thawed in the end."""
    image, mount = tmp_path / "image", tmp_path / "frozen"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        done = subprocess.run(["mount", "-o", "loop", image, mount], capture_output=True, text=True)
    except FileNotFoundError as missing:
        pytest.skip(f"{missing.filename} is not here")
    if done.returncode:
        pytest.skip(f"may not mount here: {done.stderr.strip()}")
    (mount / "lost+found").rmdir()
    yield mount
    subprocess.run(["fsfreeze", "--unfreeze", mount], capture_output=True)
    unmount(mount)


def freeze(mount: Path, how: str = "--freeze") -> None:
    subprocess.run(["fsfreeze", how, mount], check=True)


def test_training_goes_on_while_the_disk_stands_still(freezer: Path) -> None:
    with Saver(freezer) as saver:
        saver.save({"x": torch.ones(9)}, step=1)
        saver.wait()
        saver.finished()
        freeze(freezer)
        saver.save({"x": torch.zeros(9)}, step=2)
        steps = sum(1 for _ in range(100) if not saver.finished())
        freeze(freezer, "--unfreeze")
    assert steps == 100 and [saved.step for saved in saver.finished()] == [2]
    assert_only(freezer, 1, 2)


def test_a_disk_that_stands_still_for_too_long_is_given_up(freezer: Path) -> None:
    checkpoint.save(freezer, {"x": 1}, step=1)
    with Saver(freezer, timeout_s=2.0, clean_up_s=0.5) as saver:
        freeze(freezer)
        saver.save({"x": 2}, step=2)
        with pytest.raises(StorageError, match=r"step 2 was not written .* within 2 s .*the disk hangs"):
            saver.wait()
        freeze(freezer, "--unfreeze")
    with Saver(freezer) as saver:
        saver.save({"x": 3}, step=3)
        saver.save({"x": 4}, step=4)  # sweeps what came to the disk only now
    whole, problems = judge(str(freezer))
    assert not problems and {1, 3, 4} <= whole.keys()
    assert not [path for path in freezer.iterdir() if path.name.startswith(".")]


@ranks(2)
@pytest.mark.parametrize("name", ["ENOENT", "ESTALE"])
def test_names_that_another_host_sees_late(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system: what rank 0 has just made is not there yet for rank 1."""
    late = {"count": 0}

    def hide(real: Any) -> Any:
        def looked(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path).rpartition("/")[2].startswith((".tmp-", "step-")) and late["count"] < 6:
                late["count"] += 1
                number = getattr(errno, name)
                raise OSError(number, os.strerror(number))
            return real(path, *args, **kwargs)

        return looked

    if headway.rank() == 1:
        monkeypatch.setattr(os, "lstat", hide(os.lstat))
        monkeypatch.setattr(os, "open", hide(os.open))
    path = checkpoint.save(tmp_path, {"a": torch.ones(9), "b": torch.ones(9)}, step=1)
    late["count"] = 0
    loaded = checkpoint.load_latest(tmp_path)
    assert late["count"] == (6 if headway.rank() == 1 else 0)
    assert loaded is not None and loaded.path == path and path.is_dir()  # nobody called it damaged


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES"])
@pytest.mark.parametrize(
    "point",
    ["before_directory", "after_directory", "before_file", "mid_file", "before_fsync", "before_manifest",
     "after_manifest", "before_rename"],
)  # fmt: skip
def test_any_error_at_any_point_before_the_commit(tmp_path: Path, point: str, name: str) -> None:
    checkpoint.save(tmp_path, {"x": torch.ones(9)}, step=1)
    with faults.at(f"checkpoint.{point}", action=f"errno={name}"), pytest.raises(StorageError):
        checkpoint.save(tmp_path, {"x": torch.ones(9)}, step=2)
    assert_only(tmp_path, 1)
    checkpoint.save(tmp_path, {"x": torch.ones(9)}, step=2)
    assert_only(tmp_path, 1, 2)


@WAYS
def test_every_byte_and_name_is_synced_before_the_one_that_shows_it(
    tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal may hide what is missing here; not every file system has one that does."""
    synced: set[int] = set()
    shown: list[str] = []

    def fsync(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        real_fsync(fd)

    def rename(self: Path, target: Path) -> Path:
        unsynced = [path.name for path in (self, *self.glob("*")) if path.stat().st_ino not in synced]
        assert unsynced == []
        synced.discard(self.parent.stat().st_ino)  # its names have changed
        shown.append(target.name)
        return real_rename(self, target)

    real_fsync, real_rename = os.fsync, Path.rename
    with Saver(tmp_path, background=background) as saver:
        if background:  # what the writer process does, done here
            monkeypatch.setattr(WriterProcess, "call", call_here)
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "rename", rename)
        saver.save({"x": torch.ones(9)}, step=1, local={"y": 1})
        saver.wait()
    assert shown == ["step-000000000001", "latest"] and tmp_path.stat().st_ino in synced


def call_here(self: WriterProcess, command: str, target: SaveTarget, **details: Any) -> Any:
    del details["deadline"]
    server = _WriterServer(self._memory)
    message = {"command": command, "target": dataclasses.asdict(target), "faults": "", **details}
    return server.handle(json.loads(json.dumps(message)))["value"]  # pure JSON, as on the wire


@pytest.mark.parametrize("point", ["after_rename", "committed", "after_latest"])
def test_an_error_after_the_commit_leaves_the_new_one_whole(tmp_path: Path, point: str) -> None:
    checkpoint.save(tmp_path, {"x": 1}, step=1)
    with faults.at(f"checkpoint.{point}", action="errno=EIO"), pytest.raises(StorageError):
        checkpoint.save(tmp_path, {"x": 2}, step=2)
    assert_only(tmp_path, 1, 2)


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: max(1, len(data) // 2)]))
    checkpoint.save(tmp_path, {"x": torch.arange(1000.0)}, step=1)
    monkeypatch.undo()
    assert_only(tmp_path, 1)
