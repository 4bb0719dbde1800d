"""No sample is lost without a word: holes in shards, indexes that state less, more or other than their shard has."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.cli.data import main
from headway.data import NodeCache, Shard, ShardLoader, index, pack
from headway.data.shards.checksums import checksum_path
from headway.data.shards.shard import count_samples, walk
from headway.data.tools import check_shard
from headway.errors import BadShard, UsageError

SAMPLES = 8
SAMPLE_BYTES = 4 * 512


def packed(directory: Path, *, checksums: bool = False, indexed: bool = False) -> Path:
    samples = [{"__key__": f"s{n}", "txt": f"text{n}", "cls": n} for n in range(SAMPLES)]
    (path,) = pack(samples, directory)
    if not checksums:
        checksum_path(path).unlink()
    if not indexed:
        path.with_suffix(".idx").unlink()
    return path


def append(path: Path, names: list[str]) -> None:
    with tarfile.open(path, "a") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"1"))


# --- shards


@pytest.mark.parametrize("hole", [512, 1024, SAMPLE_BYTES, 3 * SAMPLE_BYTES])
def test_a_hole_of_zeros_is_not_the_end_of_a_shard(hole: int, tmp_path: Path) -> None:
    path = packed(tmp_path)
    with path.open("r+b") as file:
        file.seek(2 * SAMPLE_BYTES)
        file.write(bytes(hole))
    for use in (walk, count_samples, Shard.open, index):
        with pytest.raises(BadShard, match=r"its end marker is at byte 4096, but .* follow"):
            use(path)
    assert "end marker" in check_shard(path)[0]
    assert not path.with_suffix(".idx").exists()


def test_zeros_in_place_of_a_shard_or_of_its_rest_are_refused(tmp_path: Path) -> None:
    path = packed(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    with pytest.raises(BadShard, match="end marker is at byte 0"):
        count_samples(path)
    path.write_bytes(whole[: 2 * SAMPLE_BYTES] + bytes(2**20 + 512))
    with pytest.raises(BadShard, match="end marker is at byte 4096"):
        count_samples(path)


def test_padding_of_other_writers_is_the_end_of_a_shard(tmp_path: Path) -> None:
    path = packed(tmp_path)
    end = SAMPLES * SAMPLE_BYTES
    for padding in (512, 1024, 10_240, 2**17):
        path.write_bytes(path.read_bytes()[:end] + bytes(padding))
        assert count_samples(path) == SAMPLES
    for empty in (512, 1024, 10_240):
        path.write_bytes(bytes(empty))
        assert count_samples(path) == 0


def test_shards_joined_with_cat_are_refused(tmp_path: Path) -> None:
    path = packed(tmp_path)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(BadShard, match="end marker is at byte 16384"):
        Shard.open(path)


@pytest.mark.parametrize(
    "sample",
    [
        {"__key__": "__a__", "txt": "x"},
        {"__key__": "b/__a__", "txt": "x"},
        {"__key__": "a/", "txt": "x"},
        {"__key__": "a\0b", "txt": "x"},
        {"__key__": "a", "txt/x": "x"},
        {"__key__": "a", "x\0": "x"},
        {"__key__": "a", "": "x"},
        {"__key__": "a", "txt": "x", "TXT": "y"},
    ],
)
def test_names_that_no_reader_finds_are_not_packed(sample: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"__key__=.* would not be found|occurs twice"):
        pack([sample], tmp_path)
    assert not list(tmp_path.iterdir())


# --- counts of indexes


@pytest.mark.parametrize("digits", [8, 15, 30, 60])
def test_an_index_that_states_more_than_a_shard_can_hold_is_refused(digits: int, tmp_path: Path) -> None:
    path = packed(tmp_path)
    path.with_suffix(".idx").write_text(f"v1.1 {'9' * digits}\n")
    with pytest.raises(BadShard, match=r"shard-000000.idx states 9+ samples.* remove it"):
        count_samples(path)
    with pytest.raises(BadShard, match="cannot be counted"):
        ShardLoader(tmp_path, batch_size=2)


def test_a_shard_that_is_gone_is_named_although_its_index_is_there(tmp_path: Path) -> None:
    """A large count is compared with the size of the shard, which may be a link to a file that was moved."""
    path = packed(tmp_path)
    path.with_suffix(".idx").write_text("v1.2 10001\n")
    path.unlink()
    with pytest.raises(UsageError, match=f"cannot read the shard {path}: No such file"):
        ShardLoader([path], batch_size=2)


# --- indexes of another shard, or of this one as it was


def test_samples_that_were_appended_after_the_index_are_missed(tmp_path: Path) -> None:
    path = packed(tmp_path, indexed=True)
    append(path, ["__meta__.json", "README"])
    assert len(Shard.open(path)) == SAMPLES, "files that are no samples are not in the index"
    append(path, ["t0.txt", "t0.cls"])
    with pytest.raises(BadShard, match=r"shard-000000.idx does not match .* overwrite=True"):
        Shard.open(path)
    with pytest.raises(BadShard, match="does not match"):
        main(["count", str(tmp_path)])
    index(path, overwrite=True)
    assert len(Shard.open(path)) == SAMPLES + 1
    path.with_suffix(".idx").write_text("v1.2 0\n")
    with pytest.raises(BadShard, match="does not match"):
        Shard.open(path)


def swapped_labels(lines: list[str]) -> list[str]:
    words = [line.split() for line in lines]
    words[2][5], words[3][5] = words[3][5], words[2][5]
    return [" ".join(line) for line in words]


def line_2(pattern: str, by: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [*lines[:2], re.sub(pattern, by, lines[2]), *lines[3:]]


CHANGES: dict[str, tuple[Callable[[list[str]], list[str]], set[int]]] = {
    "two labels swapped": (swapped_labels, {2, 3}),
    "beyond the end": (line_2(r"txt \d+", "txt 99999744"), {2}),
    "a number of very many digits": (line_2(r"txt \d+", "txt " + "9" * 5000), {2}),
    "before the beginning": (line_2(r"txt \d+", "txt -512"), {2}),
    "a shorter size": (line_2(r"txt (\d+) \d+", r"txt \1 3"), {2}),
    "half a line": (line_2(" cls.*", " cls"), {2}),
    "the bytes of another sample": (line_2(r"txt \d+", "txt 512"), {2}),
}
WITHOUT_CHECKSUMS: dict[str, tuple[Callable[[list[str]], list[str]], set[int]]] = {
    "another key": (line_2(r"s2\.", "zz."), {2}),
    "the key of another case": (line_2(r"s2\.", "S2."), {2}),
    "another extension": (line_2("cls", "txt2"), {2}),
}
WITH_CHECKSUMS: dict[str, tuple[Callable[[list[str]], list[str]], set[int]]] = {
    "a part is missing": (line_2(" cls.*", ""), {2}),
    "parts in another order": (line_2(r"(txt .*) (cls.*)", r"\2 \1"), set()),
}


def seen(directory: Path, cache: NodeCache | None) -> tuple[list[tuple[str, str, int]], list[str]]:
    """All samples in their order, where the bad ones are left out, and why those are bad."""
    loader = ShardLoader(directory, batch_size=1, shuffle=False, max_bad=1, threads=1, cache=cache)
    good = [(b["__key__"][0], b["txt"][0], int(b["cls"][0])) for b in loader]
    return good, sorted(bad.reason for bad in loader.bad)


@pytest.mark.parametrize("checksums", [False, True])
def test_lines_of_an_index_are_bad_alone_with_a_cache_and_without(checksums: bool, tmp_path: Path) -> None:
    changes = CHANGES | (WITH_CHECKSUMS if checksums else WITHOUT_CHECKSUMS)
    for number, (name, (change, bad)) in enumerate(changes.items()):
        directory, memory = tmp_path / str(number), tmp_path / f"memory{number}"
        memory.mkdir()
        path = packed(directory, checksums=checksums, indexed=True)
        beside = path.with_suffix(".idx")
        head, *lines = beside.read_text().splitlines()
        beside.write_text("\n".join([head, *change(lines), ""]))
        good, reasons = seen(directory, None)
        assert len(reasons) == len(bad), name
        kept = set(range(SAMPLES)) - bad
        assert {*good} == {(f"s{n}", f"text{n}", n) for n in kept}, name
        cache = NodeCache(path=memory, copy_local=True, min_age=0, budget="100MB")
        assert seen(directory, cache) == (good, reasons), name


def test_a_check_compares_keys_also_where_checksums_match(tmp_path: Path) -> None:
    path = packed(tmp_path, checksums=True, indexed=True)
    beside = path.with_suffix(".idx")
    assert check_shard(path) == []
    beside.write_text(beside.read_text().replace("s2.", "zz."))
    assert "does not match" in check_shard(path)[0]


def test_names_in_long_headers_and_in_capitals_are_no_mismatch(tmp_path: Path) -> None:
    names = ["d" * 90 + "/" + "k" * 60 + ".txt", "süß.txt", "a.seg.PNG", "b" * 95 + ".txt", "b" * 96 + ".txt"]
    for how in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT):
        path = tmp_path / f"{how}.tar"
        with tarfile.open(path, "w", format=how) as archive:
            for number, name in enumerate(names[::2] if how == tarfile.USTAR_FORMAT else names):
                info = tarfile.TarInfo(name)
                if how == tarfile.PAX_FORMAT and name.startswith("a"):
                    info.name, info.pax_headers = (
                        "other",
                        {"path": name},
                    )  # the header is what old readers see
                info.size = 1
                archive.addfile(info, io.BytesIO(b"%d" % number))
        walked = walk(path)
        index(path)
        shard = Shard.open(path)
        assert shard.index.stated and [*shard.entries] == [*walked]
        for number in range(len(walked)):
            assert [bytes(part) for part in shard[number].values()] == [b"%d" % number]
