"""Tar shards: read in place whatever wrote them, refused where they are damaged or hostile; packed for all readers."""

from __future__ import annotations

import gc
import io
import json
import pickle
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
import webdataset
from hypothesis import given, settings, strategies as st
from PIL import Image

from headway.data import Shard, ShardLimits, ShardLoader, index, pack
from headway.data.shards.checksums import checksum_path
from headway.data.shards.decode import decode
from headway.data.shards.entries import group_samples
from headway.data.shards.shard import count_samples
from headway.data.shards.tar import members
from headway.errors import BadSample, BadShard, UsageError


def tar(path: Path, files: dict[str, bytes], how: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=how) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def contents(shard: Shard) -> dict[str, dict[str, bytes]]:
    return {
        entry.key: {extension: bytes(view) for extension, view in shard[number].items()}
        for number, entry in enumerate(shard.entries)
    }


def jpeg(height: int = 20, width: int = 30) -> bytes:
    return simplejpeg.encode_jpeg(np.full((height, width, 3), 90, np.uint8))


# --- reading

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


@pytest.mark.parametrize("how", FORMATS)
def test_every_kind_of_tar_is_read(how: str, tmp_path: Path) -> None:
    long = "d" * 90 + "/" + "k" * (60 if how == "ustar" else 300)
    files = {"a.jpg": b"1" * 700, "a.json": b"{}", "dir/b.seg.PNG": b"2", f"{long}.txt": b"3" * 512}
    if how != "ustar":
        files["süß.txt"] = b"4"
    shard = Shard.open(tar(tmp_path / "x.tar", files, FORMATS[how]))
    got = contents(shard)
    assert got["a"] == {"jpg": b"1" * 700, "json": b"{}"}
    assert got["dir/b"] == {"seg.png": b"2"}
    assert got[long] == {"txt": b"3" * 512}
    assert len(shard) == count_samples(tmp_path / "x.tar") == len(got) == (3 if how == "ustar" else 4)


NAMES = st.text("ab/é. ", min_size=1, max_size=180).filter(lambda n: not n.startswith("/") and n.strip("/ "))


@settings(max_examples=60)
@given(
    files=st.lists(st.tuples(NAMES, st.binary(max_size=1500)), max_size=8),
    how=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_members_are_those_of_tarfile(files: list[tuple[str, bytes]], how: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=how) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    raw = buffer.getvalue()
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as archive:
        expected = [(m.name, m.offset_data, m.size) for m in archive.getmembers() if m.isfile()]
    ours = [(m.name.rstrip("/"), m.offset, m.size) for m in members(raw, "x") if not m.name.endswith("/")]
    assert ours == [known for known in expected if (known[0], known[1], known[2]) in ours]
    assert [known[1:] for known in expected] == [m[1:] for m in members(raw, "x")][: len(expected)]


def test_the_index_of_an_open_shard_is_small(tmp_path: Path) -> None:
    (path,) = pack(({"__key__": f"{n:08d}", "txt": "", "cls": n} for n in range(2000)), tmp_path)
    tracemalloc.start()
    shard = Shard.open(path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / len(shard) < 200, "bytes per sample; more than twice that as objects"
    with pytest.raises(IndexError):
        _ = shard[2000]
    with pytest.raises(IndexError):
        _ = shard[-1]


def test_bytes_are_views_of_the_file(tmp_path: Path) -> None:
    shard = Shard.open(tar(tmp_path / "x.tar", {"a.bin": b"abc"}))
    view = shard[0]["bin"]
    assert isinstance(view, memoryview) and view.readonly
    assert np.shares_memory(decode({"bin": view})["bin"], np.frombuffer(view, np.uint8))


def test_sizes_in_binary_form_are_read() -> None:
    info = tarfile.TarInfo("a.bin")
    info.size = 3
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + (3).to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 256)
    assert [m.size for m in members(bytes(header) + b"abc" + bytes(509 + 1024), "x")] == [3]


# --- damaged and hostile


@pytest.mark.parametrize("keep", [100, 512, 1000, 1536])
def test_a_cut_off_shard_is_refused(keep: int, tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", {"a.bin": b"1" * 900, "b.bin": b"2"})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadShard, match=r"x\.tar .* truncated"):
        Shard.open(path)


@pytest.mark.parametrize("at", [0, 130, 150])
def test_a_flipped_bit_in_a_header_is_seen(at: int, tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", {"a.bin": b"1"})
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)
    with pytest.raises(BadShard, match="no tar header at byte 0"):
        Shard.open(path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"S"])
def test_links_devices_and_sparse_files_are_refused(kind: bytes) -> None:
    info = tarfile.TarInfo("../../etc/passwd")
    info.type, info.linkname = kind, "/etc/passwd"
    with pytest.raises(BadShard, match="link, device or sparse"):
        list(members(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024), "x"))


def test_a_size_that_is_not_there_is_refused_before_memory_is_taken() -> None:
    info = tarfile.TarInfo("a.bin")
    info.size = 10 * 2**30
    with pytest.raises(BadShard, match="10737418240 bytes"):
        list(members(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024), "x"))


def test_limits_are_kept(tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", {"a.bin": b"1" * 100, "b.bin": b"2"})
    with pytest.raises(BadShard, match="exceeds ShardLimits"):
        Shard.open(path, ShardLimits(member_bytes=99))
    with pytest.raises(BadShard, match="file 2"):
        Shard.open(path, ShardLimits(members=1))
    assert index(tmp_path)
    for limits in (ShardLimits(member_bytes=99), ShardLimits(members=1)):
        with pytest.raises(BadShard, match="exceeds ShardLimits"):
            Shard.open(path, limits)


def test_a_long_name_is_not_a_way_to_take_memory() -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**21
    with pytest.raises(BadShard, match="a name of 2097152 bytes"):
        list(members(info.tobuf(tarfile.GNU_FORMAT) + bytes(2**21 + 1024), "x"))


@pytest.mark.parametrize(
    "record", [b"99 path=x\n", b"0 path=x\n", b"path=x\n", b"30 GNU.sparse.major=1\n" + b" " * 8]
)
def test_bad_pax_records_are_refused(record: bytes) -> None:
    info = tarfile.TarInfo("p")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    raw = info.tobuf(tarfile.USTAR_FORMAT) + record + bytes(-len(record) % 512) + bytes(1024)
    with pytest.raises(BadShard, match=r"PAX|sparse"):
        list(members(raw, "x"))


@settings(max_examples=200)
@given(noise=st.binary(max_size=3000))
def test_noise_is_a_bad_shard_and_nothing_else(noise: bytes) -> None:
    try:
        group_samples(members(noise, "x"), "x")
    except BadShard:
        return
    assert noise[:512] == bytes(512)


def test_one_part_twice_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("a.txt"))
    with pytest.raises(BadShard, match=r"'a\.txt' occurs twice"):
        Shard.open(tmp_path / "x.tar")


def test_compressed_empty_and_missing_files_are_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    with pytest.raises(UsageError, match=r"gzip -d .*x\.tar\.gz"):
        Shard.open(tmp_path / "x.tar.gz")
    (tmp_path / "y.tar").touch()
    with pytest.raises(BadShard, match=r"y\.tar is empty"):
        Shard.open(tmp_path / "y.tar")
    with pytest.raises(UsageError, match="No such file"):
        Shard.open(tmp_path / "z.tar")


# --- indexes


def packed(folder: Path, count: int = 5) -> Path:
    (path,) = pack(
        ({"__key__": f"{n:04d}", "txt": str(n), "cls": n, "json": {"n": n}} for n in range(count)), folder
    )
    return path


def test_an_index_gives_what_walking_gives(tmp_path: Path) -> None:
    path = packed(tmp_path)
    index_file = path.with_suffix(".idx")
    assert index_file.read_text().splitlines()[0] == "v1.2 5"
    assert count_samples(path) == 5
    with_index = Shard.open(path).entries
    text = index_file.read_text()
    index_file.unlink()
    walked = Shard.open(path).entries
    assert [*with_index] == [*walked] == walked[:] and len(walked) == 5
    lines = [" ".join(w for i, w in enumerate(line.split()) if i % 4 != 3) for line in text.splitlines()[1:]]
    index_file.write_text("\n".join(["v1.1 5", *lines]))
    assert [*Shard.open(path).entries] == [*walked], "with the keys, which this index lacks"
    assert count_samples(path) == 5
    index_file.write_text("\n".join(["v1.1 4", *lines[:4]]))
    with pytest.raises(BadShard, match=r"does not match .* 4 samples there, 5 in the shard"):
        Shard.open(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace("v1.2 5", "v1.2 6"),
        lambda t: t.replace("txt 512", "txt 513"),
        lambda t: t.replace("txt 512", "txt 99999488"),
        lambda t: t.replace("txt 512 1 ", "txt 512 "),
        lambda t: t.rpartition("\n")[0].rpartition("\n")[0],
    ],
)
def test_the_index_of_another_shard_is_refused(change: object, tmp_path: Path) -> None:
    path = packed(tmp_path)
    index = path.with_suffix(".idx")
    assert change(index.read_text()) != index.read_text()
    index.write_text(change(index.read_text()))
    with pytest.raises(BadShard, match="does not match"):
        Shard.open(path)


def test_one_line_of_an_index_without_a_number_spoils_no_other(tmp_path: Path) -> None:
    path = packed(tmp_path)
    index = path.with_suffix(".idx")
    lines = index.read_text().splitlines()
    words = lines[3].split(" ")
    words[words.index("txt") + 1] = ""  # of sample 2
    lines[3] = " ".join(words)
    index.write_text("\n".join([*lines, ""]))
    entries = Shard.open(path).entries
    for _ in range(2):  # from the second time on, neighboring lines are parsed at once
        assert [entries.locate(number)[0] for number in (0, 1, 3, 4)] == ["0000", "0001", "0003", "0004"]
        with pytest.raises(BadShard, match="does not match"):
            entries.locate(2)


def test_an_index_older_than_its_shard_never_gives_wrong_bytes(tmp_path: Path) -> None:
    """As many samples in the new shard, all within its size: only the headers tell."""
    path = packed(tmp_path)
    old = path.with_suffix(".idx").read_text()
    path.unlink()
    pack(
        [{"__key__": f"{n:04d}", "txt": "x" * (n * 200), "cls": n, "json": {"n": n}} for n in range(5)],
        tmp_path,
    )
    path.with_suffix(".idx").write_text(old)
    with pytest.raises(BadShard, match="does not match"):
        Shard.open(path)


def test_index_writes_what_is_missing(tmp_path: Path) -> None:
    path = packed(tmp_path)
    (spaced,) = pack([{"__key__": "a b", "txt": "x"}], tmp_path, name="spaced")
    index_file = path.with_suffix(".idx")
    text = index_file.read_text()
    assert index(tmp_path) == []
    index_file.unlink()
    assert index(tmp_path) == [index_file]
    assert index_file.read_text() == text
    index_file.write_text("v1.2 0\n")
    assert index([path, spaced], overwrite=True) == [index_file]
    assert index_file.read_text() == text
    assert index_file.stat().st_mode & 0o777 == path.stat().st_mode & 0o666


def test_an_index_is_known_by_what_is_in_it_and_not_by_its_name(tmp_path: Path) -> None:
    path = packed(tmp_path)
    text, binary = path.with_suffix(".idx"), path.with_name(path.name + ".idx")
    whole = [*Shard.open(path).entries]
    text.replace(binary)
    assert count_samples(path) == 5 and [*Shard.open(path).entries] == whole, "DALI's under energon's name"
    binary.write_text(binary.read_text().replace("txt 3584", "txt 4096"))
    for _ in range(2):  # with checksums, and without them
        with pytest.raises(BadShard, match="does not match"):
            [Shard.open(path)[n] for n in range(5)]
        checksum_path(path).unlink(missing_ok=True)
    binary.unlink()
    text.write_bytes(struct.pack("=6Q", *range(0, 3072, 512)))
    assert [*Shard.open(path).entries] == whole, "what is neither is not used"


def test_energons_index_counts_and_is_compared(tmp_path: Path) -> None:
    path = packed(tmp_path)
    path.with_suffix(".idx").unlink()
    starts = [entry.parts[0].offset - 512 for entry in Shard.open(path).entries]
    index = path.with_name(path.name + ".idx")
    index.write_bytes(struct.pack("=6Q", *starts, 15 * 1024))
    assert count_samples(path) == 5
    assert len(Shard.open(path)) == 5
    index.write_bytes(struct.pack("=5Q", *starts))
    with pytest.raises(BadShard, match="does not match"):
        Shard.open(path)
    index.write_bytes(b"12345678" * 2)
    with pytest.raises(BadShard, match="not a valid energon index"):
        count_samples(path)


# --- with others


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # its files close when collected
def test_webdataset_reads_what_we_pack(tmp_path: Path) -> None:
    made = [{"__key__": f"d/{n:04d}", "jpg": jpeg(), "cls": n, "json": {"n": [n]}} for n in range(20)]
    paths = pack(made, tmp_path, shard_size=40 * 1024)
    assert len(paths) > 1
    assert all(path.stat().st_size <= 40 * 1024 for path in paths)
    read = list(webdataset.WebDataset([str(path) for path in paths], shardshuffle=False))
    gc.collect()
    assert [(s["__key__"], s["jpg"], s["cls"], json.loads(s["json"])) for s in read] == [
        (s["__key__"], s["jpg"], str(s["cls"]).encode(), s["json"]) for s in made
    ]


def test_we_read_what_webdataset_writes(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "x.tar")) as sink:
        for n in range(3):
            sink.write({"__key__": f"k{n}", "txt": f"text {n}", "cls": n, "npy": np.arange(n + 1)})
    shard = Shard.open(tmp_path / "x.tar")
    values = [decode(shard[n]) for n in range(len(shard))]
    assert [(v["txt"], v["cls"], v["npy"].tolist()) for v in values] == [
        ("text 0", 0, [0]),
        ("text 1", 1, [0, 1]),
        ("text 2", 2, [0, 1, 2]),
    ]


def test_a_folder_of_classes_is_packed(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "1.v2.jpg").write_bytes(jpeg())
    (path,) = pack(tmp_path / "in", tmp_path / "out")
    shard = Shard.open(path)
    assert [decode(shard[n])["cls"] for n in range(2)] == [0, 1]
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat", "dog"]


def test_a_name_with_a_space_has_no_index_and_is_read(tmp_path: Path) -> None:
    (path,) = pack([{"__key__": "a b", "txt": "x"}], tmp_path)
    assert not path.with_suffix(".idx").exists()
    assert contents(Shard.open(str(path))) == {"a b": {"txt": b"x"}}


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ([{"txt": "x"}], "__key__=None"),
        ([{"__key__": "a.b", "txt": "x"}], "without a dot"),
        ([{"__key__": "/etc/x", "txt": "x"}], "__key__='/etc/x'"),
        ([{"__key__": "a"}], "has no parts"),
        ([{"__key__": "a", "x": object()}], "is of type object"),
        ([{"__key__": "a", "cls": 2.5}], "'cls' of sample 'a' is 2.5, and is read as a whole number"),
        ([{"__key__": "a", "cls": np.float32("nan")}], "is nan, and is read as a whole number"),
        ([{"__key__": "a", "cls": True}], "is of type bool"),
        ([{"__key__": "a", "jpg": np.zeros(3)}], r"'jpg' of sample 'a' is an array: use the extension npy"),
        ([{"__key__": "a", "npy": np.array([object()])}], "holds Python objects"),
        ([{"__key__": "a", "json": {"x": object()}}], "json cannot hold a value of type object"),
        ([{"__key__": "a", "txt": "x"}, {"__key__": "a", "txt": "y"}], "two consecutive samples"),
    ],
)
def test_samples_that_cannot_be_packed(made: list[dict[str, object]], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        pack(made, tmp_path)
    assert not list(tmp_path.iterdir()), "nothing half-written stays"


def test_numbers_and_arrays_of_numpy_and_torch_are_packed(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = {
        "cls": np.int64(7),
        "index": 3.0,
        "txt": np.float32(0.5),
        "npy": array.T,
        "mask.npy": torch.tensor([True, False]),
        "one.npy": 2.5,
        "json": {"box": array, "n": np.int16(3), "t": torch.tensor(4), "x": 1.5, "ok": np.bool_(True)},
        "a.json": array,
        "b.json": 2.5,
    }
    (path,) = pack([{"__key__": "a", **made}], tmp_path)
    value = decode(Shard.open(path)[0])
    assert (value["cls"], value["index"], value["txt"]) == (7, 3, "0.5")
    assert np.array_equal(value["npy"], array.T) and value["npy"].dtype == np.float32
    assert value["mask.npy"].tolist() == [True, False] and value["one.npy"].tolist() == 2.5
    assert value["json"] == {"box": array.tolist(), "n": 3, "t": 4, "x": 1.5, "ok": True}
    assert (value["a.json"], value["b.json"]) == (array.tolist(), 2.5)


@pytest.mark.parametrize("size", [20_480, 25_000, 30_720, 33_333])
def test_shards_are_never_larger_than_asked_for(size: int, tmp_path: Path) -> None:
    made = [{"__key__": str(n), "bin": bytes(n % 7 * 700)} for n in range(100)]
    paths = pack(made, tmp_path, shard_size=size)
    assert max(path.stat().st_size for path in paths) <= size
    assert sum(len(Shard.open(path)) for path in paths) == 100


def test_packing_never_overwrites(tmp_path: Path) -> None:
    packed(tmp_path)
    with pytest.raises(UsageError, match="already has shards"):
        packed(tmp_path)


def test_one_process_at_a_time_packs_into_a_directory(tmp_path: Path) -> None:
    """All ranks of a script that packs what is not there do so at the same time, and would write the same files."""

    def samples() -> Iterator[dict[str, object]]:
        yield {"__key__": "a", "txt": "mine"}
        with pytest.raises(UsageError, match="another process is packing shards named shard into"):
            pack([{"__key__": "b", "txt": "theirs"}], tmp_path)
        (other,) = pack([{"__key__": "b", "txt": "theirs"}], tmp_path, name="other")
        assert len(Shard.open(other)) == 1, "under another name, it may"
        yield {"__key__": "c", "txt": "mine"}

    (path,) = pack(samples(), tmp_path, shuffle=False)
    assert contents(Shard.open(path)) == {"a": {"txt": b"mine"}, "c": {"txt": b"mine"}}
    assert not list(tmp_path.glob(".*")), "nothing hidden stays"


def test_shards_are_said_not_to_be_all_until_all_are_packed(tmp_path: Path, messages: list[str]) -> None:
    """The job that packs may have met its time limit, and the one that trains begins after it in any case."""

    def samples(count: int, fail: bool) -> Iterator[dict[str, object]]:
        for number in range(count):
            yield {"__key__": f"{number}", "bin": bytes(5000)}
        assert ShardLoader(tmp_path, batch_size=1).samples < count, "while it is under way"
        if fail:
            raise KeyboardInterrupt

    for fail in (True, False):
        messages.clear()
        with pytest.raises(KeyboardInterrupt) if fail else nullcontext():
            pack(samples(10, fail), tmp_path, shard_size=20_480)
        loader = ShardLoader(tmp_path, batch_size=1)
        warned = f"packing into {tmp_path} was interrupted, or is under way"
        assert [warned in text for text in messages] == [True] * (1 + fail)
        if fail:
            with pytest.raises(UsageError, match="already has shards"):
                pack(samples(10, False), tmp_path, shard_size=20_480)
            for path in tmp_path.glob("*.tar"):
                path.unlink()
    assert loader.samples == 10 and not list(tmp_path.glob(".*"))


def test_a_directory_is_packed_into_itself_again_with_the_same_classes(tmp_path: Path) -> None:
    """As after a first try that was interrupted: where its shards were to go is a directory, too, but not a class."""
    for name in ("cat", "zebra"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(jpeg())
    (tmp_path / "shards").mkdir()
    (path,) = pack(tmp_path, tmp_path / "shards", shuffle=False)
    assert json.loads((tmp_path / "shards" / "classes.json").read_text()) == ["cat", "zebra"]
    assert [bytes(Shard.open(path)[number]["cls"]) for number in range(2)] == [b"0", b"1"]


def test_files_that_are_not_packed_are_named_unless_they_are_hidden(
    tmp_path: Path, messages: list[str]
) -> None:
    for name in ("1.jpg", "2.bmp", "3.bmp", "notes", "._1.jpg", ".ipynb_checkpoints/1-checkpoint.jpg"):
        (tmp_path / "in" / "cat" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / "cat" / name).write_bytes(jpeg())
    (path,) = pack(tmp_path / "in", tmp_path / "out")
    assert [*contents(Shard.open(path))] == ["000000/1"]
    assert [text.partition(": ")[2] for text in messages] == [
        "3 files left out (2 .bmp, 1 notes); only images that end with .jpeg, .jpg, .png, .webp are packed"
    ]


# --- decoding


def test_images_become_rgb() -> None:
    grey, pair, alpha = (io.BytesIO() for _ in range(3))
    Image.new("L", (30, 20), 90).save(grey, "JPEG")
    Image.new("LA", (30, 20)).save(pair, "PNG")
    Image.new("RGBA", (30, 20)).save(alpha, "WEBP")
    cmyk = io.BytesIO()
    Image.new("CMYK", (30, 20)).save(cmyk, "JPEG")
    raw = {
        "jpg": jpeg(),
        "grey.jpeg": grey.getvalue(),
        "png": pair.getvalue(),
        "webp": alpha.getvalue(),
        "c.jpg": cmyk.getvalue(),
    }
    for pixels in decode({name: memoryview(data) for name, data in raw.items()}).values():
        assert pixels.shape == (20, 30, 3)
        assert pixels.dtype == np.uint8


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(kind: str) -> None:
    if kind == "png":  # 50,000 x 50,000 says the header
        file = io.BytesIO()
        Image.new("RGB", (1, 1)).save(file, "PNG")
        raw = bytearray(file.getvalue())
        raw[16:24] = struct.pack(">II", 50_000, 50_000)
        raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
        data = bytes(raw)
        limits = ShardLimits()
    else:
        data, limits = jpeg(), ShardLimits(pixels=599)
    with pytest.raises(BadSample, match="pixels"):
        decode({kind: memoryview(data)}, limits=limits)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("jpg", b""),
        ("jpg", b"\xff\xd8\xff"),
        ("png", b"GIF89a" + bytes(40)),
        ("cls", b"three"),
        ("json", b"[" * 100_000),
        ("txt", b"\xff\xfe"),
        ("npy", b"\x93NUMPY\x01\x00"),
    ],
)
def test_what_cannot_be_decoded_is_a_bad_sample(kind: str, data: bytes) -> None:
    with pytest.raises(BadSample, match=f"a {kind} of {len(data)} bytes"):
        decode({kind: memoryview(data)})


class Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("sprung"),)


@pytest.mark.parametrize("kind", ["pkl", "pickle", "pyd", "pt", "x.pth"])
def test_pickles_are_refused_by_name(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = memoryview(pickle.dumps(Trap()))
    with pytest.raises(BadSample, match=f"{kind!r} files can run code"):
        decode({kind: data})
    array = io.BytesIO()
    np.save(array, np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(BadSample, match="Python objects"):
        decode({"npy": memoryview(array.getvalue())})
    assert not (tmp_path / "sprung").exists()
    assert decode({kind: data}, {kind: len}) == {kind: len(data)}


def test_arrays_stay_where_they_are() -> None:
    for array in (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))):
        file = io.BytesIO()
        np.save(file, array)
        data = memoryview(file.getvalue())
        value = decode({"npy": data})["npy"]
        assert np.array_equal(value, array) and np.shares_memory(value, np.frombuffer(data, np.uint8))
