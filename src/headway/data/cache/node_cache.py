"""`NodeCache`: one copy of each shard per node, in memory, for all processes; never in the way of a run.

    loader = hw.data.ShardLoader(mix, batch_size=256, cache=hw.data.NodeCache(budget="50%"))

Shards on a disk of this machine are in its page cache anyway, and read in place. For those on a file system that many
nodes share, a copy is made once per node, before it is needed, and removed when it is not needed for longest.

Whatever goes wrong with the cache, shards are read at their source: it may make a run slower, but it never stops one.
The one exception is a shard whose bytes are not those of its checksum: that is a `BadShard` with and without a cache.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.data.cache.budget import is_local, parse, shortage, whole
from headway.data.cache.copier import Terms, get, identify
from headway.data.cache.directory import CacheFolder, Copy, Found, size_of
from headway.data.cache.leases import Deadline, NotCached, WaitedTooLong
from headway.data.shards.shard import File, Index, Limits, Shard, open_file
from headway.errors import HeadwayError, UsageError

_STEP = 8 * 2**20
_HURRY = 300.0  # seconds for which nobody waits again, after one wait was in vain


@final
@dataclass(frozen=True, kw_only=True)
class NodeCache:
    """How shards are kept on a node; all processes of a user on a node share what they keep.

    >>> NodeCache(budget="256GB")
    NodeCache(budget='256GB', path='/dev/shm', prefetch=2, patience=30.0, copy_local=False)
    """

    budget: str | int = "50%"
    """what all copies together may take: bytes, "256GB", or a part of the memory that this job may use"""
    path: str | Path = "/dev/shm"
    """where the copies are, in a directory of the user's own; not on a file system that nodes share"""
    prefetch: int = 2
    """shards that are copied at once on this node"""
    patience: float = 30.0
    """seconds to wait for another process that copies a shard, before it is read at its source"""
    copy_local: bool = False
    """copy shards on file systems of this machine, too"""

    def __post_init__(self) -> None:
        parse(self.budget, 100)
        if self.prefetch < 1 or self.patience < 0:
            raise UsageError(
                f"prefetch={self.prefetch}, patience={self.patience:g}: give at least 1 shard and 0 seconds"
            )

    def ls(self) -> list[Found]:
        """What this user has in the cache now, by whichever process."""
        with self._joined() as folder:
            return folder.found() if folder else []

    def sweep(self) -> int:
        """Removes what killed processes left behind, and all if nobody uses the cache; returns how many bytes."""
        with self._joined() as folder:
            if folder is None:
                return 0
            before, swept = folder.used(), folder.sweep(Deadline(self.patience))
            return before if folder.leave() else swept

    @contextmanager
    def _joined(self) -> Iterator[CacheFolder | None]:
        """The directory, if there is one: looking makes none, and leaves all as it is."""
        parent = Path(self.path)
        try:
            folder = None
            if CacheFolder.under(parent).exists():
                folder = CacheFolder.join(parent, Deadline(self.patience))
            yield folder
        except (NotCached, OSError) as trouble:
            raise UsageError(f"the node cache cannot be used: {trouble}") from trouble
        if folder is not None:
            folder.close()


@final
class CachedShards:
    """Opens the shards of one loader: copies where it can, sources where it cannot. For many threads."""

    def __init__(self, how: NodeCache, limits: Limits | None = None) -> None:
        self._how, self._limits = how, limits
        self._lock = threading.Lock()
        self._folder: CacheFolder | None = None
        self._hurry_until = 0.0
        self._local: dict[Path, bool] = {}
        self._keys: dict[Path, str] = {}
        self._order: dict[str, int] = {}
        self._sound: set[str] = set()
        self._held: dict[Path, Copy] = {}
        self.counts: Counter[str] = Counter()
        """shards opened: "hit" and "copied" in the cache, "local" and "source" in place; "bytes": of those copied"""

    def open(self, path: Path, index: Index | None = None) -> Shard:
        """A shard to read, from wherever it can be read; `index` is what is known of it."""
        source = open_file(path)
        if self._stays(path):
            self._count("local")
            return Shard.open(path, self._limits, source=source, index=index)
        try:
            copy = self._copy_now(source)
        except (NotCached, OSError) as trouble:
            self._say(path, trouble)
            return Shard.open(path, self._limits, source=source, index=index)
        return Shard.open(path, self._limits, source=source, copy=copy.data, index=index)

    def _copy_now(self, source: File) -> Copy:
        """The copy of a shard that is needed at once, if need be in the place of those that we keep for later."""
        patience = self._how.patience if time.monotonic() > self._hurry_until else 0.0
        try:
            return self._copy(source, -1, patience, lambda: False)
        except WaitedTooLong:
            if patience:
                self._hurry_until = time.monotonic() + _HURRY
            raise
        except NotCached:
            if not self._held:
                raise
        self._held = {}
        return self._copy(source, -1, patience, lambda: False)

    def expect(self, paths: Sequence[Path]) -> dict[Path, int]:
        """Tells which shards are needed next, in this order; returns those that there is room for, and their turns."""
        left = parse(self._how.budget, whole(Path(self._how.path)))
        order, fitting = dict[str, int](), dict[Path, int]()
        for turn, path in enumerate(path for path in paths if not self._stays(path)):
            if path not in self._keys:
                with suppress(NotCached, HeadwayError):  # which is said when it is opened
                    self._keys[path] = identify(open_file(path))
            if path in self._keys:
                order[self._keys[path]] = turn
                left -= size_of(self._keys[path])
                if left >= 0:
                    fitting[path] = turn
        self._order = order
        self._held = {path: copy for path, copy in self._held.items() if path in fitting}
        return fitting

    def relieve(self) -> None:
        """Removes copies when the job needs the memory that they take; what is being read stays."""
        if self._folder is None or self._folder.is_gone():
            return
        missing = shortage(self._folder.path)
        if missing:
            self._held = {}
            with self._folder.ledger(Deadline(0)):
                self._folder.free(missing, self._order, -1)

    def prepare(self, path: Path, turn: int, given_up: Callable[[], bool]) -> None:
        """Copies a shard that is needed later, and keeps its copy from being removed; waits for nobody."""
        if path not in self._held:
            self._held[path] = self._copy(open_file(path), turn, 0, given_up)

    def _stays(self, path: Path) -> bool:
        """Whether a shard is read in place. Asked once per folder."""
        if path.parent not in self._local:
            self._local[path.parent] = is_local(path.parent)
        return self._local[path.parent] and not self._how.copy_local

    def _copy(self, source: File, turn: int, patience: float, given_up: Callable[[], bool]) -> Copy:
        folder, key = self._join(patience), identify(source)
        self._keys[source.path] = key
        terms = Terms(
            budget=self._how.budget,
            slots=self._how.prefetch,
            order=self._order,
            turn=turn,
            deadline=Deadline(patience),
            given_up=given_up,
        )
        copy, made = get(folder, key, source, terms)
        self._count("copied" if made else "hit", bytes=len(source) if made else 0)
        if not made and key not in self._sound and not _is_sound(copy):
            folder.discard(key)
            raise NotCached("its copy in the cache was damaged")
        self._sound.add(key)
        return copy

    def _join(self, patience: float) -> CacheFolder:
        with self._lock:
            if self._folder is None or self._folder.is_gone():
                self._folder = CacheFolder.join(Path(self._how.path), Deadline(patience))
                weakref.finalize(self, self._folder.leave)
            return self._folder

    def totals(self) -> dict[str, int]:
        """The counts as they are now; threads go on counting."""
        with self._lock:
            return {f"cache/{what}": count for what, count in self.counts.items()}

    def _count(self, what: str, *, bytes: int = 0) -> int:
        with self._lock:
            self.counts["bytes"] += bytes
            self.counts[what] += 1
            return self.counts[what]

    def _say(self, path: Path, trouble: Exception) -> None:
        if self._count("source") == 1:
            print(
                f"headway: node cache: {trouble}; reading {path} at its source, and so on without another word",
                file=sys.stderr,
            )


def _is_sound(copy: Copy) -> bool:
    """Whether a copy that another process made has the bytes that it had then."""
    crc, view = 0, memoryview(copy.data)
    for start in range(0, len(view), _STEP):
        crc = zlib.crc32(view[start : start + _STEP], crc)
    return f"{crc:08x}" == copy.note.crc32
