"""What is wrong with a shard is found before training: structure, names, index, checksum, samples."""

from __future__ import annotations

import errno
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg

from headway.data import pack
from headway.data.shards import checksums
from headway.data.tools.shard_check import check_shard
from headway.errors import BadShard
from headway.system import retries


def made(folder: Path, name: str = "shard") -> Path:
    jpeg = simplejpeg.encode_jpeg(np.full((20, 30, 3), 90, np.uint8))
    (path,) = pack([{"__key__": f"{n}", "jpg": jpeg, "cls": n} for n in range(5)], folder, name=name)
    return path


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_a_good_shard_has_no_problems_with_or_without_what_is_beside_it(tmp_path: Path) -> None:
    path = made(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        path.name,
        "shard-000000.idx",
        "shard-000000.tar.sum",
    }
    assert checksums.read(path) == checksums.compute(path)
    assert check_shard(path) == []
    path.with_suffix(".idx").unlink()
    checksums.checksum_path(path).unlink()
    assert check_shard(path) == []


def test_a_flipped_bit_in_the_bytes_of_a_sample_is_found_by_the_checksum_alone(tmp_path: Path) -> None:
    path = made(tmp_path)
    flip(path, 2 * 512 + 300 - 512)  # a pixel: the image is decoded all the same
    whole, sample = check_shard(path)
    assert "CRC32" in whole and str(path) in whole and "'0': its bytes do not match" in sample
    checksums.write(path, checksums.compute(path))
    assert check_shard(path) == []


def test_every_kind_of_problem_is_told(tmp_path: Path) -> None:
    cut = made(tmp_path, "cut")
    cut.write_bytes(cut.read_bytes()[:2000])
    assert "truncated" in check_shard(cut)[0]
    assert "No such file" in check_shard(tmp_path / "missing.tar")[0]

    bad = made(tmp_path, "bad")
    raw = bad.read_bytes()
    bad.write_bytes(raw.replace(b"\xff\xd8\xff", b"\xff\xd8\xfe", 1))
    problems = check_shard(bad)
    assert len(problems) == 2 and "CRC32" in problems[0] and "'0': its bytes do not" in problems[1]
    checksums.checksum_path(bad).unlink()
    (problem,) = check_shard(bad)
    assert "'0': a jpg of" in problem

    twice = tmp_path / "twice.tar"
    with tarfile.open(twice, "w") as archive:
        for name in ("a.txt", "b.txt", "a.txt"):
            archive.addfile(tarfile.TarInfo(name))
    assert check_shard(twice) == [f"{twice}: the key 'a' occurs twice, with other samples in between"]

    own = tmp_path / "own.tar"  # no loader uses its sample
    with tarfile.open(own, "w") as archive:
        archive.addfile(tarfile.TarInfo("a.__key__"))
    (problem,) = check_shard(own)
    assert "'a': its part '__key__' has a name that batches use themselves" in problem

    none = tmp_path / "none.tar"
    none.write_bytes(bytes(1024))
    assert "has no samples" in check_shard(none)[0]

    stale = made(tmp_path, "stale")
    index = stale.with_suffix(".idx")
    index.write_text(re.sub(r"(cls \d+) 1", r"\1 0", index.read_text()))
    (problem,) = check_shard(stale)
    assert "does not match" in problem


def test_a_shard_full_of_problems_is_told_in_a_hundred_lines(tmp_path: Path) -> None:
    (path,) = pack(({"__key__": f"{n}", "cls": "x"} for n in range(250)), tmp_path)
    problems = check_shard(path)
    assert len(problems) == 101 and problems[-1].endswith("and 150 more problems")


@pytest.mark.parametrize("text", ["", "[]", '{"bytes": "1"}', "\xff", "[" * 5000])
def test_a_checksum_that_is_none_is_said(text: str, tmp_path: Path) -> None:
    path = made(tmp_path)
    checksums.checksum_path(path).write_text(text, "latin-1")
    with pytest.raises(BadShard, match="is not a valid checksum file"):
        checksums.read(path)
    assert "is not a valid checksum file" in check_shard(path)[0]


def test_a_checksum_is_one_line_of_json_for_whoever_may_read_the_shard(tmp_path: Path) -> None:
    path = made(tmp_path)
    path.chmod(0o640)
    beside = checksums.write(path, checksums.compute(path))
    assert json.loads(beside.read_text()) == {
        "bytes": path.stat().st_size,
        "crc32": checksums.read(path).crc32,
        "samples": checksums.read(path).samples,
    }
    assert beside.stat().st_mode & 0o777 == 0o640
    assert len(checksums.read(path).sample_sums()) == 5


def test_a_shard_that_cannot_be_read_is_one_problem_and_not_the_end_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with a bad sector in a shard, and an index that only another user may read."""
    monkeypatch.setattr(retries, "WAITS_S", ())
    path, real = made(tmp_path), os.pread

    def pread(fd: int, count: int, offset: int) -> bytes:
        if offset >= 2048:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, count, offset)

    monkeypatch.setattr(os, "pread", pread)
    (problem,) = check_shard(path)
    assert "could not read" in problem and "Input/output error" in problem
    monkeypatch.undo()
    opened = os.open

    def refuse(name: object, *how: Any, **more: Any) -> int:
        if str(name).endswith(".idx"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(name, *how, **more)

    monkeypatch.setattr(os, "open", refuse)
    (problem,) = check_shard(path)
    assert f"could not read {path.with_suffix('.idx')}: Permission denied" in problem
