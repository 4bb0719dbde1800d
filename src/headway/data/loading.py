"""What the threads of a `ShardLoader` do: a few samples at a time, read, decoded, transformed; bad ones replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch

from headway.data.decode import Decoder, decode
from headway.data.order import Order, key
from headway.data.quarantine import Bad
from headway.data.shards import Limits
from headway.data.sources import OpenShards, Source
from headway.errors import BadSample, BadShard, HeadwayError

Place = tuple[int, int, int, int]
"""dataset, epoch, shard, sample"""
Transform = Callable[[dict[str, Any], np.random.Generator], Any]

_ATTEMPTS = 8
_AT_ONCE = 2**20  # bytes that a thread reads before it decodes
_TRANSFORM, _SUBSTITUTE = 1, 2  # what a key is for


class Loaded(NamedTuple):
    """A sample, and what it took."""

    value: Any
    size: int
    """bytes in memory, at most"""
    read: int
    """bytes in the shard"""
    bad: list[Bad]
    thread: int
    times: list[tuple[float, float]]
    """when each of its stages began and ended"""


class _Found(NamedTuple):
    """A sample that is read, and not yet decoded."""

    place: Place
    name: str
    parts: dict[str, memoryview]
    bad: list[Bad]
    times: list[tuple[float, float]]


@final
class Loading:
    """Samples: read, decoded, transformed."""

    def __init__(
        self,
        shards: OpenShards,
        sources: Sequence[Source],
        orders: Sequence[Order],
        *,
        seed: int,
        transform: Transform | None,
        decoders: dict[str, Decoder],
        limits: Limits,
    ) -> None:
        self._shards, self._sources, self._orders, self._seed = shards, sources, orders, seed
        self._transform, self._decoders, self._limits = transform, decoders, limits

    def load(self, places: Sequence[Place]) -> list[Loaded]:
        """Samples. Some are read before the first of them is decoded: decoding drives Python out of the processor's
        cache, and what is slow after it is slow once."""
        thread, loaded, found, held = threading.get_native_id(), list[Loaded](), list[_Found](), 0
        for place in places:
            found.append(self._find(place, []))
            held += sum(map(len, found[-1].parts.values()))
            if held > _AT_ONCE:
                loaded += [self._load(thread, one) for one in found]
                found, held = [], 0
        return loaded + [self._load(thread, one) for one in found]

    def _find(self, place: Place, bad: list[Bad]) -> _Found:
        began = time.perf_counter()
        while True:
            dataset, _, shard, sample = place
            name = f"sample {sample}"  # as long as its shard cannot be read
            try:
                source = self._shards.get(dataset, shard)
                name = source.entries.key(sample)
                parts = source[sample]
            except BadShard as error:
                place = self._other(place, name, error, bad)
                continue
            return _Found(place, name, parts, bad, [(began, time.perf_counter())])

    def _load(self, thread: int, found: _Found) -> Loaded:
        began = time.perf_counter()
        decoded_parts: dict[str, Any] | None = None
        while decoded_parts is None:
            try:
                decoded_parts = decode(found.parts, self._decoders, self._limits)
            except (BadSample, BadShard) as error:
                found = self._find(self._other(found.place, found.name, error, found.bad), found.bad)
        value: Any = decoded_parts | {"__key__": found.name}
        decoded, size = time.perf_counter(), _bytes(value)
        found.times.append((began, decoded))
        if self._transform is not None:
            secret = key(self._seed, _TRANSFORM, *found.place)
            value = self._transform(value, np.random.Generator(np.random.Philox(secret)))
            size = max(size, _bytes(value))
            found.times.append((decoded, time.perf_counter()))
        return Loaded(value, size, sum(map(len, found.parts.values())), found.bad, thread, found.times)

    def _other(self, place: Place, name: str, error: HeadwayError, bad: list[Bad]) -> Place:
        """Notes a bad sample, and says which one to take instead: the same one on every rank, in every run."""
        dataset, epoch, shard, sample = place
        whose, order = self._sources[dataset], self._orders[dataset]
        position = key(self._seed, _SUBSTITUTE, epoch, shard, sample, len(bad)) % order.samples
        bad.append(Bad(whose.name, str(whose.paths[shard]), name, str(error)))
        if len(bad) == _ATTEMPTS:
            raise HeadwayError(f"{_ATTEMPTS} samples in a row could not be used; the last one: {bad[-1]}")
        places = order.locate(np.array([position]))
        return dataset, epoch, int(places.shard[0]), int(places.sample[0])


def _bytes(value: Any) -> int:
    if isinstance(value, np.ndarray | torch.Tensor):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int | float):
        return 8
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 8


def collate(samples: list[Any]) -> Any:
    """Dicts to a dict of batches: numbers and arrays of one shape become a tensor, all else a list."""
    first = samples[0]
    if isinstance(first, dict):
        names = [name for name in first if all(name in sample for sample in samples)]
        return {name: collate([sample[name] for sample in samples]) for name in names}
    if isinstance(first, int | float):
        return torch.tensor(samples)
    if isinstance(first, np.ndarray) and len({(each.shape, each.dtype) for each in samples}) == 1:
        return torch.from_numpy(np.stack(samples))
    if isinstance(first, torch.Tensor) and len({(each.shape, each.dtype) for each in samples}) == 1:
        return torch.stack(samples)
    return samples
