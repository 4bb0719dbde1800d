"""A run whose run.json or config.yaml was damaged, and whose checkpoints are whole, never starts over in silence."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from headway import checkpoint
from headway.cli import main
from headway.errors import RunLocked, UnreadableRun, UsageError
from headway.launcher import epilogue, job_start as start
from headway.launcher.code import snapshot
from headway.run import Run, lock
from headway.run.choice import choose
from headway.run.rebuild import rebuild

CONFIG = {"lr": 0.1}


def find(root: Path, config: object = CONFIG, **options: Any) -> Run:
    facts: dict[str, Any] = {"name": "toy", "world": {}, "resume": "auto", "environ": {}}
    return choose(root, config=config, **facts | options).run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of two attempts with a checkpoint of step 546."""
    run = Run.create(tmp_path, name="toy", config=CONFIG)
    with run.lock():
        for number in (1, 2):
            run.begin_attempt(world={})
            with run.open_rows(run.diagnostics_file, content="diagnostics") as rows:
                facts = {"time": "2026-11-15T14:30:00+00:00", "host": "n1", "argv": ["python", "train.py"]}
                rows.write({"attempt": number, **facts})
        checkpoint.save(run, {"x": 1}, step=546)
    return run


def damages(path: Path) -> dict[str, bytes | None]:
    whole = path.read_bytes()
    flipped = whole.replace(b'"toy"', b'"tox"')
    assert flipped != whole
    return {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "zeros": b"\0" * len(whole),
        "missing": None,
        "list": b"[]",
        "flipped": flipped,
    }


def put(path: Path, data: bytes | None) -> None:
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)


def test_a_damaged_record_is_86_with_the_remedy_and_can_be_rebuild(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find(tmp_path) == run
    whole = run.info_file.read_bytes()
    for kind, data in damages(run.info_file).items():
        put(run.info_file, data)
        before = sorted(path.name for path in tmp_path.iterdir())
        environ = {"HEADWAY_RUN": str(run.path)}
        for options in ({}, {"resume": "must"}, {"resume": run.path}, {"environ": environ}):
            with pytest.raises(
                UnreadableRun, match=f"to step 546; .*: headway runs rebuild {run.path}"
            ) as caught:
                find(tmp_path, **options)
            assert caught.value.exit_code == 86, kind
        assert epilogue.main(str(run.path), "0") == 86
        assert sorted(path.name for path in tmp_path.iterdir()) == before, "nothing new was begun"
        assert main(["runs", "rebuild", str(run.path)]) == 0
        assert "2 attempts, checkpoints up to step 546" in capsys.readouterr().out
        assert find(tmp_path) == run, "and the same command resumes"
        assert (
            run.info()["command"] == ["python", "train.py"]
            and run.info()["config"] == json.loads(whole)["config"]
        )
        put(run.info_file, whole)
    kept = [path.read_bytes() for path in run.path.glob("run.json.corrupt-*")]
    assert len(kept) == len(damages(run.info_file)) - 1, "what was there is kept"


def test_damaged_settings_have_a_second_copy(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run.config_file.read_bytes()
    for data in (b"", b"lr: [0.", b"lr: 0.3\n", None):
        put(run.config_file, data)
        assert find(tmp_path) == run, "run.json has them, too"
        assert run.config_file.read_bytes() == whole
        assert "were damaged" in caplog.text
    info = run.info()
    run.info_file.write_text(json.dumps(info | {"config": "lr: 0.2\n"}))
    assert find(tmp_path) == run and run.info()["config"] == whole.decode()
    assert find(tmp_path, {"lr": 0.5}) != run, "other settings are another run"


def test_damaged_settings_of_an_older_version_are_86(run: Run, tmp_path: Path) -> None:
    info = run.info()
    del info["config"]
    run.info_file.write_text(json.dumps(info))
    assert find(tmp_path) == run
    for data in (b"", b"lr: [0.", b"\0\0\0", None):
        put(run.config_file, data)
        with pytest.raises(UnreadableRun, match=f"up to step 546, .* pass resume='{run.path}'"):
            find(tmp_path)
    assert find(tmp_path, resume=run.path) == run


def test_settings_that_a_rebuilt_record_lacks_are_86(run: Run, tmp_path: Path) -> None:
    put(run.info_file, b"{")
    put(run.config_file, b"")
    assert rebuild(run.path)["config"] is None
    with pytest.raises(UnreadableRun, match=f"up to step 546, .* pass resume='{run.path}'"):
        find(tmp_path)
    assert find(tmp_path, resume=run.path) == run


def test_a_rebuilt_record_knows_the_code_that_starts_it_again(run: Run, tmp_path: Path) -> None:
    def rebuilt(cwd: Path) -> Path:
        with run.open_rows(run.diagnostics_file, content="diagnostics") as rows:
            rows.write({"attempt": 3, "cwd": str(cwd)})
        put(run.info_file, b"{")
        rebuild(run.path)
        return snapshot.load(run).directory

    with pytest.raises(UsageError, match="has no copy of its code"):
        rebuilt(tmp_path)  # a script that its user starts
    run.call_dir.mkdir(exist_ok=True)
    assert rebuilt(tmp_path) == tmp_path, "a function runs where its files are"
    first = tmp_path / "toy-2026.11.15-14.30-aaaa" / "code" / "tree" / "src"
    start = run.work_dir / "src"
    for directory in (first, start):
        directory.mkdir(parents=True)
    (start / "train.py").symlink_to(first / "train.py")
    assert rebuilt(start) == first, "the runs of a sweep use the copy of the first"
    assert snapshot.load(run).start == start
    inside = run.snapshot_dir / "src"
    inside.mkdir(parents=True)
    assert rebuilt(start) == inside and rebuilt(tmp_path) == run.snapshot_dir


def test_an_owner_that_was_killed_elsewhere_does_not_keep_its_run_for_ever(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def leave() -> None:
        owner = lock.Owner(host="n3", machine="other", pid=77, born="5", attempt=1, job=None, beat=9)
        newest = len(list(run.lock_dir.glob("owner-*"))) + 1
        (run.lock_dir / f"owner-{newest:05d}.json").write_bytes(owner.record())

    started: list[Run] = []
    monkeypatch.setattr(start, "in_background", lambda run, _: started.append(run))
    monkeypatch.setattr(lock, "hold", functools.partial(lock.hold, silence_s=0.0))
    snapshot.take(run, tmp_path, dirty="live")
    leave()
    start.restart(run)
    assert started == [run] and "took the run over from pid 77 on n3" in caplog.text
    leave()
    put(run.info_file, b"{")
    rebuild(run.path)
    assert find(tmp_path) == run and caplog.text.count("took the run over") == 2


def test_of_two_that_rebuild_a_run_one_does(run: Run) -> None:
    put(run.info_file, b"{")
    with lock.hold(run.lock_dir, attempt=0), pytest.raises(RunLocked, match="in use by pid"):
        rebuild(run.path)
    rebuild(run.path)
    assert len(list(run.path.glob("run.json.corrupt-*"))) == 1


def test_a_record_of_a_newer_headway_is_left_as_it_is(run: Run, tmp_path: Path) -> None:
    run.info_file.write_text(json.dumps(run.info() | {"format": 2}))
    before = run.info_file.read_bytes()
    with pytest.raises(UnreadableRun, match=r"written by a newer headway.* upgrade headway") as caught:
        find(tmp_path)
    assert caught.value.exit_code == 86 == main(["runs", "rebuild", str(run.path)])
    assert run.info_file.read_bytes() == before


def test_what_does_not_matter_does_not_stop_a_new_run(run: Run, tmp_path: Path) -> None:
    put(run.info_file, b"{")
    assert find(tmp_path, {"lr": 0.5}).name == "toy", "its settings can be read, and are others"
    assert find(tmp_path, name="other").name == "other"
    shutil.rmtree(run.checkpoints_dir)
    assert find(tmp_path) != run, "there is nothing to lose"
    with pytest.raises(UsageError, match="is damaged") as caught:
        Run.open(run.path)
    assert caught.value.exit_code == 2


def test_only_what_headway_named_is_rebuild(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not damaged: there is nothing to rebuild"):
        rebuild(run.path)
    put(run.info_file, None)
    os.rename(run.path, tmp_path / "mine")  # noqa: PTH104
    with pytest.raises(UsageError, match="'mine' is not the name that headway gave"):
        rebuild(tmp_path / "mine")
