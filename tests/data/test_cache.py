"""The node cache: one copy per node, within its budget, whoever dies; never wrong bytes, never in the way."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from headway.data import pack
from headway.data.cache import copier, directory
from headway.data.cache.directory import CacheDirectory, NotCached
from headway.data.cache.node_cache import CachedShards, NodeCache
from headway.data.shards import checksums
from headway.data.shards.shard_file import ShardFile
from headway.errors import BadSample, BadShard, UsageError
from headway.system import failpoints, locks
from headway.system.locks import Deadline, LockTimeout

SIZE = 1_000_000
ROOM = 1_100_000  # for one shard


@pytest.fixture(autouse=True)
def _fresh_failpoints() -> None:
    failpoints.reset_calls()


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return make(tmp_path / "source", 6)


def make(folder: Path, count: int, size: int = SIZE) -> list[Path]:
    samples = ({"__key__": f"{n:04d}", "bin": os.urandom(size // 10 - 600)} for n in range(10 * count))
    paths = pack(samples, folder, shard_size=size + 20_000)
    assert len(paths) == count
    return paths


def at(path: Path, budget: str | int = "1GB", **settings: Any) -> CachedShards:
    """A cache that copies new shards in small chunks."""
    settings = {"copy_local": True, "min_age": 0.0, "chunk_bytes": 100_000} | settings
    return CachedShards(NodeCache(path=path, budget=budget, **settings))


def contents(cache: CachedShards, path: Path) -> list[bytes]:
    shard = cache.open(path)
    return [bytes(shard[number]["bin"]) for number in range(len(shard))]


def truth(path: Path) -> list[bytes]:
    return contents(CachedShards(NodeCache()), path)


def child(work: Callable[[], Any], user: int | None = None, fail: str = "") -> tuple[int, Callable[[], Any]]:
    """Runs some work in a forked process, as another user or with a fault; returns its id, and what waits for it."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            failpoints.reset_calls()
            os.environ["HEADWAY_FAILPOINT"] = fail
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            os.write(writing, json.dumps(work()).encode())
        except BaseException:  # noqa: BLE001 - the child must not go on as a second pytest
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)

    def wait() -> Any:
        with os.fdopen(reading, "rb") as file:
            said = file.read()
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return json.loads(said) if code == 0 else code

    return pid, wait


def run(work: Callable[[], Any], **how: Any) -> Any:
    return child(work, **how)[1]()


def taken(path: Path) -> int:
    """What the copies take, as du sees it while nothing moves: a look takes time, and a copy that is removed during it
    would be counted beside the one that came in its place."""

    def look() -> dict[tuple[Path, int], int]:
        sizes = {}
        with suppress(FileNotFoundError):  # the last one out has just removed the directory
            for file in path.glob("headway-cache-*/*"):
                with suppress(FileNotFoundError):
                    status = file.stat()
                    sizes[file, status.st_ino] = status.st_blocks * 512
        return sizes

    seen = look()
    while (again := look()) != seen:
        seen = again
    return sum(seen.values())


# --- reading


def test_copies_are_read_by_all_processes_and_made_once(shards: list[Path], tmp_path: Path) -> None:
    where = tmp_path / "cache"
    where.mkdir()
    together = tmp_path / "go"

    def work() -> Any:
        cache = at(where)
        while not together.exists():
            time.sleep(0.001)
        right = [contents(cache, path) == truth(path) for path in shards]
        return [all(right), cache.counts]

    children = [child(work)[1] for _ in range(3)]
    keep = at(where)
    assert contents(keep, shards[0]) == truth(shards[0])
    together.touch()
    results = [wait() for wait in children]
    assert all(right for right, _ in results)
    counts = [counts for _, counts in results] + [keep.counts]
    assert sum(each.get("copied", 0) for each in counts) == 6, "each of the six once, by whoever came first"
    assert sum(each.get("bytes", 0) for each in counts) == sum(path.stat().st_size for path in shards)
    assert not any("source" in each for each in counts)
    (folder,) = where.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.iterdir())
    del keep
    assert not list(where.iterdir()), "the last one out clears up"


def test_shards_on_a_disk_of_this_machine_are_read_in_place(shards: list[Path], tmp_path: Path) -> None:
    cache = CachedShards(NodeCache(path=tmp_path / "cache"))
    cache.open(shards[0])
    assert cache.counts == {"local": 1, "bytes": 0}
    assert not (tmp_path / "cache").exists()


def test_the_file_system_of_a_shard_counts_and_not_that_of_a_link_to_it(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = shards[0].parent
    links = tmp_path / "links"
    links.mkdir()
    for shard in shards:
        (links / shard.name).symlink_to(shard)
    expected, looked = [*map(truth, shards)], list[Path]()
    is_local = lambda path: looked.append(path) or path != shared  # noqa: E731
    monkeypatch.setattr("headway.data.cache.node_cache.is_local", is_local)
    cache = CachedShards(NodeCache(path=tmp_path, budget="1GB", min_age=0))
    assert [contents(cache, links / shard.name) for shard in shards] == expected
    assert cache.counts["copied"] == len(shards) and not cache.counts["local"]
    assert looked == [shared], "once for all shards of a directory"


def test_a_shard_that_has_only_just_been_written_is_not_trusted(shards: list[Path], tmp_path: Path) -> None:
    cache = at(tmp_path, min_age=1e6)
    assert contents(cache, shards[0]) == truth(shards[0])
    assert cache.counts["source"] == 1 and not cache.counts["copied"]


@pytest.mark.parametrize("how", ["in place", "by rename"])
def test_a_rewritten_shard_is_another_shard(how: str, shards: list[Path], tmp_path: Path) -> None:
    cache = at(tmp_path)
    before = contents(cache, shards[0])
    (other,) = make(tmp_path / "other", 1)
    assert other.stat().st_size == shards[0].stat().st_size
    if how == "in place":
        shards[0].write_bytes(other.read_bytes())
    else:
        checksums.checksum_path(other).replace(checksums.checksum_path(shards[0]))
        other.replace(shards[0])
    os.utime(shards[0], ns=(0, 0))
    checksums.checksum_path(shards[0]).unlink()
    assert contents(cache, shards[0]) == truth(shards[0]) != before
    assert cache.counts["copied"] == 2


def test_a_shard_rewritten_while_it_is_copied_is_not_kept(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other,) = make(tmp_path / "other", 1)
    checksums.checksum_path(shards[0]).unlink()

    def rewrite(name: str) -> None:
        if name == "cache.copying" and other.exists():
            shards[0].write_bytes(other.read_bytes())
            other.unlink()

    monkeypatch.setattr(copier, "failpoint", rewrite)
    cache = at(tmp_path)
    cache.open(shards[0])
    assert cache.counts["source"] == 1
    assert contents(cache, shards[0]) == truth(shards[0])
    assert cache.counts["copied"] == 1


def test_a_shard_cut_off_while_it_is_copied_is_read_at_its_source(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        copier, "failpoint", lambda name: name == "cache.copying" and os.truncate(shards[0], 600_000)
    )
    cache = at(tmp_path)
    shard = cache.open(shards[0])
    assert cache.counts["source"] == 1 and len(shard[0]["bin"]) == SIZE // 10 - 600
    with pytest.raises(BadShard, match="ends at byte"):
        _ = shard[9]
    assert taken(tmp_path) == 0


def test_damage_at_the_source_is_found_and_leaves_nothing(shards: list[Path], tmp_path: Path) -> None:
    raw = bytearray(shards[0].read_bytes())
    raw[5000] ^= 1
    shards[0].write_bytes(raw)
    cache = at(tmp_path)
    with pytest.raises(BadSample, match="do not match"):
        contents(cache, shards[0])
    assert cache.counts["source"] == 1
    stated = checksums.read(shards[0])
    assert stated is not None
    checksums.write(shards[0], stated._replace(samples=""))
    with pytest.raises(BadShard, match="CRC32"):
        cache.open(shards[0])
    assert taken(tmp_path) == 0


def test_damage_in_the_cache_is_found_by_the_next_process(shards: list[Path], tmp_path: Path) -> None:
    cache = at(tmp_path)
    cache.open(shards[0])
    (copy,) = tmp_path.glob("headway-cache-*/*.shard")
    with copy.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))

    def work() -> Any:
        other = at(tmp_path)
        return [contents(other, shards[0]) == truth(shards[0]), other.counts["source"]]

    assert run(work) == [True, 1]
    assert not copy.exists()
    assert run(work) == [True, 0], "and copied again"


@pytest.mark.parametrize(
    "tail", [b"", b"{", b'{"source": "x", "crc32": "0", "boot": "another"}\n', b"[" * 60_000]
)
def test_copies_without_a_note_or_of_another_start_of_the_machine_are_made_again(
    tail: bytes, shards: list[Path], tmp_path: Path
) -> None:
    cache = at(tmp_path)
    cache.open(shards[0])
    (copy,) = tmp_path.glob("headway-cache-*/*.shard")
    size = shards[0].stat().st_size
    copy.write_bytes(bytes(size) + tail)
    other = at(tmp_path)
    assert contents(other, shards[0]) == truth(shards[0])
    assert other.counts["copied"] == 1


def test_a_mapped_copy_outlives_its_name(shards: list[Path], tmp_path: Path) -> None:
    cache = at(tmp_path)
    shard = cache.open(shards[0])
    (copy,) = tmp_path.glob("headway-cache-*/*.shard")
    copy.unlink()
    assert [bytes(shard[n]["bin"]) for n in range(10)] == truth(shards[0])
    for number in (-1, 10):
        with pytest.raises(IndexError):
            _ = shard[number]


def test_a_cache_that_is_removed_in_use_is_made_again(shards: list[Path], tmp_path: Path) -> None:
    cache = at(tmp_path)
    shard = cache.open(shards[0])
    (folder,) = tmp_path.glob("headway-cache-*")
    shutil.rmtree(folder)
    assert [bytes(shard[n]["bin"]) for n in range(10)] == truth(shards[0])
    assert contents(cache, shards[0]) == truth(shards[0])
    assert cache.counts["copied"] == 2 and not cache.counts["source"]
    del cache, shard
    assert not folder.exists()


# --- processes that die, stop or wait

STEPS = [
    "cache.claimed",
    "cache.reserved",
    "cache.copying",
    "cache.copying:nth=7",
    "cache.copied",
    "cache.published",
]


@pytest.mark.parametrize("step", STEPS)
def test_a_fetcher_killed_at_any_step_is_taken_over(step: str, shards: list[Path], tmp_path: Path) -> None:
    def work() -> Any:
        return [contents(at(tmp_path, budget=ROOM, patience=0), shards[0]) == truth(shards[0])]

    assert run(work, fail=f"{step}:kill9") == -signal.SIGKILL
    assert list(tmp_path.glob("headway-cache-*/*"))
    assert taken(tmp_path) <= ROOM
    assert taken(tmp_path) >= SIZE or step == "cache.claimed", "all of it is reserved before a byte is copied"
    cache = at(tmp_path, budget=ROOM, patience=0)
    assert contents(cache, shards[0]) == truth(shards[0])
    assert cache.counts["copied"] + cache.counts["hit"] == 1 and not cache.counts["source"]
    assert contents(cache, shards[1]) == truth(shards[1])
    assert taken(tmp_path) <= ROOM
    del cache
    assert not list(tmp_path.glob("headway-cache-*"))


def test_a_part_that_is_published_before_it_could_be_claimed_is_not_written_to(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening a part and locking it, its fetcher may be done: the open file is then a copy that others read."""
    cache = at(tmp_path)
    cache.open(shards[0])
    (copy,) = tmp_path.glob("headway-cache-*/*.shard")
    part, before, plain = copy.with_suffix(".part"), copy.read_bytes(), CacheDirectory._open
    copy.rename(part)

    def late(folder: CacheDirectory, name: str, flags: int) -> Any:
        handle = plain(folder, name, flags)
        if name == part.name and part.exists() and not copy.exists():
            part.rename(copy)
        return handle

    monkeypatch.setattr(CacheDirectory, "_open", late)
    other = at(tmp_path)
    assert contents(other, shards[0]) == truth(shards[0])
    assert other.counts["hit"] == 1 and not other.counts["copied"]
    assert copy.read_bytes() == before


def test_a_copy_that_is_removed_as_soon_as_it_has_its_name_is_not_read(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes would take space that nobody counts."""
    monkeypatch.setattr(
        directory,
        "failpoint",
        lambda name: name == "cache.published" and next(tmp_path.glob("*/*.shard")).unlink(),
    )
    cache = at(tmp_path)
    assert contents(cache, shards[0]) == truth(shards[0])
    assert cache.counts["source"] == 1


def test_an_evictor_killed_before_it_removes_leaves_a_whole_copy(shards: list[Path], tmp_path: Path) -> None:
    def work() -> Any:
        cache = at(tmp_path, budget=ROOM)
        return [contents(cache, path) == truth(path) for path in shards[:2]]

    assert run(work, fail="cache.evicting:kill9") == -signal.SIGKILL
    assert run(work) == [True, True]
    assert not list(tmp_path.glob("headway-cache-*"))


def test_a_waiting_reader_takes_over_when_the_fetcher_dies(shards: list[Path], tmp_path: Path) -> None:
    def work() -> Any:
        cache = at(tmp_path, patience=60)
        return [contents(cache, shards[0]) == truth(shards[0]), cache.counts]

    stopped, _ = child(work, fail="cache.reserved:stop")
    os.waitid(os.P_PID, stopped, os.WSTOPPED | os.WNOWAIT)
    _, wait = child(work)
    time.sleep(0.2)
    os.kill(stopped, signal.SIGKILL)
    os.waitpid(stopped, 0)
    right, counts = wait()
    assert right and counts["copied"] == 1 and "source" not in counts


def test_nobody_waits_longer_than_the_deadline_and_not_twice(
    shards: list[Path], tmp_path: Path, messages: list[str]
) -> None:
    stopped, _ = child(lambda: at(tmp_path).open(shards[0]) and 0, fail="cache.reserved:stop")
    os.waitid(os.P_PID, stopped, os.WSTOPPED | os.WNOWAIT)
    try:
        cache, began = at(tmp_path, patience=0.3), time.monotonic()
        assert contents(cache, shards[0]) == truth(shards[0])
        assert time.monotonic() - began >= 0.3
        assert contents(cache, shards[0]) == truth(shards[0])
        assert contents(cache, shards[1]) == truth(shards[1])
        assert cache.counts["source"] == 2 and cache.counts["copied"] == 1
        (said,) = messages
        assert "waited 0.3 s for another process to copy it" in said
        assert cache._no_wait_until > began
    finally:
        os.kill(stopped, signal.SIGKILL)
        os.waitpid(stopped, 0)


@pytest.mark.parametrize("held", ["ledger", "live", "slots"])
def test_a_stopped_process_with_any_lock_stops_nobody(held: str, shards: list[Path], tmp_path: Path) -> None:
    first = at(tmp_path)
    first.open(shards[5])
    names = ["slot-0", "slot-1"] if held == "slots" else [held]
    folder = next(tmp_path.glob("headway-cache-*"))
    if held == "live":
        del first
        folder.mkdir(mode=0o700)
    files = [(folder / name).open("w") for name in names]
    for file in files:
        fcntl.flock(file, fcntl.LOCK_EX)
    cache = at(tmp_path, patience=0.2)
    with pytest.MonkeyPatch.context() as patch:
        waits = []
        patch.setattr(locks.time, "sleep", lambda seconds: waits.append(seconds) or sleep(seconds))
        assert contents(cache, shards[0]) == truth(shards[0])
        assert waits
        waits.clear()
        assert contents(cache, shards[1]) == truth(shards[1])
        assert not waits, "not twice"
    assert cache.counts["source"] == 2
    if held != "slots":
        with pytest.raises(UsageError, match=r"cannot be used: waited 0\.1 s"):
            NodeCache(path=tmp_path, patience=0.1).sweep()
    for file in files:
        file.close()


def test_a_forked_child_does_not_hold_the_locks_of_its_parent(tmp_path: Path) -> None:
    """A data worker that outlives a killed rank would keep the others waiting."""
    folder = CacheDirectory.join(tmp_path, Deadline(1))
    forking = multiprocessing.get_context("fork")
    done = forking.Event()
    with folder.space_lock(Deadline(1)), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        worker = forking.Process(target=done.wait, args=[60])
        worker.start()
    with folder.space_lock(Deadline(30)):
        assert worker.is_alive()
    assert folder.leave(), "nor does it use the cache"
    done.set()
    worker.join()


# --- space


def test_the_budget_holds_whatever_processes_do(shards: list[Path], tmp_path: Path) -> None:
    """Three processes, six shards, room for two and a half; one was killed while it copied."""
    budget, most, over = int(2.5 * ROOM), 0, threading.Event()

    def work(seed: int) -> Any:
        cache = at(tmp_path, budget=budget, patience=0.05)
        return all(
            contents(cache, shards[(seed + 5 * n) % 6]) == truth(shards[(seed + 5 * n) % 6])
            for n in range(12)
        )

    def watch() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, taken(tmp_path))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    results = [run(lambda: work(2), fail="cache.copying:nth=5:kill9")]
    children = [child(lambda seed=seed: work(seed))[1] for seed in range(3)]
    results += [wait() for wait in children]
    over.set()
    watcher.join()
    assert results == [-signal.SIGKILL, True, True, True]
    assert ROOM < most <= budget
    NodeCache(path=tmp_path).sweep()
    assert not list(tmp_path.glob("headway-cache-*"))


def test_a_copy_that_is_published_during_a_look_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, key, listed = CacheDirectory.join(tmp_path, Deadline(1)), f"{'a' * 32}-100", os.listdir
    part = folder.claim(key)
    assert part
    os.posix_fallocate(part.fd, 0, 8192)

    def published_meanwhile(where: int) -> list[str]:
        names = listed(where)
        if f"{key}.part" in names:
            folder.publish(key, part, Deadline(1))
        return names

    monkeypatch.setattr("os.listdir", published_meanwhile)
    assert folder.used() == 8192
    part.close()


def test_what_is_needed_last_goes_first(shards: list[Path], tmp_path: Path) -> None:
    cache = at(tmp_path, budget=3 * ROOM)
    for path in shards[:3]:
        cache.open(path)
    cache.expect([shards[1], shards[3], shards[0], shards[2]])

    def there() -> set[Path]:
        return {Path(found.source) for found in NodeCache(path=tmp_path).ls() if found.source}

    cache.open(shards[3])
    assert there() == {shards[0], shards[1], shards[3]}
    cache.open(shards[4])
    assert there() == {shards[1], shards[3], shards[4]}
    cache.open(shards[5])
    assert there() == {shards[1], shards[3], shards[5]}, (
        "what nobody asked for goes before what is needed last"
    )


def test_nothing_that_is_needed_sooner_goes_for_what_is_needed_later(
    shards: list[Path], tmp_path: Path
) -> None:
    cache = at(tmp_path, budget=2 * ROOM)
    for path in shards[:2]:
        cache.open(path)
    fitting = cache.expect([shards[0], shards[1], shards[2]])
    assert list(fitting) == shards[:2]
    with pytest.raises(NotCached, match="needed sooner"):
        cache.prepare(shards[2], 2, lambda: False)


def test_a_copy_in_use_is_not_removed(shards: list[Path], tmp_path: Path) -> None:
    cache, other = at(tmp_path, budget=ROOM), at(tmp_path, budget=ROOM)
    view = other.open(shards[0])[0]["bin"]
    assert contents(cache, shards[1]) == truth(shards[1])
    assert cache.counts["source"] == 1
    del view
    assert contents(cache, shards[1]) == truth(shards[1])
    assert cache.counts["copied"] == 1


def test_what_is_prepared_is_kept_until_it_is_no_longer_expected(shards: list[Path], tmp_path: Path) -> None:
    cache, other = at(tmp_path, budget=ROOM), at(tmp_path, budget=ROOM)
    assert cache.expect([shards[0], shards[1]]) == {shards[0]: 0}
    cache.prepare(shards[0], 0, lambda: False)
    other.open(shards[1])
    assert other.counts["source"] == 1
    cache.open(shards[0])
    assert cache.counts["hit"] == 1
    cache.expect([shards[2]])
    other.open(shards[1])
    assert other.counts["copied"] == 1


def test_what_is_kept_for_later_gives_way_to_what_is_needed_now(shards: list[Path], tmp_path: Path) -> None:
    cache = at(tmp_path, budget=ROOM)
    cache.expect([shards[0]])
    cache.prepare(shards[0], 0, lambda: False)
    assert contents(cache, shards[1]) == truth(shards[1])
    assert cache.counts["copied"] == 2 and not cache.counts["source"]


def test_a_shard_larger_than_the_budget_is_read_at_its_source(
    shards: list[Path], tmp_path: Path, messages: list[str]
) -> None:
    cache = at(tmp_path, budget="500kB")
    assert [contents(cache, path) == truth(path) for path in shards[:2]] == [True, True]
    assert cache.counts["source"] == 2
    (said,) = messages
    assert "the budget is 500000" in said


@pytest.mark.parametrize("step", ["cache.reserved", "cache.copying", "cache.copied", "cache.published"])
@pytest.mark.parametrize("trouble", ["ENOSPC", "EIO"])
def test_trouble_with_the_storage_of_the_cache_is_no_trouble(
    step: str, trouble: str, shards: list[Path], tmp_path: Path
) -> None:
    def work() -> Any:
        cache = at(tmp_path)
        right = contents(cache, shards[0]) == truth(shards[0])
        parts = [path.name for path in tmp_path.glob("headway-cache-*/*.part")]
        return [right, cache.counts["source"], parts]

    assert run(work, fail=f"{step}:errno={trouble}") == [True, 1, []]
    assert not list(tmp_path.glob("headway-cache-*"))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of 64 MB."""
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("mounting needs root")
    where = tmp_path / "small"
    where.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(where)]
    if subprocess.run(mounting, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("this machine does not let us mount")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_small_file_system_is_never_filled(small: Path, tmp_path: Path) -> None:
    paths = make(tmp_path / "source", 4, 20_000_000)
    (small / "others").write_bytes(bytes(25_000_000))
    cache = at(small, budget="100%")
    shards = [cache.open(path) for path in paths]
    assert cache.counts == {"copied": 1, "source": 3, "bytes": paths[0].stat().st_size}, (
        "there is room for two, barely"
    )
    assert [[bytes(shard[n]["bin"]) for n in range(10)] for shard in shards] == [
        truth(path) for path in paths
    ]
    system = os.statvfs(small)
    assert system.f_bavail >= system.f_blocks // 20, "some of it is left for others"
    del shards, cache
    (small / "others").write_bytes(bytes(60_000_000))
    cache = at(small, budget="100%")
    assert contents(cache, paths[0]) == truth(paths[0])
    assert cache.counts["source"] == 1


# --- other users, links, and names of others

STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


@pytest.fixture
def public() -> Iterator[Path]:
    """Where everybody may make files, and nobody may remove those of others."""
    folder = Path(tempfile.mkdtemp(prefix="headway-test-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_users_have_caches_of_their_own(public: Path) -> None:
    paths = make(public / "source", 2)

    def work() -> Any:
        cache = at(public)
        right = all(contents(cache, path) == truth(path) for path in paths)
        (mine,) = [path for path in public.glob("headway-cache-*") if path.stat().st_uid == os.geteuid()]
        return [right, cache.counts["copied"], mine.name, [path.stat().st_uid for path in mine.iterdir()]]

    ours = at(public)
    ours.open(paths[0])
    right, copied, name, owners = run(work, user=STRANGER)
    assert (right, copied, name) == (True, 2, f"headway-cache-{STRANGER}")
    assert set(owners) == {STRANGER}
    assert [path.name for path in public.glob("headway-cache-*")] == ["headway-cache-0"], (
        "each clears its own away"
    )


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_directory_that_another_user_made_is_not_used(mode: int, public: Path, messages: list[str]) -> None:
    paths = make(public / "source", 1)
    planted = public / f"headway-cache-{STRANGER}"
    planted.mkdir()
    planted.chmod(mode)

    def work() -> Any:
        cache = at(public)
        right = contents(cache, paths[0]) == truth(paths[0])
        return [right, cache.counts["source"], *messages]

    right, read, said = run(work, user=STRANGER)
    assert right and read == 1
    assert f"headway-cache-{STRANGER} is drwx" in said and "of user 0" in said
    assert not list(planted.iterdir())


def test_a_directory_that_others_may_enter_is_not_used(shards: list[Path], tmp_path: Path) -> None:
    (tmp_path / f"headway-cache-{os.geteuid()}").mkdir()
    (tmp_path / f"headway-cache-{os.geteuid()}").chmod(0o755)
    cache = at(tmp_path)
    assert contents(cache, shards[0]) == truth(shards[0])
    assert cache.counts["source"] == 1


def test_a_link_in_the_place_of_the_directory_is_not_followed(shards: list[Path], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "live").write_text("mine")
    (tmp_path / f"headway-cache-{os.geteuid()}").symlink_to(victim)
    cache = at(tmp_path)
    assert contents(cache, shards[0]) == truth(shards[0])
    del cache
    assert [path.name for path in victim.iterdir()] == ["live"]
    assert (victim / "live").read_text() == "mine"


@pytest.mark.parametrize("name", ["shard", "part", "ledger", "live", "slot-0"])
def test_a_link_in_the_place_of_a_file_is_not_followed(name: str, shards: list[Path], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine" * 1000)
    folder = tmp_path / f"headway-cache-{os.geteuid()}"
    folder.mkdir(mode=0o700)
    if name in ("shard", "part"):
        name = f"{copier.identify(ShardFile(shards[0]), 0.0)}.{name}"
    (folder / name).symlink_to(victim)
    cache = at(tmp_path)
    assert contents(cache, shards[0]) == truth(shards[0])
    assert cache.counts["source"] == 1
    assert victim.read_bytes() == b"mine" * 1000


def test_files_that_are_not_the_caches_stay(shards: list[Path], tmp_path: Path) -> None:
    cache = at(tmp_path, budget=ROOM)
    cache.open(shards[0])
    mine = next(tmp_path.glob("headway-cache-*")) / "notes.tar"
    mine.write_text("mine")
    contents(cache, shards[1])
    del cache
    NodeCache(path=tmp_path).sweep()
    assert [path.name for path in mine.parent.iterdir()] == ["notes.tar"]


def test_no_cache_without_a_place_for_it(shards: list[Path], tmp_path: Path) -> None:
    cache = at(tmp_path / "missing")
    assert contents(cache, shards[0]) == truth(shards[0])
    assert cache.counts["source"] == 1


# --- looking and sweeping


def test_looking_and_sweeping_leave_a_cache_in_use_alone(shards: list[Path], tmp_path: Path) -> None:
    how = NodeCache(path=tmp_path)
    assert how.ls() == [] and how.sweep() == 0
    assert not list(tmp_path.glob("headway-cache-*"))
    killed = run(lambda: at(tmp_path).open(shards[1]) and 0, fail="cache.copying:kill9")
    assert killed == -signal.SIGKILL
    cache = at(tmp_path)
    held = cache.open(shards[0])
    found = {entry.source and Path(entry.source): entry.in_use for entry in how.ls()}
    assert found == {shards[0]: True, None: False}
    assert how.sweep() >= SIZE, "what the killed one left"
    assert [Path(entry.source) for entry in how.ls()] == [shards[0]]
    del held
    assert how.sweep() == 0 and len(how.ls()) == 1, "nobody reads it now, but the cache is in use"
    del cache
    assert not list(tmp_path.glob("headway-cache-*"))


def test_sweeping_removes_all_when_nobody_is_left(shards: list[Path], tmp_path: Path) -> None:
    def work() -> Any:
        cache = at(tmp_path)
        cache.open(shards[0])
        os.kill(os.getpid(), signal.SIGKILL)

    assert run(work) == -signal.SIGKILL
    assert len(NodeCache(path=tmp_path).ls()) == 1
    assert NodeCache(path=tmp_path).sweep() >= SIZE
    assert not list(tmp_path.glob("headway-cache-*"))


def test_slots_limit_how_many_copy_at_once(tmp_path: Path) -> None:
    folder = CacheDirectory.join(tmp_path, Deadline(1))
    with folder.slot(2, Deadline(0)), folder.slot(2, Deadline(0)):
        with pytest.raises(LockTimeout, match="one of 2 shards"), folder.slot(2, Deadline(0.05)):
            pass
        with folder.slot(3, Deadline(0)):
            pass
    with folder.slot(1, Deadline(0)):
        pass
    folder.leave()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"budget": "half"}, "budget='half'"),
        ({"budget": "101%"}, "budget='101%'"),
        ({"budget": 0}, "budget=0"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"patience": -1}, "patience=-1"),
        ({"chunk_bytes": 0}, "chunk_bytes=0"),
    ],
)
def test_bad_settings_are_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        NodeCache(**how)


@pytest.mark.parametrize("seed", range(40 if os.environ.get("HEADWAY_FAULTS") == "full" else 3))
def test_processes_that_come_and_are_killed_anywhere(seed: int, shards: list[Path], tmp_path: Path) -> None:
    """Four at a time read shards in a random order, in random steps of their own, until a random step kills them."""
    draw = random.Random(seed)
    budget, most, rounds = draw.choice([ROOM, 2 * ROOM, 3 * ROOM]), 0, []
    for _ in range(3):
        children = []
        for _ in range(4):
            order = draw.choices(shards, k=8)
            fail = f"{draw.choice([*STEPS, 'cache.evicting'])}:kill9" if draw.random() < 0.7 else ""
            if ":nth=" not in fail:
                fail = fail.replace(":kill9", f":nth={draw.randint(1, 4)}:kill9")
            how = {"budget": budget, "patience": draw.choice([0, 0.02, 1]), "prefetch": draw.randint(1, 3)}
            children.append(child(partial(read_all, tmp_path, order, how), fail=fail)[1])
        rounds += [wait() for wait in children]
        most = max(most, taken(tmp_path))
    assert set(rounds) <= {True, -signal.SIGKILL} and True in rounds, "right bytes, or killed"
    assert most <= budget
    NodeCache(path=tmp_path).sweep()
    assert not list(tmp_path.glob("headway-cache-*"))


def read_all(where: Path, order: list[Path], how: dict[str, Any]) -> bool:
    cache = at(where, **how)
    return all(contents(cache, path) == truth(path) for path in order)
