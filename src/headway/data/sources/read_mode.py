"""`ReadModeChooser`: decides whether threads, one thread or processes read the samples of a batch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, final

import torch

from headway import dist
from headway.data.counters import Span
from headway.data.sources.chunk import Chunk
from headway.data.sources.reader_pool import MAX_DECODERS
from headway.system.limits import usable_cpus

_MAX_CHUNK_SAMPLES = 64  # that a thread loads at a time: a task costs as much as two small samples
_MAX_GPU_READERS = 3  # more would read faster than a GPU decodes
_MIN_REQUEST_SAMPLES = 128  # a request costs as much as a few small samples
_SMALL_SAMPLE_S = 50e-6  # CPU time
_MAX_WAIT = 4  # elapsed time per CPU time: threads that wait only for the interpreter take less
_MARGIN = 4  # samples that processes read count as small even if this many times slower: machines are busy
_RECENT_BATCHES = 16  # that the decision depends on
_MIN_WAITED_S = 1.0  # before processes are started, which takes half as long
_MIN_WAITED_SHARE = 0.1  # of the loop's time


class ReadMode(Enum):
    """What reads a batch."""

    THREADS = "threads"
    """they decode in parallel, because decoders release the interpreter lock"""
    ONE_THREAD = "one thread"
    """for small samples, which hold the interpreter lock nearly all the time: several threads would be slower"""
    PROCESSES = "processes"
    """each with its own interpreter, if the training loop waits for small samples, or if a GPU decodes"""


class ReadCost(NamedTuple):
    """How long samples took to read and decode."""

    samples: int
    busy_s: float
    """CPU time"""
    took_s: float
    """elapsed time per thread"""

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> ReadCost:
        """Returns the cost of the chunks of a batch, which several threads may have read in parallel."""
        took_s = sum(times[-1] - times[0] for chunk in chunks for times in chunk.times)
        threads = len({chunk.thread for chunk in chunks})
        samples, busy_s = sum(chunk.count for chunk in chunks), sum(chunk.busy_s for chunk in chunks)
        return cls(samples, busy_s, took_s / max(1, threads))

    def is_small(self, margin: int = 1) -> bool:
        """Whether samples take microseconds, up to `margin` times the limit, and wait little for storage."""
        small = self.busy_s < margin * _SMALL_SAMPLE_S * self.samples
        return small and self.took_s < margin * _MAX_WAIT * self.busy_s


@final
class ReadModeChooser:
    """Chooses what reads the next batch, by the cost of the last ones. The samples do not depend on the choice."""

    def __init__(self, threads: int | None, gpu: torch.device | None) -> None:
        self._on_gpu = gpu is not None
        self._recent = deque[ReadCost](maxlen=_RECENT_BATCHES)
        self._waited_s = self._elapsed_s = 0.0
        self._min_waited_s, self._last_s = _MIN_WAITED_S, math.nan
        self.threads = _usable_threads() if threads is None else threads
        if threads is None and gpu is not None:
            self.threads = min(self.threads, _MAX_GPU_READERS)
        self.mode = ReadMode.PROCESSES if gpu is not None else ReadMode.THREADS

    def begin_pass(self) -> None:
        """Excludes the time since the last batch from the loop's time."""
        self._last_s = math.nan

    def observe(self, chunks: Sequence[Chunk], waited: Span, *, processes: bool) -> None:
        """Updates the choice after a batch that the loop waited for; `processes` says whether processes can be used."""
        if self._on_gpu:
            return
        self._waited_s += waited.ended - waited.began
        self._elapsed_s += waited.ended - (waited.began if math.isnan(self._last_s) else self._last_s)
        self._last_s = waited.ended
        self._recent.append(ReadCost.of(chunks))
        mode = self._next_mode(processes)
        if mode is not self.mode:
            self._recent.clear()
        self.mode = mode

    def _next_mode(self, processes: bool) -> ReadMode:
        cost = ReadCost(*map(sum, zip(*self._recent, strict=True)))
        if self.mode is ReadMode.PROCESSES and processes:
            if len(self._recent) < _RECENT_BATCHES or cost.is_small(_MARGIN):
                return self.mode
            # they did not help: do not try again soon
            self._waited_s, self._elapsed_s, self._min_waited_s = 0.0, 0.0, 2 * self._min_waited_s
        if not cost.is_small():
            return ReadMode.THREADS
        waits = self._waited_s > max(self._min_waited_s, _MIN_WAITED_SHARE * self._elapsed_s)
        return ReadMode.PROCESSES if processes and self.threads > 1 and waits else ReadMode.ONE_THREAD

    def chunk_samples(self, samples: int) -> int:
        """Returns how many samples of a batch make a chunk.

        Threads get several chunks each, but not too small ones, because a task has a cost. One thread gets all samples,
        and a process its share, because a request has a cost, too.
        """
        if self.mode is ReadMode.ONE_THREAD:
            return max(1, samples)
        if self._on_gpu:
            return max(1, -(-samples // self.threads))
        if self.mode is ReadMode.PROCESSES:
            share = -(-samples // min(self.threads, MAX_DECODERS))
            return max(1, min(samples, max(share, _MIN_REQUEST_SAMPLES)))
        return max(1, min(_MAX_CHUNK_SAMPLES, samples // (2 * self.threads)))


def _usable_threads() -> int:
    """Returns how many CPUs this rank has."""
    cpus = usable_cpus()
    return max(1, cpus // dist.local_world_size()) if dist.is_initialized() else cpus
