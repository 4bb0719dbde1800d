"""DALI on the CPU and headway read each other's shards and indexes. Needs the environment of scripts/make-peers.sh."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import webdataset

from headway.data import Shard, ShardLoader, pack
from headway.data.shards.shard import walk

PEERS = Path(os.environ.get("HEADWAY_PEERS", Path(__file__).parents[2] / ".peers"))
pytestmark = pytest.mark.skipif(
    not (PEERS / "bin" / "wds2idx").exists(),
    reason=f"no DALI in {PEERS}: run scripts/make-peers.sh, or set HEADWAY_PEERS",
)

READ = """
import hashlib, json, sys
from nvidia.dali import fn, pipeline_def, types

paths, total = sys.argv[2:], int(sys.argv[1])

@pipeline_def(batch_size=total, num_threads=1, device_id=None)
def reader():
    raw, label = fn.readers.webdataset(
        paths=paths, index_paths=[path.removesuffix("tar") + "idx" for path in paths], ext=["jpg", "cls"]
    )
    return raw, label, fn.decoders.image(raw, device="cpu", output_type=types.RGB)

pipe = reader()
pipe.build()
raw, label, image = pipe.run()
print(json.dumps([
    [bytes(label.at(n)).decode(), hashlib.md5(bytes(raw.at(n))).hexdigest(), list(image.at(n).shape)]
    for n in range(total)
]))
"""


def photos(count: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    return [
        simplejpeg.encode_jpeg(rng.integers(0, 256, (20 + n, 30, 3), dtype=np.uint8)) for n in range(count)
    ]


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dali_reads_what_we_pack(tmp_path: Path) -> None:
    images = photos(12)
    samples = ({"__key__": f"a/{n:03d}", "jpg": image, "cls": n} for n, image in enumerate(images))
    paths = pack(samples, tmp_path, shard_size=20_480)
    assert len(paths) > 1
    seen = json.loads(run(PEERS / "bin" / "python", "-W", "ignore", "-c", READ, "12", *map(str, paths)))
    assert seen == [
        [str(n), hashlib.md5(image).hexdigest(), [20 + n, 30, 3]] for n, image in enumerate(images)
    ]


def test_we_read_the_index_that_dali_makes(tmp_path: Path) -> None:
    path = tmp_path / "theirs.tar"
    with webdataset.TarWriter(str(path)) as sink:
        for n, image in enumerate(photos(5)):
            sink.write({"__key__": f"{n:03d}", "jpg": image, "cls": n})
    run(PEERS / "bin" / "wds2idx", path, path.with_suffix(".idx"))
    walked, shard = list(walk(path)), Shard.open(path)
    assert list(shard.entries) == walked and len(walked) == 5
    assert [bytes(shard[n]["jpg"]) for n in range(5)] == photos(5)


def test_dali_makes_the_index_that_we_make(tmp_path: Path) -> None:
    (path,) = pack(({"__key__": str(n), "jpg": image} for n, image in enumerate(photos(4))), tmp_path)
    ours = path.with_suffix(".idx").read_text()
    run(PEERS / "bin" / "wds2idx", path, path.with_suffix(".idx"))
    assert path.with_suffix(".idx").read_text().split() == ours.split()


FEED = """
import json, sys
from nvidia.dali import fn, pipeline_def, types

sys.path.insert(0, sys.argv[1])
from headway.data import DaliSource

def run(source, batches):
    @pipeline_def(batch_size=4, num_threads=1, device_id=None)
    def pipeline():
        jpg, cls, end = fn.external_source(source, num_outputs=3)
        return fn.decoders.image(jpg, device="cpu", output_type=types.RGB), cls, end

    pipe, seen, end = pipeline(), [], 0
    pipe.build()
    for _ in range(batches):
        images, labels, ends = pipe.run()
        seen += [[int(bytes(labels.at(n))), images.at(n).shape[0]] for n in range(4)]
        end = int(ends.at(0)[0])
    return seen, end

source = DaliSource(sys.argv[2:], batch_size=4, seed=3)
first, end = run(source, 1)
resumed = DaliSource(sys.argv[2:], batch_size=4, seed=3)
resumed.load_state_dict(source.state_dict(end))
print(json.dumps(first + run(resumed, 2)[0]))
"""


def test_dali_gets_samples_in_our_order_and_resumes_after_the_batch_it_returned(tmp_path: Path) -> None:
    if run_fails(PEERS / "bin" / "python", "-c", "import torch"):
        pytest.skip(f"no torch in {PEERS}, which headway.data needs in the process of DALI")
    samples = ({"__key__": f"{n:03d}", "jpg": image, "cls": n} for n, image in enumerate(photos(12)))
    paths, source = pack(samples, tmp_path, shard_size=20_480), Path(__file__).parents[2] / "src"
    seen = json.loads(
        run(PEERS / "bin" / "python", "-W", "ignore", "-c", FEED, source, *map(str, paths)).splitlines()[-1]
    )
    order = [label for batch in ShardLoader(paths, batch_size=4, seed=3) for label in batch["cls"].tolist()]
    assert seen == [[label, 20 + label] for label in order]


def run_fails(*command: str | Path) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode != 0
