"""`StagingThread`: copies batches that are in memory already to a device, before training needs them."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import Empty, Queue
from typing import Any, NamedTuple, final

from headway.data.feed.device_feed import DeviceFeed, StagedBatch, is_small
from headway.data.feed.nested import find_tensors

_AHEAD_BATCHES = 2


class _Item(NamedTuple):
    """A batch and its copy, if there is one; or the last item, with the error that ended the source, if any."""

    batch: Any = None
    staged: StagedBatch | None = None
    is_last: bool = False
    error: BaseException | None = None


@final
class StagingThread:
    """Stages two batches ahead of training.

    Only for batches that exist: a loader that makes them may save its position or draw from the model's random
    numbers, so it must not run ahead. Two kinds of batches are copied only when the loop takes them: those that share a
    tensor with one of the two batches before, which may be a buffer that the loop refills, and small ones, whose copy
    blocks nothing.

        with closing(StagingThread(feed)) as thread:
            for batch in thread.stage_ahead(batches):
                moved = thread.move(batch)
    """

    def __init__(self, feed: DeviceFeed) -> None:
        self._feed, self._stopped = feed, threading.Event()
        # a second batch waits to be put into it
        self._items: Queue[_Item] = Queue(maxsize=_AHEAD_BATCHES - 1)
        self._staged = defaultdict[int, deque[StagedBatch | None]](deque)  # a batch may come several times
        self._thread: threading.Thread | None = None

    def stage_ahead(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches, while a thread copies the next ones. Call it once."""
        self._thread = threading.Thread(target=self._run, args=(batches,), name="headway feed", daemon=True)
        self._thread.start()
        while True:
            item = self._items.get()
            if item.is_last:
                if item.error is not None:
                    raise item.error
                return
            self._staged[id(item.batch)].append(item.staged)
            yield item.batch

    def move(self, batch: Any) -> Any:
        """Returns a batch on the device, for use on the current stream; a further call copies it again."""
        waiting = self._staged.get(id(batch))
        staged = waiting.popleft() if waiting else None
        return self._feed.move(batch) if staged is None else staged.hand_over()

    def close(self) -> None:
        """Ends the thread, and drops batches that were copied ahead."""
        self._stopped.set()
        with suppress(Empty):
            self._items.get_nowait()  # the thread may be waiting for room in the queue
        if self._thread is not None:
            self._thread.join()
        self._staged.clear()

    def _run(self, batches: Iterable[Any]) -> None:
        before = deque[set[int]](maxlen=_AHEAD_BATCHES)
        try:
            for batch in batches:
                tensors = {id(tensor) for tensor in find_tensors(batch)}
                is_ahead = all(map(tensors.isdisjoint, before)) and not is_small(batch)
                staged = self._feed.stage(batch) if is_ahead else None
                before.append(tensors)
                if self._stopped.is_set():
                    return
                self._items.put(_Item(batch, staged))
                if self._stopped.is_set():
                    return
            self._items.put(_Item(is_last=True))
        except BaseException as error:  # noqa: BLE001 (raised by the loop that waits for this batch)
            self._items.put(_Item(is_last=True, error=error))
