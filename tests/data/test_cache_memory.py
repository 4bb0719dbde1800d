"""A job is never killed for what it caches: in a real control group, where the kernel kills whoever takes more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headway.data import pack

JOB = """
import json, os, sys
from pathlib import Path
group, where, *shards = map(Path, sys.argv[1:])
(group / "cgroup.procs").write_text(str(os.getpid()))
from headway.data.cache.node_cache import CachedShards, NodeCache
from headway.data.shards.shard import Shard

def right(shard, path):
    plain = Shard.open(path)
    return all(bytes(shard[number]["bin"]) == bytes(plain[number]["bin"]) for number in range(len(plain)))

def taken():
    return sum(file.stat().st_blocks * 512 for file in where.glob("*/*"))

cache = CachedShards(
    NodeCache(path=where, budget="100%", copy_local=True, patience=0, min_age=0, chunk_bytes=2**20)
)
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group of the first kind, with 160 MB of memory."""
    group = Path(f"/sys/fs/cgroup/memory/headway-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("this machine does not let us make control groups of the first kind")
    (group / "memory.limit_in_bytes").write_text("160000000")
    yield group
    for _ in range(100):  # the kernel takes a moment to see that its processes are gone
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)


def job(group: Path, work: str, folder: Path, shards: int) -> dict[str, Any]:
    """What a job says that does some work in a control group, with shards of 8 MB and a cache in /dev/shm."""
    made = ({"__key__": f"{n:04d}", "bin": os.urandom(800_000)} for n in range(10 * shards))
    paths = pack(made, folder, shard_size=8_030_000)
    assert len(paths) == shards
    with tempfile.TemporaryDirectory(dir="/dev/shm") as where:
        done = subprocess.run(
            [sys.executable, "-c", JOB + work, str(group), where, *map(str, paths)],
            capture_output=True,
            text=True,
            check=False,
        )
        shutil.rmtree(Path(where, f"headway-cache-{os.geteuid()}"), ignore_errors=True)
    assert done.returncode == 0, f"{done.returncode}: -9 is the kernel's kill. {done.stderr}"
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_a_job_is_not_killed_for_what_it_caches(limited: Path, tmp_path: Path) -> None:
    """Memory of /dev/shm counts for the job that wrote it: ten shards do not fit beside a model of 70 MB."""
    work = """
model = [os.urandom(2**20) for _ in range(70)]
opened = [cache.open(path) for path in shards]
good = all(right(shard, path) for shard, path in zip(opened, shards))
print(json.dumps({"right": good and len(model) == 70, "taken": taken(), **cache.counts}))
"""
    said = job(limited, work, tmp_path, 10)
    assert said["right"] and said["copied"] >= 1 and said["copied"] + said["source"] == 10
    assert said["taken"] < 80_000_000


def test_copies_go_when_the_job_needs_their_memory(limited: Path, tmp_path: Path) -> None:
    """A model that grows to 100 MB beside copies of 64 MB; the copy that is being read stays."""
    work = """
cache.expect(shards)
for turn, path in enumerate(shards):
    cache.prepare(path, turn, lambda: False)
before, model = taken(), []
reading = cache.open(shards[0])
for _ in range(100):
    model.append(os.urandom(2**20))
    cache.relieve()
after = taken()
model.clear()
good = all(right(cache.open(path), path) for path in shards) and right(reading, shards[0])
print(json.dumps({"right": good, "before": before, "after": after}))
"""
    said = job(limited, work, tmp_path, 8)
    assert said["right"]
    assert said["before"] > 64_000_000 > 50_000_000 > said["after"] > 8_000_000
