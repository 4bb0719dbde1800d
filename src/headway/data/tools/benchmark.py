"""Measures how fast shards are loaded, and what the bottleneck is: each stage alone, then all of them together.

Reading alone and decoding alone (from memory) are upper bounds: the loader cannot be faster than the slower of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, final

import numpy as np

from headway.data.order.order import Order, Shuffle
from headway.data.shard_loader import ShardLoader
from headway.data.shards.decode import decode
from headway.data.shards.shard import Shard
from headway.errors import BadSample
from headway.system.limits import usable_cpus
from headway.system.text import plural

_MEMCPY_BYTES = 64 * 2**20
_BLOCK_SAMPLES = 256  # between two checks of the clock
_MAX_SAMPLES = 2048  # held in memory
_MIN_EFFICIENCY = 0.8  # relative to the slower stage: below it, the loader itself is the bottleneck


@final
@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Rates in samples per second, and the settings that they were measured with."""

    samples: int
    """loaded during the measurement"""
    sample_bytes: float
    """per sample in its shard, on average"""
    threads: int
    cores: int
    read: float
    """reading bytes from shards"""
    decode: float
    """decoding bytes in memory"""
    load: float
    """loading batches with the loader"""
    first_batch: float
    """seconds to the first batch"""
    memcpy: float
    """bytes per second of one thread"""

    def verdict(self, need: float | None = None) -> str:
        """Returns one sentence on the bottleneck and its remedy; `need`: samples per second that training consumes."""
        rate = f"{self.load:,.0f} samples/s"
        if need is not None and self.load >= need:
            return f"fast enough: {rate}, and {need:,.0f} are needed"
        if self.load < _MIN_EFFICIENCY * min(self.read, self.decode):
            return (
                f"the loader is the bottleneck: {rate}, though reading reaches {self.read:,.0f} and decoding "
                f"{self.decode:,.0f}; use larger batches, or measure on an idle machine"
            )
        if self.read < self.decode:
            speed = self.read * self.sample_bytes / 1e6
            return f"reading is the bottleneck: {rate}, {speed:,.0f} MB/s; use a faster disk or a cache"
        return f"the decoder is the bottleneck: {rate} with {plural(self.threads, 'thread')}; {self._remedy(need)}"

    def _remedy(self, need: float | None) -> str:
        idle = self.cores - self.threads
        wanted = idle if need is None else -(-int(need - self.load) * self.threads // max(1, int(self.load)))
        if idle < 1:
            return f"all {plural(self.cores, 'core')} are in use: use smaller images or more cores"
        if wanted > idle:
            return f"{idle} more will not suffice: {plural(wanted, 'more core')} needed, or smaller images"
        return f"{wanted} more will suffice" if need is not None else f"{idle} more would use all cores"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_benchmark(
    paths: list[Path], *, threads: int | None = None, batch_size: int = 64, seconds: float = 3.0
) -> Benchmark:
    """Measures reading, decoding and loading of shards, each for about `seconds`.

    >>> print(run_benchmark(sorted(Path("/data/laion").glob("*.tar"))).verdict())
    the decoder is the bottleneck: 1,700 samples/s with 2 threads; all 2 cores are in use: use smaller images ...
    """
    cores = usable_cpus()
    threads = threads or cores
    loader = ShardLoader(paths, batch_size=batch_size, threads=threads, tail="pad", rank=0, world_size=1)
    locations = _shuffled_samples(paths, loader.samples)
    with ThreadPoolExecutor(threads, "headway bench") as pool:
        read, raw = _rate(pool, lambda location: _copy_bytes(*location), locations, seconds)
        decoded, _ = _rate(pool, _decode, cycle(raw), seconds)
    load, first, used = _measure_loader(loader, seconds)
    size = sum(len(part) for sample in raw for part in sample.values()) / len(raw)
    return Benchmark(
        samples=used,
        sample_bytes=size,
        threads=threads,
        cores=cores,
        read=read,
        decode=decoded,
        load=load,
        first_batch=first,
        memcpy=_memcpy(),
    )


def _shuffled_samples(paths: list[Path], samples: int) -> list[tuple[Shard, int]]:
    """Returns samples in a shuffled order, as a loader reads them."""
    shards = [Shard.open(path) for path in paths[:64]]
    order = Order([len(shard) for shard in shards], Shuffle(seed=0, lanes=8))
    found = order.locate(np.arange(min(samples, order.samples, _MAX_SAMPLES)))
    return [(shards[s], n) for s, n in zip(found.shard.tolist(), found.sample.tolist(), strict=True)]


def _copy_bytes(shard: Shard, number: int) -> dict[str, memoryview]:
    return {name: memoryview(bytes(part)) for name, part in shard[number].items()}


def _decode(sample: dict[str, memoryview]) -> None:
    """Decodes a sample as a loader's thread does, and discards the result."""
    try:
        decode(sample)
    except BadSample:
        return  # a loader would load a substitute


def _rate(
    pool: ThreadPoolExecutor, work: Callable[[Any], Any], items: Iterable[Any], seconds: float
) -> tuple[float, list[Any]]:
    """Returns items per second, and the results."""
    waiting = iter(items)
    results: list[Any] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        block = list(islice(waiting, _BLOCK_SAMPLES))
        if not block:
            break
        results += pool.map(work, block)
    return len(results) / (time.perf_counter() - began), results


def _measure_loader(loader: ShardLoader, seconds: float) -> tuple[float, float, int]:
    """Returns samples per second, seconds to the first batch, and samples."""
    began, first = time.perf_counter(), None
    while time.perf_counter() - began < seconds:
        for _ in loader:
            first = first or time.perf_counter() - began
            if time.perf_counter() - began > seconds:
                break
    used = int(loader.counters()["samples"])
    return used / (time.perf_counter() - began), first or 0.0, used


def _memcpy() -> float:
    """Returns the bytes per second of copying memory, the best of five."""
    source, target, took = np.ones(_MEMCPY_BYTES, np.uint8), np.ones(_MEMCPY_BYTES, np.uint8), []
    for _ in range(5):
        began = time.perf_counter()
        target[:] = source
        took.append(time.perf_counter() - began)
    return _MEMCPY_BYTES / min(took)
