"""What a small sample costs: function calls of Python per sample, which are the same on any machine. What is looked up
once for many samples is equal to what is looked up for each."""

from __future__ import annotations

import cProfile
import random
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch

from headway.data import Shard, ShardLimits, ShardLoader, pack
from headway.data.counters import Span
from headway.data.shards.decode import HeaderCache, _plain_size
from headway.data.shards.indexes import DaliIndex
from headway.data.sources.chunk import Chunk
from headway.data.sources.read_mode import ReadCost, ReadMode, ReadModeChooser
from headway.errors import BadShard

MAX_CALLS = 46  # per sample, to read and decode it; each takes a tenth of a microsecond or more


def jpeg(height: int, width: int, *, seed: int = 0, **how: object) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    encoded: bytes = simplejpeg.encode_jpeg(pixels, **how)
    return encoded


def test_calls_per_thumbnail(tmp_path: Path) -> None:
    image = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
    pack(({"__key__": f"{n:04d}", "jpg": image, "cls": n % 10} for n in range(640)), tmp_path)
    loader = ShardLoader(tmp_path, batch_size=64, threads=1)
    assert len(next(iter(loader))["jpg"]) == 64  # shards are open
    batches = list(islice(loader._rank_batches(loader._mix_timeline(), 0), 4))
    profile = cProfile.Profile()
    for batch in batches:
        profile.runcall(loader._reader.read, batch.locations)
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls / 256 <= MAX_CALLS


def test_lines_of_an_index_that_are_parsed_at_once_say_what_each_says(tmp_path: Path) -> None:
    lines = [
        f"jpg {512 + 2048 * n} {100 + n} d/{n:03d}.jpg cls {1536 + 2048 * n} 1 d/{n:03d}.cls"
        for n in range(300)
    ]
    lines[140] = "cls 512 1 odd.cls"  # the block around it has no common parts
    lines[290] += "  "  # spaces change nothing
    index = make_index(lines, tmp_path)
    index.locate(0)
    assert not index._blocks, "the first batch after a resume needs one line of most blocks"
    for _ in range(2):
        for number in range(300):
            assert located(index, number) == (index.key(number), index.parts(number))
    assert [block is None for block in index._blocks.values()] == [False, True, True]
    assert located(index, 7) == ("d/007", [("jpg", 14848, 107), ("cls", 15872, 1)])
    for outside in (-1, 300, 10_000):
        with pytest.raises(IndexError):
            index.locate(outside)


@pytest.mark.parametrize(
    "line",
    [
        "jpg 100 5 a.jpg cls 1024 1 a.cls",  # not where a block begins
        "jpg 0 5 a.jpg cls 1024 1 a.cls",
        "jpg 512 9999999 a.jpg cls 1024 1 a.cls",  # after the end
        "jpg 512 99999999999999999999 a.jpg cls 1024 1 a.cls",
        "jpg 512 -5 a.jpg cls 1024 1 a.cls",
        "jpg 512 5 a.jpg cls 1024",
        "",
    ],
)
def test_a_damaged_line_of_an_index_harms_its_own_sample_alone(line: str, tmp_path: Path) -> None:
    lines = [f"jpg {512 + 2048 * n} 5 {n}.jpg cls {1536 + 2048 * n} 1 {n}.cls" for n in range(20)]
    lines[10] = line
    index = make_index(lines, tmp_path)
    with pytest.raises(BadShard, match="does not match"):
        index.locate(10)
    for _ in range(2):
        assert [index.locate(n)[0] for n in range(20) if n != 10] == [str(n) for n in range(20) if n != 10]
        with pytest.raises(BadShard, match="does not match"):
            index.locate(10)


def located(index: DaliIndex, number: int) -> tuple[str, list[tuple[str, int, int]]]:
    key, names, spans, _ = index.locate(number)
    return key, list(zip(names, spans[::2], spans[1::2], strict=True))


def make_index(lines: list[str], where: Path) -> DaliIndex:
    text = "\n".join([f"v1.2 {len(lines)}", *lines, ""]).encode()
    return DaliIndex(text, where / "shard.tar", 1_000_000, ShardLimits())


def test_lines_with_other_numbers_of_parts_are_not_mistaken_for_one_another(tmp_path: Path) -> None:
    index = make_index(
        ["jpg 512 5 a.jpg", "cls 1536 1 b.cls jpg 2560 5 b.jpg cls 3584 1 b.cls"], tmp_path
    )  # together they look like two samples of two parts
    assert located(index, 0) == ("a", [("jpg", 512, 5)])
    assert len(index.locate(1)[1]) == len(index.locate(1)[1]) == 3


def test_lines_with_other_parts_are_not_mistaken_for_one_another(tmp_path: Path) -> None:
    index = make_index(["jpg 512 5 a.jpg cls 1536 1 a.cls", "png 2560 5 b.png cls 3584 1 b.cls"], tmp_path)
    for _ in range(2):
        assert located(index, 0) == ("a", [("jpg", 512, 5), ("cls", 1536, 1)])
        assert located(index, 1) == ("b", [("png", 2560, 5), ("cls", 3584, 1)])


def test_headers_of_jpegs_that_are_remembered_say_what_each_says() -> None:
    rng, cache = random.Random(0), HeaderCache()
    plain = [
        jpeg(height, width, seed=seed, quality=quality)
        for height, width in ((16, 16), (16, 24), (300, 2))
        for quality in (50, 90)
        for seed in range(3)
    ]
    images = [*plain, *(data[:cut] for data in plain[:3] for cut in (0, 3, 40, 500, 618, 623, 628, 632))]
    for data in plain:  # any byte of a header may be damaged
        for _ in range(60):
            changed = bytearray(data)
            changed[rng.randrange(min(len(data), 640))] = rng.randrange(256)
            images.append(bytes(changed))
    rng.shuffle(images)
    for data in images:
        assert cache.size(memoryview(data)) == _plain_size(memoryview(data))
    assert cache.size(memoryview(plain[0])) == (16, 16)


def test_samples_of_a_shard_are_equal_with_and_without_an_index(tmp_path: Path) -> None:
    samples = [{"__key__": f"{n:03d}", "jpg": jpeg(4, 4, seed=n), "txt": str(n)} for n in range(150)]
    (path,) = pack(iter(samples), tmp_path)
    shard = Shard.open(path)
    path.with_suffix(".idx").unlink()
    walked = Shard.open(path)
    for number, sample in enumerate(samples):
        assert shard.read(number) == walked.read(number)
        assert bytes(shard[number]["jpg"]) == sample["jpg"] and shard.read(number)[0] == sample["__key__"]


def chunk(thread: int, *, busy_us: float, took_us: float) -> Chunk:
    """A chunk of ten samples; times are of each."""
    return Chunk(thread, count=10, busy_s=busy_us * 1e-5, times=[(3.0, 3.1, 3.0 + took_us * 1e-5)])


SMALL = [chunk(1, busy_us=20, took_us=25), chunk(2, busy_us=20, took_us=60)]
PHOTOS = [chunk(1, busy_us=900, took_us=1000), chunk(2, busy_us=900, took_us=1000)]


@pytest.mark.parametrize(
    ("chunks", "small"),
    [
        (SMALL, True),
        ([chunk(n, busy_us=20, took_us=600) for n in range(16)], True),  # they wait for the interpreter
        ([chunk(1, busy_us=20, took_us=600)], False),  # for storage
        (PHOTOS, False),
        ([], False),
    ],
)
def test_samples_are_small_if_they_take_microseconds_and_not_for_waiting(
    chunks: list[Chunk], small: bool
) -> None:
    assert ReadCost.of(chunks).is_small() is small


class Loop:
    """A training loop that computes and waits as it is told."""

    def __init__(self, threads: int = 2) -> None:
        self.chooser, self.now = ReadModeChooser(threads, gpu=None), 0.0

    def take(
        self, chunks: list[Chunk], waits: float, computes: float = 0.0, *, processes: bool = True
    ) -> ReadMode:
        began = self.now + computes
        self.now = began + waits
        self.chooser.observe(chunks, Span("wait", 1, began, self.now), processes=processes)
        return self.chooser.mode


def test_processes_read_small_samples_if_the_loop_waits_for_them() -> None:
    one, by_processes, threads = ReadMode.ONE_THREAD, ReadMode.PROCESSES, ReadMode.THREADS
    loop = Loop()
    assert loop.chooser.mode is threads
    assert [loop.take(SMALL, 0.4) for _ in range(3)] == [one, one, by_processes]
    assert loop.take(SMALL, 0, 900) is by_processes, "they are there"
    assert loop.take(SMALL, 0, processes=False) is one
    assert Loop(threads=1).take(SMALL, 9) is one
    busy = Loop()
    assert {busy.take(SMALL, 0.1, 2.0) for _ in range(99)} == {one}, (
        "a loop that hardly waits needs no processes"
    )
    busy.chooser.begin_pass()
    assert [busy.take(SMALL, 9, 9999), busy.take(SMALL, 9)] == [one, by_processes]
    assert Loop().take(PHOTOS, 9) is threads


def test_processes_that_do_not_help_are_tried_ever_more_rarely() -> None:
    loop, waits = Loop(), []
    for _ in range(4):
        batches = 0
        while loop.take(SMALL, 0.1) is not ReadMode.PROCESSES:
            batches += 1
        waits.append(batches)
        after = [loop.take(PHOTOS, 0) for _ in range(16)]  # or samples that wait for storage
        assert after == [*[ReadMode.PROCESSES] * 15, ReadMode.THREADS], "one slow batch says nothing"
    assert waits == pytest.approx([10, 20, 40, 80], abs=1)


@pytest.mark.parametrize(
    ("mode", "threads", "sizes"),
    [
        (ReadMode.THREADS, 2, {0: 1, 1: 1, 8: 2, 1000: 64}),
        (ReadMode.ONE_THREAD, 2, {0: 1, 1: 1, 1000: 1000}),
        (ReadMode.PROCESSES, 2, {0: 1, 1: 1, 64: 64, 200: 128, 1000: 500}),
        (ReadMode.PROCESSES, 64, {1: 1, 1000: 250}),
    ],
)
def test_chunks_suit_those_who_read_them(mode: ReadMode, threads: int, sizes: dict[int, int]) -> None:
    chooser = ReadModeChooser(threads, gpu=None)
    chooser.mode = mode
    assert {samples: chooser.chunk_samples(samples) for samples in sizes} == sizes
    on_gpu = ReadModeChooser(8, gpu=torch.device("cuda"))
    assert on_gpu.mode is ReadMode.PROCESSES and on_gpu.chunk_samples(256) == 32, (
        "all threads that were asked for"
    )


def test_batches_are_the_same_whoever_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [{"__key__": f"{n}", "jpg": jpeg(8, 8, seed=n), "cls": n} for n in range(96)]
    samples[40]["jpg"] = b"broken"
    pack(iter(samples), tmp_path)
    found, names = [], list[set[str]]()

    def note(sample: dict[str, Any], _: np.random.Generator) -> dict[str, object]:
        names[-1].add(threading.current_thread().name.rpartition("_")[0])
        sample["jpg"] += 1  # it is the transform's own
        return sample

    def read_by(mode: ReadMode) -> ShardLoader:
        def observe(chooser: ReadModeChooser, *_: Any, **__: Any) -> None:
            chooser.mode = mode

        monkeypatch.setattr(ReadModeChooser, "observe", observe)
        names.append(set())
        loader = ShardLoader(tmp_path, batch_size=8, threads=2, transform=note, max_bad=0.5)
        found.append([(batch["cls"].tolist(), batch["jpg"].tolist()) for batch in loader])
        assert [bad.key for bad in loader.bad] == ["40"]
        return loader

    processes = [len(_processes(read_by(mode))) for mode in ReadMode]
    assert found[0] == found[1] == found[2] and len(found[0]) == 12
    load, gather = "headway load", "headway gather"
    assert names == [{load}, {load, gather}, {load}]  # the first batch tells
    assert processes[:2] == [0, 0] and processes[2] in (1, 2)


def _processes(loader: ShardLoader) -> list[Any]:
    """The processes that have read for a loader."""
    pool = loader._reader._pool
    assert pool is not None and pool.usable
    return pool._idle
