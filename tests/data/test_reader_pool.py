"""Samples that other processes read are those that this process reads, whatever is wrong with them."""

from __future__ import annotations

import cProfile
import errno
import gc
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from waiting import EXIT_LIMIT_S, wait_until

from headway.data import MultiCrop, ShardLoader, pack
from headway.data.images.batch import IMAGE, SAMPLES, EncodedImage
from headway.data.samples.sample_reader import SampleReader
from headway.data.shards.checksums import checksum_path
from headway.data.shards.shard import Shard
from headway.data.sources import reader_pool, reader_process
from headway.data.sources.chunk import Chunk
from headway.data.sources.reader_pool import MAX_DECODERS, FilledSlot, ReaderPool, SharedSlots
from headway.data.sources.reader_process import ReaderSettings, SlotAnswer, SlotReader, send_answer
from headway.errors import BadSample, StorageError
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

    usable = True

    def __init__(self, pool: ReaderPool, around: Callable[[], Any] | None = None) -> None:
        self._slots = SharedSlots(Pinning())
        settings = ReaderSettings.from_json(pool._settings.to_json())
        self._reader = SlotReader(settings, memoryview(self._slots._memory))
        self._around, self.rows = around, list[Any]()

    def read(self, locations: Locations) -> FilledSlot:
        slot = self._slots.take()
        assert slot is not None
        undo = self._around() if self._around is not None else None
        answer = self._reader.read(slot, locations)
        if undo is not None:
            undo()
        self.rows += [(row[0], dict(row[1]), *row[2:]) if row is not None else None for row in answer.rows]
        return FilledSlot(self._slots.view(slot), answer)


class Pinning:
    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def pin(self, address: int, count: int) -> None:
        assert address not in self.pinned
        self.pinned[address] = count

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def readers(loader: ShardLoader, **how: Any) -> tuple[SampleReader, SampleReader]:
    """Readers, for a GPU unless `how` says otherwise: one that has processes, and one that reads by itself."""
    settings = {"seed": 0, "substitute": True, "decoders": {}, "transform": MultiCrop(), "gpu": GPU, **how}
    two = [
        SampleReader(
            loader._shards,
            loader._order,
            watch=loader._label_watch,
            limits=loader._limits,
            **settings,
        )
        for _ in range(2)
    ]
    two[1]._pool = None
    return two[0], two[1]


def read(reader: SampleReader, locations: Locations) -> Chunk:
    return reader.read(locations, by_process=True)


def invert(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A transform that writes to the image, and refuses some samples."""
    if sample["__key__"].endswith("0"):
        raise BadSample("it is round")
    for name in {"jpg", "jpeg"} & sample.keys():
        sample[name] ^= rng.integers(256, dtype=np.uint8)
    return sample


def batches(loader: ShardLoader) -> list[Locations]:
    found = loader._rank_batches(loader._mix_timeline(), loader._position)
    return [batch.locations for batch in islice(found, 8)]


def assert_equal(found: Chunk, expected: Chunk) -> None:
    for name in ("substitutes", "read", "size", "read_retries"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("bad", "labels"):  # in any sequence: images are decoded later where a thread reads
        assert sorted(getattr(found, name)) == sorted(getattr(expected, name)), name
    assert len(found.values) == len(expected.values)
    for one, other in zip(found.values, expected.values, strict=True):
        assert type(one.get(IMAGE)) is type(other.get(IMAGE))
        if IMAGE in one:  # it has no place among the parts
            np.testing.assert_equal(one.pop(IMAGE), other.pop(IMAGE))
            assert one.pop(SAMPLES) == other.pop(SAMPLES)
        assert [*one] == [*other]
        np.testing.assert_equal(one, other)


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_process, "SLOT_BYTES", SLOT)
    monkeypatch.setattr(reader_pool, "SLOT_BYTES", SLOT)


@pytest.mark.usefixtures("small_slots")
@pytest.mark.parametrize("how", [{}, {"substitute": False}, {"decoders": {"cls": bytes}}, {"exif": True}])
@pytest.mark.parametrize("gpu", [True, False], ids=["for a GPU", "decoded there"])
def test_samples_of_all_kinds_are_those_that_are_read_here(
    shards: Path, how: dict[str, Any], gpu: bool
) -> None:
    varied = "exif" in how
    how = {name: value for name, value in how.items() if name != "exif"}
    if gpu:
        how |= {"transform": MultiCrop(exif=varied)}
    else:
        how |= {"gpu": None, "transform": invert if varied else None}
    loader = ShardLoader(shards, batch_size=60)
    fast, plain = readers(loader, **how)
    assert fast._pool is not None
    fast._pool = there = InProcess(fast._pool)  # type: ignore[assignment]
    for locations in batches(loader):
        assert_equal(read(fast, locations), plain.read(locations))
    assert sum(row is None for row in there.rows) > 40
    assert sum(row is not None for row in there.rows) > (0 if "decoders" in how else 60)


def test_processes_that_decline_most_samples_are_asked_no_more(shards: Path) -> None:
    loader = ShardLoader(shards, batch_size=60)
    fast, _ = readers(loader, gpu=None, transform=None)
    assert fast._pool is not None
    fast._pool = there = InProcess(fast._pool)  # type: ignore[assignment]
    for locations in batches(loader)[:2]:
        read(fast, locations)
    assert fast._requested == (120, there.rows.count(None)) and there.rows.count(None) > 10
    for asked, declined, has in (
        (999, 999, True),
        (1000, 501, False),
        (1000, 500, True),
        (9999, 9000, False),
    ):
        fast._requested = asked, declined
        assert fast.has_processes is has


@pytest.mark.usefixtures("small_slots")
def test_what_does_not_fit_a_slot_is_not_read_twice(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ShardLoader(shards, batch_size=200)
    fast, plain = readers(loader, gpu=None, transform=None)
    assert fast._pool is not None
    fast._pool = InProcess(fast._pool)  # type: ignore[assignment]
    begun, begin = [0], SlotReader._begin

    def count(reader: SlotReader, *where: int) -> Any:
        begun[0] += 1
        return begin(reader, *where)

    monkeypatch.setattr(SlotReader, "_begin", count)
    locations = batches(loader)[0]
    for limit, most in ((2**22, 2), (4000, 1)):  # an answer ends with the slot, or with what was read for it
        monkeypatch.setattr(reader_process, "_MAX_READ_BYTES", limit)
        begun[0] = 0
        found = read(fast, locations)
        answers = len(found.times)
        assert answers > 8 // most and begun[0] <= len(locations) + answers
        assert_equal(found, plain.read(locations))


def test_an_answer_does_not_wait_for_all_shards(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ShardLoader(shards, batch_size=60)
    monkeypatch.setattr(reader_process, "_ANSWER_S", 0.0)
    for how in ({}, {"gpu": None, "transform": None}):
        fast, plain = readers(loader, **how)
        assert fast._pool is not None
        fast._pool = there = InProcess(fast._pool)  # type: ignore[assignment]
        locations = batches(loader)[0]
        assert len(there.read(locations).answer.rows) == 1
        assert_equal(read(fast, locations), plain.read(locations))


def test_only_parts_that_are_called_jpegs_are_decoded_as_such(tmp_path: Path) -> None:
    """Others have another decoder in the rank."""
    names = ("jpg", "left.jpeg", "png", "webp", "left.png")
    pack(({"__key__": str(number), name: jpeg(0)} for number, name in enumerate(names)), tmp_path)
    loader = ShardLoader(tmp_path, batch_size=5, shuffle=False)
    fast, _ = readers(loader, gpu=None, transform=None)
    assert fast._pool is not None
    rows = InProcess(fast._pool).read(batches(loader)[0]).answer.rows
    assert [row is not None for row in rows] == [name.endswith(("jpg", "jpeg")) for name in names]
    assert all(row[3] % 64 == 0 for row in rows if row is not None)


def test_shards_without_an_index_are_not_walked_by_each_process(shards: Path, tmp_path: Path) -> None:
    shards = copytree(shards, tmp_path / "copy")
    for path in shards.glob("*.idx"):
        path.unlink()
    loader = ShardLoader(shards, batch_size=60)
    fast, _ = readers(loader, gpu=None, transform=None)
    assert fast.has_processes  # nothing is known yet
    fast.read(batches(loader)[0])
    assert not fast.has_processes


class Stub:
    """Stands for a reader process; takes as long to start and to answer as the test wants."""

    ready, running, most, started = True, 0, 0, 0
    gate = threading.Barrier(1)

    def __init__(self, *_: Any) -> None:
        Stub.started += 1

    def is_ready(self) -> bool:
        return self.ready

    def read(self, *_: Any) -> SlotAnswer:
        Stub.running += 1
        Stub.most = max(Stub.most, Stub.running)
        time.sleep(0.01)
        Stub.running -= 1
        return SlotAnswer([], 0.0, 0.0)

    def shut_down(self) -> None: ...
    def close(self) -> None: ...
    def wait(self, deadline: float) -> None: ...


def test_processes_are_few_and_nobody_waits_for_their_start(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_pool, "_ReaderProcess", Stub)
    fast, _ = readers(ShardLoader(shards, batch_size=60), gpu=None, transform=None)
    pool = fast._pool
    assert pool is not None
    monkeypatch.setattr(Stub, "ready", False)
    assert [pool.read([]) for _ in range(3)] == [None] * 3 and Stub.started == 1
    monkeypatch.setattr(Stub, "ready", True)
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: pool.read([]), range(64)))
    assert None not in answers
    assert 1 < Stub.started <= MAX_DECODERS and 1 < Stub.most <= MAX_DECODERS


def test_a_fork_does_not_take_the_answers_of_the_process_that_it_comes_from(shards: Path) -> None:
    loader = ShardLoader(shards, batch_size=60)
    fast, _ = readers(loader, gpu=None, transform=None)
    pool = fast._pool
    assert pool is not None and pool.usable
    here, there = Pipe()
    child = os.fork()
    if not child:
        there.send((pool.usable, pool.read(batches(loader)[0]), fast.has_processes))
        os._exit(0)
    os.waitpid(child, 0)
    assert here.recv() == (False, None, False) and pool.usable


@pytest.mark.parametrize("error", [pickle.UnpicklingError("truncated"), ConnectionResetError("reset")])
def test_a_process_that_failed_is_not_asked_again(
    shards: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str], error: Exception
) -> None:
    """Its next answer may be that to the last request."""
    fast, _ = readers(ShardLoader(shards, batch_size=60), gpu=None, transform=None)
    pool = fast._pool
    assert pool is not None

    def fail(*_: Any) -> SlotAnswer:
        raise error

    monkeypatch.setattr(reader_pool, "_ReaderProcess", Stub)
    monkeypatch.setattr(Stub, "read", fail)
    assert pool.read([]) is None and not pool._idle and not pool.usable
    assert len(messages) == 1 and str(error) in messages[0]


@pytest.mark.parametrize(("name", "value"), [("executable", None), ("executable", ""), ("frozen", True)])
def test_without_an_interpreter_to_start_threads_read(
    shards: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    fast, _ = readers(ShardLoader(shards, batch_size=60), gpu=None, transform=None)
    assert not fast.has_processes and fast._pool is not None and fast._pool.read([]) is None


def test_images_are_their_owners(shards: Path) -> None:
    """They may be kept, and a fork does not see the next ones in their place."""
    loader = ShardLoader(shards, batch_size=60)
    fast, plain = readers(loader, gpu=None, transform=None)
    assert fast._pool is not None
    fast._pool = there = InProcess(fast._pool)  # type: ignore[assignment]
    chunk = read(fast, batches(loader)[0])
    there._slots._memory[:] = 0
    assert_equal(chunk, plain.read(batches(loader)[0]))
    images = [value["jpg"] for value in chunk.values if "jpg" in value]
    assert len(images) > 20 and all(image.flags.writeable and image.base is None for image in images)
    assert there._slots.take() == 0, "and its slot is free again"


def test_a_process_that_does_not_start_is_not_awaited_forever(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    stub = tmp_path / "python"
    stub.write_text("#!/bin/bash\nkill -STOP $$\n")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    monkeypatch.setattr(reader_pool, "_ANSWER_WAIT_S", 0.2)
    monkeypatch.setattr(reader_pool, "_EXIT_WAIT_S", 0.2)
    loader = ShardLoader(shards, batch_size=60)
    fast, _ = readers(loader, gpu=None, transform=None)
    pool, locations = fast._pool, batches(loader)[0]
    assert pool is not None and pool.read(locations) is None and pool.usable
    wait_until(lambda: pool.read(locations) is None and not pool.usable, "the process is given up")
    assert len(messages) == 1 and "did not answer in 0.2 s" in messages[0]


@pytest.mark.parametrize("failed", [False, True])
def test_all_processes_end_together(shards: Path, failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are stopped, and when one of them has failed."""
    monkeypatch.setattr(reader_pool, "_EXIT_WAIT_S", 0.5)
    loader = ShardLoader(shards, batch_size=60)
    fast, _ = readers(loader, gpu=None, transform=None)
    pool = fast._pool
    assert pool is not None
    before = open_files()
    for _ in range(3):  # none of them is ready
        pool._idle.clear()
        pool._take()
    processes = [psutil.Process(each._process.pid) for each in pool._processes]
    processes[0].suspend()
    if failed:
        pool._give_up(OSError("one failed"))
    del pool, fast
    gc.collect()
    assert not psutil.wait_procs(processes, EXIT_LIMIT_S)[1]
    assert open_files() <= before


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_process_finds_headway_where_the_script_did(shards: Path, tmp_path: Path) -> None:
    """By a relative path that is no longer valid, and not what stands beside the script."""
    (tmp_path / "src").symlink_to(Path(reader_pool.headway.__file__).parents[1])
    (tmp_path / "json.py").write_text("raise SystemExit('not mine')")
    others = [each for each in sys.path if each and "headway" not in each]
    script = f"""
import json, os, sys
sys.path[:] = ["", "src", *{others!r}]
from headway.data import ShardLoader
os.chdir("/")
pool = ShardLoader({str(shards)!r}, batch_size=60, max_bad=1)._reader._pool
pool._waits = True
os.chdir({str(tmp_path)!r})
print(pool.read([(0, 0, 2, 0)]) is not None)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.stdout == "True\n" and not done.stderr, done.stderr


def test_processes_read_where_nothing_stands_against_it(shards: Path) -> None:
    loader = ShardLoader(shards, batch_size=60)
    for gpu, transform, has in ((GPU, MultiCrop(), True), (None, MultiCrop(), False), (None, invert, True)):
        assert readers(loader, gpu=gpu, transform=transform)[0].has_processes is has


@pytest.mark.usefixtures("small_slots")
@pytest.mark.parametrize("substitute", [True, False])
@pytest.mark.parametrize("how", [{}, {"gpu": None, "transform": invert}], ids=["for a GPU", "decoded there"])
def test_time_is_counted_once_also_for_samples_that_a_process_declines(
    shards: Path, substitute: bool, how: dict[str, Any]
) -> None:
    loader = ShardLoader(shards, batch_size=60)
    reader, _ = readers(loader, substitute=substitute, **how)
    assert reader._pool is not None
    reader._pool = there = InProcess(reader._pool)  # type: ignore[assignment]
    for locations in batches(loader):
        began = time.perf_counter()
        times = read(reader, locations).times
        edges = [began, *chain.from_iterable(times), time.perf_counter()]
        assert edges == sorted(edges), "spans of one thread do not overlap"
    assert sum(row is None for row in there.rows) > 40


def test_a_damaged_sample_is_left_to_this_process(shards: Path) -> None:
    loader = ShardLoader(shards, batch_size=60)
    fast, plain = readers(loader)
    assert fast._pool is not None
    there = InProcess(fast._pool)
    damaged = (0, 0, 0, 10)
    (row, good) = there._reader.read(0, [damaged, (0, 0, 0, 11)]).rows
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
    assert_equal(read(fast, first), plain.read(first))
    path = min(shards.glob("*.tar"))
    os.truncate(path, path.stat().st_size // 2)
    for locations in rest[:3]:
        found, expected = read(fast, locations), plain.read(locations)
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
        assert_equal(read(fast, locations), expected)
    assert calls[0] > 200 and sum(row is not None for row in there.rows) > 60
    monkeypatch.setattr(retries, "WAITS_S", (0.0,))
    monkeypatch.setattr(os, "preadv", always)
    monkeypatch.setattr(os, "pread", always)
    with pytest.raises(StorageError, match="Input/output error"):
        read(fast, batches(loader)[0])


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
    good = ("a", {"json": [[1]]}, "jpg", 0, 1, 2, 3, 4)
    here, there = Pipe()
    with here, there:
        send_answer(there, SlotAnswer([good, ("b", {"json": deep}, *good[2:]), None], 0.5, 0.25))
        assert here.recv() == ([good, None, None], 0.5, 0.25)


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
    assert_equal(read(fast, locations), plain.read(locations))
    assert fast._pool is not None and fast._pool.read(locations) is None
    (message,) = messages
    found = re.search(r"\(process (\d+) did not answer in 0\.2 s\); threads read them instead", message)
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
        assert_equal(read(fast, locations), plain.read(locations))
    assert [*pool._idle] == [process] and not messages
    # a few calls for each sample, in the process that trains
    answer = pool.read(expected[0])
    assert answer is not None
    read_there = [row is not None for row in answer.answer.rows]
    good = [location for location, is_good in zip(expected[0], read_there, strict=True) if is_good] * 10
    profile = cProfile.Profile()
    chunk = profile.runcall(fast.read, good, by_process=True)
    calls = sum(entry.callcount for entry in profile.getstats())
    assert len(chunk.values) == len(good) and calls / len(good) <= MAX_CALLS
    # a process that has ended is noticed, and this one reads
    process._process.kill()
    assert_equal(read(fast, expected[0]), plain.read(expected[0]))
    assert_equal(read(fast, expected[1]), plain.read(expected[1]))
    assert len(messages) == 1 and "threads read them" in messages[0]
    assert pool.read(expected[0]) is None and not pool._idle
