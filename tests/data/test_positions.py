"""Positions in files: the newest good one counts, three are kept, and steps only rise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import headway as hw
from headway.data import DataLoader, load_position, save_position
from headway.errors import NoValidCheckpoint, UsageError
from headway.testing import ranks

NUMBERS = list(range(40))


def loader() -> DataLoader:
    return DataLoader(NUMBERS, batch_size=4, shuffle=True)


def saved(folder: Path) -> list[int]:
    """Positions at steps 1 to 5 of a loop; the batches that follow the last one."""
    run, step = loader(), load_position(loader(), folder)
    for batch in run:
        step += 1
        if step > 5:
            return batch.tolist()
        save_position(run, folder, step)
    raise AssertionError("a loop of ten steps")


def test_a_loop_goes_on_from_the_last_of_three_files(tmp_path: Path) -> None:
    following = saved(tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        f"step-00000000000{n}.json" for n in (3, 4, 5)
    ]
    again = loader()
    assert load_position(again, tmp_path) == 5
    again.set_epoch(0)
    assert next(iter(again)).tolist() == following


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'\\"samples\\": 20', b'\\"samples\\": 24'))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("harm", [damage, cut])
def test_a_damaged_file_is_passed_over_and_nothing_but_damage_is_an_error(
    tmp_path: Path, harm: object
) -> None:
    saved(tmp_path)
    newest, *others = sorted(tmp_path.iterdir(), reverse=True)
    before = newest.read_bytes()
    harm(newest)
    assert newest.read_bytes() != before
    assert load_position(loader(), tmp_path) == 4
    for path in others:
        cut(path)
    with pytest.raises(NoValidCheckpoint, match=r"3 positions in .*none of them is whole"):
        load_position(loader(), tmp_path)


def test_steps_only_rise(tmp_path: Path) -> None:
    saved(tmp_path)
    save_position(loader(), tmp_path, 5)  # the same step again
    with pytest.raises(
        UsageError, match=r"has step-000000000005\.json already, which is after step-000000000002"
    ):
        save_position(loader(), tmp_path, 2)
    with pytest.raises(UsageError, match="keep=0"):
        save_position(loader(), tmp_path, 9, keep=0)
    save_position(loader(), tmp_path, 9, keep=1)
    assert len(list(tmp_path.iterdir())) == 1


@ranks(2)
def test_rank_0_writes_and_reads_for_all(tmp_path: Path) -> None:
    folder = Path(hw.broadcast_object(str(tmp_path)))
    mine = DataLoader(NUMBERS, global_batch_size=4, shuffle=True)
    assert load_position(mine, folder / "none") == 0
    next(iter(mine))
    save_position(mine, folder, 1)
    assert len(list(folder.iterdir())) == 1
    again = DataLoader(NUMBERS, global_batch_size=4, shuffle=True)
    assert load_position(again, folder) == 1
    assert json.dumps(again.state_dict()) == json.dumps(mine.state_dict())
