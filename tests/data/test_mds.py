"""Datasets of MosaicML Streaming are packed as they are. Its version 0.13 wrote and read `tests/fixtures/mds`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.cli import main
from headway.data import ShardLoader, pack
from headway.data.shards.shard import Shard
from headway.errors import UsageError

FIXTURE = Path(__file__).parents[1] / "fixtures" / "mds"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("shuffle", [False, None])
def test_samples_are_those_that_streaming_reads(shuffle: bool | None, tmp_path: Path) -> None:
    pack(FIXTURE, tmp_path / "shards", shuffle=shuffle)
    samples = ShardLoader(
        tmp_path / "shards", batch_size=1, shuffle=False, collate_fn=lambda samples: samples[0]
    )
    found = [{name: plain(part) for name, part in sample.items()} for sample in samples]
    assert len({sample.pop("__key__") for sample in found}) == 6
    assert (found == EXPECTED) is (shuffle is False), "a directory is shuffled unless it must not be"
    assert sorted(found, key=lambda sample: sample["txt"]) == EXPECTED


Damage = Callable[[dict[str, Any], Path], None]


def pickled(index: dict[str, Any], _: Path) -> None:
    index["shards"][0]["column_encodings"][0] = "pkl"


def other_version(index: dict[str, Any], _: Path) -> None:
    index["version"] = 3


def not_copied(_: dict[str, Any], shard: Path) -> None:
    shard.unlink()


def packed_only(index: dict[str, Any], shard: Path) -> None:
    index["shards"][0]["zip_data"] = {"basename": f"{shard.name}.zstd"}
    shard.unlink()


def cut(_: dict[str, Any], shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-7])


def empty(_: dict[str, Any], shard: Path) -> None:
    shard.write_bytes(b"")


def overwritten(_: dict[str, Any], shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    begin = int.from_bytes(data[4:8], "little")
    data[begin : begin + 4] = bytes(4)
    shard.write_bytes(data)


def in_first(**facts: Any) -> Damage:
    """Replaces what the index says of its first shard."""

    def damage(index: dict[str, Any], _: Path) -> None:
        index["shards"][0].update(facts)

    return damage


def at(basename: str) -> Damage:
    return in_first(raw_data={"basename": basename})


def no_columns(index: dict[str, Any], _: Path) -> None:
    del index["shards"][0]["column_sizes"]


def no_samples(index: dict[str, Any], shard: Path) -> None:
    del index["shards"][1]
    index["shards"][0]["samples"] = 0
    shard.write_bytes(bytes(4) + (8).to_bytes(4, "little"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (pickled, r"column 'free' of .* is encoded as 'pkl', which is not supported"),
        (other_version, r"has version 3: expected 2"),
        (not_copied, r"shard\.00000\.mds is missing: copy it, and pack again"),
        (packed_only, r"is missing: unpack shard\.00000\.mds\.zstd, or copy the shard"),
        (cut, r"shard\.00000\.mds has 3273 bytes, but its table of samples ends at 3280: copy it again"),
        (empty, r"shard\.00000\.mds has 0 samples in 0 bytes, but index\.json has 3: copy both again"),
        (overwritten, r"sample 0 of .*shard\.00000\.mds is damaged: it has 944 bytes instead of \d+"),
        (in_first(samples=2), r"has 3 samples in 3280 bytes, but index\.json has 2: copy both again"),
        (in_first(samples=10**12), r"has 3 samples in 3280 bytes, but index\.json has 10{12}"),
        (in_first(samples="3"), r"as MDS does: shard\.00000\.mds has '3' samples"),
        (in_first(format="jsonl"), r"as MDS does: the format of shard\.00000\.mds is 'jsonl'"),
        (at("../mds/shard.00000.mds"), r"\.\./mds/shard\.00000\.mds is not a path below that directory"),
        (at("/etc/passwd"), r"as MDS does: /etc/passwd is not a path below that directory"),
        (at("./shard.00001.mds"), r"index\.json has .*/shard\.00001\.mds twice"),
        (in_first(column_names=5), r"as MDS does: column_names, .* are not lists of equal length"),
        (in_first(column_encodings=["jpeg"]), r"column_names, .* are not lists of equal length"),
        (
            in_first(column_encodings=[*range(10)]),
            r"as MDS does: 0 in column_names or column_encodings is not text",
        ),
        (in_first(column_sizes=[-8] * 10), r"as MDS does: -8 in column_sizes is not a number of bytes"),
        (in_first(column_names=[*"abcdefghij"]), r"has shards with other columns than its first one"),
        (in_first(column_names=["a"] * 10), r"columns 'a' and 'a' of .* would both be packed as 'a\.npy'"),
        (no_samples, r"mds has no samples: give a directory with images, files or MDS shards"),
        (no_columns, r"index\.json does not describe its shards as MDS does: KeyError\('column_sizes'\)"),
    ],
)
def test_what_cannot_be_read_is_refused(damage: Damage, says: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path / "mds")
    index = tmp_path / "mds" / "index.json"
    facts = json.loads(index.read_text())
    damage(facts, tmp_path / "mds" / "shard.00000.mds")
    index.write_text(json.dumps(facts))
    with pytest.raises(UsageError, match=says):
        pack(tmp_path / "mds", tmp_path / "shards", shuffle=False)
    assert not [*tmp_path.glob("shards/*")], "nothing half-made is left"


def write_shard(path: Path, *samples: tuple[bytes, ...]) -> None:
    """Writes samples whose columns have no fixed sizes, as Streaming does."""
    rows = [np.array([*map(len, each)], "<u4").tobytes() + b"".join(each) for each in samples]
    offsets = np.cumsum([4 * (2 + len(rows)), *map(len, rows)])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.array([len(rows), *offsets], "<u4").tobytes() + b"".join(rows))


def write_index(directory: Path, shards: dict[str, int], names: list[str]) -> None:
    columns = {
        "column_names": names,
        "column_encodings": ["str"] * len(names),
        "column_sizes": [None] * len(names),
    }
    facts = [
        {"format": "mds", "samples": count, "raw_data": {"basename": name}, **columns}
        for name, count in shards.items()
    ]
    (directory / "index.json").write_text(json.dumps({"version": 2, "shards": facts}))


def test_every_column_of_every_directory_is_packed(tmp_path: Path) -> None:
    for name in ("a", "b"):  # as in an index of several that Streaming has merged
        write_shard(tmp_path / "mds" / name / "shard.00000.mds", (b"name of " + name.encode(), b"text"))
    shards = {f"{name}/shard.00000.mds": 1 for name in ("a", "b")}
    write_index(tmp_path / "mds", shards, ["__key__", "caption"])
    pack(tmp_path / "mds", tmp_path / "shards", shuffle=False)
    (batch,) = ShardLoader(tmp_path / "shards", batch_size=2, shuffle=False)
    assert batch["key.txt"] == ["name of a", "name of b"] and batch["caption.txt"] == ["text", "text"]
    write_index(tmp_path / "mds", shards, ["__key__", "KEY"])
    with pytest.raises(
        UsageError, match=r"columns '__key__' and 'KEY' of .* would both be packed as 'key\.txt'"
    ):
        pack(tmp_path / "mds", tmp_path / "again")


def test_no_part_is_dropped_for_its_name(tmp_path: Path) -> None:
    sample = {"__key__": "a", "txt": "x"}
    (path,) = pack([sample | {"__url__": "elsewhere.tar"}], tmp_path / "one")
    assert Shard.open(path).entries[0].parts[0].extension == "txt", "metadata of WebDataset is not a part"
    with pytest.raises(UsageError, match=r"'__meta\.json' of sample 'a' begins with two underscores"):
        pack([sample | {"__meta.json": {}}], tmp_path / "two")
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "a.__key__"):
        (tmp_path / "in" / name).write_text("x")
    with pytest.raises(UsageError, match=r"the extension of .*/a\.__key__ begins with two underscores"):
        pack(tmp_path / "in", tmp_path / "three")


def test_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "pack", str(FIXTURE), str(tmp_path / "shards")]) == 0
    assert main(["data", "check", str(tmp_path / "shards")]) == 0
    assert main(["data", "count", "--json", str(tmp_path / "shards")]) == 0
    assert "6" in capsys.readouterr().out
