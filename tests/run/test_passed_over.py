"""When a new run begins, it names the runs of its name that are not resumed, and why."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.errors import UsageError
from headway.run import Run
from headway.run.arguments import change, find_changes
from headway.run.choice import Choice, choose


def begin(root: Path, config: dict[str, Any], resume: str = "auto", free: Any = ()) -> Choice:
    return choose(root, name="fit", config=config, world={}, resume=resume, free=free, environ={})


def end(run: Run, status: str | None) -> Run:
    """Ends a first attempt as `status`; None as by kill -9."""
    with run.lock():
        run.begin_attempt(world={"world_size": 1})
        if status:
            run.end_attempt(1, status=status, exit_code=0 if status == "done" else 1, why="RuntimeError('x')")
    return run


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "headway")
    return caplog


def test_nothing_is_said_of_the_first_run_or_of_a_resumed_one(
    tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    run = end(begin(tmp_path, {"steps": 30}).run, None)
    begin(tmp_path, {"steps": 31}, resume="never")
    assert begin(tmp_path, {"steps": 30}).run == run
    assert said.text == ""


def test_other_settings_are_named_with_the_command_that_continues(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "train.py", "--data", "x", "--steps", "30"]
    old = end(Run.create("runs", name="fit", config={"steps": 30, "lr": 1}, command=command), None)
    now = [sys.executable, "train.py", "--data", "x", "--steps", "100"]
    monkeypatch.setattr(sys, "orig_argv", now)
    monkeypatch.setattr(sys, "argv", now[1:])
    with pytest.raises(
        UsageError, match=rf"these settings \({old.id}: other settings: steps 30 -> 7\): start"
    ):
        begin(Path("runs"), {"steps": 7, "lr": 1}, resume="must")
    assert begin(Path("runs"), {"steps": 100, "lr": 1}).why == "new"
    (record,) = said.records
    assert record.message == (
        f"a new run begins, since this one is not resumed: {old.id}: other settings: steps 30 -> 100; "
        f"to resume it: headway resume {old.id} -- --steps 100"
    )


def test_each_is_named_the_closest_first_and_many_are_counted(
    tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    finished = end(begin(tmp_path, {"lr": 1}).run, "done")
    other = end(begin(tmp_path, {"lr": 2}).run, "done")
    unstarted = begin(tmp_path, {"lr": 1}, resume="never").run
    for lr in range(3, 9):
        end(begin(tmp_path, {"lr": lr}, resume="never").run, "failed")
    used = end(begin(tmp_path, {"lr": 1}, resume="never").run, None)
    said.clear()
    with used.lock():
        assert begin(tmp_path, {"lr": 1}).why == "new"
    (record,) = said.records
    head, *lines = record.message.split("\n  ")
    assert head == "a new run begins, since these are not resumed:" and len(lines) == 6
    assert lines[0].startswith(f"{used.id}: in use by pid ")
    assert lines[1] == f"{unstarted.id}: it was never started"
    assert all(": other settings: lr " in line for line in lines[2:5])
    assert lines[5] == "and 5 more: 3 other settings, 1 finished, 1 finished with other settings"
    shutil.rmtree(used.path)
    for run in (finished, other):
        assert run.id not in record.message


def test_a_copy_of_a_run_in_use_is_named(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    run = end(begin(tmp_path, {}).run, None)
    with run.lock():
        shutil.copytree(run.path, tmp_path / "copy")
        assert begin(tmp_path, {}).why == "new"
        assert f"{run.id}: in use by pid" in said.text and "copy: in use by pid" in said.text


def test_settings_that_do_not_identify_a_run(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    config = {"lr": 1, "steps": 30, "data": {"workers": 2, "name": "a"}}
    run = end(begin(tmp_path, config).run, None)
    free = ("steps", "data.workers")
    changed = config | {"steps": 100, "data": {"workers": 0, "name": "a"}}
    assert begin(tmp_path, changed, free=free).run == run
    assert said.text == ""
    assert begin(tmp_path, changed | {"lr": 2}, free=free).why == "new"
    assert "other settings: lr 1 -> 2" in said.text and "steps" not in said.text
    with pytest.raises(
        UsageError, match=r"'stpes' is not a valid setting in free \(did you mean 'steps'\?\)"
    ):
        begin(tmp_path, config, free=("stpes",))


def test_a_cell_that_failed_begins_a_new_run_and_one_that_was_interrupted_continues(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = end(begin(tmp_path, {}).run, "failed")
    assert begin(tmp_path, {}).run == failed, "the same command resumes it"
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    new = begin(tmp_path, {}).run
    assert new != failed
    call = f"to resume it: pipe.enable_checkpointing(resume='{failed.path}')"
    assert said.text.count("\n") == 1 and f"{failed.id}: failed: RuntimeError('x'); {call}" in said.text
    for status in ("stopped", "interrupted"):
        end(new, status)
        assert begin(tmp_path, {}).run == new
        info = json.loads(new.info_file.read_text())
        new.info_file.write_text(json.dumps(info | {"attempts": []}))


@pytest.mark.parametrize(
    ("before", "new", "now"),
    [
        ("--lr 0.1 --fast", "--lr 0.01", "--lr 0.01 --fast"),
        ("--lr=0.1", "--lr 0.01", "--lr 0.01"),
        ("--lr 0.1 data.csv", "--lr 0.01", "--lr 0.01 data.csv"),
        ("data.csv --lr 0.1", "--lr -0.5 --new", "data.csv --lr -0.5 --new"),
        ("model.lr=1 +a=2", "model.lr=3", "model.lr=3 +a=2"),
        ("fit --lr 1", "fit --lr 2 --fast", "fit --lr 2 --fast"),
        ("--sizes 1 2 3", "--sizes 4 5 6", "--sizes 4 5 6"),
    ],
)
def test_new_arguments_change_those_of_a_run(before: str, new: str, now: str) -> None:
    assert change(before.split(), new.split()) == now.split()
    found = find_changes(before.split(), now.split())
    assert found is not None and change(before.split(), found) == now.split()


def test_arguments_that_are_gone_have_no_new_ones() -> None:
    assert find_changes(["--fast"], []) is None
    assert find_changes(["--fast"], ["--fast"]) == []
    assert change(["--lr", "0.1", "data.csv"], ["--lr=0.01"]) == ["--lr=0.01", "data.csv"]
