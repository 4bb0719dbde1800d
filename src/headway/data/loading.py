"""What the threads of a `ShardLoader` do: one sample at a time, read, decoded, transformed; a bad one replaced."""

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
    times: tuple[float, ...]
    """when its stages began, and the last one ended"""


@final
class Loading:
    """One sample: read, decoded, transformed."""

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
        """A few samples, one after the other."""
        thread = threading.get_native_id()
        return [self._load(thread, *place) for place in places]

    def _load(self, thread: int, dataset: int, epoch: int, shard: int, sample: int) -> Loaded:
        bad: list[Bad] = []
        began = time.perf_counter()
        for attempt in range(_ATTEMPTS):
            name = f"sample {sample}"  # as long as its shard cannot be read
            try:
                source = self._shards.get(dataset, shard)
                name, opened = source.entries.key(sample), time.perf_counter()
                parts = source[sample]
                value = decode(parts, self._decoders, self._limits)
            except (BadSample, BadShard) as error:
                whose = self._sources[dataset]
                bad.append(Bad(whose.name, str(whose.paths[shard]), name, str(error)))
                shard, sample = self._other(dataset, epoch, shard, sample, attempt)
                continue
            value["__key__"] = name
            times: tuple[float, ...] = (began, opened, time.perf_counter())
            size = _bytes(value)
            if self._transform is not None:
                secret = key(self._seed, _TRANSFORM, dataset, epoch, shard, sample)
                value = self._transform(value, np.random.Generator(np.random.Philox(secret)))
                size = max(size, _bytes(value))
                times += (time.perf_counter(),)
            return Loaded(value, size, sum(map(len, parts.values())), bad, thread, times)
        raise HeadwayError(f"{_ATTEMPTS} samples in a row could not be used; the last one: {bad[-1]}")

    def _other(self, dataset: int, epoch: int, shard: int, sample: int, attempt: int) -> tuple[int, int]:
        """A substitute: the same one on every rank, in every run."""
        order = self._orders[dataset]
        position = key(self._seed, _SUBSTITUTE, epoch, shard, sample, attempt) % order.samples
        places = order.locate(np.array([position]))
        return int(places.shard[0]), int(places.sample[0])


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
