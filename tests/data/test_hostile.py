"""Shards and images that were made to hurt, or that change under us: bounded, counted, named, and nothing runs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings, strategies as st
from PIL import Image

import headway as hw
from headway.data import Shard, ShardLimits, ShardLoader, pack
from headway.data.shards.decode import decode
from headway.data.shards.shard import members, walk
from headway.errors import BadSample, BadShard, HeadwayError, UsageError
from headway.testing import ranks


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.USTAR_FORMAT)


def peak_megabytes(code: str, *args: object) -> float:
    """How much memory a fresh process took at most for some lines, beyond what importing takes."""
    script = f"""
import resource, sys
from pathlib import Path
from headway.data.shards.shard import Shard, walk
from headway.data.shards.tar import ShardLimits
from headway.data.shards.decode import decode
from headway.errors import BadShard, BadSample
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
{code}
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


# --- a shard that changes in use


def big(folder: Path, samples: int = 8, size: int = 300_000) -> Path:
    (path,) = pack(({"__key__": f"{n:03d}", "bin": bytes([n]) * size} for n in range(samples)), folder)
    return path


def test_a_shard_cut_off_in_use_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    """A mapped file would end the process with SIGBUS."""
    path = big(tmp_path)
    code = """
shard = Shard.open(Path(sys.argv[1]))
assert len(shard[7]["bin"]) == 300_000
import os; os.truncate(sys.argv[1], 1000)
try:
    shard[7]["bin"].tobytes()
except BadShard as error:
    assert "ends at byte" in str(error) and sys.argv[1] in str(error), error
else:
    raise SystemExit("no error")
"""
    peak_megabytes(code, path)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_shard_rewritten_in_use_never_gives_wrong_bytes(indexed: bool, tmp_path: Path) -> None:
    """Written over in place, so that an open file sees it: other sizes, so other headers."""
    path = big(tmp_path / "one")
    if not indexed:
        path.with_suffix(".idx").unlink()
    (other,) = pack(
        ({"__key__": f"{n:03d}", "bin": bytes([9]) * 300_000} for n in range(8)), tmp_path / "two"
    )
    shifted = header("x.bin", 5000) + bytes(5120) + other.read_bytes()
    shard = Shard.open(path)
    with path.open("r+b") as file:
        file.write(shifted[: path.stat().st_size])
    with pytest.raises(BadShard, match=r"does not match|rewritten|no tar header"):
        _ = shard[3]


def test_a_shard_replaced_by_rename_is_read_to_its_end(tmp_path: Path) -> None:
    path = big(tmp_path / "one")
    (other,) = pack([{"__key__": "x", "bin": b"other"}], tmp_path / "two")
    shard = Shard.open(path)
    other.replace(path)
    assert all(bytes(shard[n]["bin"]) == bytes([n]) * 300_000 for n in range(8))


def test_a_pipe_or_folder_in_the_place_of_a_shard_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tar")
    (tmp_path / "y.tar").mkdir()
    for name in ("x.tar", "y.tar"):
        with pytest.raises(BadShard, match="is not a regular file"):
            Shard.open(tmp_path / name)


def test_open_shards_hold_one_file_each_and_close_it(tmp_path: Path) -> None:
    path = big(tmp_path)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counting only
    shards = [Shard.open(path) for _ in range(5)]
    view = shards[0][0]["bin"]
    assert len(os.listdir("/proc/self/fd")) == before + 5  # noqa: PTH208
    del shards
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert view[0] == 0 and len(view) == 300_000, "what was read stays"


def test_many_threads_read_one_shard(tmp_path: Path) -> None:
    shard, wrong = Shard.open(big(tmp_path)), []

    def read(seed: int) -> None:
        for n in range(40):
            number = (n * 7 + seed) % 8
            if bytes(shard[number]["bin"]) != bytes([number]) * 300_000:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- archives


def test_two_sizes_for_one_file_are_refused() -> None:
    """Some readers believe the header and some the PAX record: one sees files that the other does not."""
    record = b"14 size=1024\n"
    record = b"%d size=1024\n" % len(record)
    data = header("p", len(record), tarfile.XHDTYPE) + record + bytes(512 - len(record))
    data += header("a.bin", 512) + bytes(1024) + bytes(1024)
    with pytest.raises(BadShard, match="two sizes, 512 and 1024"):
        list(members(data, "x"))


class Counted(bytes):
    """Bytes that count how many of them are looked at."""

    looked_at = 0

    def __getitem__(self, part: Any) -> Any:
        if not isinstance(part, slice):
            return super().__getitem__(part)
        found = Counted(super().__getitem__(part))
        Counted.looked_at += len(found)
        assert Counted.looked_at < 10_000_000, "again and again"
        return found


def test_very_many_pax_records_are_read_in_one_pass() -> None:
    record = b"6 a=b\n" * 170_000
    data = header("p", len(record), tarfile.XHDTYPE) + record + bytes(-len(record) % 512)
    Counted.looked_at = 0
    assert [m.name for m in members(Counted(data + header("a.bin", 0) + bytes(1024)), "x")] == ["a.bin"]


def test_a_name_that_is_no_text_is_a_name(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a")
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        info.name, info.size = b"\xff\xfe.bin".decode("utf-8", "surrogateescape"), 3
        archive.addfile(info, io.BytesIO(b"abc"))
    shard = Shard.open(tmp_path / "x.tar")
    assert shard.entries[0].key.encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert bytes(shard[0]["bin"]) == b"abc"


def test_very_many_files_take_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    one = b"".join(header(f"{n:06d}.bin", 0) for n in range(1000))
    with path.open("wb") as file:
        for _ in range(200):
            file.write(one)
        file.write(bytes(1024))
    taken = peak_megabytes("assert len(walk(Path(sys.argv[1]))) == 200_000", path)
    assert taken < 60, "megabytes for 200,000 samples; as objects they took 150"


def test_an_index_that_never_ends_takes_little_memory(tmp_path: Path) -> None:
    path = big(tmp_path)
    with path.with_suffix(".idx").open("wb") as file:
        file.write(b"v1.2 9\n")
        file.truncate(300_000_000)  # one line of zeros
    code = """
try:
    Shard.open(Path(sys.argv[1]))
except BadShard as error:
    assert "does not match" in str(error)
else:
    raise SystemExit("no error")
"""
    assert peak_megabytes(code, path) < 50
    path.with_suffix(".idx").unlink()
    with path.with_name(path.name + ".idx").open("wb") as file:
        file.truncate(300_000_000)
    assert peak_megabytes(code.replace("does not match", "not a valid energon index"), path) < 50


def test_names_that_lead_outside_are_only_names(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(header("../../etc/a.txt", 0) + header("/b.txt", 0) + bytes(1024))
    assert [entry.key for entry in walk(path)] == ["../../etc/a", "/b"]
    assert [file.name for file in tmp_path.iterdir()] == ["x.tar"]


# --- images and texts


def png(width: int, height: int, *, chunks: bytes = b"", rows: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunks + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def text_chunk(size: int) -> bytes:
    data = b"key\0\0" + zlib.compress(bytes(size), 9)
    return len(data).to_bytes(4, "big") + b"zTXt" + data + zlib.crc32(b"zTXt" + data).to_bytes(4, "big")


def animation(frames: int) -> bytes:
    file = io.BytesIO()
    pictures = [Image.new("RGB", (8, 8), (n % 2 * 200, 0, 0)) for n in range(frames)]
    pictures[0].save(file, "WEBP", save_all=True, append_images=pictures[1:])
    return file.getvalue()


def progressive(scans: int) -> bytes:
    """A progressive JPEG whose last scan is there many times."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (9, 90, 200)).save(file, "JPEG", progressive=True)
    raw = file.getvalue()
    last = raw.rindex(b"\xff\xda")
    return raw[:last] + raw[last:-2] * scans + raw[-2:]


def story() -> bytes:
    """An array whose header is long, and quoted by numpy when it complains."""
    return b"\x93NUMPY\1\0" + (9000).to_bytes(2, "little") + b"{'" + b"x" * 8994 + b"':1}"


BOMBS = {
    "a PNG that says 50,000 x 50,000": ("png", lambda: png(50_000, 50_000), "pixels"),
    "300 MB of zeros in 300 kB": (
        "png",
        lambda: png(9000, 9000, rows=zlib.compress(bytes(243_009_000))),
        "times",
    ),
    "a comment of 200 MB": ("png", lambda: png(8, 8, chunks=text_chunk(200_000_000)), "cannot be decoded"),
    "frames without end": ("webp", lambda: animation(300), "more than 200 frames"),
    "scans without end": ("jpg", lambda: progressive(200), "more than 100 scans"),
    "scans without end, after fill bytes": (
        "jpg",
        lambda: progressive(200).replace(b"\xff\xdb", b"\xff\xff\xdb", 1),
        "more than 100 scans",
    ),
    "a truncated JPEG": ("jpg", lambda: progressive(1)[:400], "cannot be decoded"),
    "another format under this name": ("png", lambda: b"SIMPLE  =  T" + bytes(4000), "cannot be decoded"),
    "a number of a million digits": ("cls", lambda: b"9" * 1_000_000, "cannot be decoded"),
    "an array with a story": ("npy", story, "npy of"),
    "a text of 20 MB": ("txt", lambda: b" " * 20_000_000, "bytes of text"),
    "lists in lists": ("json", lambda: b"[" * 1_000_000, "cannot be decoded"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_bad_samples_and_take_little_memory(name: str, tmp_path: Path) -> None:
    kind, make, says = BOMBS[name]
    data = make()
    with pytest.raises(BadSample, match=says) as caught:
        decode({kind: memoryview(data)}, limits=ShardLimits(frames=200))
    assert len(str(caught.value)) < 400
    (tmp_path / "bomb").write_bytes(data)
    code = f"""
import warnings
import simplejpeg, numpy, PIL.Image, PIL.PngImagePlugin, PIL.WebPImagePlugin
data = Path(sys.argv[1]).read_bytes()
before = peak()
try:
    decode({{"{kind}": memoryview(data)}}, limits=ShardLimits(frames=200))
except BadSample:
    pass
else:
    raise SystemExit("decoded")
"""
    assert peak_megabytes(code, tmp_path / "bomb") < 90, (
        "megabytes; the text chunk and the image would take 200"
    )


def test_a_small_picture_of_one_colour_is_no_bomb() -> None:
    file = io.BytesIO()
    Image.new("RGB", (2000, 2000)).save(file, "WEBP")
    assert 12_000_000 / len(file.getvalue()) > 1000
    assert decode({"webp": memoryview(file.getvalue())})["webp"].shape == (2000, 2000, 3)


def encoded(kind: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 24, 3), np.uint8)
    file = io.BytesIO()
    if kind == "npy":
        np.save(file, pixels)
    else:
        Image.fromarray(pixels).save(file, {"jpg": "JPEG"}.get(kind, kind.upper()))
    return file.getvalue()


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(["jpg", "png", "webp", "npy"]),
    flips=st.lists(st.tuples(st.integers(0, 1400), st.integers(1, 255)), max_size=6),
    cut=st.integers(0, 1500),
)
def test_any_damage_is_a_bad_sample_or_a_picture(kind: str, flips: list[tuple[int, int]], cut: int) -> None:
    raw = bytearray(encoded(kind))
    for at, value in flips:
        if at < len(raw):
            raw[at] ^= value
    if cut % 3 == 0:
        del raw[max(0, len(raw) - cut) :]
    try:
        value = decode({kind: memoryview(bytes(raw))})[kind]
    except BadSample:
        return
    assert isinstance(value, np.ndarray) and not value.dtype.hasobject


# --- what a loader does about it


def test_bad_samples_are_replaced_counted_and_named(tmp_path: Path) -> None:
    good = simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8))
    bad = {17: png(50_000, 50_000), 40: b""}
    made = [
        {"__key__": f"{n:03d}", **({"png": bad[n]} if n in bad else {"jpg": good}), "cls": n}
        for n in range(100)
    ]
    pack(made, tmp_path)
    loader = ShardLoader(tmp_path, batch_size=10, max_bad=0.05)
    seen = [number for batch in loader for number in batch["cls"].tolist()]
    assert len(seen) == 100 and set(seen) == set(range(100)) - {17, 40}
    assert sorted(entry.key for entry in loader.bad) == ["017", "040"]
    assert {entry.shard for entry in loader.bad} == {str(tmp_path / "shard-000000.tar")}
    with pytest.raises(HeadwayError, match=r"1 of \d+ samples could not be used, more than max_bad=0;"):
        list(ShardLoader(tmp_path, batch_size=10, max_bad=0))


@pytest.mark.parametrize("damage", ["truncated", "truncated in use", "a flipped header"])
def test_a_damaged_shard_is_so_many_bad_samples(damage: str, tmp_path: Path) -> None:
    """They are replaced as others are, and the order of the rest is what it was; more than allowed stop the run."""
    paths = [
        pack(
            [{"__key__": f"{n}", "cls": n} for n in range(first, first + 50)], tmp_path, name=f"s{first:03d}"
        )[0]
        for first in range(0, 200, 50)
    ]
    for path in paths:
        path.with_suffix(".idx").unlink()
    how = {"batch_size": 10, "lanes": 2, "window": 20, "threads": 1}
    whole = [batch["cls"].tolist() for batch in ShardLoader(tmp_path, **how)]
    loader, strict = ShardLoader(tmp_path, **how, max_bad=1), ShardLoader(tmp_path, **how)
    if damage == "truncated in use":
        for each in (loader, strict):
            for number in range(4):
                each._shards.get(0, number)
    if damage.startswith("truncated"):
        os.truncate(paths[2], 30_000)
    else:
        raw = bytearray(paths[2].read_bytes())
        raw[0] ^= 1
        paths[2].write_bytes(raw)
    seen = [batch["cls"].tolist() for batch in loader]
    lost = range(100, 150)
    for before, after in zip(whole, seen, strict=True):
        assert all(a == b for b, a in zip(before, after, strict=True) if b not in lost)
    assert {entry.shard for entry in loader.bad} == {str(paths[2])}
    assert len(loader.bad) >= (20 if damage == "truncated in use" else 50)
    with pytest.raises(HeadwayError, match=rf"more than max_bad.* in {paths[2]}"):
        list(strict)


@ranks(2)
def test_bad_samples_are_written_down_once_in_the_run(tmp_path: Path) -> None:
    where = Path(hw.broadcast_object(str(tmp_path)))
    if hw.is_root():
        pack([{"__key__": f"{n}", "cls": "\x1b[31m" if n in (3, 70) else n} for n in range(100)], where)
    run = hw.dist.open_run(where / "runs", name="quarantine")
    hw.barrier()
    loader = ShardLoader(where, batch_size=5, max_bad=1)
    for _ in range(3):
        list(loader)
    assert sum(hw.all_gather_object(len(loader.bad))) >= 6, "two in each of three passes, and substitutes"
    files = [file for rank in range(2) if (file := run.quarantine_file(rank)).exists()]
    mine = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert {line["key"] for lines in mine for line in lines} == {"3", "70"}
    assert all(len({line["key"] for line in lines}) == len(lines) for lines in mine), "each once"
    assert all(line["dataset"] == "data" and "a cls of" in line["reason"] for lines in mine for line in lines)
    assert all("\x1b" not in file.read_text() for file in files)


@pytest.mark.parametrize(
    "where",
    [
        "pipe:touch sprung",
        "file:///etc/passwd",
        "http://169.254.169.254/x.tar",
        "/**/**/**/*.tar",
        "$(touch sprung)",
    ],
)
def test_only_files_are_shards_and_no_shell_is_asked(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for source in (where, [where]):
        with pytest.raises(UsageError):
            ShardLoader(source, batch_size=1)
    assert not list(tmp_path.iterdir())
