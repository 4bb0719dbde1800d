"""`LoaderThreads`: the threads that load the batches of a pass, ahead of the training loop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch

from headway.data.feed.device_feed import DeviceFeed
from headway.data.samples.assembly import AssembledBatch, BatchAssembler
from headway.data.samples.sample_reader import SampleReader
from headway.data.sources.chunk import Chunk, SampleLocation
from headway.data.sources.read_mode import ReadMode, ReadModeChooser

_SWITCH_S = 0.0001


class RankBatch(NamedTuple):
    """This rank's part of a batch."""

    locations: list[SampleLocation]
    padding: int
    """how many of the last ones are padding"""
    end: int
    """the position after the batch"""


class PendingBatch(NamedTuple):
    """A batch that threads are loading."""

    batch: RankBatch
    tasks: list[Future[Any]]
    result: Future[AssembledBatch]

    def cancel(self) -> None:
        for task in (*self.tasks, self.result):
            task.cancel()


@final
class LoaderThreads:
    """Some threads read chunks, one gathers those of a batch, and one makes the batch."""

    def __init__(self, chooser: ReadModeChooser, feed: DeviceFeed | None) -> None:
        self._chooser, self._feed = chooser, feed
        self._reading = _make_pool(chooser.threads, "headway load")
        self._gathering, self._collating = _make_pool(1, "headway gather"), _make_pool(1, "headway collate")

    def __enter__(self) -> LoaderThreads:
        return self

    def __exit__(self, *_: object) -> None:
        pools = self._reading, self._gathering, self._collating
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in pools:
            pool.shutdown(wait=True)

    def load(self, batch: RankBatch, reader: SampleReader, assembler: BatchAssembler) -> PendingBatch:
        """Starts to load a batch."""
        reads = self._reads(batch.locations, reader)
        alone = self._chooser.mode is ReadMode.ONE_THREAD
        chunks = [] if alone else [self._reading.submit(read) for read in reads]
        results = [chunk.result for chunk in chunks] or reads
        gathered = self._gathering.submit(assembler.gather, results)
        result = self._collating.submit(assembler.assemble, gathered, batch.padding, self._feed)
        return PendingBatch(batch, [*chunks, gathered], result)

    def _reads(self, locations: list[SampleLocation], reader: SampleReader) -> list[Callable[[], Chunk]]:
        """Splits a batch into chunks, and returns a function for each that reads it."""
        memory, size = reader.crop_memory(len(locations)), self._chooser.chunk_samples(len(locations))
        read = partial(reader.read, memory=memory, by_process=self._chooser.mode is ReadMode.PROCESSES)
        return [partial(read, locations[at : at + size], at) for at in range(0, len(locations) or 1, size)]


def _make_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Returns a pool whose threads use one core each; the number of torch's threads stays the same elsewhere.

    Otherwise torch would start a team of threads for each thread of the loader, whose members spin while they wait for
    each other: on two cores, crops took nine times as much CPU time.
    """
    return ThreadPoolExecutor(threads, name, initializer=_use_one_core, initargs=(torch.get_num_threads(),))


def _use_one_core(others: int) -> None:
    torch.get_num_threads()  # a thread inherits the global number at its first call or computation
    torch.set_num_threads(1)  # sets the number for this thread, and the global one
    restorer = threading.Thread(target=torch.set_num_threads, args=(others,))
    restorer.start()
    restorer.join()


@contextmanager
def quick_switches(*, active: bool) -> Iterator[None]:
    """Lowers the interval at which threads switch to a tenth of a millisecond; Python's default is five.

    The thread that feeds the GPU's decoder needs the interpreter lock once per batch, and a decoder that waits five
    milliseconds for it loses a third of its time.
    """
    before = sys.getswitchinterval()
    if active:
        sys.setswitchinterval(min(before, _SWITCH_S))
    try:
        yield
    finally:
        if active:
            sys.setswitchinterval(before)
