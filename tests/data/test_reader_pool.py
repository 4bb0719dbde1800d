"""Samples that other processes read for a GPU are those that this process reads, whatever is wrong with them."""

from __future__ import annotations

import cProfile
import errno
import gc
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from multiprocessing import Pipe
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import psutil
import pytest
import simplejpeg
import torch
from PIL import Image
from waiting import EXIT_LIMIT_S

from headway.data import MultiCrop, ShardLoader, pack
from headway.data.images.batch import IMAGE, SAMPLES, EncodedImage
from headway.data.sample_reader import Chunk, SampleReader
from headway.data.shards.checksums import checksum_path
from headway.data.shards.shard import Shard
from headway.data.sources import reader_pool, reader_process
from headway.data.sources.reader_pool import ReadAnswer, ReaderPool, SharedSlots
from headway.data.sources.reader_process import ReaderSettings, SlotReader, send_rows
from headway.errors import StorageError
from headway.system import retries

GPU = torch.device("cuda", 0)
SLOT = 2**16
MAX_CALLS = 7  # of Python per sample, in the process that trains
Locations = Sequence[tuple[int, int, int, int]]


def jpeg(seed: int, height: int = 24, width: int = 32) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    encoded: bytes = simplejpeg.encode_jpeg(pixels)
    return encoded


def by_pillow(seed: int, kind: str, **how: Any) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(jpeg(seed))).save(file, kind, **how)
    return file.getvalue()


def sample(number: int) -> dict[str, Any]:
    """Samples of all kinds: each has what a GPU decodes, or what it cannot, or nothing of use."""
    own: dict[int, dict[str, Any]] = {
        1: {"png": by_pillow(number, "PNG")},
        2: {"jpg": by_pillow(number, "JPEG", progressive=True)},
        3: {"jpg": jpeg(number)[:-40]},  # cut
        4: {"jpg": jpeg(number), "json": {"a": [number, None, 1.5]}, "txt": "é"},
        5: {"jpg": jpeg(number), "npy": np.arange(number)},
        6: {"jpg": jpeg(number), "cls": b"seven"},
        7: {"cls": number},
        8: {"jpeg": jpeg(number), "seg.png": by_pillow(number, "PNG"), "bin": bytes(number)},
        9: {"cls": number, "jpg": jpeg(number, 150, 200)},  # larger than a slot
    }
    return {"__key__": f"{number:03d}", **own.get(number % 12, {"jpg": jpeg(number), "cls": number})}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with checksums and one without; some samples are damaged."""
    tmp_path = tmp_path_factory.mktemp("shards")
    pack((sample(number) for number in range(240)), tmp_path, shard_size=2**18)
    paths = sorted(tmp_path.glob("*.tar"))
    assert len(paths) > 3
    checksum_path(paths[1]).unlink()
    for path in paths[:2]:
        shard = Shard.open(path)
        for number in (3, 10):
            for part in shard.entries.parts(number)[:1]:
                with path.open("r+b") as file:
                    file.seek(part.offset + part.size // 2)
                    file.write(b"\0\xff\xd8\0")
    return tmp_path


class InProcess:
    """Reads as a reader process does, in this one."""

    def __init__(self, pool: ReaderPool, around: Callable[[], Any] | None = None) -> None:
        self._slots = SharedSlots(Pinning())
        settings = ReaderSettings.from_json(pool._settings.to_json())
        self._reader = SlotReader(settings, memoryview(self._slots._memory))
        self._around, self.rows = around, list[Any]()

    def read(self, locations: Locations) -> ReadAnswer:
        slot = self._slots.take()
        assert slot is not None
        undo = self._around() if self._around is not None else None
        rows = self._reader.read(slot, locations)
        if undo is not None:
            undo()
        self.rows += [(row[0], dict(row[1]), *row[2:]) if row is not None else None for row in rows]
        return ReadAnswer(self._slots.view(slot), rows)


class Pinning:
    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def pin(self, address: int, count: int) -> None:
        assert address not in self.pinned
        self.pinned[address] = count

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def readers(loader: ShardLoader, **how: Any) -> tuple[SampleReader, SampleReader]:
    """Readers for a GPU: one that has processes, and one that reads by itself."""
    settings = {"seed": 0, "substitute": True, "decoders": {}, "transform": MultiCrop(), **how}
    two = [
        SampleReader(
            loader._shards,
            loader._order,
            watch=loader._label_watch,
            limits=loader._limits,
            gpu=GPU,
            **settings,
        )
        for _ in range(2)
    ]
    two[1]._pool = None
    return two[0], two[1]


def batches(loader: ShardLoader) -> list[Locations]:
    found = loader._rank_batches(loader._weights_over_time(), loader._position)
    return [batch.locations for batch in islice(found, 8)]


def assert_equal(found: Chunk, expected: Chunk) -> None:
    for name in ("substitutes", "read", "size", "read_retries"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("bad", "labels"):  # in any sequence: images are decoded later where a thread reads
        assert sorted(getattr(found, name)) == sorted(getattr(expected, name)), name
    assert len(found.values) == len(expected.values)
    for one, other in zip(found.values, expected.values, strict=True):
        rest = [{key: each[key] for key in each if key not in (SAMPLES, IMAGE)} for each in (one, other)]
        assert [*rest[0]] == [*rest[1]] and one[SAMPLES] == other[SAMPLES]
        assert type(one[IMAGE]) is type(other[IMAGE])
        np.testing.assert_equal(one[IMAGE], other[IMAGE])
        np.testing.assert_equal(*rest)


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_process, "SLOT_BYTES", SLOT)
    monkeypatch.setattr(reader_pool, "SLOT_BYTES", SLOT)


@pytest.mark.usefixtures("small_slots")
@pytest.mark.parametrize("how", [{}, {"substitute": False}, {"decoders": {"cls": bytes}}, {"exif": True}])
def test_samples_of_all_kinds_are_those_that_are_read_here(shards: Path, how: dict[str, Any]) -> None:
    if how.pop("exif", False):
        how = {"transform": MultiCrop(exif=True)}
    loader = ShardLoader(shards, batch_size=60)
    fast, plain = readers(loader, **how)
    assert fast._pool is not None
    fast._pool = there = InProcess(fast._pool)  # type: ignore[assignment]
    for locations in batches(loader):
        assert_equal(fast.read(locations), plain.read(locations))
    assert sum(row is None for row in there.rows) > 40
    assert sum(row is not None for row in there.rows) > (0 if "decoders" in how else 60)


@pytest.mark.usefixtures("small_slots")
@pytest.mark.parametrize("substitute", [True, False])
def test_time_is_counted_once_also_for_samples_that_a_process_declines(
    shards: Path, substitute: bool
) -> None:
    loader = ShardLoader(shards, batch_size=60)
    reader, _ = readers(loader, substitute=substitute)
    assert reader._pool is not None
    reader._pool = there = InProcess(reader._pool)  # type: ignore[assignment]
    for locations in batches(loader):
        began = time.perf_counter()
        times = reader.read(locations).times
        edges = [began, *chain.from_iterable(times), time.perf_counter()]
        assert edges == sorted(edges), "spans of one thread do not overlap"
    assert sum(row is None for row in there.rows) > 40


def test_a_damaged_sample_is_left_to_this_process(shards: Path) -> None:
    loader = ShardLoader(shards, batch_size=60)
    fast, plain = readers(loader)
    assert fast._pool is not None
    there = InProcess(fast._pool)
    damaged = (0, 0, 0, 10)
    (row, good) = there._reader.read(0, [damaged, (0, 0, 0, 11)])
    assert row is None and good is not None and good[0] == "011"
    (bad,) = plain.read([damaged]).bad
    assert bad.key == "010" and "do not match" in bad.reason


def test_a_shard_that_is_truncated_while_in_use(shards: Path, tmp_path: Path) -> None:
    shards = copytree(shards, tmp_path / "copy")
    loader = ShardLoader(shards, batch_size=60)
    fast, plain = readers(loader)
    assert fast._pool is not None
    fast._pool = InProcess(fast._pool)  # type: ignore[assignment]
    first, *rest = batches(loader)
    assert_equal(fast.read(first), plain.read(first))
    path = min(shards.glob("*.tar"))
    os.truncate(path, path.stat().st_size // 2)
    for locations in rest[:3]:
        found, expected = fast.read(locations), plain.read(locations)
        assert_equal(found, expected)
        assert any("truncated" in bad.reason for bad in found.bad)


def test_errors_of_storage_are_this_process_to_handle(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ShardLoader(shards, batch_size=60)
    fast, plain = readers(loader)
    assert fast._pool is not None
    real, calls = os.preadv, [0]

    def always(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    def sometimes(*args: Any) -> int:
        calls[0] += 1
        return real(*args) if calls[0] % 3 else always()

    def break_reads() -> Callable[[], None]:
        scope = pytest.MonkeyPatch()
        scope.setattr(os, "preadv", sometimes)
        scope.setattr(os, "pread", always)
        scope.setattr(retries, "WAITS_S", ())
        return scope.undo

    fast._pool = there = InProcess(fast._pool, break_reads)  # type: ignore[assignment]
    there._reader._shards = loader._shards
    for locations in batches(loader):
        expected = plain.read(locations)  # and shards are open
        assert_equal(fast.read(locations), expected)
    assert calls[0] > 200 and sum(row is not None for row in there.rows) > 60
    monkeypatch.setattr(retries, "WAITS_S", (0.0,))
    monkeypatch.setattr(os, "preadv", always)
    monkeypatch.setattr(os, "pread", always)
    with pytest.raises(StorageError, match="Input/output error"):
        fast.read(batches(loader)[0])


@pytest.mark.usefixtures("small_slots")
def test_slots_are_used_again_when_nobody_looks_at_them() -> None:
    pinning = Pinning()
    slots = SharedSlots(pinning)
    assert [slots.take(), slots.take()] == [0, 1]
    view = slots.view(0)
    piece = view[5:9]
    del view
    slots.view(1)
    assert slots.take() == 1 and slots.take() == 2, "of the first, a piece is left"
    encoded = EncodedImage(piece, 1, 1, 1)
    del piece
    assert slots.take() == 3 and encoded.address
    del encoded
    assert slots.take() == 0 and {*pinning.pinned.values()} == {SLOT}
    while slots.take() is not None:
        pass
    slots.free(7)
    assert slots.take() == 7
    del slots
    gc.collect()
    assert not pinning.pinned


@pytest.mark.usefixtures("small_slots")
def test_memory_that_cannot_be_pinned_is_used_as_it_is(messages: list[str]) -> None:
    class Limited(Pinning):
        def pin(self, address: int, count: int) -> None:
            if self.pinned:
                raise RuntimeError("out of memory")
            super().pin(address, count)

    pinning = Limited()
    slots = SharedSlots(pinning)
    assert [slots.take() for _ in range(4)] == [0, 1, 2, 3]
    assert len(messages) == 1 and "cannot be pinned (out of memory)" in messages[0]
    del slots
    gc.collect()
    assert not pinning.pinned, "and only what was pinned is released"


def test_json_that_is_nested_too_deeply_for_pickle_is_left_to_this_process() -> None:
    deep = json.loads("[" * 800 + "]" * 800)
    good = ("a", {"json": [[1]]}, 0, 1, 2, 3, 4)
    here, there = Pipe()
    with here, there:
        send_rows(there, [good, ("b", {"json": deep}, 0, 1, 2, 3, 4), None])
        assert here.recv() == [good, None, None]


def test_a_process_that_is_stopped_is_not_awaited_forever(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    stub = tmp_path / "python"  # says that it is ready, and is stopped
    stub.write_text("#!/bin/bash\nprintf '\\0\\0\\0\\4\\200\\4N.' >&$4\nkill -STOP $$\n")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    monkeypatch.setattr(reader_pool, "_ANSWER_WAIT_S", 0.2)
    loader = ShardLoader(shards, batch_size=60)
    fast, plain = readers(loader)
    locations = batches(loader)[0]
    assert_equal(fast.read(locations), plain.read(locations))
    assert fast._pool is not None and fast._pool.read(locations) is None
    (message,) = messages
    found = re.search(r"\(process (\d+) did not answer in 0\.2 s\); they are read by threads", message)
    assert found is not None
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(found[1])).wait(EXIT_LIMIT_S)  # it was killed


@pytest.fixture
def started(shards: Path) -> Iterator[tuple[ShardLoader, SampleReader, SampleReader]]:
    loader = ShardLoader(shards, batch_size=60, collate_fn=len, max_bad=1)
    fast, plain = readers(loader)
    assert fast._pool is not None and fast._pool.read(batches(loader)[0]) is not None
    yield loader, fast, plain


def test_a_process_reads_the_same_samples_also_after_a_resume(
    started: tuple[ShardLoader, SampleReader, SampleReader], messages: list[str]
) -> None:
    loader, fast, plain = started
    pool = fast._pool
    assert pool is not None
    (process,) = pool._idle
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        process._process.send_signal(number)  # meant for the rank
    taken = iter(loader)
    for _ in range(2):
        next(taken)
    resumed = ShardLoader(loader._sources[0].paths, batch_size=60)
    resumed.load_state_dict(loader.state_dict())
    expected = batches(resumed)
    assert expected == batches(loader)
    for locations in expected[:3]:
        assert_equal(fast.read(locations), plain.read(locations))
    assert pool._idle == [process] and not messages
    # a few calls for each sample, in the process that trains
    answer = pool.read(expected[0])
    assert answer is not None
    read_there = [row is not None for row in answer.rows]
    good = [location for location, is_good in zip(expected[0], read_there, strict=True) if is_good] * 10
    profile = cProfile.Profile()
    chunk = profile.runcall(fast.read, good)
    calls = sum(entry.callcount for entry in profile.getstats())
    assert len(chunk.values) == len(good) and calls / len(good) <= MAX_CALLS
    # a process that has ended is noticed, and this one reads
    process._process.kill()
    assert_equal(fast.read(expected[0]), plain.read(expected[0]))
    assert_equal(fast.read(expected[1]), plain.read(expected[1]))
    assert len(messages) == 1 and "read by threads" in messages[0]
    assert pool.read(expected[0]) is None and not pool._idle
