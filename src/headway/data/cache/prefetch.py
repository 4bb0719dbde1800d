"""`Prefetcher`: copies shards into the node cache before they are needed, in a thread of the loader.

The order of samples is a function, so the next uses of all shards can be computed. All ranks of a node proceed in the
same order; the first one copies a shard for all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, final

from headway.data.cache.directory import NotCached
from headway.data.cache.node_cache import CachedShards
from headway.errors import HeadwayError
from headway.system.locks import LockTimeout

_HORIZON_POSITIONS = 2**18  # a few windows of all lanes
_STEP_POSITIONS = 2**14  # by which the look-ahead grows at a time, so that the first shards are known at once
_RELIEF_PERIOD_S = 1.0  # between two checks whether the job needs the memory of its copies
_RETRY_S = 0.1  # until a retry of a shard that another process is copying


class BatchShards(NamedTuple):
    """The shards that a node needs for one batch."""

    shards: Collection[Path]
    end: int
    """the position after the batch"""


@final
class LookAhead:
    """The shards that are needed next, in the order of their first use, up to a horizon."""

    def __init__(
        self, batches: Iterator[BatchShards], horizon: int = _HORIZON_POSITIONS, step: int = _STEP_POSITIONS
    ) -> None:
        self._batches, self._horizon, self._step = batches, horizon, step
        self._upcoming: deque[BatchShards] = deque()
        self.complete = False
        """whether all batches within the horizon are in it"""

    def after(self, position: int) -> list[Path]:
        """Returns the shards that are needed after a position, the next ones first."""
        while self._upcoming and self._upcoming[0].end <= position:
            self._upcoming.popleft()
        seen = self._upcoming[-1].end if self._upcoming else position
        until = min(position + self._horizon, seen + self._step)
        for batch in self._batches:
            if batch.end > position:
                self._upcoming.append(batch)
            if batch.end >= until:
                self.complete = batch.end >= position + self._horizon
                break
        else:
            self.complete = True
        return list(dict.fromkeys(path for batch in self._upcoming for path in batch.shards))


@final
class Prefetcher:
    """The prefetch thread of one loop over a loader: `follow` starts it, `advance` moves it, `stop` ends it."""

    def __init__(self, cache: CachedShards, release_others: Callable[[Collection[Path]], None]) -> None:
        self._cache, self._release_others = cache, release_others
        self._look_ahead, self._position = LookAhead(iter(())), 0
        self._wanted: dict[Path, int] = {}
        self._next_relief = 0.0
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway cache", daemon=True)

    def follow(self, batches: Iterator[BatchShards], position: int) -> None:
        """Sets the next batches; called again after a change of weights."""
        self._look_ahead, self._position = LookAhead(batches), position
        self._wake.set()
        if self._thread.ident is None:
            self._thread.start()

    def advance(self, position: int) -> None:
        """Sets the position; all batches before it are consumed."""
        self._position = position
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread; cancels a copy in progress."""
        self._stopped.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1)  # it takes longer only if the file system does not answer

    def _run(self) -> None:
        retry = False
        while not self._stopped.is_set():
            self._wake.wait(_RETRY_S if retry else None)
            retry = False
            # A shard that could not be copied is reported when it is opened; until then the reason may be gone.
            with suppress(NotCached, OSError, HeadwayError):
                self._update()
                for path in self._wanted:
                    if not self._is_unneeded(path):
                        retry |= not self._prepare(path)

    def _prepare(self, path: Path) -> bool:
        """Copies a shard; returns False if another process copies it, or holds the space lock."""
        try:
            self._cache.prepare(path, self._wanted[path], lambda: self._is_unneeded(path))
        except LockTimeout:
            return False
        return True

    def _is_unneeded(self, path: Path) -> bool:
        """Whether a shard is no longer needed. Called after each chunk, so it also updates the wanted shards."""
        if self._wake.is_set():
            self._update()
        return self._stopped.is_set() or path not in self._wanted

    def _update(self) -> None:
        self._wake.clear()
        look_ahead = self._look_ahead
        paths = look_ahead.after(self._position)
        if not look_ahead.complete:
            self._wake.set()
        self._release_others(paths)
        self._wanted = self._cache.expect(paths)
        if time.monotonic() >= self._next_relief:
            self._next_relief = time.monotonic() + _RELIEF_PERIOD_S
            self._cache.relieve()
