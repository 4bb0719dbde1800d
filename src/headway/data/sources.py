"""The datasets of a mix, with known numbers of samples, and their shards while they are open.

Rank 0 looks, the others are told: a thousand ranks that list a folder each are a storm for a parallel file system.
"""

from __future__ import annotations

import hashlib
import resource
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway import dist
from headway.data.cache import CachedShards
from headway.data.catalog import Catalog
from headway.data.finding import counts, paths_of
from headway.data.mix import Mix, Shards
from headway.data.shards import Limits, Shard
from headway.errors import BadShard, UsageError


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
    found = dist.from_root(told)
    return [Source(name, [Path(path) for path in paths], counts) for name, paths, counts in found]


def _look(name: str, where: Shards, limits: Limits, catalog: Catalog | None) -> tuple[list[Path], list[int]]:
    paths = paths_of(name, where, catalog)
    each = list(counts(paths, limits))
    if not any(each):
        raise UsageError(f"dataset {name!r}: none of its {len(paths)} shards has a sample")
    return paths, each


@final
class OpenShards:
    """The shards in use; the one not used for longest is let go first. For many threads."""

    def __init__(
        self, sources: Sequence[Source], capacity: int, limits: Limits, cache: CachedShards | None = None
    ) -> None:
        self.sources, self._limits, self._cache = sources, limits, cache
        self._capacity = min(
            capacity, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        )  # each is an open file
        self._open: OrderedDict[tuple[int, int], _Opening] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, dataset: int, shard: int) -> Shard:
        place = dataset, shard
        with self._lock:
            opening = self._open.get(place)
            if opening is None:
                opening = self._open[place] = _Opening()
                if len(self._open) > self._capacity:
                    self._open.popitem(last=False)  # its views, where there are any, keep it mapped
            else:
                self._open.move_to_end(place)
                if opening.shard is not None:
                    return opening.shard
        with opening.lock:  # only those wait who want this very shard
            if opening.damage:
                raise BadShard(opening.damage)
            if opening.shard is None:
                source = self.sources[dataset]
                path = source.paths[shard]
                try:
                    opened = self._cache.open(path) if self._cache else Shard.open(path, self._limits)
                except BadShard as error:
                    opening.damage = str(error)  # it is not read again for each of its samples
                    raise
                if len(opened) != source.counts[shard]:
                    raise UsageError(
                        f"{path} has {len(opened)} samples, but had {source.counts[shard]} when the loader was made: "
                        "it was replaced meanwhile, and positions would mean other samples"
                    )
                opening.shard = opened  # only now: others take it without a question
            return opening.shard

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
