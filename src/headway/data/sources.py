"""Where shards are: folders, patterns and lists of files to datasets with known numbers of samples.

Rank 0 looks, the others are told: a thousand ranks that list a folder each are a storm for a parallel file system.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import final

from headway import dist
from headway.data.mix import Shards
from headway.data.shards import Limits, Shard, count_samples, index_text, walk
from headway.errors import UsageError
from headway.files import storage, write_atomic

_COUNTING_THREADS = 16  # most of counting is waiting for the file system


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


def find(shards: Mapping[str, Shards], limits: Limits, *, shared: bool) -> list[Source]:
    """The datasets of a mix; `shared`: rank 0 looks for all ranks, which must all call this."""

    def look() -> list[tuple[str, list[str], list[int]]]:
        return [(name, *_look(name, where, limits)) for name, where in shards.items()]

    found = dist.from_root(look) if shared else look()
    return [Source(name, [Path(path) for path in paths], counts) for name, paths, counts in found]


def index(shards: Shards, *, overwrite: bool = False) -> list[Path]:
    """Writes DALI's text index beside each shard that has none, and returns the paths of those written.

    Not needed for headway, which walks shards without one; it saves the walk, and DALI needs it. Shards with spaces in
    their names cannot have one, and are left out.

        hw.data.index("/data/laion/*.tar")
    """
    paths = [path for path in _paths("index", shards) if overwrite or not path.with_suffix(".idx").exists()]
    with ThreadPoolExecutor(_COUNTING_THREADS, "headway index") as pool:
        return [written for written in pool.map(_write_index, paths) if written is not None]


def _write_index(path: Path) -> Path | None:
    text = index_text(walk(path))
    if text is None:
        return None
    target = path.with_suffix(".idx")
    with storage(f"write {target}"):
        write_atomic(target, text.encode("utf-8", "surrogateescape"))
        target.chmod(path.stat().st_mode & 0o666)  # who may read the shard may read its index
    return target


def _look(name: str, where: Shards, limits: Limits) -> tuple[list[str], list[int]]:
    paths = _paths(name, where)
    with ThreadPoolExecutor(_COUNTING_THREADS, "headway count") as pool:
        counts = list(pool.map(lambda path: count_samples(path, limits), paths))
    if not any(counts):
        raise UsageError(f"dataset {name!r}: none of its {len(paths)} shards has a sample")
    return [str(path) for path in paths], counts


def _paths(name: str, where: Shards) -> list[Path]:
    if not isinstance(where, str | Path):
        paths = [Path(path) for path in where]
    elif "://" in str(where) or str(where).startswith("pipe:"):
        raise UsageError(
            f"dataset {name!r}: {str(where)!r} is not a path; shards are read from file systems only"
        )
    elif Path(where).is_dir():
        paths = sorted(Path(where).glob("*.tar"))
    else:
        paths = sorted(Path(path) for path in glob(str(where), recursive=True))  # noqa: PTH207 - may be absolute
    if not paths:
        raise UsageError(
            f"dataset {name!r}: no shards found at {str(where)!r}; give a folder, a pattern or a list"
        )
    return paths


@final
class OpenShards:
    """The shards in use, mapped; the one not used for longest is let go first. For many threads."""

    def __init__(self, sources: Sequence[Source], limits: Limits, capacity: int) -> None:
        self._sources, self._limits, self._capacity = sources, limits, capacity
        self._open: OrderedDict[tuple[int, int], _Opening] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, dataset: int, shard: int) -> Shard:
        with self._lock:
            opening = self._open.setdefault((dataset, shard), _Opening())
            self._open.move_to_end((dataset, shard))
            if len(self._open) > self._capacity:
                self._open.popitem(last=False)  # its views, where there are any, keep it mapped
        with opening.lock:  # only those wait who want this very shard
            if opening.shard is None:
                source = self._sources[dataset]
                opening.shard = Shard.open(source.paths[shard], self._limits)
                if len(opening.shard) != source.counts[shard]:
                    raise UsageError(
                        f"{source.paths[shard]} has {len(opening.shard)} samples, but had {source.counts[shard]} when "
                        "the loader was made: it was replaced meanwhile, and positions would mean other samples"
                    )
            return opening.shard


@final
class _Opening:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shard: Shard | None = None
