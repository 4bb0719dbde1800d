"""Damage of every kind is found before a byte of it is used; nothing in a checkpoint can execute.

`HEADWAY_FAULTS=full` flips 2000 bits instead of 200.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import stat
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import checkpoint
from headway.errors import NewerFormat, NoValidCheckpoint, StorageError
from headway.system import retries

FLIPS = 2000 if os.environ.get("HEADWAY_FAULTS") == "full" else 200
NEW, OLD = "step-000000000002", "step-000000000001"
FILES = ["index.json", "manifest.json", "rank-00000.json", "rank-00000.safetensors", "state.json"]


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """Two checkpoints with equal tensors, so that only their steps tell them apart."""
    for step in (1, 2):
        state = {"net": {"a": torch.arange(64.0), "b": torch.ones(3, 5)}, "epoch": step}
        checkpoint.save(tmp_path, state, step=step, local={"rng": "00" * 50})
    assert sorted(path.name for path in (tmp_path / NEW).iterdir()) == FILES
    return tmp_path


def assert_falls_back(shelf: Path) -> None:
    assert checkpoint.verify(shelf / NEW) != []
    with pytest.raises(NoValidCheckpoint, match="is damaged"):
        checkpoint.load(shelf / NEW)
    loaded = checkpoint.load_latest(shelf)
    assert loaded is not None and loaded.state["epoch"] == 1
    assert os.path.lexists(shelf / f"{NEW}.corrupt-1") and not os.path.lexists(shelf / NEW)


def test_every_flipped_bit_is_found(shelf: Path) -> None:
    rng = random.Random(0)
    found = dict.fromkeys(FILES, 0)
    for trial in range(FLIPS):
        file = shelf / NEW / FILES[trial % len(FILES)]
        whole = file.read_bytes()
        bit = rng.randrange(len(whole) * 8)
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        assert checkpoint.verify(shelf / NEW), f"bit {bit} of {file.name}"
        found[file.name] += 1
        file.write_bytes(whole)
    assert checkpoint.verify(shelf / NEW) == []
    assert sum(found.values()) == FLIPS and min(found.values()) >= FLIPS // 5


@pytest.mark.parametrize("name", FILES)
def test_truncation_and_growth(shelf: Path, name: str) -> None:
    file = shelf / NEW / name
    whole = file.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert checkpoint.verify(shelf / NEW), length
    file.write_bytes(whole + b"\0")
    assert_falls_back(shelf)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(shelf: Path, name: str) -> None:
    (shelf / NEW / name).unlink()
    assert_falls_back(shelf)


@pytest.mark.parametrize("name", FILES)
def test_files_of_two_steps_do_not_mix(shelf: Path, name: str) -> None:
    shutil.copy(shelf / OLD / name, shelf / NEW / name)
    assert_falls_back(shelf)


def test_two_files_swapped(shelf: Path) -> None:
    one, two = (shelf / NEW / name for name in ("state.json", "index.json"))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert_falls_back(shelf)


def test_a_checkpoint_under_the_name_of_another_step(shelf: Path) -> None:
    shutil.rmtree(shelf / NEW)
    shutil.copytree(shelf / OLD, shelf / NEW)
    assert_falls_back(shelf)


@pytest.mark.parametrize("name", FILES)
def test_a_file_behind_a_link_is_refused(shelf: Path, name: str) -> None:
    elsewhere = shelf / "elsewhere"
    (shelf / NEW / name).rename(elsewhere)
    (shelf / NEW / name).symlink_to(elsewhere)
    assert_falls_back(shelf)


def test_a_checkpoint_behind_a_link_is_refused(shelf: Path) -> None:
    (shelf / NEW).rename(shelf / "elsewhere")
    (shelf / NEW).symlink_to(shelf / "elsewhere")
    assert_falls_back(shelf)
    assert (
        sorted(path.name for path in (shelf / "elsewhere").iterdir()) == FILES
    )  # only the link was set aside


def test_a_pipe_does_not_stop_us(shelf: Path) -> None:
    (shelf / NEW / "state.json").unlink()
    os.mkfifo(shelf / NEW / "state.json")
    assert_falls_back(shelf)


def sealed(change: Callable[[dict[str, Any]], object], file: Path) -> None:
    """A forged manifest whose own checksum holds."""
    manifest = json.loads(file.read_bytes())
    del manifest["crc32"]
    changed = change(manifest)
    text = json.dumps(manifest if changed is None else changed, indent=1)
    body = text.removesuffix("\n}").encode()
    file.write_bytes(body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda _: [],
        lambda m: m.update(step="2"),
        lambda m: m.update(step=None),
        lambda m: m.update(format=0),
        lambda m: m.update(files=[]),
        lambda m: m.update(files={}),
        lambda m: m.update(world=3),
        lambda m: m["files"].update({"index.json": 7}),
        lambda m: m["files"].update({"index.json": {"bytes": -1, "crc32": "00000000"}}),
        lambda m: m.pop("save"),
        lambda m: m.update(metrics={"a": "b"}),
    ],
)
def test_a_manifest_of_the_wrong_kind(shelf: Path, change: Callable[[dict[str, Any]], object]) -> None:
    sealed(change, shelf / NEW / "manifest.json")
    assert_falls_back(shelf)


@pytest.mark.parametrize("name", ["../outside.json", "{}/outside.json", ".json", "a/b.json"])
def test_a_manifest_that_names_files_elsewhere(shelf: Path, name: str) -> None:
    held = json.loads((shelf / NEW / "state.json").read_bytes())
    data = json.dumps({**held, "holds": None}).encode()
    (shelf / NEW / "a").mkdir()
    for place in (shelf / "outside.json", shelf / NEW / "a" / "b.json", shelf / NEW / ".json"):
        place.write_bytes(data)  # all else about it would be in order
    fact = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    sealed(lambda m: m["files"].update({name.format(shelf): fact}), shelf / NEW / "manifest.json")
    assert "not a valid file name of a checkpoint" in checkpoint.verify(shelf / NEW)[0]
    assert_falls_back(shelf)


def test_another_format_is_refused_by_its_number(shelf: Path) -> None:
    sealed(lambda m: m.update(format=99), shelf / NEW / "manifest.json")
    for use in (lambda: checkpoint.verify(shelf / NEW), lambda: checkpoint.load_latest(shelf)):
        with pytest.raises(NewerFormat, match=r"has format 99, written by a newer headway"):
            use()
    assert (shelf / NEW).is_dir()  # not set aside: it is not damaged


def forge(shelf: Path, name: str, data: bytes) -> None:
    """Puts a file into the newest checkpoint and makes all checksums hold, as an attacker can."""
    (shelf / NEW / name).write_bytes(data)
    fact = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    sealed(lambda m: m["files"].update({name: fact}), shelf / NEW / "manifest.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(bytes=[0, 2**62]),
        lambda c: c.update(bytes=[-8, 248]),
        lambda c: c.update(bytes=[c["bytes"][0], c["bytes"][1] - 4]),
        lambda c: c.update(file="state.json"),
        lambda c: c.update(file="../../etc/passwd"),
        lambda c: c.update(offsets=[1]),
        lambda c: c.update(offsets=[-1]),
        lambda c: c.update(offsets=[]),
        lambda c: c.update(shape=[2**40]),
        lambda c: c.update(shape=[63]),
        lambda c: c.clear(),
    ],
)
def test_a_forged_index_is_refused(shelf: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((shelf / NEW / "index.json").read_bytes())
    change(index["holds"]["net.a"]["chunks"][0])
    forge(shelf, "index.json", json.dumps(index).encode())
    assert_falls_back(shelf)


def test_deep_json_is_refused(shelf: Path) -> None:
    forge(shelf, "state.json", b"[" * 200_000 + b"]" * 200_000)
    assert_falls_back(shelf)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize("name", [*FILES, "rank-00001.safetensors", ".metadata", "extra.pt"])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
@pytest.mark.parametrize("with_checksums", [False, True])
def test_a_pickle_in_any_place_is_never_executed(
    shelf: Path, name: str, kind: str, with_checksums: bool
) -> None:
    marker = shelf / "executed"
    bomb = shelf / "bomb"
    if kind == "pickle":
        bomb.write_bytes(pickle.dumps(Bomb(marker)))
    else:
        torch.save({"x": Bomb(marker)}, bomb)
    data = bomb.read_bytes()
    if with_checksums and name in FILES[2:]:
        forge(shelf, name, data)
    else:
        (shelf / NEW / name).write_bytes(data)
    checkpoint.verify(shelf / NEW)
    with suppress(NoValidCheckpoint):
        checkpoint.load(shelf / NEW)
    checkpoint.load_latest(shelf)
    assert not marker.exists()
    with pytest.raises(FileNotFoundError):  # the bomb was live
        marker.rmdir()
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.is_dir()


def test_all_damaged_is_exit_code_86(shelf: Path) -> None:
    for step in (OLD, NEW):
        (shelf / step / "manifest.json").write_bytes(b"{}")
    for _ in range(2):  # and it stays so: what was set aside is not forgotten
        with pytest.raises(NoValidCheckpoint, match="none is valid") as caught:
            checkpoint.load_latest(shelf)
        assert caught.value.exit_code == 86


def test_what_may_not_be_read_is_not_called_damaged(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> int:
        if args[0] == "state.json":
            raise PermissionError(13, "Permission denied")
        return real(*args, **kwargs)

    real = os.open
    monkeypatch.setattr(os, "open", refuse)  # root may read everything, so no mode can do this
    with pytest.raises(StorageError, match="Permission denied"):
        checkpoint.load_latest(shelf)
    assert (shelf / NEW).is_dir() and stat.S_IMODE((shelf / NEW).stat().st_mode) == 0o700


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("function", ["open", "fstat", "preadv"])
@pytest.mark.parametrize("times", [1, 2, 1000])
def test_a_file_system_that_fails_for_a_moment_damages_nothing(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int, times: int
) -> None:
    """No disk here can be made to fail on reading. What keeps failing ends the run, and keeps its name."""
    failures = [OSError(code, os.strerror(code))] * times

    def fail(what: Any, *args: Any, **how: Any) -> Any:
        name = str(Path(f"/proc/self/fd/{what}").readlink()) if isinstance(what, int) else str(what)
        if failures and (NEW in name or name.endswith((".safetensors", ".json"))):
            raise failures.pop()
        return real(what, *args, **how)

    real = getattr(os, function)
    monkeypatch.setattr(os, function, fail)
    monkeypatch.setattr(retries, "WAITS_S", (0.0, 0.0, 0.0))
    if times < 4:
        loaded = checkpoint.load_latest(shelf)
        assert loaded is not None and loaded.path == shelf / NEW and not failures
    else:
        with pytest.raises(StorageError, match=rf"could not read .*: {os.strerror(code)}, 4 times in 0 s"):
            checkpoint.load_latest(shelf)
    assert not list(shelf.glob("*.corrupt-*"))
