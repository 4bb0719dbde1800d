"""What a small sample costs: function calls of Python per sample, which are the same on any machine. What is looked up
once for many samples is equal to what is looked up for each."""

from __future__ import annotations

import cProfile
import random
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from headway.data import Shard, ShardLimits, ShardLoader, pack, shard_loader
from headway.data.assembly import one_thread_suffices
from headway.data.sample_reader import Chunk
from headway.data.shards.decode import _HeaderCache, _plain_size
from headway.data.shards.indexes import DaliIndex
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
    batches = list(islice(loader._rank_batches(loader._weights_over_time(), 0), 4))
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
    rng, cache = random.Random(0), _HeaderCache()
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


@pytest.mark.parametrize(
    ("chunks", "alone"),
    [
        ([chunk(1, busy_us=20, took_us=25), chunk(2, busy_us=20, took_us=60)], True),
        ([chunk(n, busy_us=20, took_us=600) for n in range(16)], True),  # they wait for the interpreter
        ([chunk(1, busy_us=20, took_us=600)], False),  # for storage
        ([chunk(1, busy_us=900, took_us=1000), chunk(2, busy_us=900, took_us=1000)], False),  # photos
        ([], False),
    ],
)
def test_small_samples_are_read_by_one_thread_unless_it_waits(chunks: list[Chunk], alone: bool) -> None:
    assert one_thread_suffices(chunks) is alone


def test_batches_are_the_same_whichever_threads_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [{"__key__": f"{n}", "jpg": jpeg(8, 8, seed=n), "cls": n} for n in range(96)]
    samples[40]["jpg"] = b"broken"
    pack(iter(samples), tmp_path)
    found, names = [], list[set[str]]()

    def note(sample: dict[str, object], _: np.random.Generator) -> dict[str, object]:
        names[-1].add(threading.current_thread().name.rpartition("_")[0])
        return sample

    for alone in (False, True):
        monkeypatch.setattr(shard_loader, "one_thread_suffices", lambda _, alone=alone: alone)
        names.append(set())
        loader = ShardLoader(tmp_path, batch_size=8, threads=2, transform=note, max_bad=0.5)
        found.append([batch["cls"].tolist() for batch in loader])
        assert [bad.key for bad in loader.bad] == ["40"]
    assert found[0] == found[1] and len(found[0]) == 12
    assert names == [{"headway load"}, {"headway load", "headway gather"}]  # the first batch tells
