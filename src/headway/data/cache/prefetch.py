"""Copies shards into the node cache before they are needed: a thread that walks ahead of its loader.

The order of samples is a function, so the shards that come next are known, and so is when each is needed again. All
ranks of a node walk the same way; whoever is first copies a shard, for all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, final

from headway.data.cache.leases import NotCached, WaitedTooLong
from headway.data.cache.node_cache import CachedShards
from headway.errors import HeadwayError

_HORIZON = 2**18  # positions that are looked at: some windows of all lanes
_RELIEF = 1.0  # seconds between two looks at whether the job needs the memory of its copies
_AGAIN = 0.1  # seconds until a shard is tried again that another process was in the way of
_STEP = 2**14  # positions by which it grows at a time, so that the first shards are known at once


class Needed(NamedTuple):
    """What a node needs for one batch."""

    shards: Collection[Path]
    end: int
    """the position after the batch"""


@final
class Window:
    """The shards that come next, in the order of their first use, as far as one looks."""

    def __init__(self, batches: Iterator[Needed], horizon: int = _HORIZON, step: int = _STEP) -> None:
        self._batches, self._horizon, self._step = batches, horizon, step
        self._ahead: deque[Needed] = deque()
        self.complete = False
        """whether all batches within the horizon are in it"""

    def after(self, position: int) -> list[Path]:
        """The shards that are needed after a position, the next ones first."""
        while self._ahead and self._ahead[0].end <= position:
            self._ahead.popleft()
        seen = self._ahead[-1].end if self._ahead else position
        until = min(position + self._horizon, seen + self._step)
        for batch in self._batches:
            if batch.end > position:
                self._ahead.append(batch)
            if batch.end >= until:
                self.complete = batch.end >= position + self._horizon
                break
        else:
            self.complete = True
        return list(dict.fromkeys(path for batch in self._ahead for path in batch.shards))


@final
class Ahead:
    """The thread, for one loop over a loader: `follow` begins, `moved` tells of progress, `stop` ends it."""

    def __init__(self, cache: CachedShards, let_go: Callable[[Collection[Path]], None]) -> None:
        self._cache, self._let_go = cache, let_go
        self._window, self._position = Window(iter(())), 0
        self._wanted: dict[Path, int] = {}
        self._relief = 0.0
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway cache", daemon=True)

    def follow(self, batches: Iterator[Needed], position: int) -> None:
        """From now on these are the batches that come; also after a change of weights."""
        self._window, self._position = Window(batches), position
        self._wake.set()
        if self._thread.ident is None:
            self._thread.start()

    def moved(self, position: int) -> None:
        """Batches before this position are done with."""
        self._position = position
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread; a copy that it is making is given up."""
        self._stopped.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1)  # longer only if the file system does not answer

    def _run(self) -> None:
        put_off = False
        while not self._stopped.is_set():
            self._wake.wait(_AGAIN if put_off else None)
            put_off = False
            # Whoever opens a shard that could not be copied says why; until then there may be room, or a cure.
            with suppress(NotCached, OSError, HeadwayError):
                self._look()
                for path in self._wanted:
                    if not self._is_in_vain(path):
                        put_off |= not self._prepare(path)

    def _prepare(self, path: Path) -> bool:
        """Copies a shard, unless another process is in the way: it may be at this one, or at the ledger."""
        try:
            self._cache.prepare(path, self._wanted[path], lambda: self._is_in_vain(path))
        except WaitedTooLong:
            return False
        return True

    def _is_in_vain(self, path: Path) -> bool:
        """Whether a shard need not be copied any longer; asked often, so that the loader is followed meanwhile."""
        if self._wake.is_set():
            self._look()
        return self._stopped.is_set() or path not in self._wanted

    def _look(self) -> None:
        self._wake.clear()
        window = self._window
        paths = window.after(self._position)
        if not window.complete:
            self._wake.set()
        self._let_go(paths)
        self._wanted = self._cache.expect(paths)
        if time.monotonic() >= self._relief:
            self._relief = time.monotonic() + _RELIEF
            self._cache.relieve()
