"""What the threads of a `ShardLoader` do: a few samples at a time, read, decoded, transformed; bad ones replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch

from headway.data.order.order import Order, key
from headway.data.quarantine import Bad
from headway.data.shards.decode import Decoder, begin, finish
from headway.data.shards.shard import Limits
from headway.data.sources.open_shards import OpenShards
from headway.errors import BadSample, BadShard, HeadwayError

Place = tuple[int, int, int, int]
"""dataset, epoch, shard, sample"""
Transform = Callable[[dict[str, Any], np.random.Generator], Any]

_ATTEMPTS = 8
_AT_ONCE = 2**20  # bytes that a thread reads before it decodes
_TRANSFORM, _SUBSTITUTE = 1, 2  # what a key is for


@dataclass(slots=True)
class Portion:
    """Some samples, and what they took."""

    thread: int
    values: list[Any] = field(default_factory=list)
    size: int = 0
    """bytes in memory, at most"""
    read: int = 0
    """bytes in the shards"""
    bad: list[Bad] = field(default_factory=list)
    times: list[tuple[float, ...]] = field(default_factory=list)
    """of a few samples at a time: when they were begun, read, decoded and, where that is done, transformed"""


@dataclass(slots=True)
class _Found:
    """A sample that is read. All it has is known but its pictures."""

    place: Place
    name: str
    value: dict[str, Any]
    late: list[tuple[str, memoryview, Decoder]]
    """pictures, and what decodes them"""
    read: int
    bad: list[Bad]


@final
class Loading:
    """Samples: read, decoded, transformed."""

    def __init__(
        self,
        shards: OpenShards,
        orders: Sequence[Order],
        *,
        seed: int,
        transform: Transform | None,
        decoders: dict[str, Decoder],
        limits: Limits,
    ) -> None:
        self._shards, self._orders, self._seed = shards, orders, seed
        self._transform, self._decoders, self._limits = transform, decoders, limits

    def load(self, places: Sequence[Place]) -> Portion:
        """Samples, a few at a time: all are read, then all pictures are decoded. A picture drives Python out of the
        processor's cache: what would run between two of them would take several times as long."""
        portion = Portion(threading.get_native_id())
        found, held, began = list[_Found](), 0, time.perf_counter()
        for place in places:
            found.append(self._find(place, []))
            held += found[-1].read
            if held > _AT_ONCE:
                self._finish(portion, found, began)
                found, held, began = [], 0, time.perf_counter()
        if found:
            self._finish(portion, found, began)
        return portion

    def _find(self, place: Place, bad: list[Bad]) -> _Found:
        while True:
            dataset, _, shard, sample = place
            name = f"sample {sample}"  # as long as its shard cannot be read
            try:
                source = self._shards.get(dataset, shard)
                name = source.entries.key(sample)
                parts, value, late, read = source[sample], dict[str, Any](), [], 0
                for extension, data in parts.items():
                    value[extension], decoder = begin(extension, data, self._decoders, self._limits)
                    read += len(data)
                    if decoder is not None:
                        late.append((extension, data, decoder))
            except (BadSample, BadShard) as error:
                place = self._other(place, name, error, bad)
                continue
            value["__key__"] = name
            return _Found(place, name, value, late, read, bad)

    def _finish(self, portion: Portion, found: list[_Found], began: float) -> None:
        """Decodes pictures. A transform follows at once: it finds them in the cache, and often makes them smaller."""
        read, transforming = time.perf_counter(), 0.0
        for number, each in enumerate(found):
            found[number] = one = self._decoded(each)
            if self._transform is not None:
                decoded, before = time.perf_counter(), _bytes(one.value)
                value = self._transformed(one)
                portion.size += max(before, _bytes(value))
                portion.values.append(value)
                transforming += time.perf_counter() - decoded
        end = time.perf_counter()
        if self._transform is None:
            portion.values += [one.value for one in found]
            portion.size += sum([_bytes(one.value) for one in found])
            portion.times.append((began, read, end))
        else:
            portion.times.append((began, read, end - transforming, end))
        portion.read += sum([one.read for one in found])
        portion.bad += [each for one in found for each in one.bad]

    def _decoded(self, one: _Found) -> _Found:
        """The sample with its pictures, or another one instead, if they cannot be decoded."""
        while True:
            try:
                finish(one.late, one.value, self._decoders)
            except (BadSample, BadShard) as error:
                one = self._find(self._other(one.place, one.name, error, one.bad), one.bad)
            else:
                return one

    def _transformed(self, one: _Found) -> Any:
        assert self._transform is not None
        secret = key(self._seed, _TRANSFORM, *one.place)
        return self._transform(one.value, np.random.Generator(np.random.Philox(secret)))

    def _other(self, place: Place, name: str, error: HeadwayError, bad: list[Bad]) -> Place:
        """Notes a bad sample, and says which one to take instead: the same one on every rank, in every run."""
        dataset, epoch, shard, sample = place
        whose, order = self._shards.sources[dataset], self._orders[dataset]
        position = key(self._seed, _SUBSTITUTE, epoch, shard, sample, len(bad)) % order.samples
        bad.append(Bad(whose.name, str(whose.paths[shard]), name, str(error)))
        if len(bad) == _ATTEMPTS:
            raise HeadwayError(f"{_ATTEMPTS} samples in a row could not be used; the last one: {bad[-1]}")
        places = order.locate(np.array([position]))
        return dataset, epoch, int(places.shard[0]), int(places.sample[0])


def _bytes(value: Any) -> int:
    if isinstance(value, (int, float)):
        return 8
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return int(value.nbytes)
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 8


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
