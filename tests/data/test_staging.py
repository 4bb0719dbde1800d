"""Staging: whole files, once per node, resumed, verified; space, changes and damage are found."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.data.cache.staging import (
    StagingResult,
    list_files,
    log_progress,
    stage as stage_plain,
)
from headway.data.shards import pack
from headway.errors import StorageError, UsageError


def stage(*args: Any, **options: Any) -> StagingResult:
    return stage_plain(*args, **{"chunk_bytes": 1000} | options)


STAGE = """if True:
    import sys
    from headway.data.cache.staging import stage
    from headway.system.log import install_handler
    install_handler()
    print(stage([sys.argv[1]], chunk_bytes=1000).copied)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
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
        from headway.data.cache.staging import stage
        stop = lambda done, total: done > 4000 and os._exit(9)
        stage([sys.argv[1]], progress=stop, chunk_bytes=1000, threads=1)
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
    (item,) = list_files([file], node)
    (node).mkdir(mode=0o700)
    item.part.write_bytes(b"x" * 1500)
    stage([file])
    assert (node / "0.tar").read_bytes() == b"x" * 1500 + file.read_bytes()[1500:], "it went on from the part"
    (source / "SHA256SUMS").write_text(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  ./a/0.tar\n")
    shutil.rmtree(node)
    item = next(item for item in list_files([source], node) if item.source == file)
    item.part.parent.mkdir(parents=True)
    item.part.write_bytes(b"x" * 1500)
    node.chmod(0o700)
    stage([source])
    assert contents(node / "data set") == contents(source)


def test_a_part_from_before_a_power_cut_is_not_used(source: Path, node: Path) -> None:
    """It may hold less than its size says."""
    (item,) = list_files([source / "a" / "0.tar"], node)
    assert item.boot and replace(item, boot="another boot of the machine").part != item.part


@pytest.mark.usefixtures("node")
def test_a_file_is_on_the_disk_before_its_name_is(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    rename = os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(f"sync {os.fstat(fd).st_size} bytes"))
    monkeypatch.setattr(os, "replace", lambda *names: events.append("rename") or rename(*names))
    stage([source / "a" / "0.tar"])
    assert events == ["sync 2500 bytes", "rename"]


def test_when_one_file_fails_the_others_are_not_copied_to_their_end(
    source: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is told to stop has little time, and files may be large."""
    began, cancelled = threading.Event(), threading.Event()
    shutdown, fsync = ThreadPoolExecutor.shutdown, os.fsync
    (source / "a" / "SHA256SUMS").write_text(f"{'0' * 64}  0.tar\n")
    os.truncate(source / "a" / "0.tar", 0)
    for name in ("2.tar", "3.tar", "4.tar"):
        (source / "a" / name).unlink()
    node.mkdir(mode=0o700)
    stage([source / "a" / "SHA256SUMS"], node / "a")  # else its chunk would be the first

    def fail_late(fd: int) -> None:
        if ".0.tar." in os.readlink(f"/proc/self/fd/{fd}"):  # noqa: PTH115
            assert began.wait(60)
        fsync(fd)

    def cancel(*args: Any, **options: Any) -> None:
        cancelled.set()
        shutdown(*args, **options)

    def progress(done: int, _: int) -> None:
        if done > 100:  # the first chunk of the other file is there
            began.set()
            cancelled.wait(60)

    monkeypatch.setattr(os, "fsync", fail_late)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", cancel)
    with pytest.raises(StorageError, match=r"0\.tar is damaged"):
        stage([source / "a"], progress=progress)
    (part,) = node.rglob(".1.tar.*.part")
    assert part.stat().st_size == 1000, "the next start continues from here"


def test_parts_of_other_sources_are_swept(source: Path, node: Path) -> None:
    (node / "data set" / "a").mkdir(parents=True)
    stale = node / "data set" / "a" / ".0.tar.0123456789ab.part"
    stale.touch()
    own = [stale.with_name(".notes.part"), stale.with_name(".0.tar.0123456789AB.part")]
    for file in own:
        file.touch()
    (directory := stale.with_name(".1.tar.0123456789ab.part")).mkdir()
    stage([source])
    assert not stale.exists()
    assert directory.is_dir() and all(file.exists() for file in own), "the user's own"


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
        while not begun.exists():
            assert first.poll() is None
            time.sleep(0.05)
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
        StorageError, match=r"staging needs 12\.6 kB more, and .*node has 12\.5 kB free: stage less"
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
    with pytest.raises(StorageError, match=r"0\.tar is damaged: its SHA256SUMS states 0000"):
        stage([source])
    assert not (node / "data set" / "a" / "0.tar").exists()


@pytest.mark.usefixtures("node")
def test_a_list_may_have_its_sums_in_capitals(source: Path) -> None:
    file = source / "a" / "0.tar"
    digest = hashlib.sha256(file.read_bytes()).hexdigest().upper()
    (source / "SHA256SUMS").write_text(f"{digest} *a/0.tar\n")
    assert stage([source]).files == 7


def test_what_marks_shards_as_not_all_of_the_data_stays_with_the_source(
    source: Path, node: Path, messages: list[str]
) -> None:
    """Only who packed may read it; a copy would have it for ever, also when the source is whole."""

    def samples() -> Iterator[dict[str, object]]:
        yield from ({"__key__": f"{number}", "bin": bytes(5000)} for number in range(10))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(samples(), source / "packed", shard_size=20_480)
    wanted = contents(source)
    wanted.pop("packed/.shard.packing")
    stage([source, source / "a" / "3.tar"])
    assert contents(node / "data set") == wanted and "packed/shard-000000.tar" in wanted
    assert [f"packing into {source / 'packed'} was interrupted" in text for text in messages] == [True]


def test_files_of_an_earlier_version_are_named(source: Path, node: Path, messages: list[str]) -> None:
    """On a disk that outlives the job: a pattern for shards would find those, too."""
    stage([source, source / "a" / "3.tar"])
    (node / "mine").touch()
    (source / "a" / "1.tar").unlink()
    shutil.rmtree(source / "a" / "b")
    assert stage([source]).files == 4
    (warning,) = [text for text in messages if "sources" in text]
    assert warning.startswith(
        f"{node} has 2 files that the sources do not have, such as {node}/data set/a/1.tar: "
    )


def test_a_disk_that_loses_bits(source: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, synced, fsync = os.pread, set[str](), os.fsync

    def name(fd: int) -> str:
        return str(Path(f"/proc/self/fd/{fd}").readlink())

    def read_other_bits(fd: int, size: int, offset: int) -> bytes:
        data = read(fd, size, offset)
        return bytes([data[0] ^ 1]) + data[1:] if data and name(fd) in synced else data

    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(name(fd)) or fsync(fd))
    monkeypatch.setattr(os, "pread", read_other_bits)
    with pytest.raises(StorageError, match="do not use that disk"):
        stage([source / "a" / "0.tar"])
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
    refused("would have the same name", source, tmp_path / "other" / "data set")
    refused("contain each other", source, to=source / "inside")
    (source / "nowhere").symlink_to("/nowhere")
    refused("nowhere is neither a file nor a directory", source)
    refused("cannot be used for staging: No such file", source, to=tmp_path / "x" / "y")
    refused("cannot be used for staging: Not a dir", source, to=source / "a" / "1.tar" / "y")
    if os.geteuid() == 0:
        (tmp_path / "theirs").mkdir()
        os.chown(tmp_path / "theirs", 65534, 65534)
        refused("belongs to another user", source, to=tmp_path / "theirs")
    monkeypatch.delenv("SLURM_TMPDIR")
    refused("this job has no directory on the node's own disk; give one with --tmp", source)
    assert list(node.rglob("*.tar")) == []


def test_lines_about_progress(messages: list[str]) -> None:
    clock = iter([0.0, 1.0, 6.0, 7.0])
    log = log_progress(5.0, lambda: next(clock))
    for done in (0, 3 * 10**9, 4 * 10**9):
        log(done, 10 * 10**9)
    assert messages == ["staged 3.0 GB of 10.0 GB, 500.0 MB/s, 14s left"]
