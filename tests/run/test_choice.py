"""Which run the same command finds again when the run is finished and its script may not be."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from headway import schedulers
from headway.cli import main
from headway.run import Run
from headway.run.choice import Choice, choose


def choose_again(root: Path) -> Choice:
    return choose(root, name="a", config=None, world={}, resume="auto", environ={})


def finish(root: Path, **owner: object) -> Run:
    """A run whose training is done, and whose script has not noted its end; changes what is known of its process."""
    run = choose_again(root).run
    with run.lock():
        run.begin_attempt(world={"world_size": 1})
        run.note_attempt(1, script_ended=False)
        run.end_attempt(1, status="done", exit_code=0)
    (file,) = run.lock_dir.glob("owner-*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | owner))
    return run


def test_a_script_that_may_still_export_keeps_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exporting = finish(tmp_path)
    assert choose_again(tmp_path).run != exporting, "its process is this one"
    cut = finish(tmp_path / "cut", pid=2**22 + 7)
    assert choose_again(tmp_path / "cut") == Choice(run=cut, why="its script had not ended", finished=True)

    elsewhere = finish(tmp_path / "elsewhere", machine="another", host="n7")
    with caplog.at_level(logging.WARNING):
        assert choose_again(tmp_path / "elsewhere").run != elsewhere, "nobody knows whether it exports"
    assert f"its script may still run on n7; to resume it, set HEADWAY_RUN={elsewhere.path}" in caplog.text
    assert main(["resume", str(elsewhere.path), "--dry-run"]) == 0, "a user who names it knows"
    monkeypatch.setattr(schedulers, "is_gone", lambda *_: True)
    assert choose_again(tmp_path / "elsewhere").run == elsewhere, "its job is over"
