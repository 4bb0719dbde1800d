"""`headway cache`: what is kept on this node, and clearing away what killed jobs left."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headway.cli import main
from headway.data import NodeCache, pack
from headway.data.cache.node_cache import CachedShards


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    (path,) = pack([{"__key__": "a", "bin": bytes(50_000)}], tmp_path / "source")
    return path


def test_what_is_kept_is_listed_and_swept(
    shard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--path", str(tmp_path)]
    assert main(["cache", "ls", *where]) == 0
    assert "0 shards" in capsys.readouterr().out
    cache = CachedShards(NodeCache(path=tmp_path, copy_local=True, min_age=0))
    held = cache.open(shard)
    assert main(["cache", "ls", *where, "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["source"] == str(shard) and entry["in_use"] and 50_000 <= entry["bytes"] < 100_000
    assert main(["cache", "ls", *where]) == 0
    said = capsys.readouterr().out
    assert "in use" in said and "1 shard under " in said
    assert main(["cache", "sweep", *where]) == 0
    assert "removed 0 B; " in (said := capsys.readouterr().out) and "in use by a job" in said
    (folder,) = tmp_path.glob("headway-cache-*")
    (folder / f"{'0' * 32}-5.part").write_bytes(bytes(8192))
    assert main(["cache", "sweep", *where, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["removed_bytes"] == 8192 and facts["left_bytes"] == entry["bytes"]
    del held, cache
    assert not folder.exists()
    assert main(["cache", "sweep", *where]) == 0
    assert capsys.readouterr().out == "removed 0 B\n"
    assert not folder.exists(), "looking makes none"


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0 and "usage: headway cache" in capsys.readouterr().out
    assert main(["cache", "burn"]) == 2
    assert "there is no cache verb 'burn'" in capsys.readouterr().err
    (tmp_path / f"headway-cache-{os.geteuid()}").mkdir()
    (tmp_path / f"headway-cache-{os.geteuid()}").chmod(0o755)
    assert main(["cache", "ls", "--path", str(tmp_path)]) == 2
    assert "cannot be used" in capsys.readouterr().err
