"""Decoded images per second from JPEG shards: headway beside its peers, and beside the bare decoder.

    python benchmarks/data.py [--samples 4096] [--threads 2] [--repeat 3]

All read the same samples, in batches of 64, decoded to RGB with simplejpeg, with the page cache warm. Peers that cannot
be imported are left out. Runs are interleaved and medians printed, because the machine is shared: ratios are safer
than rates. The limit is as many threads decoding bytes that are already in memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from torch.utils import data as torch_data

from headway.data import Shard, ShardLoader, pack

BATCH = 64


def photo(rng: np.random.Generator) -> bytes:
    """Like a photograph to a decoder: smooth, with some noise; around 500 x 375 and 70 kB."""
    height, width = rng.integers(340, 420), rng.integers(460, 540)
    coarse = rng.integers(0, 256, (height // 24 + 2, width // 24 + 2, 3)).astype(np.float32)
    y, x = np.linspace(0, len(coarse) - 1.01, height), np.linspace(0, coarse.shape[1] - 1.01, width)
    rows = (
        coarse[y.astype(int)] * (1 - y % 1)[:, None, None]
        + coarse[y.astype(int) + 1] * (y % 1)[:, None, None]
    )
    smooth = rows[:, x.astype(int)] * (1 - x % 1)[:, None] + rows[:, x.astype(int) + 1] * (x % 1)[:, None]
    noisy = smooth + rng.normal(0, 8, smooth.shape)
    return simplejpeg.encode_jpeg(noisy.clip(0, 255).astype(np.uint8), quality=85)


def make(folder: Path, count: int) -> list[Path]:
    rng = np.random.default_rng(0)
    photos = [photo(rng) for _ in range(256)]
    print(f"{count} samples of 256 photos, mean {sum(map(len, photos)) / 256 / 1000:.0f} kB")
    samples = ({"__key__": f"{n:06d}", "jpg": photos[n % 256], "cls": n % 1000} for n in range(count))
    return pack(samples, folder, shard_size=sum(map(len, photos)) // 256 * count // 8 + 2**20)


def limit(paths: list[Path], threads: int) -> Iterator[int]:
    raw = [bytes(shard[n]["jpg"]) for shard in map(Shard.open, paths) for n in range(len(shard))]
    yield 0  # reading is not counted
    with ThreadPoolExecutor(threads) as pool:
        for at in range(0, len(raw), BATCH):
            yield len(list(pool.map(simplejpeg.decode_jpeg, raw[at : at + BATCH])))


def headway(paths: list[Path], threads: int) -> Iterator[int]:
    for batch in ShardLoader(paths, batch_size=BATCH, threads=threads):
        yield len(batch["jpg"])


def webdataset(paths: list[Path], threads: int) -> Iterator[int]:
    import webdataset as wds

    dataset = (
        wds.WebDataset([str(path) for path in paths], shardshuffle=100)
        .map(_decode)
        .batched(BATCH, collation_fn=list)
    )
    for batch in wds.WebLoader(dataset, batch_size=None, num_workers=threads):
        yield len(batch)


def _decode(sample: dict[str, Any]) -> Any:
    return simplejpeg.decode_jpeg(sample["jpg"])


class Files(torch_data.Dataset[Any]):
    """One file per sample: what torch's loader is given most often."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return simplejpeg.decode_jpeg(self.paths[index].read_bytes())


def torch_files(paths: list[Path], threads: int) -> Iterator[int]:
    dataset = Files(paths[0].parent / "files")
    for batch in torch_data.DataLoader(dataset, BATCH, shuffle=True, num_workers=threads, collate_fn=list):
        yield len(batch)


def dali(paths: list[Path], threads: int) -> Iterator[int]:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=threads, device_id=None)
    def reader() -> Any:
        raw, _ = fn.readers.webdataset(
            paths=[str(path) for path in paths],
            index_paths=[str(path.with_suffix(".idx")) for path in paths],
            ext=["jpg", "cls"],
            random_shuffle=True,
        )
        return fn.decoders.image(raw, device="cpu", output_type=types.RGB)

    pipe = reader()
    pipe.build()
    total = sum(len(Shard.open(path)) for path in paths)
    for _ in range(total // BATCH):
        yield len(pipe.run()[0])


PEERS: dict[str, tuple[str | None, Callable[[list[Path], int], Iterator[int]]]] = {
    "bare decoder threads": (None, limit),
    "headway": (None, headway),
    "DALI, CPU": ("nvidia.dali", dali),
    "WebDataset": ("webdataset", webdataset),
    "torch DataLoader, files": (None, torch_files),
}


def importable(module: str | None) -> bool:
    return module is None or (
        find_spec(module.partition(".")[0]) is not None and find_spec(module) is not None
    )


def measure(run: Iterator[int]) -> tuple[float, float]:
    """Images per second, and seconds to the first batch."""
    first, images, began = None, 0, time.perf_counter()
    for count in run:
        if not count:
            began = time.perf_counter()
            continue
        first = first or time.perf_counter() - began
        images += count
    return images / (time.perf_counter() - began), first or 0.0


def resume(paths: list[Path]) -> float:
    """Seconds from a state at nine tenths of an epoch to the next batch."""
    loader = ShardLoader(paths, batch_size=BATCH)
    state = loader.state_dict() | {"position": loader.samples * 9 // 10 // BATCH * BATCH}
    began = time.perf_counter()
    again = ShardLoader(paths, batch_size=BATCH)
    again.load_state_dict(json.loads(json.dumps(state)))
    batches = iter(again)
    next(batches)
    took = time.perf_counter() - began
    batches.close()  # type: ignore[attr-defined]
    return took


def raw_rate(paths: list[Path]) -> tuple[float, float]:
    """Sample bytes out of mapped shards, and memcpy, both in GB/s: one copy of all bytes each, the best of five."""
    views = [
        view for shard in map(Shard.open, paths) for n in range(len(shard)) for view in shard[n].values()
    ]
    size = sum(map(len, views))
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    samples, copies = [], []
    for _ in range(5):
        began, at = time.perf_counter(), 0
        for view in views:
            target[at : at + len(view)] = view
            at += len(view)
        samples.append(time.perf_counter() - began)
        began = time.perf_counter()
        target[:] = source
        copies.append(time.perf_counter() - began)
    return size / min(samples) / 1e9, size / min(copies) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = make(Path(folder), args.samples)
        files = Path(folder, "files")
        files.mkdir()
        for number, path in enumerate(paths):
            shard = Shard.open(path)
            for n in range(len(shard)):
                (files / f"{number}-{n:05d}.jpg").write_bytes(shard[n]["jpg"])
        peers = {name: run for name, (module, run) in PEERS.items() if importable(module)}
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
        for _ in range(args.repeat):
            for name, run in peers.items():
                seen[name].append(measure(run(paths, args.threads)))
        rates = {name: statistics.median(rate for rate, _ in runs) for name, runs in seen.items()}
        for name, rate in rates.items():
            first = statistics.median(first for _, first in seen[name])
            part = rate / rates["bare decoder threads"]
            print(f"{name:26} {rate:7.0f} img/s  {part:5.0%} of the decoder   first batch {first:5.2f} s")
        sample_rate, copy_rate = raw_rate(paths)
        print(
            f"resume at 90 % of an epoch {resume(paths):.3f} s to the first batch, making the loader included"
        )
        print(
            f"sample bytes {sample_rate:.1f} GB/s, memcpy {copy_rate:.1f} GB/s: {sample_rate / copy_rate:.0%}"
        )


if __name__ == "__main__":
    main()
