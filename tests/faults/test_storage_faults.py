"""A disk that is full, read-only or broken: the save fails as a whole, says so, and the next one works."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checker import judge

import headway
from headway import checkpoint
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
    subprocess.run(["umount", mount], check=True)


def assert_only(folder: Path, *steps: int) -> None:
    whole, problems = judge(str(folder))
    assert not problems and sorted(whole) == list(steps)
    names = {path.name for path in folder.iterdir()} - {"latest", "ballast"}
    assert names == {f"step-{step:012d}" for step in steps}, names


def test_a_full_disk(small_disk: Path) -> None:
    state = {"x": torch.ones(50_000)}  # 200 kB
    for step in (1, 2):
        checkpoint.save(small_disk, state, step=step)
    (small_disk / "ballast").write_bytes(b"\0" * 500_000)
    for _ in range(2):
        with pytest.raises(StorageError, match="No space left") as caught:
            checkpoint.save(small_disk, state, step=3)
        assert caught.value.exit_code == 74
        assert_only(small_disk, 1, 2)
    (small_disk / "ballast").unlink()
    checkpoint.save(small_disk, state, step=3)
    assert_only(small_disk, 1, 2, 3)


@ranks(2)
def test_a_full_disk_under_two_ranks(small_disk: Path) -> None:
    state = {"x": torch.ones(50_000), "y": torch.ones(50_000)}
    checkpoint.save(small_disk, state, step=1)
    if headway.is_root():
        (small_disk / "ballast").write_bytes(b"\0" * 350_000)
    headway.barrier()
    with pytest.raises(StorageError, match="No space left"):
        checkpoint.save(small_disk, state, step=2)
    headway.barrier()
    assert_only(small_disk, 1)
    headway.barrier()
    if headway.is_root():
        (small_disk / "ballast").unlink()
    checkpoint.save(small_disk, state, step=2)
    assert_only(small_disk, 1, 2)


def test_a_file_system_that_became_read_only(small_disk: Path) -> None:
    checkpoint.save(small_disk, {"x": 1}, step=1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StorageError, match="Read-only"):
        checkpoint.save(small_disk, {"x": 2}, step=2)
    assert_only(small_disk, 1)
    assert checkpoint.load_latest(small_disk).state == {"x": 1}  # type: ignore[union-attr]
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    checkpoint.save(small_disk, {"x": 2}, step=2)
    assert_only(small_disk, 1, 2)


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


@pytest.mark.parametrize("point", ["after_rename", "committed", "after_latest"])
def test_an_error_after_the_commit_leaves_the_new_one_whole(tmp_path: Path, point: str) -> None:
    checkpoint.save(tmp_path, {"x": 1}, step=1)
    with faults.at(f"checkpoint.{point}", action="errno=EIO"), pytest.raises(StorageError):
        checkpoint.save(tmp_path, {"x": 2}, step=2)
    assert_only(tmp_path, 1, 2)


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: max(1, len(data) // 2)]))
    checkpoint.save(tmp_path, {"x": torch.arange(1000.0)}, step=1)
    monkeypatch.undo()
    assert_only(tmp_path, 1)
