"""`NodeCache`: one copy of each shard per node, in memory, for all processes; it never stops a run.

    loader = hw.data.ShardLoader(mix, batch_size=256, cache=hw.data.NodeCache(budget="50%"))

Shards on a local disk are in the page cache anyway, and are read in place. Shards on a shared file system are copied
once per node, before they are needed; when space runs out, those that are needed last are removed.

If anything goes wrong with the cache, shards are read at their source: a run may become slower, but does not stop. The
same samples are bad with and without a cache: those that do not match their checksum, or all samples of a damaged shard
that has only one checksum.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.data.cache.budget import is_local, parse_budget, shortage_bytes, total_bytes
from headway.data.cache.copier import CopyRequest, fetch, identify
from headway.data.cache.directory import CachedCopy, CacheDirectory, CacheEntry, NotCached, size_of
from headway.data.shards.checksums import CHUNK_BYTES, Crc32, update_digest
from headway.data.shards.shard import Shard, ShardIndex
from headway.data.shards.shard_file import ShardFile, open_file
from headway.data.shards.tar import ShardLimits
from headway.errors import HeadwayError, UsageError
from headway.system.locks import Deadline, LockTimeout
from headway.system.log import logger

_NO_WAIT_AFTER_TIMEOUT_S = 300.0  # after one timeout, no thread waits for another process during this time
_TROUBLE = (NotCached, LockTimeout, OSError)


@final
@dataclass(frozen=True, kw_only=True)
class NodeCache:
    """Settings of the cache on a node, which all processes of a user on that node share.

    >>> NodeCache(budget="256GB")
    NodeCache(budget='256GB', path='/dev/shm', prefetch=2, patience=30.0, copy_local=False, ...)
    """

    budget: str | int = "50%"
    """the size of all copies together: bytes, "256GB", or a share of the memory that this job may use"""
    path: str | Path = "/dev/shm"
    """the parent of the user's own cache directory; must not be on a shared file system"""
    prefetch: int = 2
    """shards that are copied at the same time on this node"""
    patience: float = 30.0
    """seconds to wait for another process that copies a shard, before the shard is read at its source"""
    copy_local: bool = False
    """also copy shards that are on local file systems"""
    min_age: float = 2.0
    """seconds; younger shards are not copied: versions written within a tick of the file system's clock look equal"""
    chunk_bytes: int = CHUNK_BYTES
    """bytes that are copied at a time"""

    def __post_init__(self) -> None:
        parse_budget(self.budget, 100)
        if self.prefetch < 1 or self.patience < 0 or self.chunk_bytes < 1:
            raise UsageError(
                f"prefetch={self.prefetch}, patience={self.patience:g}, chunk_bytes={self.chunk_bytes}: give at least "
                "1 shard, 0 seconds and 1 byte"
            )

    def ls(self) -> list[CacheEntry]:
        """Lists what all processes of this user have in the cache now."""
        with self._joined() as directory:
            return directory.entries() if directory else []

    def sweep(self) -> int:
        """Removes leftovers of killed processes, or everything if the cache is unused; returns the bytes freed."""
        with self._joined() as directory:
            if directory is None:
                return 0
            before, swept = directory.used(), directory.sweep(Deadline(self.patience))
            return before if directory.leave() else swept

    @contextmanager
    def _joined(self) -> Iterator[CacheDirectory | None]:
        """Opens the directory, if there is one; never creates it."""
        parent = Path(self.path)
        try:
            directory = None
            if CacheDirectory.under(parent).exists():
                directory = CacheDirectory.join(parent, Deadline(self.patience))
            yield directory
        except _TROUBLE as trouble:
            raise UsageError(
                f"the node cache cannot be used: {trouble}; headway cache sweep removes what killed jobs left"
            ) from trouble
        if directory is not None:
            directory.close()


@final
class CachedShards:
    """Opens the shards of one loader: from a copy where possible, else at the source. Thread-safe."""

    def __init__(self, settings: NodeCache, limits: ShardLimits | None = None) -> None:
        self._settings, self._limits = settings, limits
        self._lock = threading.Lock()
        self._directory: CacheDirectory | None = None
        self._no_wait_until = 0.0
        self._local: dict[Path, bool] = {}
        self._keys: dict[Path, str] = {}
        self._order: dict[str, int] = {}
        self._verified: set[str] = set()
        self._held: dict[Path, CachedCopy] = {}
        self.counts: Counter[str] = Counter()
        """shards opened: "hit" and "copied" in the cache, "local" and "source" in place; "bytes": copied bytes"""

    def open(self, path: Path, index: ShardIndex | None = None) -> Shard:
        """Opens a shard, from a copy or at its source; `index` is an earlier index of it, if there is one."""
        source = open_file(path)
        if self._reads_in_place(path):
            self._count("local")
            return Shard.open(path, self._limits, source=source, index=index)
        try:
            copy = self._copy_now(source)
        except _TROUBLE as trouble:
            self._report(path, trouble)
            return Shard.open(path, self._limits, source=source, index=index)
        return Shard.open(path, self._limits, source=source, copy=copy.data, index=index)

    def _copy_now(self, source: ShardFile) -> CachedCopy:
        """Copies a shard that is needed now; if there is no space, releases copies that are held for later."""
        patience = self._settings.patience if time.monotonic() > self._no_wait_until else 0.0
        try:
            return self._copy(source, -1, patience, lambda: False)
        except LockTimeout:
            if patience:
                self._no_wait_until = time.monotonic() + _NO_WAIT_AFTER_TIMEOUT_S
            raise
        except NotCached:
            if not self._held:
                raise
        self._held = {}
        return self._copy(source, -1, patience, lambda: False)

    def expect(self, paths: Sequence[Path]) -> dict[Path, int]:
        """Sets the shards that are needed next, in this order; returns those that fit the budget, and their turns."""
        left = parse_budget(self._settings.budget, total_bytes(Path(self._settings.path)))
        order, fitting = dict[str, int](), dict[Path, int]()
        for turn, path in enumerate(path for path in paths if not self._reads_in_place(path)):
            if path not in self._keys:
                with suppress(NotCached, HeadwayError):  # reported when it is opened
                    self._keys[path] = identify(open_file(path), self._settings.min_age)
            if path in self._keys:
                order[self._keys[path]] = turn
                left -= size_of(self._keys[path])
                if left >= 0:
                    fitting[path] = turn
        self._order = order
        self._held = {path: copy for path, copy in self._held.items() if path in fitting}
        return fitting

    def relieve(self) -> None:
        """Removes copies if the job needs their memory; copies in use stay."""
        if self._directory is None or self._directory.is_gone():
            return
        missing = shortage_bytes(self._directory.path)
        if missing:
            self._held = {}
            with self._directory.space_lock(Deadline(0)):
                self._directory.free(missing, self._order, -1)

    def prepare(self, path: Path, turn: int, is_cancelled: Callable[[], bool]) -> None:
        """Copies a shard that is needed later, and holds its copy; does not wait for other processes."""
        if path not in self._held:
            self._held[path] = self._copy(open_file(path), turn, 0, is_cancelled)

    def _reads_in_place(self, path: Path) -> bool:
        """Whether a shard is read in place, by the file system of its own directory, not that of a link to it."""
        if path not in self._local:
            directory = path.resolve().parent
            if directory not in self._local:
                self._local[directory] = is_local(directory)
            self._local[path] = self._local[directory]
        return self._local[path] and not self._settings.copy_local

    def _copy(
        self, source: ShardFile, turn: int, patience: float, is_cancelled: Callable[[], bool]
    ) -> CachedCopy:
        directory, key = self._join(patience), identify(source, self._settings.min_age)
        self._keys[source.path] = key
        request = CopyRequest(
            budget=self._settings.budget,
            slots=self._settings.prefetch,
            order=self._order,
            turn=turn,
            deadline=Deadline(patience),
            is_cancelled=is_cancelled,
            chunk_bytes=self._settings.chunk_bytes,
        )
        copy, made = fetch(directory, key, source, request)
        self._count("copied" if made else "hit", bytes=len(source) if made else 0)
        if not made and key not in self._verified and not _is_intact(copy):
            directory.discard(key)
            raise NotCached("its copy in the cache was damaged")
        self._verified.add(key)
        return copy

    def _join(self, patience: float) -> CacheDirectory:
        with self._lock:
            if self._directory is None or self._directory.is_gone():
                self._directory = CacheDirectory.join(Path(self._settings.path), Deadline(patience))
                weakref.finalize(self, self._directory.leave)
            return self._directory

    def totals(self) -> dict[str, int]:
        """Returns the current counts; other threads may change them."""
        with self._lock:
            return {f"cache/{what}": count for what, count in self.counts.items()}

    def _count(self, what: str, *, bytes: int = 0) -> int:
        with self._lock:
            self.counts["bytes"] += bytes
            self.counts[what] += 1
            return self.counts[what]

    def _report(self, path: Path, trouble: Exception) -> None:
        if self._count("source") == 1:
            logger.warning(
                f"node cache: {trouble}; reading {path} at its source (this is reported once per loader)"
            )


def _is_intact(copy: CachedCopy) -> bool:
    """Whether a copy that another process made still has the bytes of its checksum."""
    crc = Crc32()
    update_digest(crc, memoryview(copy.data))
    return crc.hexdigest() == copy.note.crc32
