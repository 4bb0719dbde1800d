"""A loop without a Pipeline keeps its loader's position with `hw.checkpoint`: the newest valid one counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.data import DataLoader
from headway.errors import NoValidCheckpoint
from headway.testing import ranks

NUMBERS = list(range(40))


def make_loader(**batch: Any) -> DataLoader:
    return DataLoader(NUMBERS, shuffle=True, **batch or {"batch_size": 4})


def save(directory: Path, loader: DataLoader, step: int) -> Path:
    return hw.checkpoint.save(directory, {"loader": loader.state_dict()}, step=step)


def resume(directory: Path, loader: DataLoader) -> int:
    """What docs/data.md shows: returns the step to continue from."""
    loaded = hw.checkpoint.load_latest(directory)
    if loaded is None:
        return 0
    loader.load_state_dict(loaded.state["loader"])
    return loaded.step


def train(directory: Path) -> list[int]:
    """Saves positions at steps 1 to 5 of a loop; returns the batch that follows the last one."""
    loader = make_loader()
    step = resume(directory, loader)
    for batch in loader:
        step += 1
        if step > 5:
            following: list[int] = batch.tolist()
            return following
        save(directory, loader, step)
    raise AssertionError("a loop of ten steps")


def test_a_loop_resumes_from_the_latest_position(tmp_path: Path) -> None:
    following = train(tmp_path)
    loader = make_loader()
    assert resume(tmp_path, loader) == 5
    loader.set_epoch(0)
    assert next(iter(loader)).tolist() == following


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("damage", [flip, truncate])
def test_a_damaged_position_is_skipped_and_damage_alone_is_an_error(tmp_path: Path, damage: Any) -> None:
    train(tmp_path)
    newest, *older = sorted(tmp_path.glob("step-*"), reverse=True)
    damage(newest / "state.json")
    assert resume(tmp_path, make_loader()) == 4
    for path in older:
        damage(path / "state.json")
    with pytest.raises(NoValidCheckpoint):
        resume(tmp_path, make_loader())


@ranks(2)
def test_one_position_serves_all_ranks(tmp_path: Path) -> None:
    directory = Path(hw.broadcast_object(str(tmp_path)))
    loader = make_loader(global_batch_size=4)
    assert resume(directory / "none", loader) == 0
    next(iter(loader))
    save(directory, loader, 1)
    assert len(list(directory.glob("step-*"))) == 1
    resumed = make_loader(global_batch_size=4)
    assert resume(directory, resumed) == 1
    assert resumed.state_dict() == loader.state_dict()
