"""A run root that others can write to: what they put there neither stops nor misleads anybody."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from headway import cli
from headway.errors import StorageError, UnreadableRun, UsageError
from headway.run import Run, find_latest, find_runs, runs_under
from headway.run.choice import choose
from headway.run.job_record import record_end
from headway.system import files, jsonlines, ownership
from headway.system.log import logger
from headway.watch import runs as watched

pytestmark = pytest.mark.timeout(60)  # a pipe that is opened blocks for ever
NOBODY = 65534
REAL_FCHMOD = os.fchmod
DEEP = "[" * 300_000


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")
    os.lchown(path, NOBODY, NOBODY) if os.geteuid() == 0 else None


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 35)


def other_kind(path: Path) -> None:
    path.write_text('{"format": 1, "id": "a-1", "name": "a", "created": "soon", "attempts": [1, "x", null]}')


HOSTILE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "zero": zero,
    "deep": lambda path: path.write_text(DEEP),
    "sparse": sparse,
    "directory": Path.mkdir,
    "other": other_kind,
    "long": lambda path: path.symlink_to("x" * 300),
}


def broken_run(root: Path, kind: str) -> Path:
    path = root / "a-2026.11.16-03.30-aaaa"
    path.mkdir(parents=True)
    HOSTILE[kind](path / "run.json")
    return path


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_broken_run_of_another_user_is_skipped(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Run.create(tmp_path, name="a", config={"lr": 1})
    own.begin_attempt(world={})
    path = broken_run(tmp_path, kind)
    shutil.chown(path, NOBODY, NOBODY) if os.geteuid() == 0 else None
    said: list[str] = []
    assert [each.run.id for each in watched.select(tmp_path, warn=said.append)] == [own.id]
    assert len(said) == 1
    assert str(path) in said[0]
    chosen = choose(tmp_path, name="a", config={"lr": 1}, world={}, resume="auto")
    assert chosen.run.id == own.id
    if kind != "other":
        assert f"{path}/run.json" in caplog.text


@pytest.mark.parametrize("info", [None, "{"])
def test_checkpoints_of_another_user_that_cannot_be_listed_stop_nobody(
    info: str | None, tmp_path: Path
) -> None:
    """A link to where this user may not look, or to a name that is too long: beside a run.json, or without one."""
    own = Run.create(tmp_path, name="a", config={"lr": 1})
    own.begin_attempt(world={})
    path = tmp_path / "a-2026.11.16-03.30-aaaa"
    path.mkdir()
    (path / "checkpoints").symlink_to("x" * 300)
    if info is not None:
        (path / "run.json").write_text(info)
    shutil.chown(path, NOBODY, NOBODY) if os.geteuid() == 0 else None
    said: list[str] = []
    assert [each.run.id for each in watched.select(tmp_path, warn=said.append)] == [own.id]
    assert len(said) == (info is not None)
    chosen = choose(tmp_path, name="a", config={"lr": 1}, world={}, resume="auto")
    assert chosen.run.id == own.id


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a run to another user")
def test_a_run_of_another_user_whose_checkpoints_cannot_be_listed_needs_no_warning(tmp_path: Path) -> None:
    other = Run.create(tmp_path, name="a", config={"lr": 1})
    shutil.rmtree(other.checkpoints_dir)
    other.checkpoints_dir.symlink_to("x" * 300)
    shutil.chown(other.path, NOBODY, NOBODY)
    assert choose(tmp_path, name="a", config={"lr": 1}, world={}, resume="auto").why == "new"


@pytest.mark.parametrize("kind", ["pipe", "zero", "deep", "sparse"])
def test_ones_own_damaged_run_with_checkpoints_is_refused(kind: str, tmp_path: Path) -> None:
    path = broken_run(tmp_path, kind)
    (path / "checkpoints" / "step-000000000005").mkdir(parents=True)
    with pytest.raises(UnreadableRun, match="up to step 5; restore it with: headway runs rebuild"):
        choose(tmp_path, name="a", config={"lr": 1}, world={}, resume="auto")


@pytest.mark.parametrize("kind", ["pipe", "deep"])
def test_files_beside_a_valid_run(kind: str, tmp_path: Path) -> None:
    """Every file of a run is replaced in turn: listing, opening, locking and recording do not block or end."""
    run = Run.create(tmp_path, name="a", config={"lr": 1})
    with run.lock():
        attempt = run.begin_attempt(world={})
        run.end_attempt(attempt, status="failed", exit_code=1)
    others = [
        run.config_file,
        run.failure_file,
        run.submission_file,
        run.sweep_file,
        run.job_file,
        run.plan_file,
    ]
    locks = [run.lock_dir / "owner-00001.json", run.lock_dir / "owner-00002.json"]
    for file in [*others, *locks, run.ended_file, run.metrics_file(0), run.old_failure_file(1)]:
        file.parent.mkdir(exist_ok=True, parents=True)
        file.unlink(missing_ok=True)
        HOSTILE[kind](file)
    assert [each.run.id for each in watched.select(tmp_path)] == [run.id]
    assert list(watched.metric_rows(run)) == []
    if kind == "pipe":
        with pytest.raises(StorageError, match="it is not a regular file"), run.lock():
            pass
    for file in locks:
        file.unlink()
    with run.lock():
        attempt = run.begin_attempt(world={})
        run.end_attempt(attempt, status="failed", exit_code=1)


def test_links_of_ones_own_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    assert files.read_regular(tmp_path / "link") == b"x"
    if os.geteuid() == 0:
        os.lchown(tmp_path / "link", NOBODY, NOBODY)
        with pytest.raises(OSError, match="a link of another user"):
            files.read_regular(tmp_path / "link")


def test_rows_that_are_nested_too_deeply_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{DEEP}\n{{"step": 1}}\n')
    assert list(jsonlines.read(file)) == [{"step": 1}]
    assert list(jsonlines.read_reversed(file)) == [{"step": 1}]


def started(root: Path, run: Run, way: str) -> Run:
    """Starts the same training again, in one of the ways to name the run."""
    environ = {"HEADWAY_RUN": str(run.path)} if way == "variable" else {}
    resume = run.path if way == "path" else "auto"
    return choose(root, name="a", config={"lr": 1}, world={}, resume=resume, environ=environ).run


@pytest.mark.parametrize("way", ["auto", "path", "variable"])
def test_what_others_could_have_written_is_not_resumed(way: str, tmp_path: Path) -> None:
    """The walk of jobs over owners and modes, for every start; what the refusal says to run makes it work."""
    root = tmp_path / "runs"
    run = Run.create(root, name="a", config={"lr": 1})
    run.end_attempt(run.begin_attempt(world={}), status="failed", exit_code=1)
    assert started(root, run, way) == run
    for path, mode in (
        (run.path, 0o777),
        (run.path, 0o702),
        (run.info_file, 0o666),
        (run.checkpoints_dir, 0o777),
        (root, 0o777),
        (tmp_path, 0o777),
    ):
        before = path.stat().st_mode & 0o7777
        path.chmod(mode)
        with pytest.raises(UsageError, match="can be written by others") as refused:
            started(root, run, way)
        remedy = str(refused.value).rpartition(": ")[2]
        assert remedy in (f"chmod go-w {path}", f"chmod +t {path}")
        subprocess.run(remedy, shell=True, check=True)
        assert started(root, run, way) == run
        path.chmod(before)
    root.chmod(0o1777)
    assert started(root, run, way) == run, "with the sticky bit nobody else can rename it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("way", ["auto", "path", "variable"])
def test_what_others_own_is_not_resumed(way: str, tmp_path: Path) -> None:
    run = Run.create(tmp_path, name="a", config={"lr": 1})
    run.end_attempt(run.begin_attempt(world={}), status="failed", exit_code=1)
    for path in (run.info_file, run.checkpoints_dir):
        shutil.chown(path, NOBODY)
        with pytest.raises(UsageError, match=f"{path} belongs to another user, nobody"):
            started(tmp_path, run, way)
        shutil.chown(path, 0)
    assert started(tmp_path, run, way) == run


def test_a_root_that_others_can_change_is_refused_before_training(tmp_path: Path) -> None:
    """Not only when the run is to be resumed, after days of training."""
    tmp_path.chmod(0o777)
    for resume in ("auto", "never"):
        with pytest.raises(UsageError, match=rf"can be written by others .*: chmod \+t {tmp_path}$"):
            choose(tmp_path, name="a", config=None, world={}, resume=resume, environ={})
    assert list(tmp_path.iterdir()) == []


def test_where_no_modes_are_kept_there_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Drives of Windows and exFAT show one mode for all files: no chmod could help. The mode is imitated."""
    run = Run.create(tmp_path, name="a", config={"lr": 1})
    run.end_attempt(run.begin_attempt(world={}), status="failed", exit_code=1)
    tmp_path.chmod(0o777)
    assert ownership.keeps_modes(tmp_path)
    monkeypatch.setattr(os, "fchmod", lambda fd, _: REAL_FCHMOD(fd, 0o777))
    assert not ownership.keeps_modes(tmp_path)
    assert started(tmp_path, run, "auto") == run
    assert f"chmod +t {tmp_path}; training continues, since this file system keeps no modes" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [run.id], "no trial is left"


EVIL = "\x1b]0;owned\x07\x1b[2J\u202e"


def test_text_of_a_run_cannot_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path, name="a", config={"lr": 1})
    run.end_attempt(run.begin_attempt(world={}), status="failed", exit_code=1)
    record_end(run, 1, error=f"out of luck{EVIL}\nheadway: all is well")
    for name, job in (("b", f"7{EVIL}"), (f"c{EVIL}", "8")):
        path = tmp_path / f"{name}-2026.11.16-03.30-aaaa"
        shutil.copytree(run.path, path)
        info = json.loads(run.info_file.read_text()) | {"id": f"{name}-1", "name": name}
        (path / "run.json").write_text(json.dumps(info))
        (path / "submitted.json").write_text(json.dumps({"scheduler": "slurm", "job_id": job}))
    damaged = tmp_path / f"d{EVIL}\nheadway: all is well"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    for arguments in (
        ["runs"],
        ["watch", "nothing"],
        ["report", f"no{EVIL}"],
        ["runs", "rm", "b-2026", "--dry-run"],
        ["runs", "rm", f"c{EVIL}", "--dry-run"],
    ):
        cli.main([*arguments, "--root", str(tmp_path)])
        out, err = capsys.readouterr()
        said = out + err
        assert said and not any(c in said for c in "\x1b\x07\u202e"), (arguments, said)
        assert "\nheadway: all is well" not in said
    logger.warning("%s is damaged", damaged)
    assert "\x1b" not in capsys.readouterr().err, "neither can what a training prints of its root"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_runs_of_others_are_not_the_newest_and_do_not_take_ids(tmp_path: Path) -> None:
    mine = Run.create(tmp_path, name="a", config={"lr": 1})
    theirs = tmp_path / f"a-2099.01.01-00.00-{mine.id[-4:]}"
    shutil.copytree(mine.path, theirs)
    facts = json.loads(mine.info_file.read_text())
    (theirs / "run.json").write_text(json.dumps(facts | {"created": "2099-01-01T00:00:00+00:00"}))
    assert {run.id for run in runs_under(tmp_path)} == {mine.id, theirs.name}, "an id is a directory's name"
    newest = find_latest(tmp_path)
    assert newest is not None and newest.path == theirs, "while it is of the same user"
    shutil.chown(theirs, NOBODY, NOBODY)
    (theirs / "submitted.json").write_text('{"scheduler": "evil:Scheduler", "job_id": "7"}')
    said: list[str] = []
    assert len(watched.select(tmp_path, warn=said.append)) == 2
    assert not said, "no advice to load what others name"
    assert find_latest(tmp_path) == find_latest(tmp_path, name="a") == mine
    assert find_runs(mine.id[-4:], tmp_path) == find_runs("a-", tmp_path) == [mine]
    assert watched.newest_run(tmp_path) == watched.resolve([mine.id], tmp_path) == [mine]
    assert [run.path for run in find_runs("a-2099", tmp_path)] == [theirs], "who names it gets it"
    assert find_runs(str(theirs), tmp_path)[0].path == theirs
    longer = Run.create(tmp_path, name=f"{mine.id}-tuned")
    assert find_runs(mine.id, tmp_path) == [mine] and len(find_runs(mine.id[:-1], tmp_path)) == 2
    shutil.rmtree(longer.path)
    shutil.rmtree(mine.path)
    assert find_latest(tmp_path) is None


@pytest.fixture
def shared_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A root for the runs of all users, with one of somebody else's; this process is an ordinary user."""
    if os.geteuid() != 0:
        pytest.skip("only root can make files of others")
    for verb in ("runs", "watch"):
        import_module(f"headway.cli.{verb}")  # which the other user may not be able to read
    with tempfile.TemporaryDirectory() as made:  # not in pytest's own directory, which is root's alone
        root = Path(made)
        root.chmod(0o1777)
        monkeypatch.chdir(root)
        monkeypatch.setenv("HOME", made)
        theirs = Run.create(root, name="a", config={"lr": 1})
        for path in (theirs.path, *theirs.path.rglob("*")):
            os.lchown(path, NOBODY - 1, NOBODY - 1)
        (root / "lost+found").mkdir(mode=0o700)
        os.seteuid(NOBODY)
        try:
            yield root
        finally:
            os.seteuid(os.getuid())


def test_runs_that_others_have_closed_are_passed_over(
    shared_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [theirs] = shared_root.glob("a-*")
    said: list[str] = []
    assert runs_under(shared_root, warn=said.append) == []
    assert find_latest(shared_root) is None
    own = choose(shared_root, name="a", config={"lr": 1}, world={}, resume="auto").run
    assert runs_under(shared_root, warn=said.append) == [own]
    assert find_runs(own.id[-4:], shared_root) == [own]
    assert cli.main(["runs", "--root", str(shared_root)]) == 0
    shown = capsys.readouterr()
    assert own.id in shown.out and theirs.name not in shown.out + shown.err
    assert said == []
    assert cli.main(["watch", str(theirs), "--once"]) == 2
    assert f"{theirs}/run.json cannot be read: Permission denied" in capsys.readouterr().err


def test_ones_own_run_that_may_not_be_read_is_not_trained_again(shared_root: Path) -> None:
    own = Run.create(shared_root, name="a", config={"lr": 1})
    own.path.chmod(0)  # as with a network file system whose ticket has expired
    said: list[str] = []
    assert runs_under(shared_root, warn=said.append) == []
    assert said == [f"{own.info_file} cannot be read: Permission denied"]
    with pytest.raises(UsageError, match="Permission denied"):
        choose(shared_root, name="a", config={"lr": 1}, world={}, resume="auto")
    own.path.chmod(0o700)
