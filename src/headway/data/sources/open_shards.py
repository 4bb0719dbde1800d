"""The datasets of a mix, with known numbers of samples, and their shards while they are open.

Rank 0 looks, the others are told: a thousand ranks that list a folder each are a storm for a parallel file system.
"""

from __future__ import annotations

import hashlib
import resource
import shlex
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.data.cache.node_cache import CachedShards
from headway.data.catalog.catalog import Catalog
from headway.data.catalog.find import counts, paths_of
from headway.data.order.mix import Mix, Shards
from headway.data.shards.indexes import stated_count
from headway.data.shards.shard import Index, Limits, Shard
from headway.dist import collective
from headway.errors import BadShard, UsageError

_LONG = 3.0  # seconds without a word
_LEAST = 64  # shards: fewer would not do for the batches that are loaded ahead


@final
@dataclass(frozen=True)
class Source:
    """A dataset: its shards, and how many samples each of them has."""

    name: str
    paths: Sequence[Path]
    counts: Sequence[int]

    def fingerprint(self) -> str:
        """Changes when shards are added, removed, renamed or refilled; not when the dataset moves."""
        text = "\n".join(f"{path.name} {count}" for path, count in zip(self.paths, self.counts, strict=True))
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def find(mix: Mix, limits: Limits, *, shared: bool) -> list[Source]:
    """The datasets of a mix; `shared`: rank 0 looks for all ranks, which must all call this."""

    def look() -> list[tuple[str, list[Path], list[int]]]:
        return [(name, *_look(name, where, limits, mix.catalog)) for name, where in mix.shards.items()]

    def told() -> list[tuple[str, list[str], list[int]]]:
        return [(name, [str(path) for path in paths], counts) for name, paths, counts in look()]

    if not shared:
        return [Source(*each) for each in look()]
    found = collective.from_root(told)
    return [Source(name, [Path(path) for path in paths], counts) for name, paths, counts in found]


def _look(name: str, where: Shards, limits: Limits, catalog: Catalog | None) -> tuple[list[Path], list[int]]:
    paths = paths_of(name, where, catalog)
    each = _count(name, paths, limits)
    if not any(each):
        raise UsageError(f"dataset {name!r}: none of its {len(paths)} shards has a sample")
    return paths, each


def _count(name: str, paths: Sequence[Path], limits: Limits) -> list[int]:
    """Samples of each shard. If that takes long because they must be walked, it says how not to wait again."""
    began, said, each = time.monotonic(), False, list[int]()
    for path, count in zip(paths, counts(paths, limits), strict=True):
        each.append(count)
        if not said and time.monotonic() - began > _LONG and stated_count(path, limits) is None:
            said = True
            print(
                f"headway: counting the samples of {name!r}, {len(each)} of {len(paths)} shards so far; without an "
                f"index they are walked at every start: `headway data index {shlex.quote(str(path.parent))}` helps",
                file=sys.stderr,
            )
    return each


@final
class OpenShards:
    """The shards in use, `reach` of them; the one not used for longest is let go first. For many threads.

    If there may not be so many open files, indexes are kept of those that are closed: a shard without one beside it
    would be walked again for the next sample, which takes a thousand times as long as to read it.
    """

    def __init__(
        self, sources: Sequence[Source], reach: int, limits: Limits, cache: CachedShards | None = None
    ) -> None:
        self.sources, self._limits, self._cache = sources, limits, cache
        self._reach = max(reach, _LEAST)
        self._files = min(self._reach, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._open: OrderedDict[tuple[int, int], _Opening] = OrderedDict()
        self._indexes: OrderedDict[tuple[int, int], Index] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, dataset: int, shard: int) -> Shard:
        place = dataset, shard
        with self._lock:
            opening = self._open.get(place)
            if opening is None:
                opening = self._open[place] = _Opening()
                if len(self._open) > self._files:
                    self._open.popitem(last=False)  # its views, where there are any, keep it mapped
            else:
                self._open.move_to_end(place)
                if opening.shard is not None:
                    return opening.shard
        with opening.lock:  # only those wait who want this very shard
            if opening.damage:
                raise BadShard(opening.damage)
            if opening.shard is None:
                try:
                    opening.shard = self._opened(dataset, shard)
                except BadShard as error:
                    opening.damage = str(error)  # it is not read again for each of its samples
                    raise
            return opening.shard

    def _opened(self, dataset: int, shard: int) -> Shard:
        source, index = self.sources[dataset], self._indexes.get((dataset, shard))
        path, count = source.paths[shard], source.counts[shard]
        if self._cache is not None:
            opened = self._cache.open(path, index)
        else:
            opened = Shard.open(path, self._limits, index=index)
        if len(opened) != count:
            raise UsageError(
                f"{path} has {len(opened)} samples, but had {count} when the loader was made: it was replaced "
                "meanwhile, and positions would mean other samples"
            )
        with self._lock:
            self._indexes[dataset, shard] = opened.index
            self._indexes.move_to_end((dataset, shard))
            if len(self._indexes) > self._reach:
                self._indexes.popitem(last=False)
        return opened

    def keep(self, paths: Collection[Path]) -> None:
        """Lets go of all other shards: they are not needed soon."""
        wanted = set(paths)
        with self._lock:
            for dataset, shard in list(self._open):
                if self.sources[dataset].paths[shard] not in wanted:
                    del self._open[dataset, shard]


@final
class _Opening:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shard: Shard | None = None
        self.damage = ""
