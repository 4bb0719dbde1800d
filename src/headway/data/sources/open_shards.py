"""Finds the datasets of a mix and counts their samples (`find_sources`), and keeps shards open (`OpenShards`).

Rank 0 lists directories for all ranks, because a thousand ranks at once would overload a parallel file system.
"""

from __future__ import annotations

import hashlib
import resource
import shlex
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.data.cache.node_cache import CachedShards
from headway.data.catalog.catalog import Catalog
from headway.data.catalog.shard_files import ShardSpec, count_shards, find_shards, warn_of_unfinished
from headway.data.shards.indexes import indexed_count
from headway.data.shards.shard import Shard, ShardIndex
from headway.data.shards.tar import ShardLimits
from headway.data.sources.mix import Mix
from headway.dist.collective.guard import from_root
from headway.errors import BadShard, UsageError
from headway.system.log import logger

_NOTICE_AFTER_S = 3.0  # of counting without an index
_MIN_OPEN_SHARDS = 64  # fewer would not suffice for prefetched batches


@final
@dataclass(frozen=True)
class Source:
    """A dataset: its shards, and the number of samples in each of them."""

    name: str
    paths: Sequence[Path]
    counts: Sequence[int]

    def fingerprint(self) -> str:
        """Returns a hash that changes when shards are added, removed, renamed or refilled; not when they are moved."""
        text = "\n".join(f"{path.name} {count}" for path, count in zip(self.paths, self.counts, strict=True))
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def find_sources(
    mix: Mix,
    limits: ShardLimits,
    *,
    shared: bool,
    max_bad: float = 0.0,
    notice_after_s: float = _NOTICE_AFTER_S,
) -> list[Source]:
    """Finds the datasets of a mix; with `shared`, on rank 0 for all ranks, which must all call this.

    Shards whose samples cannot be counted, because they are damaged, are left out, up to a share of `max_bad`.
    """

    def find() -> list[tuple[str, list[str], list[int]]]:
        found = [
            (name, *_find(name, spec, limits, mix.catalog, max_bad, notice_after_s))
            for name, spec in mix.shards.items()
        ]
        return [(name, [str(path) for path in paths], counts) for name, paths, counts in found]

    sources = from_root(find) if shared else find()
    return [Source(name, [Path(path) for path in paths], counts) for name, paths, counts in sources]


def _find(
    name: str,
    spec: ShardSpec,
    limits: ShardLimits,
    catalog: Catalog | None,
    max_bad: float,
    notice_after_s: float,
) -> tuple[list[Path], list[int]]:
    paths, damaged = find_shards(name, spec, catalog), dict[Path, str]()
    warn_of_unfinished(name, paths)
    counts = _count(name, paths, limits, notice_after_s, damaged)
    if damaged:
        first = damaged[min(damaged)]
        found = f"dataset {name!r}: {len(damaged)} of {len(paths)} shards cannot be counted"
        if len(damaged) > max_bad * len(paths):
            raise BadShard(f"{found}, more than max_bad={max_bad:g}; the first of them: {first}")
        logger.warning(f"{found}, and are left out; the first of them: {first}")
    if not any(counts):
        raise UsageError(f"dataset {name!r}: none of its {len(paths)} shards has a sample; pack it again")
    return paths, counts


def _count(
    name: str, paths: Sequence[Path], limits: ShardLimits, notice_after_s: float, damaged: dict[Path, str]
) -> list[int]:
    """Counts the samples of each shard. If that takes long because there is no index, logs how to write one."""
    began, noticed, counts = time.monotonic(), False, list[int]()
    for path, count in zip(paths, count_shards(paths, limits, damaged=damaged), strict=True):
        counts.append(count)
        is_slow = time.monotonic() - began > notice_after_s
        if not noticed and is_slow and indexed_count(path, limits) is None:
            noticed = True
            logger.info(
                f"counting the samples of {name!r}, {len(counts)} of {len(paths)} shards so far; without an index this "
                f"is repeated at every start: run `headway data index {shlex.quote(str(path.parent))}` once"
            )
    return counts


@final
class OpenShards:
    """The shards in use, at most `max_open`; the least recently used one is closed first. Thread-safe.

    If the limit of open files is lower, the indexes of closed shards are kept: walking a shard that has no index file
    again would take a thousand times as long as reading the next sample.
    """

    def __init__(
        self, sources: Sequence[Source], max_open: int, limits: ShardLimits, cache: CachedShards | None = None
    ) -> None:
        self.sources, self.max_open, self.limits, self._cache = sources, max_open, limits, cache
        self._max_indexes = max(max_open, _MIN_OPEN_SHARDS)
        self._max_files = min(self._max_indexes, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._open: OrderedDict[tuple[int, int], _OpenShard] = OrderedDict()
        self._indexes: OrderedDict[tuple[int, int], ShardIndex] = OrderedDict()
        self._lock = threading.Lock()
        self.indexed = True
        """whether all shards opened so far have an index; others take long to open"""

    @property
    def cached(self) -> bool:
        """Whether they are read from the node cache."""
        return self._cache is not None

    def get(self, dataset: int, shard: int) -> Shard:
        """Returns a shard, opening it if it is not open. A damaged one raises `BadShard` each time."""
        place = dataset, shard
        with self._lock:
            slot = self._open.get(place)
            if slot is None:
                slot = self._open[place] = _OpenShard()
                if len(self._open) > self._max_files:
                    self._open.popitem(last=False)  # views of its bytes keep it mapped
            else:
                self._open.move_to_end(place)
                if slot.shard is not None:
                    return slot.shard
        with slot.lock:  # only threads that need this very shard wait
            if slot.damage:
                raise BadShard(slot.damage)
            if slot.shard is None:
                try:
                    slot.shard = self._open_shard(dataset, shard)
                except BadShard as error:
                    slot.damage = str(error)  # so that its other samples do not open it again
                    raise
            return slot.shard

    def _open_shard(self, dataset: int, shard: int) -> Shard:
        source, index = self.sources[dataset], self._indexes.get((dataset, shard))
        path, count = source.paths[shard], source.counts[shard]
        if self._cache is not None:
            opened = self._cache.open(path, index)
        else:
            opened = Shard.open(path, self.limits, index=index)
        if len(opened) != count:
            raise UsageError(
                f"{path} has {len(opened)} samples, but had {count} when the loader was created: it was replaced, and "
                "positions would mean other samples; create the loader again"
            )
        with self._lock:
            self.indexed &= opened.index.stated
            self._indexes[dataset, shard] = opened.index
            self._indexes.move_to_end((dataset, shard))
            if len(self._indexes) > self._max_indexes:
                self._indexes.popitem(last=False)
        return opened

    def keep(self, paths: Collection[Path]) -> None:
        """Closes all other shards."""
        wanted = set(paths)
        with self._lock:
            for dataset, shard in list(self._open):
                if self.sources[dataset].paths[shard] not in wanted:
                    del self._open[dataset, shard]


@final
class _OpenShard:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shard: Shard | None = None
        self.damage = ""
