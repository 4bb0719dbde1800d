"""Runs that are over are removed and archived, and only they; sinks catch up; nothing is asked twice."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import tarfile
from pathlib import Path

import pytest
from synthetic_run import make_run, row, write_rows

from headway.cli import main
from headway.errors import UsageError
from headway.record.sinks import Csv, feeding, replay
from headway.run import Run
from headway.watch import housekeeping


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = make_run(tmp_path / "runs")
    run.end_attempt(1, status="done", exit_code=0)
    (run.checkpoints_dir / "step-000000000100").mkdir(parents=True)
    (run.checkpoints_dir / "step-000000000100" / "a.safetensors").write_bytes(os.urandom(100_000))
    return run


def test_a_run_is_removed_after_it_was_shown(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "rm", str(run.path), "--dry-run"]) == 0 and run.path.exists()
    assert re.search(r"1\d\d\.\d kB  " + str(run.path), capsys.readouterr().out)
    assert main(["runs", "rm", str(run.path)]) == 2 and run.path.exists()
    assert "nobody can be asked here: to remove 1 run, add --yes" in capsys.readouterr().err
    assert main(["runs", "rm", run.id[-4:], "--root", str(run.path.parent), "--yes"]) == 0
    assert list(run.path.parent.iterdir()) == []


@pytest.mark.parametrize(("answer", "kept"), [("n", True), ("", True), ("y", False)])
def test_the_answer_decides(run: Run, answer: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    os.write(leader, f"{answer}\n".encode())
    with os.fdopen(follower) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["runs", "rm", str(run.path)]) == 0
    os.close(leader)
    assert run.path.exists() is kept


def test_an_archive_has_every_byte_and_replaces_the_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {path.name: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert main(["runs", "archive", str(run.path), "--yes"]) == 0
    target = run.path.parent / "archive" / f"{run.id}.tar"
    assert capsys.readouterr().out.splitlines()[-1] == str(target) and not run.path.exists()
    with tarfile.open(target) as tar:
        tar.extractall(run.path.parent, filter="data")
    again = Run.open(run.path)
    assert again.info()["attempts"][0]["status"] == "done"
    found = {path.name: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert {name: found.get(name) for name in wanted} == wanted
    assert main(["runs", "archive", str(run.path), "--yes"]) == 2 and run.path.exists(), (
        "it has been archived"
    )


def test_hard_links_are_archived(run: Run) -> None:
    (run.path / "linked.txt").write_text("twice")
    os.link(run.path / "linked.txt", run.path / "other.txt")
    with tarfile.open(housekeeping.archive(run)) as tar:
        tar.extractall(run.path.parent, filter="data")
    assert (run.path / "linked.txt").read_text() == (run.path / "other.txt").read_text() == "twice"


def test_a_damaged_archive_keeps_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    add = tarfile.TarFile.add

    def lose(tar: tarfile.TarFile, name: str, *args: object, **settings: object) -> None:
        if not str(name).endswith(".safetensors"):
            add(tar, name, *args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(tarfile.TarFile, "add", lose)
    assert main(["runs", "archive", str(run.path), "--yes"]) == 74
    assert run.path.exists() and not list((run.path.parent / "archive").iterdir())


def test_what_runs_is_refused(run: Run, tmp_path: Path) -> None:
    with run.lock():
        run.begin_attempt(world={})
        for work in (housekeeping.remove, housekeeping.archive):
            with pytest.raises(UsageError, match="is running: wait until it has ended"):
                work(run)
    assert run.path.exists() and not (tmp_path / "runs" / "archive").exists()


def lines_of(path: Path) -> list[tuple[int, str]]:
    with path.open(newline="") as file:
        return [(int(line["step"]), line["name"]) for line in csv.DictReader(file)]


def test_a_sink_catches_up_with_what_it_missed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(step, 0, 1.0) | {"data": {}} for step in (10, 20)]
    write_rows(run.metrics_file(0), rows)
    with feeding(run, [Csv()], finish_s=60):
        pass
    assert [step for step, name in lines_of(run.csv_file) if name == "train/loss"] == [10, 20]
    write_rows(run.metrics_file(0), [*rows, row(30, 0, 2.0)])
    assert main(["runs", "sync", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {run.id: {"csv": True}}
    assert [step for step, name in lines_of(run.csv_file) if name == "train/loss"] == [10, 20, 30]
    with pytest.raises(UsageError, match="had no sink 'wandb'; it had: csv"):
        replay(run, ["wandb"])


def test_a_csv_file_has_each_step_once_whatever_was_repeated(run: Run) -> None:
    sink = Csv()
    sink.open(run)
    sink.write([row(step, 0, 1.0) for step in (10, 20, 30)])
    sink.close("failed", 1)
    with run.csv_file.open("a") as file:
        file.write("30,1.0,tra")  # killed in the middle of a line
    again = Csv()
    again.open(run)
    late = {"kind": "checkpoint", "time": 1.0, "step": 10, "bytes": 5}
    again.write([late, row(20, 0, 2.0) | {"metrics": {"train/loss": 7.0}}, row(30, 0, 2.0), row(40, 0, 2.0)])
    again.close("done", 0)
    losses = [step for step, name in lines_of(run.csv_file) if name == "train/loss"]
    assert losses == [10, 20, 30, 40]
    assert (10, "headway/checkpoint/bytes") in lines_of(run.csv_file)
    assert "train/loss,7.0" in run.csv_file.read_text()
