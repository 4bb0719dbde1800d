from __future__ import annotations

import json
import os
import re
import shlex
import stat
import string
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from headway.errors import UsageError
from headway.run import Run, check_name, creation, find_latest, find_runs
from headway.run.paths import RunPaths
from headway.system import files

HOSTILE = [
    "", ".", "..", "../x", "a/b", "/abs", "-rf", ".hidden", "a b", "a;id", "$(id)", "`id`", "a\nb", "a\n", "a\0b",
    "x" * 65, "%j%A", "\u202egnp", "\x1b[31m", "é", "a\\b", "a'b", "a*",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_hostile_names_are_refused_and_leave_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give 1 to 64 letters") as caught:
        Run.create(tmp_path / "runs", name=name)
    assert str(caught.value).isprintable()  # what is wrong must not reach the terminal raw
    assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=70) | st.text(alphabet=string.ascii_letters + "._-\n", max_size=70))
def test_names_by_allow_list(name: str) -> None:
    allowed = set(string.ascii_letters + string.digits + "._-")
    if 1 <= len(name) <= 64 and set(name) <= allowed and name[0] not in ".-":
        assert check_name(name) == name
    else:
        with pytest.raises(UsageError):
            check_name(name)


def test_a_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.create(
        name="digits", config={"lr": 3e-4}, command=["train.py", "--lr", "3e-4"], world={"world_size": 2}
    )
    assert run.path.parent == tmp_path / "runs"
    assert re.fullmatch(r"digits-\d{4}\.\d\d\.\d\d-\d\d\.\d\d-[a-z2-9]{4}", run.id)
    assert run.path.name == run.id
    assert {path.name for path in run.path.iterdir()} == {
        "run.json", "config.yaml", "code", "log", "metrics", "checkpoints", "traces",
    }  # fmt: skip
    info = run.info()
    assert (info["id"], info["name"], info["attempts"]) == (run.id, "digits", [])
    assert info["command"] == ["train.py", "--lr", "3e-4"]
    assert info["world"] == {"world_size": 2}
    assert set(info["versions"]) == {"headway", "python", "torch"} and all(info["versions"].values())
    assert abs(datetime.fromisoformat(info["created"]).timestamp() - time.time()) < 60
    assert "not a git repository" in info["code"]["note"]
    assert yaml.safe_load(run.config_file.read_text()) == {"lr": 3e-4}
    assert Run.open(run.path) == run
    assert Run.open(os.path.relpath(run.path)) == run


def test_the_code_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (
        "init -q -b main",
        "add .",
        "-c user.name=me -c user.email=me@x commit -q --allow-empty -m first",
    ):
        subprocess.run(["git", *command.split()], check=True)
    Path("train.py").write_text("lr = 1\n")
    subprocess.run(["git", "add", "train.py"], check=True)
    Path("notes").touch()
    run = Run.create(tmp_path / "runs")
    code = run.info()["code"]
    assert (code["branch"], code["dirty"], code["untracked"], code["note"]) == ("main", True, ["notes"], None)
    assert len(code["commit"]) == 40
    assert "+lr = 1" in (run.path / code["diff"]).read_text()
    assert run.code_dir / "uncommitted.diff" == run.path / code["diff"]


def test_paths_are_those_of_the_design(tmp_path: Path) -> None:
    run = Run(path=tmp_path, id="x", name="x")
    properties = [name for name in vars(RunPaths) if isinstance(vars(RunPaths)[name], property)]
    found = {name: str(getattr(run, name).relative_to(tmp_path)) for name in properties}
    assert found == {
        "alerts_dir": "alerts", "doctor_file": "doctor.json", "media_dir": "media",
        "config_file": "config.yaml", "plan_file": "plan.json", "job_script": "job.sh", "code_dir": "code",
        "log_dir": "log", "metrics_dir": "metrics", "checkpoints_dir": "checkpoints", "traces_dir": "traces",
        "failure_file": "failure.json", "report_file": "report.html", "diagnostics_file": "log/diagnostics.jsonl",
        "job_file": "job.json", "submission_file": "submitted.json", "launch_dir": "launch", "ended_file": "ended.json",
        "starts_file": "starts.jsonl",
        "job_log": "log/job.txt", "sweep_file": "sweep.json", "call_dir": "call", "snapshot_dir": "code/tree",
        "diff_file": "code/uncommitted.diff", "work_dir": "work",
        "ledger_file": "ledger.jsonl", "tensorboard_dir": "tensorboard", "csv_file": "metrics.csv",
        "info_file": "run.json", "lock_dir": "lock", "eval_dir": "eval", "nodes_dir": "nodes",
    }  # fmt: skip
    assert run.log_file(3) == tmp_path / "log/rank-00003.txt"
    assert run.metrics_file(12) == tmp_path / "metrics/rank-00012.jsonl"
    assert run.checkpoint_dir(1000) == tmp_path / "checkpoints/step-000000001000"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277])
def test_modes_do_not_depend_on_the_umask(umask: int, tmp_path: Path, run_python: Any) -> None:
    code = """if True:
        import os, sys
        from headway.run import Run
        os.umask(int(sys.argv[1]))
        run = Run.create("runs", config={"a": 1})
        with run.lock():
            run.begin_attempt(world={})
            run.write_failure({"rank": 0})
            run.begin_attempt(world={})
    """
    run_python(code, str(umask))
    paths = [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]
    assert len(paths) >= 12
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_modes_are_right_from_the_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    before = os.umask(0)
    try:
        run = Run.create(tmp_path / "runs")
    finally:
        os.umask(before)
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.config_file.stat().st_mode) == 0o600


@pytest.mark.parametrize("looks", [True, False])
def test_ids_do_not_collide_and_nothing_is_overwritten(
    looks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation, "_SUFFIX_LETTERS", "ab")  # sixteen possible ids
    if not looks:  # as if the other run came between the look and the rename
        monkeypatch.setattr(creation.os.path, "lexists", lambda _: False)
    runs = [Run.create(tmp_path, name=f"r{number % 2}", config={"number": number}) for number in range(16)]
    assert len({run.path for run in runs}) == 16
    for number, run in enumerate(runs):
        assert yaml.safe_load(run.config_file.read_text()) == {"number": number}
        assert run.info()["id"] == run.path.name
    assert len(list(tmp_path.iterdir())) == 16


@pytest.mark.parametrize("kind", ["directory", "file", "link", "dangling link"])
def test_what_is_in_the_way_stays(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    root = tmp_path / "runs"
    suffixes = iter("aaaabbbb")
    monkeypatch.setattr(creation.secrets, "choice", lambda _: next(suffixes))
    minute = datetime.now().strftime("%Y.%m.%d-%H.%M")
    taken = root / f"run-{minute}-aaaa"
    root.mkdir()
    match kind:
        case "directory":
            taken.mkdir()
        case "file":
            taken.touch()
        case "link":
            taken.symlink_to(victim)
        case "dangling link":
            taken.symlink_to(tmp_path / "nowhere")
    before = taken.lstat().st_ino
    run = Run.create(root)
    if run.id.startswith(f"run-{minute}"):  # unless the minute changed meanwhile
        assert run.id.endswith("-bbbb")
    assert taken.lstat().st_ino == before
    assert list(victim.iterdir()) == []


def test_many_processes_create_at_once(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from headway import run
        from headway.run import creation
        creation._SUFFIX_LETTERS = "ab"
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(3):
            print(run.Run.create("runs").path)
    """
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    for worker in workers:
        assert worker.stdout and worker.stdout.readline() == "ready\n"
    made = [line for worker in workers for line in worker.communicate("go\n", timeout=180)[0].splitlines()]
    assert len(made) == len(set(made)) == 12
    assert {str(path) for path in (tmp_path / "runs").iterdir()} == set(made)
    assert all(worker.returncode == 0 for worker in workers)


def _refused(root: object, run_python: Any, **options: Any) -> str:
    code = """if True:
        import sys
        from headway.errors import HeadwayError
        from headway.run import Run
        try:
            Run.create(sys.argv[1])
        except HeadwayError as error:
            print(error)
            sys.exit(error.exit_code)
    """
    done = run_python(code, str(root), check=False, bound=True, **options)
    assert done.returncode == 2, done.stderr
    assert len(done.stdout.splitlines()) == 1
    return str(done.stdout)


def test_unwritable_root(tmp_path: Path, run_python: Any) -> None:
    root = tmp_path / "runs"
    root.mkdir(mode=0o500)
    assert "Permission denied; choose a directory that you may write to" in _refused(root, run_python)
    assert "Permission denied" in _refused(root / "below", run_python)
    assert list(root.iterdir()) == []


def test_root_without_a_parent(tmp_path: Path, run_python: Any) -> None:
    assert f"create {tmp_path}/no first" in _refused(tmp_path / "no" / "runs", run_python)
    assert list(tmp_path.iterdir()) == []


def test_file_in_the_way_of_the_root(tmp_path: Path, run_python: Any) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert "File exists" in _refused(tmp_path / "file", run_python)
    assert "Not a directory" in _refused(tmp_path / "file" / "runs", run_python)
    assert "File exists" in _refused(tmp_path / "dangling", run_python)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "dangling"}
    assert (tmp_path / "file").read_text() == "mine"


def test_bad_root_text_and_bad_settings_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="null byte"):
        Run.create(f"{tmp_path}/a\0b")
    with pytest.raises(UsageError, match=r"config\.model"):
        Run.create(tmp_path / "runs", config={"model": object()})
    assert list(tmp_path.iterdir()) == []


def test_another_process_may_make_the_root_first(tmp_path: Path) -> None:
    assert creation._make_root(tmp_path / "runs")
    assert not creation._make_root(tmp_path / "runs")


def test_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "runs").symlink_to("real")
    run = Run.create(tmp_path / "runs")
    assert run.path.parent == tmp_path / "runs"
    assert (tmp_path / "real" / run.id / "run.json").exists()


@pytest.mark.parametrize(("action", "left"), [("errno=ENOSPC", 0), ("raise", 0), ("kill9", 1)])
def test_a_half_made_run_never_appears(action: str, left: int, tmp_path: Path, run_python: Any) -> None:
    environ = os.environ | {"HEADWAY_FAILPOINT": f"run.create.publish:{action}"}
    done = run_python("from headway.run import Run; Run.create('runs')", env=environ, check=False)
    assert done.returncode != 0
    rest = list((tmp_path / "runs").iterdir()) if left else [tmp_path / "runs"]
    assert all(path.name.startswith(".headway-") for path in rest) if left else not rest[0].exists()
    assert find_latest(tmp_path / "runs") is None


def test_full_disk_is_a_storage_error(run_python: Any) -> None:
    environ = os.environ | {"HEADWAY_FAILPOINT": "run.create.publish:errno=ENOSPC"}
    code = """if True:
        from headway.errors import StorageError
        from headway.run import Run
        try:
            Run.create("runs")
        except StorageError as error:
            print(error)
    """
    assert "No space left on device" in run_python(code, env=environ).stdout


def test_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    run = Run.create(tmp_path)
    assert run.begin_attempt(world={"world_size": 2}) == 1
    [attempt] = run.info()["attempts"]
    started = datetime.fromisoformat(attempt.pop("started"))
    assert started.utcoffset() is not None
    assert attempt == {
        "number": 1, "status": "running", "exit_code": None, "ended": None,
        "host": os.uname().nodename, "pid": os.getpid(),
        "scheduler": "slurm", "ids": {"job_id": "7", "array_task_id": "3", "restart_count": "0"},
        "world": {"world_size": 2},
    }  # fmt: skip
    run.end_attempt(1, status="stopped", exit_code=75)
    assert run.begin_attempt(world={}) == 2
    assert run.begin_attempt(world={}) == 3
    run.end_attempt(3, status="done", exit_code=0)
    attempts = run.info()["attempts"]
    assert [attempt["status"] for attempt in attempts] == ["stopped", "lost", "done"]
    assert [attempt["exit_code"] for attempt in attempts] == [75, None, 0]
    assert attempts[2]["ended"] >= attempts[2]["started"] >= attempts[0]["ended"]


def test_an_attempt_that_was_killed_after_it_failed_has_failed(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    for _ in range(2):
        run.begin_attempt(world={})
        run.write_failure({"rank": 1, "error": "was killed by SIGKILL"})
    run.begin_attempt(world={})
    run.begin_attempt(world={})
    statuses = [attempt["status"] for attempt in run.info()["attempts"]]
    assert statuses == ["failed", "failed", "lost", "running"], "the third left no record"


def test_an_attempt_that_was_replaced_writes_nothing(tmp_path: Path) -> None:
    """It may live on where its scheduler cannot see it, and find out when it wants to save."""
    run = Run.create(tmp_path)
    first = run.begin_attempt(world={})
    run.begin_attempt(world={})
    before = (run.path / "run.json").read_bytes()
    run.note_attempt(first, step_ended=7)
    run.end_attempt(first, status="failed", exit_code=80)
    assert (run.path / "run.json").read_bytes() == before
    assert [attempt["status"] for attempt in run.info()["attempts"]] == ["lost", "running"]


@pytest.mark.parametrize(("number", "status"), [(0, "done"), (2, "done"), (1, "running"), (1, "gone")])
def test_attempts_end_only_once_begun_and_in_known_ways(number: int, status: str, tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    run.begin_attempt(world={})
    before = run.info()
    with pytest.raises(UsageError, match="done, failed, stopped, interrupted"):
        run.end_attempt(number, status=status, exit_code=0)
    assert run.info() == before


def test_run_json_is_whole_at_every_moment(tmp_path: Path) -> None:
    """A reader in a loop, while a writer begins and ends attempts, never sees a part."""
    run = Run.create(tmp_path)
    code = """if True:
        import sys
        from headway.run import Run
        run = Run.open(sys.argv[1])
        for _ in range(60):
            run.end_attempt(run.begin_attempt(world={"filler": "x" * 5000}), status="done", exit_code=0)
    """
    writer = subprocess.Popen([sys.executable, "-c", code, run.path])
    seen = set()
    while writer.poll() is None:
        seen.add(len(run.info()["attempts"]))
    assert writer.returncode == 0
    assert len(seen) > 3
    assert {path.name for path in run.path.iterdir() if path.name.startswith(".")} == set()


def test_run_json_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(tmp_path)
    events: list[str] = []

    def sync(fd: int) -> None:
        events.append(
            "sync directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"sync {os.fstat(fd).st_size} bytes"
        )

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(
        os, "replace", lambda source, target: events.append("rename") or Path(source).rename(target)
    )
    run.begin_attempt(world={})
    assert events == [f"sync {(run.path / 'run.json').stat().st_size} bytes", "rename", "sync directory"]


@pytest.mark.parametrize(
    ("kind", "status", "code"), [("vanished", "failed", 1), ("interrupted", "interrupted", 130)]
)
def test_an_attempt_that_could_not_record_its_end_ended_as_its_failure_says(
    kind: str, status: str, code: int, tmp_path: Path
) -> None:
    run = Run.create(tmp_path)
    run.begin_attempt(world={})
    run.write_failure({"rank": 1, "kind": kind, "exit_code": code})
    run.begin_attempt(world={})
    assert [run.info()["attempts"][0][key] for key in ("status", "exit_code")] == [status, code]


def test_first_failure_wins_and_the_next_attempt_sets_it_aside(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    run.begin_attempt(world={})
    assert run.write_failure({"rank": 1, "traceback": "boom"})
    assert not run.write_failure({"rank": 2})
    assert json.loads(run.failure_file.read_text()) == {"rank": 1, "traceback": "boom"}
    run.begin_attempt(world={})
    assert not run.failure_file.exists()
    assert json.loads((run.path / "failure-1.json").read_text())["rank"] == 1
    assert run.write_failure({"rank": 3})
    run.begin_attempt(world={})
    assert json.loads((run.path / "failure-2.json").read_text())["rank"] == 3


@pytest.mark.parametrize("links", [True, False])
def test_of_many_failures_exactly_one_is_written(links: bool, tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    code = """if True:
        import errno, pathlib, sys
        from headway.run import Run
        run = Run.open(sys.argv[1])
        if sys.argv[3] == "False":                    # a file system without hard links: there is none to mount here
            def hardlink_to(self, target):
                raise OSError(errno.EPERM, "no links")
            pathlib.Path.hardlink_to = hardlink_to
        print("ready", flush=True)
        sys.stdin.readline()
        print(run.write_failure({"rank": int(sys.argv[2]), "traceback": "x" * 20000}))
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, run.path, str(rank), str(links)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(6)
    ]
    for rank in ranks:
        assert rank.stdout and rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin
        rank.stdin.write("go\n")
        rank.stdin.flush()
    answers = [rank.communicate(timeout=180)[0].strip() for rank in ranks]
    assert sorted(answers) == ["False"] * 5 + ["True"]
    assert json.loads(run.failure_file.read_text())["rank"] == answers.index("True")
    assert {path.name for path in run.path.iterdir() if path.name.startswith(".")} == set()


def test_a_failed_write_is_a_storage_error(tmp_path: Path, run_python: Any) -> None:
    run = Run.create(tmp_path)
    code = """if True:
        import resource, signal, sys
        from headway.errors import StorageError
        from headway.run import Run
        run = Run.open(sys.argv[1])
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        try:
            run.begin_attempt(world={})
        except StorageError as error:
            print(error)
    """
    before = run.info()
    assert "could not begin attempt 1" in run_python(code, run.path).stdout
    assert run.info() == before
    assert {path.name for path in run.path.iterdir() if path.name.startswith(".")} == set()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"format": 2, "id": "a", "name": "b", "created": "c", "attempts": []}',
        '{"format": 1, "id": "a-1", "name": "a", "created": "c", "attempts": [1]}',
        '{"format": 1, "id": "a-1", "name": "a", "created": "c", "attempts": [{"number": 1, "status": "x"}]}',
        "\udcff",
    ],
)
def test_what_is_not_a_run(text: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError, match=r"run\.json"):
        Run.open(tmp_path / "a")
    with pytest.raises(UsageError, match=r"is not a run directory: it has no run\.json"):
        Run.open(tmp_path)
    with pytest.raises(UsageError, match=r"is not a run directory: it has no run\.json"):
        Run.open(tmp_path / "a" / "run.json")
    assert find_latest(tmp_path) is None


def test_find_latest(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "nowhere") is None
    assert find_latest(tmp_path) is None
    first, second, third = (Run.create(tmp_path, name=name) for name in ("z", "b", "a"))
    for path in (tmp_path / "other", tmp_path / ".headway-0.tmp"):
        path.mkdir()
    (tmp_path / ".headway-0.tmp" / "run.json").write_text(
        (third.path / "run.json").read_text().replace("202", "302")
    )
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(third.path)
    os.utime(first.path / "run.json")  # times of files say nothing: a copy has new ones
    assert find_latest(tmp_path) == third
    assert find_latest(tmp_path, name="b") == second
    assert find_latest(tmp_path, name="c") is None
    with pytest.raises(UsageError, match="give 1 to 64"):
        find_latest(tmp_path, name="../b")
    with pytest.raises(UsageError, match="Not a directory"):
        find_latest(tmp_path / "file")


def test_run_imports_no_torch(run_python: Any) -> None:
    assert run_python("import headway.run, sys; print('torch' in sys.modules)").stdout == "False\n"


def test_a_start_that_slurm_has_replaced_tells_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "big")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run = Run.create(tmp_path / "runs")
    run.begin_attempt(world={})
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")  # the one before, on a node that was cut off
    assert not run.write_failure({"rank": 0})
    assert not run.write_failure({"rank": 0}, overwrite=True)
    assert not run.failure_file.exists()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run.write_failure({"rank": 0})
    run.failure_file.unlink()
    (run.path / "run.json").write_text("{")
    assert run.write_failure({"rank": 0}), "whatever failed is told, though run.json cannot be read"


def test_directories_keep_the_group_that_their_project_hands_down(tmp_path: Path) -> None:
    tmp_path.chmod(0o2700)
    for umask in (0o022, 0o277):
        before = os.umask(umask)
        try:
            files.make_dir(tmp_path / str(umask))
        finally:
            os.umask(before)
        assert (tmp_path / str(umask)).stat().st_mode & 0o7777 == 0o2700


def test_a_command_names_a_run_so_that_it_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are looked up in ./runs, and a path may have spaces."""
    monkeypatch.chdir(tmp_path)
    run, other = Run.create("runs", name="digits"), Run.create(tmp_path / "my runs", name="digits")
    assert run.shell_name == run.id and other.shell_name == f"'{other.path}'" == other.shell_path
    assert find_runs(*shlex.split(run.shell_name)) == [run]
    assert find_runs(*shlex.split(other.shell_name)) == [other]
    monkeypatch.chdir("/")
    assert run.shell_name == str(run.path)
