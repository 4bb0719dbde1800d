"""No sample is lost without a word: holes in shards, indexes that state less, more or other than their shard has."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from headway.data import Shard, ShardLoader, index, pack
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
