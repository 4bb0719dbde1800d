"""A file system that fails now and then: reads are tried again and counted, and the order stays as it was."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from headway.data import NodeCache, Shard, ShardLoader, pack
from headway.data.catalog.shard_files import find_shards
from headway.data.shards.shard_file import ShardFile
from headway.errors import BadShard, StorageError
from headway.system import retries


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(retries, "WAITS_S", (0.0, 0.0, 0.0))
    for shard in range(3):
        pack([{"__key__": f"{shard}-{n}", "cls": n} for n in range(20)], tmp_path, name=f"s{shard}")
    return tmp_path


class Failing:
    """A function of `os` that fails when it is asked to, for names or files within the folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, folder: Path, code: int) -> None:
        self._real: Callable[..., Any] = getattr(os, name)
        self._folder, self._code = str(folder), code
        self.times, self.calls, self.every = 0, 0, 1
        monkeypatch.setattr(os, name, self)

    def __call__(self, what: Any, *args: Any, **how: Any) -> Any:
        path = Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else os.fspath(what)
        if str(path).startswith(self._folder):
            self.calls += 1
            if self.times and self.calls % self.every == 0:
                self.times -= 1
                raise OSError(self._code, os.strerror(self._code), path)
        return self._real(what, *args, **how)


def keys(loader: ShardLoader) -> list[str]:
    return [key for batch in loader for key in batch["__key__"]]


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize(
    ("function", "code"),
    [("pread", errno.EIO), ("pread", errno.ESTALE), ("open", errno.ESTALE), ("fstat", errno.EIO)],
)
def test_an_error_that_passes_changes_nothing_and_is_counted(
    folder: Path, function: str, code: int, indexed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not indexed:
        for index in folder.glob("*.idx"):
            index.unlink()
    expected = keys(ShardLoader(folder, batch_size=10, threads=1))
    failing = Failing(monkeypatch, function, folder, code)
    for times, every in ((1, 1), (3, 1), (5, 2)):
        failing.times, failing.every = times, every
        loader = ShardLoader(folder, batch_size=10, threads=1)
        failing.times = times  # some were used up while samples were counted
        assert keys(loader) == expected and not loader.bad
        assert loader.counters()["read_retries"] == times - failing.times > 0


def test_an_error_that_stays_ends_the_run_as_a_failure_of_storage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    loader = ShardLoader(folder, batch_size=10, max_bad=1)
    failing = Failing(monkeypatch, "pread", folder, errno.EIO)
    failing.times = 1000
    monkeypatch.setattr(retries, "_next_notice", 0.0)
    with pytest.raises(
        StorageError, match=r"could not read .*\.tar at byte .*: Input/output error, 4 times in 0 s"
    ):
        keys(loader)
    assert not loader.bad
    assert len(messages) == 1 and "trying again in 0 s" in messages[0], "once, and not for each try"


def test_a_stale_handle_is_opened_again_if_the_shard_is_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "s0-000000.tar"
    shard = Shard.open(path)
    failing = Failing(monkeypatch, "pread", folder, errno.ESTALE)
    failing.times = 2
    assert bytes(shard[3]["cls"]) == b"3"
    (other,) = pack([{"__key__": f"{n}", "cls": 9} for n in range(20)], folder / "other")
    other.replace(path)
    assert bytes(shard[4]["cls"]) == b"4", "the handle is still good"
    failing.times = 1
    with pytest.raises(BadShard, match="was replaced while in use"):
        _ = shard[5]


def test_a_directory_that_cannot_be_listed_has_not_fewer_shards(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack([{"__key__": "a", "cls": 1}], folder / "in", name="t")
    specs = [
        folder,
        *(str(folder / each) for each in ("*.tar", "s[01]*", "i*/t*.tar", "**/*.tar", "i?/t-000000.tar")),
    ]
    expected = [find_shards("x", spec) for spec in specs]
    for spec, paths in zip(specs[1:], expected[1:], strict=True):
        assert paths == sorted(map(Path, glob(str(spec), recursive=True))), "as glob"  # noqa: PTH207
    assert list(map(len, expected)) == [3, 3, 6, 1, 4, 1], "with the indexes and checksums of the third"
    real, failures = Path.iterdir, [2]

    def iterdir(self: Path) -> Any:
        yield from list(real(self))[:1]
        if failures[0]:
            failures[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        yield from list(real(self))[1:]

    monkeypatch.setattr(Path, "iterdir", iterdir)
    for spec, paths in zip(specs, expected, strict=True):
        failures[0] = 2
        assert find_shards("x", spec) == paths and not failures[0]
        failures[0] = 4
        with pytest.raises(StorageError, match="could not list"):
            find_shards("x", spec)


def test_the_node_cache_copies_over_an_error_that_passes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = keys(ShardLoader(folder, batch_size=10, threads=1))
    memory = NodeCache(path=tmp_path_factory.mktemp("cache"), copy_local=True, min_age=0, budget="100MB")
    loader = ShardLoader(folder, batch_size=10, threads=1, cache=memory)
    failing = Failing(monkeypatch, "pread", folder, errno.EIO)
    failing.times, failing.every = 6, 3
    assert keys(loader) == expected and not loader.bad
    counted = loader.counters()
    assert counted["cache/copied"] + counted.get("cache/hit", 0) >= 3 and "cache/source" not in counted


def test_a_shard_that_ends_with_the_interpreter_makes_no_noise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ShardFile(folder / "s0-000000.tar")
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", None)  # as when modules are cleared
        file.__del__()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.fileno())
    file._fd = -1
