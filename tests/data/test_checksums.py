"""Checksums of shards and samples: the same samples are bad in place and with a cache, with an index and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.cli.data import main
from headway.data import NodeCache, Shard, ShardLoader, pack
from headway.data.shards import checksums
from headway.errors import BadSample, BadShard

BAD = b"the seventh"


@pytest.fixture(params=["indexed", "walked"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Three shards of 20 samples. In the second, one byte of the seventh sample is damaged, and can be decoded."""
    data = tmp_path / "data"
    for shard in range(3):
        texts = [b"the seventh" if n == 7 else b"text %d" % n for n in range(20)]
        samples = [{"__key__": f"{shard}-{n:02d}", "txt": text, "cls": n} for n, text in enumerate(texts)]
        pack(samples, data, name=f"s{shard}")
    path = data / "s1-000000.tar"
    path.write_bytes(path.read_bytes().replace(BAD, BAD[:-1] + b"!"))
    if request.param == "walked":
        for index in data.glob("*.idx"):
            index.unlink()
    return data


def without_samples(folder: Path) -> None:
    """Makes the checksums what they were before samples had their own."""
    for path in folder.glob("*.sum"):
        stated = json.loads(path.read_text())
        path.write_text(json.dumps({"bytes": stated["bytes"], "crc32": stated["crc32"]}))


def batches(folder: Path, cache: NodeCache | None = None) -> tuple[list[str], set[str]]:
    """All texts in their order, and the keys of bad samples."""
    loader = ShardLoader(folder, batch_size=10, max_bad=1, threads=1, cache=cache)
    return [text for batch in loader for text in batch["txt"]], {bad.key for bad in loader.bad}


def cache_in(folder: Path) -> NodeCache:
    memory = folder.parent / "memory"
    memory.mkdir(exist_ok=True)
    return NodeCache(path=memory, copy_local=True, min_age=0, budget="100MB")


def test_one_damaged_sample_is_bad_with_a_cache_and_without(folder: Path) -> None:
    texts, bad = batches(folder)
    assert bad == {"1-07"} and len(texts) == 60 and "the sevent!" not in texts
    assert batches(folder, cache_in(folder)) == (texts, bad)


def test_a_damaged_shard_with_one_checksum_is_bad_with_a_cache_and_without(folder: Path) -> None:
    without_samples(folder)
    texts, bad = batches(folder)
    assert len(texts) == 60 and "the sevent!" not in texts
    assert bad == {f"sample {n}" for n in range(20)}, "those of the second shard"
    assert batches(folder, cache_in(folder)) == (texts, bad)


def test_checksums_of_another_shard_are_refused(folder: Path) -> None:
    path = folder / "s0-000000.tar"
    beside = checksums.checksum_path(path)
    stated = json.loads(beside.read_text())
    for changed, says in (
        ({"bytes": 7}, "has 51200 bytes, but s0-000000.tar.sum states 7"),
        ({"samples": stated["samples"][:-8]}, "has 20 samples, but s0-000000.tar.sum states 19"),
        ({"samples": stated["samples"][:-1]}, "is not a valid checksum file"),
    ):
        beside.write_text(json.dumps(stated | changed))
        with pytest.raises(BadShard, match=says):
            Shard.open(path)
    beside.write_text(json.dumps(stated | {"samples": stated["samples"][8:] + stated["samples"][:8]}))
    with pytest.raises(BadSample, match="do not match"):
        _ = Shard.open(path)[0]


def test_the_command_adds_the_checksums_of_samples_to_whole_shards_only(folder: Path) -> None:
    expected = {path.name: path.read_text() for path in folder.glob("*.sum")}
    without_samples(folder)
    with pytest.raises(BadShard, match=r"s1-000000.tar has .* CRC32"):
        main(["index", str(folder), "--checksums"])
    assert "samples" not in (folder / "s1-000000.tar.sum").read_text()
    (folder / "s1-000000.tar").unlink()
    assert main(["index", str(folder), "--checksums"]) == 0
    for name in ("s0-000000.tar.sum", "s2-000000.tar.sum"):
        assert (folder / name).read_text() == expected[name]
