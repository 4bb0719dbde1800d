"""Media of a run: the index and its reader, what is encoded, how much is kept, and what sinks get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.record.media import MediaIndex, read_histogram, read_media
from headway.run import Run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return Run.create(tmp_path / "runs", name="digits")


def row(
    step: int, *, name: str = "val/samples", attempt: int = 1, number: int = 0, **more: Any
) -> dict[str, Any]:
    facts = {
        "kind": "image",
        "time": 1.5,
        "attempt": attempt,
        "rank": 0,
        "step": step,
        "stage": "fit",
        "epoch": 0,
    }
    file = f"rank-00000/{name}/step-{step:012d}-{number:03d}.png"
    return {**facts, "name": name, "number": number, "file": file, "bytes": 3, "caption": "", **more}


def append(run: Run, *rows: dict[str, Any], rank: int = 0) -> None:
    run.media_dir.mkdir(exist_ok=True)
    with run.media_index_file(rank).open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)


# --- the index


def test_items_are_followed_by_step_and_those_that_a_resume_repeats_do_not_count(run: Run) -> None:
    index = MediaIndex(run)
    assert not index.refresh() and index.items() == []
    append(run, row(20), row(10), row(30), row(10, name="weights", kind="histogram"))
    append(run, row(30, rank=3, file="rank-00003/a/step-1.png"), rank=3)
    assert index.refresh() and not index.refresh()
    assert [(item.step, item.rank) for item in index.items("val/samples")] == [
        (10, 0),
        (20, 0),
        (30, 0),
        (30, 3),
    ]
    assert index.names() == ["val/samples", "weights"]
    append(
        run, {"kind": "resumed", "attempt": 2, "step": 10}, row(10, attempt=2), row(30, attempt=2, bytes=4)
    )
    assert index.refresh()
    assert [(item.step, item.attempt) for item in index.items("val/samples")] == [(10, 2), (30, 2)]
    append(run, {"kind": "removed", "file": row(10)["file"]})
    index.refresh()
    assert [item.bytes for item in index.items("val/samples")] == [4]
    assert read_media(run) == index.items(), "what was followed is what is read at once"
    assert index.items("weights")[0].path(run) == run.path / "media" / row(10, name="weights")["file"]


@pytest.mark.parametrize(
    "damage",
    [
        {"file": "../../secret"},
        {"file": "/etc/passwd"},
        {"file": ""},
        {"file": None},
        {"step": "1"},
        {"step": -1},
        {"kind": "virus"},
        {"time": "x"},
        {"width": "9"},
        {"name": 7},
    ],
)
def test_a_row_that_is_not_an_item_is_passed_over(run: Run, damage: dict[str, Any]) -> None:
    append(run, {**row(1), **damage}, row(2))
    assert [item.step for item in read_media(run)] == [2]


def test_a_damaged_histogram_is_none(tmp_path: Path) -> None:
    file = tmp_path / "h.json"
    assert read_histogram(file) is None
    for text in ("{", "[]", '{"edges": [0, 1], "counts": [1, 2]}', '{"edges": [0, "a"], "counts": [1]}'):
        file.write_text(text)
        assert read_histogram(file) is None
    file.write_text('{"edges": [0, 1.5], "counts": [4]}')
    assert read_histogram(file) == {"edges": [0, 1.5], "counts": [4], "non_finite": 0}
