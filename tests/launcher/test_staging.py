"""Data on a node's own disk: once, whole, and going on where the last start ended."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from headway.cli import main
from headway.data.cache import staging
from headway.data.cache.staging import stage
from headway.errors import StorageError, UsageError
from headway.launcher.program import JobFile, Program
from headway.launcher.targets import Slurm
from headway.run import Run
from headway.run.status import status
from headway.schedulers.base import Queue

STAGE = "import sys; from headway.data.cache.staging import stage; print(stage([sys.argv[1]]).copied)"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(staging, "_CHUNK", 1000)
    folder = tmp_path / "data set"
    (folder / "a" / "b").mkdir(parents=True)
    for number in range(5):
        (folder / "a" / f"{number}.tar").write_bytes(os.urandom(2500 + number))
    (folder / "a" / "b" / "empty").touch()
    return folder


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "node"))
    return tmp_path / "node"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_folders_and_files(source: Path, node: Path) -> None:
    single = source / "a" / "3.tar"
    staged = stage([source, single])
    assert staged.paths == (node / "data set", node / "3.tar")
    assert contents(node / "data set") == contents(source)
    assert (node / "3.tar").read_bytes() == single.read_bytes()
    assert (staged.files, staged.bytes, staged.copied) == (7, 12510 + 2503, 12510 + 2503)
    assert node.stat().st_mode & 0o777 == 0o700
    (node / "data set" / "a" / "1.tar").unlink()
    os.utime(source / "a" / "2.tar", ns=(1, 1))  # another file, by its looks
    again = stage([source, single])
    assert (again.files, again.copied) == (7, 2501 + 2502)


def test_the_verb(source: Path, node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "stage", str(source)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(node / "data set")
    assert main(["data", "stage", "--tmp", str(node), "--json", str(source)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"paths": [str(node / "data set")], "files": 6, "bytes": 12510, "copied": 0}
    assert main(["data", "stage", str(source / "nope")]) == 2
    assert "there is nothing to stage at" in capsys.readouterr().err


def test_it_goes_on_within_a_file(source: Path, node: Path) -> None:
    code = """if True:
        import os, sys
        from headway.data.cache import staging
        staging._CHUNK, staging._READERS = 1000, 1
        staging.stage([sys.argv[1]], progress=lambda done, total: done > 4000 and os._exit(9))
    """
    died = subprocess.run([sys.executable, "-c", code, str(source)], env=os.environ, check=False)
    assert died.returncode == 9
    (part,) = node.rglob(".*.part")
    assert not (node / "data set" / part.name.split(".")[1]).exists() and part.stat().st_size > 0
    seen: list[int] = []
    shown = stage([source], progress=lambda done, _: seen.append(done))
    assert contents(node / "data set") == contents(source)
    assert 0 < shown.copied < shown.bytes and seen[-1] == shown.bytes and seen == sorted(seen)


def test_an_earlier_part_is_used_unless_the_sum_says_that_it_is_rubbish(source: Path, node: Path) -> None:
    file = source / "a" / "0.tar"
    (item,) = staging._items([file], node)
    (node).mkdir(mode=0o700)
    item.part.write_bytes(b"x" * 1500)
    stage([file])
    assert (node / "0.tar").read_bytes() == b"x" * 1500 + file.read_bytes()[1500:], "it went on from the part"
    (source / "SHA256SUMS").write_text(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  ./a/0.tar\n")
    shutil.rmtree(node)
    item = next(item for item in staging._items([source], node) if item.source == file)
    item.part.parent.mkdir(parents=True)
    item.part.write_bytes(b"x" * 1500)
    node.chmod(0o700)
    stage([source])
    assert contents(node / "data set") == contents(source)


def test_a_part_from_before_a_power_cut_is_not_used(
    source: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold less than its size says."""
    (item,) = staging._items([source / "a" / "0.tar"], node)
    before = item.part
    monkeypatch.setattr(staging, "boot_id", lambda: "another start of the machine")
    assert item.part != before


@pytest.mark.usefixtures("node")
def test_a_file_is_on_the_disk_before_its_name_is(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(f"sync {os.fstat(fd).st_size} bytes"))
    monkeypatch.setattr(os, "replace", lambda *names: events.append("rename") or replace(*names))
    stage([source / "a" / "0.tar"])
    assert events == ["sync 2500 bytes", "rename"]


def test_when_one_file_fails_the_others_are_not_copied_to_their_end(
    source: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is told to stop has little time, and files may be large."""
    began, given_up = threading.Event(), threading.Event()
    shutdown = ThreadPoolExecutor.shutdown

    def damaged(item: staging.Item, *_: Any) -> None:
        assert item.source.name == "empty" and began.wait(10)
        raise StorageError("it is damaged")

    def give_up(*args: Any, **options: Any) -> None:
        given_up.set()
        shutdown(*args, **options)

    def progress(done: int, _: int) -> None:
        if done:  # the first chunk of the other file is there
            began.set()
            given_up.wait(10)

    monkeypatch.setattr(staging, "_check", damaged)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", give_up)
    with pytest.raises(StorageError, match="it is damaged"):
        stage([source / "a" / "b" / "empty", source / "a" / "1.tar"], progress=progress)
    (part,) = node.glob(".1.tar.*.part")
    assert part.stat().st_size == 1000, "the next start goes on from here"


def test_parts_of_other_sources_are_swept(source: Path, node: Path) -> None:
    (node / "data set" / "a").mkdir(parents=True)
    stale = node / "data set" / "a" / ".0.tar.0123456789ab.part"
    stale.touch()
    stage([source])
    assert not stale.exists()


def test_many_processes_of_a_node(source: Path, node: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", STAGE, str(source)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    copied = sorted(int(rank.communicate()[0]) for rank in ranks)
    assert copied == [0, 0, 12510] and contents(node / "data set") == contents(source)


def test_one_waits_for_the_other(source: Path, node: Path) -> None:
    """Whoever comes while another is at it says so, and finds everything there."""
    code = """if True:
        import os, sys, time
        from pathlib import Path
        from headway.data.cache.staging import stage
        def show(done, total):
            Path(sys.argv[2]).touch()
            while not Path(sys.argv[3]).exists(): time.sleep(0.01)
        stage([sys.argv[1]], progress=show)
    """
    begun, go = node.parent / "begun", node.parent / "go"
    with subprocess.Popen([sys.executable, "-c", code, str(source), str(begun), str(go)]) as first:
        wait_until(lambda: begun.exists() or first.poll() is not None, "the first copier is at work")
        assert first.poll() is None
        second = subprocess.Popen(
            [sys.executable, "-c", STAGE, str(source)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert second.stderr and "another process is staging" in second.stderr.readline()
        go.touch()
        assert second.communicate()[0] == "0\n"


def test_space_is_looked_at_before_anything_is_copied(
    source: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6, 12_509))
    with pytest.raises(
        StorageError, match=r"staging needs 0\.00 GB more, and .*node has 0\.00 GB free: stage less"
    ):
        stage([source])
    assert list(node.rglob("*.tar")) == []


def test_a_source_that_changes_meanwhile(source: Path, node: Path) -> None:
    file = source / "a" / "0.tar"
    with pytest.raises(StorageError, match=r"0\.tar changed while it was copied"):
        stage([file], progress=lambda done, _: done and os.utime(file, ns=(5, 5)))
    assert not (node / "0.tar").exists() and not list(node.glob("*.part"))


def test_a_source_that_its_list_disowns(source: Path, node: Path) -> None:
    (source / "SHA256SUMS").write_text(f"{'0' * 64}  a/0.tar\n")
    with pytest.raises(StorageError, match=r"0\.tar is damaged: its SHA256SUMS says 0000"):
        stage([source])
    assert not (node / "data set" / "a" / "0.tar").exists()


def test_a_disk_that_loses_bits(source: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = staging._read

    def other(part, digest, meter=None):  # type: ignore[no-untyped-def]
        if meter is None:
            digest.update(b"?")
        return read(part, digest, meter)

    monkeypatch.setattr(staging, "_read", other)
    with pytest.raises(StorageError, match="that disk cannot be trusted"):
        stage([source])
    assert list(node.rglob("*.tar")) == []


def test_links_are_followed_and_loops_end(source: Path, node: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"far away")
    (source / "link").symlink_to(tmp_path / "elsewhere")
    (source / "a" / "b" / "up").symlink_to(source)
    stage([source])
    assert (node / "data set" / "link").read_bytes() == b"far away"
    assert (
        not (node / "data set" / "link").is_symlink() and not (node / "data set" / "a" / "b" / "up").exists()
    )


def test_mistakes_are_one_sentence(
    source: Path, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(words: str, *sources: Path, to: Path | None = None) -> None:
        with pytest.raises(UsageError, match=words):
            stage(sources, to)

    refused("there is nothing to stage at", tmp_path / "nope")
    (tmp_path / "other" / "data set").mkdir(parents=True)
    refused("would have one name", source, tmp_path / "other" / "data set")
    refused("lie in each other", source, to=source / "inside")
    (source / "nowhere").symlink_to("/nowhere")
    refused("nowhere is neither a file nor a folder", source)
    refused("cannot be used for staging: No such file", source, to=tmp_path / "x" / "y")
    refused("cannot be used for staging: Not a dir", source, to=source / "a" / "1.tar" / "y")
    if os.geteuid() == 0:
        (tmp_path / "theirs").mkdir()
        os.chown(tmp_path / "theirs", 65534, 65534)
        refused("belongs to another user", source, to=tmp_path / "theirs")
    monkeypatch.delenv("SLURM_TMPDIR")
    refused("this job has no directory on the node's own disk; give one with --tmp", source)
    assert list(node.rglob("*.tar")) == []


def test_lines_about_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 6.0, 7.0])
    monkeypatch.setattr(staging.time, "monotonic", lambda: next(clock))
    show = staging._lines()
    for done in (0, 3 * 10**9, 4 * 10**9):
        show(done, 10 * 10**9)
    assert capsys.readouterr().err == "headway: staged 3.00 of 10.00 GB, 500 MB/s, 14 s left\n"


def test_in_a_job_script_it_is_a_step_before_the_ranks() -> None:
    def script(target: Slurm) -> str:
        request = target.request(name="x", directory=Path("/runs/x"), log=Path("log/job.txt"))
        return target.scheduler.script(request)

    plain, with_data = script(Slurm(nodes=2)), script(Slurm(nodes=2, pre=("/data/$(id) set",)))
    assert "prologue" not in plain and "/data" not in with_data, (
        "paths wait in job.json, out of reach of the shell"
    )
    begin, _, end = with_data.partition("# Data for the ranks")
    assert plain == begin + end.partition('launcher.epilogue "$run" $?\n')[2]
    assert with_data.count("headway.launcher.prologue") == 1, "what it leaves behind is read by the epilogue"
    with pytest.raises(UsageError, match="pre: 'data' must be an absolute path"):
        Slurm(pre=("data",))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR2, 75), (signal.SIGTERM, 143)])
def test_a_job_that_is_stopped_while_it_copies_may_come_back(
    number: int, code: int, source: Path, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path / "runs", name="x", command=["train"])
    target = Slurm(pre=(str(source),), requeue=False)
    JobFile(program=Program(command=["train"]), target=target).write(run)
    signalled = """if True:
        import os, sys
        from functools import partial
        from headway.launcher import prologue
        from headway.launcher.agent.team import Team
        kill = lambda done, _: done and os.kill(os.getpid(), int(sys.argv[2]))
        prologue.stage = partial(prologue.stage, progress=kill)
        write = Team.mark_ended
        def ended(team, code):
            os.kill(os.getpid(), int(sys.argv[2]))  # SLURM and srun may both tell it
            write(team, code)
        Team.mark_ended = ended
        sys.exit(prologue.main(sys.argv[1]))
    """
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    done = subprocess.run([sys.executable, "-c", signalled, str(run.path), str(number)], capture_output=True)
    assert (done.returncode, done.stderr) == (code, b"")
    after = [sys.executable, "-m", "headway.launcher.epilogue", str(run.path), str(code)]
    told = subprocess.run(after, capture_output=True, text=True)
    assert told.returncode == code
    assert f"not queued again, as requeue is off; to resume: sbatch {run.job_script}" in told.stderr
    if number == signal.SIGUSR2:
        assert "headway: stopped while data was copied to the nodes; the next start continues" in told.stderr
        assert status(run, Queue()).state == "stopped"
    assert not list(run.launch_dir.glob("*"))
    assert stage([source]).files == 6 and contents(node / "data set") == contents(source)


def test_where_data_goes_is_known_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISK", "/scratch")

    def staged(target: Slurm) -> dict[str, str]:
        return JobFile(program=Program(command=["train"]), target=target).staged()

    assert staged(Slurm(pre=("/data",), pre_to="$DISK/me")) == {"HEADWAY_STAGED": "/scratch/me"}
    assert staged(Slurm(pre_to="$NOWHERE")) == {}, "nothing is staged"
    with pytest.raises(UsageError, match=r"pre_to='\$NOWHERE/me': not all of these variables are set on "):
        staged(Slurm(pre=("/data",), pre_to="$NOWHERE/me"))


@pytest.mark.usefixtures("node")
def test_data_that_is_not_there_ends_the_job(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "runs", name="x", command=["train"])
    JobFile(program=Program(command=["train"]), target=Slurm(pre=(str(tmp_path / "no"),))).write(run)
    environ = {**os.environ, "SLURM_JOB_ID": "7"}
    for line in (["prologue", str(run.path)], ["epilogue", str(run.path), "2"]):
        command = [sys.executable, "-m", f"headway.launcher.{line[0]}", *line[1:]]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert done.returncode == 2
    assert done.stderr == f"headway: there is nothing to stage at {tmp_path / 'no'}\n"
    assert status(run, Queue()).why == f"there is nothing to stage at {tmp_path / 'no'}"
