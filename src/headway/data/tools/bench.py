"""How fast are these shards here, and what is the limit: each stage alone, then all of them together.

Reading alone and decoding alone (of bytes in memory, by threads that do nothing else) are what this machine can do; the
loader cannot be faster than the slower of them.
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

_COPY = 64 * 2**20
_BLOCK = 256  # samples between two looks at the clock
_MOST = 2048  # samples that are held in memory
_NEAR = 0.8  # of what limits it: then the loader itself is in order


@final
@dataclass(frozen=True, kw_only=True)
class Bench:
    """Rates in samples per second, beside what they were measured with."""

    samples: int
    """how many were used"""
    sample_bytes: float
    """of one sample, in its shard"""
    threads: int
    cores: int
    read: float
    """bytes out of shards, by the threads"""
    decode: float
    """bytes in memory to values, by the threads"""
    load: float
    """all of it, in batches, by the loader"""
    first_batch: float
    """seconds"""
    memcpy: float
    """bytes per second of one thread"""

    def verdict(self, need: float | None = None) -> str:
        """One sentence: what is the limit, and what to do about it; `need`: samples per second that training takes."""
        rate = f"{self.load:,.0f} samples/s"
        if need is not None and self.load >= need:
            return f"fast enough: {rate}, and {need:,.0f} are needed"
        if self.load < _NEAR * min(self.read, self.decode):
            return (
                f"the loader is the limit: {rate}, though reading gives {self.read:,.0f} and decoding "
                f"{self.decode:,.0f}; batches too small, or a machine that is busy?"
            )
        if self.read < self.decode:
            speed = self.read * self.sample_bytes / 1e6
            return f"reading is the limit: {rate}, {speed:,.0f} MB/s; put the shards on a faster disk, or use a cache"
        return f"the decoder is the limit: {rate} with {_count(self.threads, 'thread')}; {self._more(need)}"

    def _more(self, need: float | None) -> str:
        idle = self.cores - self.threads
        wanted = idle if need is None else -(-int(need - self.load) * self.threads // max(1, int(self.load)))
        if idle < 1:
            return f"all {_count(self.cores, 'core')} decode already: take smaller images or more cores"
        if wanted > idle:
            return f"{idle} more would not do: {_count(wanted, 'more core')} needed, or smaller images"
        return f"{wanted} more would do" if need is not None else f"{idle} more would use all cores"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def bench(
    paths: list[Path], *, threads: int | None = None, batch_size: int = 64, seconds: float = 3.0
) -> Bench:
    """Measures reading, decoding and loading of some shards, each for about so many seconds.

    >>> print(bench(sorted(Path("/data/laion").glob("*.tar"))).verdict())
    the decoder is the limit: 1,700 samples/s with 2 threads; all 2 cores decode already: take smaller images ...
    """
    cores = usable_cpus()
    threads = threads or cores
    loader = ShardLoader(paths, batch_size=batch_size, threads=threads, tail="pad", rank=0, world_size=1)
    places = _places(paths, loader.samples)
    with ThreadPoolExecutor(threads, "headway bench") as pool:
        read, raw = _rate(pool, lambda place: _bytes(*place), places, seconds)
        decoded, _ = _rate(pool, _decode, cycle(raw), seconds)
    load, first, used = _loading(loader, seconds)
    size = sum(len(part) for sample in raw for part in sample.values()) / len(raw)
    return Bench(
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


def _places(paths: list[Path], samples: int) -> list[tuple[Shard, int]]:
    """Samples in a shuffled order, as a loader would want them."""
    shards = [Shard.open(path) for path in paths[:64]]
    order = Order([len(shard) for shard in shards], Shuffle(seed=0, lanes=8))
    places = order.locate(np.arange(min(samples, order.samples, _MOST)))
    return [(shards[s], n) for s, n in zip(places.shard.tolist(), places.sample.tolist(), strict=True)]


def _bytes(shard: Shard, number: int) -> dict[str, memoryview]:
    return {name: memoryview(bytes(part)) for name, part in shard[number].items()}


def _decode(sample: dict[str, memoryview]) -> None:
    """As a loader's thread would; what came out is let go at once."""
    try:
        decode(sample)
    except BadSample:
        return  # a loader would take another one


def _rate(
    pool: ThreadPoolExecutor, work: Callable[[Any], Any], items: Iterable[Any], seconds: float
) -> tuple[float, list[Any]]:
    """Items per second, and what came out."""
    waiting = iter(items)
    results: list[Any] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        block = list(islice(waiting, _BLOCK))
        if not block:
            break
        results += pool.map(work, block)
    return len(results) / (time.perf_counter() - began), results


def _loading(loader: ShardLoader, seconds: float) -> tuple[float, float, int]:
    """Samples per second, seconds to the first batch, samples."""
    began, first = time.perf_counter(), None
    while time.perf_counter() - began < seconds:
        for _ in loader:
            first = first or time.perf_counter() - began
            if time.perf_counter() - began > seconds:
                break
    used = int(loader.counters()["samples"])
    return used / (time.perf_counter() - began), first or 0.0, used


def _memcpy() -> float:
    """The best of five."""
    source, target, took = np.ones(_COPY, np.uint8), np.ones(_COPY, np.uint8), []
    for _ in range(5):
        began = time.perf_counter()
        target[:] = source
        took.append(time.perf_counter() - began)
    return _COPY / min(took)
