"""Datasets of MosaicML Streaming are packed as they are. Its version 0.13 wrote and read `tests/fixtures/mds`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.data import ShardLoader, pack
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


def elsewhere(index: dict[str, Any], _: Path) -> None:
    index["shards"][0]["raw_data"]["basename"] = "../../etc/passwd"


def no_columns(index: dict[str, Any], _: Path) -> None:
    del index["shards"][0]["column_sizes"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (pickled, r"column 'free' of .* is encoded as 'pkl', which is not read"),
        (other_version, r"has version 3: expected 2"),
        (not_copied, r"shard\.00000\.mds is missing: copy it, and pack again"),
        (packed_only, r"is missing: unpack shard\.00000\.mds\.zstd, or copy the shard"),
        (cut, r"sample \d of .*shard\.00000\.mds is damaged: it has \d+ bytes instead of \d+"),
        (empty, r"sample 0 of .*shard\.00000\.mds is damaged"),
        (elsewhere, r"mds/passwd is missing"),
        (no_columns, r"index\.json does not describe its shards as MDS does: KeyError\('column_sizes'\)"),
    ],
)
def test_what_cannot_be_read_is_refused(
    damage: Callable[[dict[str, Any], Path], None], says: str, tmp_path: Path
) -> None:
    shutil.copytree(FIXTURE, tmp_path / "mds")
    index = tmp_path / "mds" / "index.json"
    facts = json.loads(index.read_text())
    damage(facts, tmp_path / "mds" / "shard.00000.mds")
    index.write_text(json.dumps(facts))
    with pytest.raises(UsageError, match=says):
        pack(tmp_path / "mds", tmp_path / "shards", shuffle=False)
    assert not [*tmp_path.glob("shards/*")], "nothing half-made is left"


def test_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "pack", str(FIXTURE), str(tmp_path / "shards")]) == 0
    assert main(["data", "check", str(tmp_path / "shards")]) == 0
    assert main(["data", "count", "--json", str(tmp_path / "shards")]) == 0
    assert "6" in capsys.readouterr().out
