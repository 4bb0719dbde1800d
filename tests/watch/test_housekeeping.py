"""Runs that are over are removed and archived, and only they; sinks catch up; nothing is asked twice."""

from __future__ import annotations

import csv
import errno
import json
import os
import pty
import re
import tarfile
from pathlib import Path

import pytest
from synthetic_run import make_run, row, write_rows

from headway.cli import main
from headway.errors import StorageError, UsageError
from headway.record.sinks import Csv, feeding, replay
from headway.run import Run
from headway.run.info import write_info
from headway.run.job_record import record_end
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
    assert (
        "standard input is not a terminal; to remove 1 run without a question, add --yes"
        in capsys.readouterr().err
    )
    assert main(["runs", "rm", run.id[-4:], "--root", str(run.path.parent), "--yes"]) == 0
    assert list(run.path.parent.iterdir()) == []


@pytest.mark.parametrize(("answer", "kept"), [("n\n", True), ("\n", True), ("y\n", False), ("\x04", True)])
def test_the_answer_decides(run: Run, answer: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    os.write(leader, answer.encode())  # \x04 is Ctrl-D
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


def test_the_code_of_a_sweep_goes_with_its_last_run(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs of a sweep use the copy of the first one: a job that starts again would not find it."""
    others = [Run.create(run.path.parent) for _ in range(2)]
    run.snapshot_dir.mkdir()
    facts = {
        "from": str(tmp_path),
        "directory": ".",
        "script": None,
        "python_path": [],
        "added": [],
        "left_out": [],
    }
    for each in (run, *others):
        each.record_snapshot(facts | {"tree": "code/tree" if each == run else str(run.snapshot_dir)})
    for verb in ("rm", "archive"):
        assert main(["runs", verb, str(run.path), "--yes"]) == 2 and run.path.exists()
        said = capsys.readouterr().err
        assert f"{run.id} holds the code of runs that are not done (" in said and others[0].id in said
    with pytest.raises(UsageError, match="holds the code of runs that are not done"):
        housekeeping.remove(run)
    record_end(others[0], 0)
    assert main(["runs", "rm", str(run.path), str(others[1].path), "--yes"]) == 0, "the rest is done"
    assert list(run.path.parent.iterdir()) == [others[0].path]


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


def test_a_run_stays_locked_from_its_archive_to_its_removal(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what a start in between has written would be removed, and is not in the archive."""
    taken, lock = [], Run.lock

    def counted(self: Run) -> object:
        taken.append(self.id)
        return lock(self)

    monkeypatch.setattr(Run, "lock", counted)
    assert housekeeping.archive(run).exists() and not run.path.exists()
    assert taken == [run.id]


def test_runs_of_others_do_not_hold_a_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """In a shared root: neither what they record as code, nor that they claim to use this copy of it."""
    run.snapshot_dir.mkdir()
    for code in ("x", ["x"], {"snapshot": "x"}, {"snapshot": {"tree": "\0"}}, {"snapshot": {"tree": 7}}):
        other = Run.create(run.path.parent)
        write_info(other.path, other.info() | {"code": code})
    if os.geteuid() == 0:  # only root can give files away
        theirs = Run.create(run.path.parent)
        write_info(theirs.path, theirs.info() | {"code": {"snapshot": {"tree": str(run.snapshot_dir)}}})
        os.chown(theirs.path, 65534, 65534)
    assert main(["runs", "rm", str(run.path), "--dry-run"]) == 0, capsys.readouterr().err
    assert str(run.path) in capsys.readouterr().out


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


def test_a_sink_that_others_could_have_described_is_not_imported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "headway.record.sinks.replayer.transport.make", lambda _: pytest.fail("it was imported")
    )
    run.metrics_dir.chmod(0o700)
    run.sink_file("x").write_text('{"module": "evil"}')
    for path, mode in ((run.metrics_dir, 0o777), (run.sink_file("x"), 0o666)):
        before = path.stat().st_mode & 0o7777
        path.chmod(mode)
        with pytest.raises(UsageError, match=rf"{path} can be written by others"):
            replay(run)
        path.chmod(before)
    run.sink_file("x").rename(tmp_path / "elsewhere.json")
    run.sink_file("x").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(UsageError, match="is damaged"):
        replay(run)


def test_a_run_is_not_archived_where_others_could_remove_it(run: Run, tmp_path: Path) -> None:
    place = run.path.parent / "archive"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(UsageError, match=rf"{place} is not safe.*written by others.*--to DIR"):
        housekeeping.archive(run)
    place.rmdir()
    (tmp_path / "mine").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "mine")
    if os.geteuid() == 0:
        os.lchown(place, 65534, 65534)
        with pytest.raises(UsageError, match=rf"{place} is not safe.*another user, nobody"):
            housekeeping.archive(run)
        os.lchown(place, 0, 0)
    assert run.path.exists() and not list((tmp_path / "mine").iterdir())
    assert housekeeping.archive(run).exists() and not run.path.exists(), "a link of one's own is followed"


def test_a_renamed_run_is_archived_and_a_link_to_one_is_not_removed(run: Run) -> None:
    renamed = Run.open(run.path.rename(run.path.with_name("best")))
    link = run.path.with_name("link")
    link.symlink_to(renamed.path)
    for work in (housekeeping.remove, housekeeping.archive):
        with pytest.raises(UsageError, match=f"link is a link: give the run itself, {renamed.path}"):
            work(Run.open(link))
    assert link.is_symlink() and renamed.path.is_dir()
    with tarfile.open(housekeeping.archive(renamed)) as tar:
        assert f"{run.id}/run.json" in tar.getnames()


def test_a_full_disk_leaves_the_run_and_no_half_of_an_archive(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "add", full)
    with pytest.raises(StorageError, match="No space left"):
        housekeeping.archive(run)
    assert run.path.exists() and not list((run.path.parent / "archive").iterdir())


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
