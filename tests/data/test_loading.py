"""From a shard into a batch: samples are read at once, decoded exactly, never overwritten, whatever a disk does."""

from __future__ import annotations

import io
import os
import shlex
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from headway.cli import data as data_verbs
from headway.data import Shard, ShardLimits, ShardLoader, pack
from headway.data.catalog import count_shards
from headway.data.shards import shard as shards
from headway.data.shards.checksums import checksum_path
from headway.data.shards.decode import decode
from headway.data.sources import Mix, OpenShards, Source, find_sources
from headway.errors import BadSample, BadShard, UsageError

PIECE = 300_000


def photo(height: int, width: int, seed: int = 0, **how: str) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return simplejpeg.encode_jpeg(pixels, **how)


def packed(folder: Path, count: int = 24) -> Path:
    (path,) = pack(
        ({"__key__": f"{n:03d}", "jpg": photo(40 + n, 60, n), "cls": n} for n in range(count)), folder
    )
    return path


def by_pillow(data: bytes, **how: object) -> tuple[bytes, np.ndarray]:
    """A JPEG that Pillow has written, and what Pillow reads from it."""
    file = io.BytesIO()
    with Image.open(io.BytesIO(data)) as image:
        image.convert(str(how.pop("mode", "RGB"))).save(file, "JPEG", **how)
    with Image.open(file) as image:
        return file.getvalue(), np.asarray(image.convert("RGB"))


# --- reading


def test_a_sample_is_one_read_and_its_parts_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, reads, pread = Shard.open(packed(tmp_path)), [], os.pread
    monkeypatch.setattr(os, "pread", lambda *args: reads.append(args) or pread(*args))
    for number in (0, 7, 23):
        sample = shard[number]
        assert (
            bytes(sample["jpg"]) == photo(40 + number, 60, number) and bytes(sample["cls"]) == b"%d" % number
        )
    assert len(reads) == 3


def test_parts_that_an_index_names_in_another_order_are_read_one_by_one(tmp_path: Path) -> None:
    path = packed(tmp_path)
    index = path.with_suffix(".idx")
    first, *lines = index.read_text().splitlines()
    turned = [" ".join([*line.split()[4:], *line.split()[:4]]) for line in lines]
    index.write_text("\n".join([first, *turned, ""]))
    sample = Shard.open(path)[5]
    assert [*sample] == ["cls", "jpg"]
    assert bytes(sample["jpg"]) == photo(45, 60, 5) and bytes(sample["cls"]) == b"5"


def test_a_damaged_line_of_an_index_costs_its_sample_and_no_other(tmp_path: Path) -> None:
    path = packed(tmp_path)
    index = path.with_suffix(".idx")
    lines = index.read_text().splitlines()
    lines[8] = lines[8].replace("jpg ", "jpg x", 1)
    index.write_text("\n".join([*lines, ""]))
    shard = Shard.open(path)
    with pytest.raises(BadShard, match="does not match"):
        _ = shard[7]
    assert bytes(shard[8]["cls"]) == b"8"
    loader = ShardLoader(path, batch_size=24, max_bad=0.1)
    (batch,) = loader
    assert len(batch["cls"]) == 24 and [bad.key for bad in loader.bad] == ["007"]


def test_no_more_is_read_than_is_soon_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large samples wait in the shard, not in memory."""
    (path,) = pack(({"__key__": f"{n:03d}", "bin": bytes(PIECE)} for n in range(32)), tmp_path)
    read, most, held, pread = threading.local(), [0], threading.Lock(), os.pread

    def reading(fd: int, size: int, offset: int) -> bytes:
        read.ahead = getattr(read, "ahead", 0) + (size > PIECE)
        with held:
            most[0] = max(most[0], read.ahead)
        return pread(fd, size, offset)

    def decoding(data: memoryview) -> int:
        read.ahead -= 1
        return len(data)

    monkeypatch.setattr(os, "pread", reading)
    (batch,) = ShardLoader(path, batch_size=32, threads=1, decoders={"bin": decoding})
    assert batch["bin"].tolist() == [PIECE] * 32
    assert 1 < most[0] <= 2**20 // PIECE + 1, "of 16 that a thread takes at a time"


def test_a_disk_that_does_not_answer_for_a_while_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pread, answered, asked = packed(tmp_path), os.pread, threading.Event(), threading.Event()
    expected = [batch["__key__"] for batch in ShardLoader(path, batch_size=4, seed=3)]
    loader, reads = ShardLoader(path, batch_size=4, seed=3, threads=2), []

    def stalling(fd: int, size: int, offset: int) -> bytes:
        reads.append(offset)
        if len(reads) > 12:
            asked.set()
            answered.wait(30)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", stalling)
    seen: list[list[str]] = []
    consumer = threading.Thread(target=lambda: seen.extend(batch["__key__"] for batch in loader))
    consumer.start()
    assert asked.wait(30)
    time.sleep(0.2)
    held = len(seen)
    assert held < 6 and consumer.is_alive()
    answered.set()
    consumer.join(30)
    assert seen == expected and not loader.bad
    assert loader.counters()["seconds/wait"] >= 0.1, "the wait is seen"


# --- decoding


@pytest.mark.parametrize("sampling", ["444", "422", "420", "440", "411"])
def test_pixels_are_those_of_pillow(sampling: str) -> None:
    data = photo(61, 83, colorsubsampling=sampling)
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(
            decode({"jpg": memoryview(data)})["jpg"], np.asarray(image.convert("RGB"))
        )


@pytest.mark.parametrize(
    "how",
    [
        {"mode": "L"},
        {"progressive": True},
        {"mode": "CMYK"},
        {"restart_marker_rows": 1},
        {"comment": b"x" * 999},
    ],
)
def test_every_kind_of_jpeg_is_decoded_within_limits(how: dict[str, object]) -> None:
    data, pixels = by_pillow(photo(61, 83), **how)
    np.testing.assert_array_equal(decode({"jpg": memoryview(data)})["jpg"], pixels)
    with pytest.raises(BadSample, match="83 x 61 is more than 5000 pixels"):
        decode({"jpg": memoryview(data)}, limits=ShardLimits(pixels=5000))


def disguised(data: bytes, *, fill: bytes) -> bytes:
    """A JPEG with a small frame and a scan in a comment: who miscounts `fill` takes them for its own."""
    frame = b"\xff\xc0\0\x11\x08\0\x08\0\x08\x03" + bytes(9)
    scan = b"\xff\xda\0\x0c\x03" + bytes(9)
    inside = bytearray(0xFFFF - 2)
    at = 0xEFFF + 2 - len(fill) - 4  # where the length leads of who takes the second 0xff for the marker
    inside[at : at + len(frame + scan)] = frame + scan
    return data[:2] + fill + b"\xff\xef\xff\xff" + bytes(inside) + data[2:]


def test_a_header_that_readers_could_see_in_two_ways_does_not_go_around_limits() -> None:
    data = photo(61, 83)
    frame = data.index(b"\xff\xc0")
    small = bytearray(data[frame : frame + 19])
    small[5:9] = b"\0\x08\0\x08"
    tricks = {
        "fill bytes": disguised(data, fill=b"\xff"),
        "two frames": data[:frame] + bytes(small) + data[frame:],
        "the small one last": data[: frame + 19] + bytes(small) + data[frame + 19 :],
        "a segment of no length": data[:2] + b"\xff\xef\0\0" + data[2:],
        "a marker without a length": data[:2] + b"\xff\x01" + data[2:],
    }
    for name, trick in tricks.items():
        with pytest.raises(BadSample, match=r"is more than 5000 pixels|cannot be decoded"):
            decode({"jpg": memoryview(trick)}, limits=ShardLimits(pixels=5000))
            pytest.fail(name)


# --- what the training loop holds


def test_what_was_handed_out_is_never_written_again(tmp_path: Path) -> None:
    """All batches of two passes are held while others are decoded, and let go in between: memory comes back."""
    loader = ShardLoader(packed(tmp_path), batch_size=3, threads=2)
    held: list[tuple[int, np.ndarray]] = []
    for _ in range(2):
        for number, batch in enumerate(loader):
            for image in batch["jpg"] if number % 2 else []:
                held.append((zlib.crc32(image.tobytes()), np.asarray(image)))
    assert len(held) == 24
    assert all(zlib.crc32(image.tobytes()) == was for was, image in held)


# --- finding


def unindexed(folder: Path, count: int, samples: int, fill: bytes = b"x") -> list[Path]:
    paths = []
    for shard in range(count):
        numbers = range(shard * samples, (shard + 1) * samples)
        named = ({"__key__": f"{n:05d}", "bin": fill + b"%05d" % n} for n in numbers)
        paths += pack(named, folder, name=f"shard-{shard:03d}")
        paths[-1].with_suffix(".idx").unlink()
    return paths


@pytest.mark.parametrize("files", [1024, 40], ids=["all open", "few open"])
def test_a_shard_without_an_index_is_walked_once_for_each_window_it_lies_in(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (files, files))
    loader = ShardLoader(unindexed(tmp_path, 200, 5), batch_size=8, lanes=2, window=250, threads=1)
    walked, members = [], shards.members
    monkeypatch.setattr(shards, "members", lambda *args: walked.append(args) or members(*args))
    seen = [bytes(each) for batch in loader for each in batch["bin"].numpy()]
    assert len(set(seen)) == 1000
    assert 200 <= len(walked) <= 204, "two lanes of two windows meet in at most three shards"


def test_an_index_is_read_anew_with_its_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (4, 4))  # one open shard
    paths = unindexed(tmp_path, 2, 3)
    opened = OpenShards([Source("data", paths, [3, 3])], 2, ShardLimits())
    assert bytes(opened.get(0, 0)[1]["bin"]) == b"x00001"
    assert bytes(opened.get(0, 1)[1]["bin"]) == b"x00004"
    again = unindexed(tmp_path / "again", 2, 3, fill=b"longer")[0]
    checksum_path(again).replace(checksum_path(paths[0]))
    again.replace(paths[0])
    assert bytes(opened.get(0, 0)[1]["bin"]) == b"longer00001"


def test_slow_counting_for_lack_of_an_index_is_reported_with_the_command_that_writes_one(
    tmp_path: Path, messages: list[str]
) -> None:
    paths = unindexed(tmp_path / "it's", 3, 2)
    mix = Mix({"data": 1}, shards={"data": paths})
    ShardLoader(paths, batch_size=1)
    assert not messages, "not if it is quick"
    assert find_sources(mix, ShardLimits(), shared=False, notice_after_s=0.0)[0].counts == [2, 2, 2]
    (said,) = messages
    assert "'data', 1 of 3 shards so far" in said
    command = shlex.split(said.split("`")[1])
    assert command[:3] == ["headway", "data", "index"] and data_verbs.main(command[2:]) == 0
    messages.clear()
    find_sources(mix, ShardLimits(), shared=False, notice_after_s=0.0)
    assert not messages


def test_a_shard_that_was_refilled_is_refused_by_every_thread(tmp_path: Path) -> None:
    path = packed(tmp_path, count=5)
    opened = OpenShards([Source("data", [path], [6])], 10, ShardLimits())
    for _ in range(2):
        with pytest.raises(UsageError, match=r"has 5 samples, but had 6 .* was replaced, and"):
            opened.get(0, 0)


@pytest.mark.parametrize("quick", [-1.0, 1.0], ids=["by threads", "one by one"])
def test_shards_are_counted_in_their_order(quick: float, tmp_path: Path) -> None:
    paths = [packed(tmp_path / str(count), count) for count in range(1, 71)]
    assert list(count_shards(paths, quick_s=quick)) == list(range(1, 71))


def test_damaged_shards_that_cannot_be_counted_are_left_out_up_to_max_bad(
    tmp_path: Path, messages: list[str]
) -> None:
    for shard in range(4):
        (path,) = pack([{"__key__": f"{shard}-{n}", "cls": n} for n in range(5)], tmp_path, name=f"s{shard}")
        path.with_suffix(".idx").unlink()
    cut, empty = tmp_path / "s1-000000.tar", tmp_path / "s2-000000.tar"
    cut.write_bytes(cut.read_bytes()[:2000])
    empty.write_bytes(b"")
    with pytest.raises(
        BadShard, match=r"2 of 4 shards .*max_bad=0\.001; the first of them: .*s1-.*truncated"
    ):
        ShardLoader(tmp_path, batch_size=5)
    assert not messages
    loader = ShardLoader(tmp_path, batch_size=5, max_bad=0.5)
    assert [message for message in messages if "2 of 4 shards cannot be counted, and are left out" in message]
    keys = [key for batch in loader for key in batch["__key__"]]
    assert sorted(keys) == [f"{shard}-{n}" for shard in (0, 3) for n in range(5)] and not loader.bad
    path.write_bytes(b"")
    (tmp_path / "s0-000000.tar").write_bytes(b"")
    with pytest.raises(UsageError, match="none of its 4 shards has a sample"):
        ShardLoader(tmp_path, batch_size=5, max_bad=1)
