"""A checkpoint that a run replaces or removes while another process reads it is not damaged, and nobody mixes two."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway import checkpoint
from headway.checkpoint import Weights, api
from headway.checkpoint.format import verification
from headway.checkpoint.inspect import exporter
from headway.checkpoint.weights import loading
from headway.checkpoint.weights.loading import load_weights
from headway.cli import checkpoint as command
from headway.errors import NoValidCheckpoint, UsageError
from headway.run import Run
from headway.testing import faults, ranks

STEP = "step-000000000007"


def save(folder: Path, value: float) -> None:
    net = {"a": torch.full((4,), value), "b": torch.full((4,), value)}
    checkpoint.save(folder, {"models": {"net": net}, "value": value}, step=7)


def before(patch: pytest.MonkeyPatch, module: Any, name: str, deed: Callable[[], object]) -> None:
    """Does something once, just before a function is called."""
    real, todo = getattr(module, name), [deed]

    def call(*args: Any, **options: Any) -> Any:
        while todo:
            todo.pop()()
        return real(*args, **options)

    patch.setattr(module, name, call)


def replace(shelf: Path) -> None:
    """As a save does that replaces an earlier one of the step: two renames, and the old files are removed."""
    old = (shelf / STEP).rename(shelf / f".old-path-7-{'0' * 16}")
    min(shelf.glob(f"later-*/{STEP}")).rename(shelf / STEP)
    shutil.rmtree(old)


def fill(folder: Path) -> Path:
    """A checkpoint, and beside it two later ones of the same step."""
    for place, value in ((folder, 1.0), (folder / "later-1", 2.0), (folder / "later-2", 3.0)):
        save(place, value)
    return folder


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    return fill(tmp_path)


def load_net(shelf: Path) -> float:
    tensors = {name: torch.zeros(4) for name in "ab"}
    load_weights(Weights(shelf), tensors, model="net")
    assert torch.equal(tensors["a"], tensors["b"])
    return tensors["a"][0].item()


def verify_and_load(shelf: Path) -> Any:
    assert checkpoint.verify(shelf / STEP) == []
    return checkpoint.load(shelf / STEP).state["value"]


READERS: dict[str, Callable[[Path], Any]] = {
    "verify": verify_and_load,
    "load": lambda shelf: checkpoint.load(shelf / STEP).state["value"],
    "load_latest": lambda shelf: checkpoint.load_latest(shelf).state["value"],  # type: ignore[union-attr]
    "weights": load_net,
}


@pytest.mark.parametrize("reader", READERS)
def test_one_that_is_replaced_is_read_again(
    reader: str, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its bytes are verified, and again between that and the reading."""
    before(monkeypatch, verification, "check_files", lambda: replace(shelf))
    assert READERS[reader](shelf) == 2.0
    module, name = {"weights": (loading, "_match")}.get(reader, (api, "_read"))
    before(monkeypatch, module, name, lambda: replace(shelf))
    assert READERS[reader](shelf) == 3.0
    assert not list(shelf.glob("*.corrupt-*"))


def test_a_directory_that_a_server_has_forgotten_is_not_mixed_with_a_later_one(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, a removed directory is stale for who has it open; its path is that of the later save by then."""
    real, todo = os.open, [replace]

    def forget(path: Any, *args: Any, **options: Any) -> int:
        if todo and str(path).endswith(".safetensors"):
            todo.pop()(shelf)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, *args, **options)

    before(monkeypatch, api, "_read", lambda: monkeypatch.setattr(os, "open", forget))
    loaded = checkpoint.load(shelf / STEP)
    assert not todo
    assert loaded.state["value"] == loaded.state["models"]["net"]["a"][0].item() == 2.0


def test_a_directory_that_has_another_number_after_a_failover_is_not_damaged(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same save at the same path: it is read again, and not set aside."""
    real, todo = os.open, [errno.ESTALE]

    def forget(path: Any, *args: Any, **options: Any) -> int:
        if todo and str(path).endswith(".safetensors"):
            shutil.copytree(shelf / STEP, shelf / "copy")
            shutil.rmtree(shelf / STEP)
            (shelf / "copy").rename(shelf / STEP)
            raise OSError(todo.pop(), os.strerror(errno.ESTALE))
        return real(path, *args, **options)

    before(monkeypatch, verification, "check_files", lambda: monkeypatch.setattr(os, "open", forget))
    loaded = checkpoint.load_latest(shelf)
    assert not todo and loaded is not None and loaded.state["value"] == 1.0
    assert not list(shelf.glob("*.corrupt-*"))


def test_a_file_of_weights_that_this_node_lacks_is_not_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, which chooses the path, has it on the disk of its own node."""
    monkeypatch.setattr(Weights, "locate", lambda _: tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        load_weights(Weights(tmp_path), {"a": torch.zeros(4)}, model="net")


@ranks(2)
def test_ranks_never_read_parts_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is through with the old one when rank 1 opens the new one."""
    fill(tmp_path)
    for value, module, name in ((2.0, verification, "check_contents"), (3.0, api, "_read")):
        with monkeypatch.context() as patch:
            if headway.rank() == 0:
                real, todo = getattr(module, name), [replace]

                def read_first(*args: Any, real: Any = real, todo: list[Any] = todo) -> Any:
                    result = real(*args)
                    while todo:
                        todo.pop()(tmp_path)
                        headway.barrier()
                    return result

                patch.setattr(module, name, read_first)
            else:
                before(patch, module, "CheckpointDirectory", headway.barrier)
            loaded = checkpoint.load(tmp_path / STEP)
        assert loaded.state["value"] == loaded.state["models"]["net"]["a"][0].item() == value
        headway.barrier()


@ranks(2)
def test_a_rank_that_sees_a_later_save_first_is_no_sign_of_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 finds another manifest for a moment; the directory that rank 0 sees stays the same."""
    save(tmp_path, 1.0)
    real, todo = api.read_manifest, [1] if headway.rank() == 1 else []

    def read(directory: Any) -> Any:
        found = real(directory)
        return dataclasses.replace(found, save="later") if todo and todo.pop() else found

    monkeypatch.setattr(api, "read_manifest", read)
    assert checkpoint.load(tmp_path / STEP).state["value"] == 1.0


def test_one_that_is_removed_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the retention of a run that trains, which has newer or better ones."""

    def shelf_of(name: str) -> tuple[Path, Callable[[], object]]:
        folder = tmp_path / name
        for step, loss in ((1, 2.0), (2, 1.0), (3, 0.5)):
            checkpoint.save(folder, {"net": {"w": torch.ones(1)}}, step=step, metrics={"val/loss": loss})
        return folder, lambda: shutil.rmtree(folder / "step-000000000003")

    for name, look in (
        ("valid", checkpoint.find_valid),
        ("best", lambda folder: checkpoint.load_best(folder, metric="val/loss").path),
        ("weights", lambda folder: Weights(folder).locate()),
        ("best weights", lambda folder: Weights(folder, at="best", metric="val/loss").locate()),
    ):
        folder, remove = shelf_of(name)
        before(monkeypatch, verification, "check_files", remove)
        assert look(folder) == folder / "step-000000000002", name
        assert not list(folder.glob("*.corrupt-*"))
    folder, remove = shelf_of("one")
    before(monkeypatch, verification, "check_files", remove)
    with pytest.raises(UsageError, match="there is no checkpoint at"):
        checkpoint.load(folder / "step-000000000003")
    folder, remove = shelf_of("read")
    before(monkeypatch, loading, "_match", remove)
    load_weights(Weights(folder, model="net"), {"w": torch.zeros(1)}, model="net")
    folder, remove = shelf_of("between")
    before(monkeypatch, loading, "read_save", remove)  # after it was verified, and before it is opened
    report = load_weights(Weights(folder, model="net"), {"w": torch.zeros(1)}, model="net")
    assert report.path == folder / "step-000000000002"


def test_verify_of_a_run_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, {"x": step}, step=step)
    before(monkeypatch, verification, "check_files", lambda: shutil.rmtree(tmp_path / "step-000000000003"))
    assert command.main(["verify", str(tmp_path)]) == 0
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert words == ["removed", "whole", "whole"]


def test_export_of_one_that_is_replaced(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before(monkeypatch, exporter, "_shards", lambda: replace(shelf))
    with pytest.raises(UsageError, match="was removed or replaced by a later save while it was being read"):
        checkpoint.export(shelf / STEP, shelf / "net.safetensors", part="models.net")
    assert not list(shelf.glob("*net*")) and not list(shelf.glob(".net*"))


# --- the directory of a run that another process trains


def set_owner(run: Run, **facts: Any) -> None:
    file = run.lock_dir / "owner-00001.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def test_damage_in_a_run_that_another_process_trains_is_left_to_that(tmp_path: Path) -> None:
    """However its checkpoints are named."""
    run = Run.create(tmp_path)
    with run.lock():
        pass
    for step in (1, 2):
        checkpoint.save(run, {"x": step}, step=step)
    (run.checkpoint_dir(2) / "state.json").write_bytes(b"{}")
    set_owner(run, host="elsewhere", machine="elsewhere", released=False)
    for where in (run.checkpoints_dir, run.path, str(run.path), run):
        assert checkpoint.find_valid(where) == run.checkpoint_dir(1)
        assert run.checkpoint_dir(2).is_dir()
    set_owner(run, released=True)
    assert checkpoint.find_valid(run.path) == run.checkpoint_dir(1)
    assert not run.checkpoint_dir(2).exists()


@pytest.mark.parametrize("error", ["EROFS", "EACCES"])
def test_damage_that_cannot_be_renamed_is_passed_over(error: str, tmp_path: Path) -> None:
    """On a disk that is read-only, or in the directory of another user."""
    for step in (1, 2):
        checkpoint.save(tmp_path, {"x": step}, step=step)
    (tmp_path / "step-000000000002" / "state.json").unlink()
    with faults.at("checkpoint.before_set_aside", action=f"errno={error}"):
        assert checkpoint.find_valid(tmp_path) == tmp_path / "step-000000000001"
    assert (tmp_path / "step-000000000002").is_dir()


def test_a_checkpoint_that_was_being_replaced_is_one(tmp_path: Path) -> None:
    """A kill between two renames has left it hidden, and this process does not know of which run it is."""
    path = checkpoint.save(tmp_path, {"x": 1}, step=1)
    path.rename(tmp_path / f".old-toy-2026.11.16-1-{'0' * 16}")
    with pytest.raises(NoValidCheckpoint, match="none is valid"):
        checkpoint.load_latest(tmp_path)


def test_the_directory_of_a_run_has_its_checkpoints(tmp_path: Path) -> None:
    """None would mean that there never was one, and a script would start from scratch."""
    run = Run.create(tmp_path)
    for step in (1, 2, 3):
        checkpoint.save(str(run.path), {"x": step}, step=step)
    assert checkpoint.load_latest(run.path).path == run.checkpoint_dir(3)  # type: ignore[union-attr]
    assert checkpoint.prune(run.path, checkpoint.Retention(keep_last=2)) == [run.checkpoint_dir(1)]
    (run.checkpoint_dir(2) / "manifest.json").unlink()
    (run.checkpoint_dir(3) / "manifest.json").unlink()
    with pytest.raises(NoValidCheckpoint, match="none is valid"):
        checkpoint.load_latest(run.path)
