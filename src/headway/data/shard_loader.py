"""`ShardLoader`: tar shards to batches, in an exact order and exact proportions, at the speed of the decoder.

A few threads read and decode; decoders release the interpreter lock, and nothing is copied between processes. What
they load is computed from the position: `mix` says which dataset, `order` which sample, and samples of a batch are
dealt to ranks by lane, so that a node reads few shards. The position and the changes of weights are all the state.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from headway import dist
from headway.data.cache.node_cache import CachedShards, NodeCache
from headway.data.cache.prefetch import Ahead, Needed
from headway.data.counters import Counters, Span, Trace
from headway.data.order.locate import describe
from headway.data.order.mix import Mix, Segment, Shards, Timeline
from headway.data.order.order import Order, Shuffle, check_same_order, key
from headway.data.order.passes import Passes, Tail
from headway.data.order.share import Share
from headway.data.quarantine import Bad, Quarantine
from headway.data.sample_reader import Loading, Place, Portion, Transform, collate
from headway.data.shards.decode import Decoder
from headway.data.shards.shard import Limits
from headway.data.sources.open_shards import OpenShards, find
from headway.dist.shared_run import current_run
from headway.errors import HeadwayError, UsageError
from headway.system.limits import usable_cpus

_PORTION = 16  # samples that a thread takes at a time, at most


class _Plan(NamedTuple):
    """This rank's part of a batch."""

    places: list[Place]
    padding: int
    """how many of the last ones are there to fill the batch"""
    end: int
    """the position after the batch"""


@final
class ShardLoader:
    """Batches from tar shards, for training (shuffled, endless) or validation (`shuffle=False`, each sample once).

        mix = hw.data.Mix({"laion": 0.5, "datacomp": 0.3}, shards=...)           # or a folder, a pattern, a list
        loader = hw.data.ShardLoader(mix, batch_size=256, transform=augment, seed=0)
        for batch in loader:
            ...
        loader.set_weights({"laion": 0.2})       # on all ranks alike; holds from the next batch on

    A pass is an epoch: as many samples as all datasets have together. `tail` says what becomes of those that do not
    fill a batch: `"carry"` begins the next pass with them (without shuffle, the last batch is short), `"drop"` leaves
    them out, `"pad"` fills the batch with the first samples of the pass, `padding` of them in the batch in hand, at its
    end. `transform` gets a decoded sample and a generator of random numbers that belongs to seed, dataset, epoch and
    sample.

    A sample that cannot be decoded is replaced by another one of its dataset, always the same, and noted in `bad`; more
    than `max_bad` of them (a part of all) stop the run. Batches that wait take at most `memory` bytes, or are one.
    `cache=hw.data.NodeCache()` keeps a copy of shards in the memory of the node, made before they are needed.
    `trace="traces/train.json"` keeps a time line of the stages, a file per rank, for Perfetto or chrome://tracing; in a
    run, in its directory.
    """

    def __init__(
        self,
        source: Mix | Shards,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        lanes: int = 24,
        window: int = 4096,
        tail: Tail = "carry",
        transform: Transform | None = None,
        decoders: Mapping[str, Decoder] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        threads: int | None = None,
        prefetch: int = 4,
        memory: int = 2**30,
        max_bad: float = 0.001,
        limits: Limits | None = None,
        cache: NodeCache | None = None,
        trace: str | Path | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._share = Share(
            batch_size=batch_size, global_batch_size=global_batch_size, rank=rank, world_size=world_size
        )
        _check(prefetch, threads, max_bad)
        mix = source if isinstance(source, Mix) else Mix({"data": 1.0}, shards={"data": source})
        self._limits = limits or Limits()
        self._sources = find(mix, self._limits, shared=rank is None and dist.is_initialized())
        self._how = Shuffle(seed=seed, lanes=lanes, window=window)
        self._hows = [_own(self._how, number) for number in range(len(self._sources))]
        self._orders = [
            Order(source.counts, how if shuffle else None)
            for source, how in zip(self._sources, self._hows, strict=True)
        ]
        self._passes = Passes(self._orders, self._share, shuffle=shuffle, tail=tail)
        self.samples = self._passes.samples
        self._shuffle, self._schedule, self._weights = shuffle, mix.schedule, mix.weights
        self._timeline: Timeline | None = None
        self._ahead: Ahead | None = None
        self._cache = CachedShards(cache, self._limits) if cache else None
        reach = sum(order.reach() for order in self._orders)
        self._shards = OpenShards(self._sources, reach, self._limits, self._cache)
        self._loading = Loading(
            self._shards,
            self._orders,
            seed=seed,
            transform=transform,
            decoders=dict(decoders or {}),
            limits=self._limits,
        )
        self._collate = collate_fn or collate
        self._threads, self._prefetch, self._memory, self._max_bad = threads, prefetch, memory, max_bad
        self._epoch = self._position = self._loops = self.padding = 0
        self._restored = self._begun = False
        self._given: tuple[int, int] | None = None
        self._trace_path, self._counters, self._changing = trace, Counters(), threading.Lock()
        self.bad, self._quarantine = list[Bad](), Quarantine()

    # --- iterating

    def __len__(self) -> int:
        """Batches of the present pass from its beginning, on this rank."""
        return self._passes.length(self._epoch)

    def __iter__(self) -> Iterator[Any]:
        self._passes.check()
        if not (self._shuffle or self._restored):
            self._position = self._epoch * self.samples
        self._restored = False
        self._loops += 1
        return self._loop(self._loops)

    def _loop(self, number: int) -> Iterator[Any]:
        if self._trace_path is not None and self._counters.trace is None:
            run = current_run()
            path = run.path / self._trace_path if run is not None else Path(self._trace_path)
            self._counters.trace = Trace(path, rank=self._share.place()[0])
        pool = ThreadPoolExecutor(self._threads or _cores(), "headway load")
        ahead = self._ahead = None if self._cache is None else Ahead(self._cache, self._shards.keep)
        try:
            yield from self._loaded(pool, number)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            if ahead is not None:
                ahead.stop()
            if self._counters.trace is not None:
                self._counters.trace.save()
        if self._loops == number:
            self._epoch, self._begun = self._epoch + 1, False
            if not self._passes.carries():
                self._position = self._epoch * self.samples

    def _loaded(self, pool: ThreadPoolExecutor, number: int) -> Iterator[Any]:
        """Batches, loaded ahead; what is ahead is loaded anew when weights change."""
        waiting: deque[tuple[list[Future[Portion]], _Plan]] = deque()
        timeline, largest = self._history(), 0
        plans = self._plans(timeline, self._position)
        self._look_ahead(timeline)
        while True:
            if self._history() is not timeline:
                for future in (future for futures, _ in waiting for future in futures):
                    future.cancel()
                waiting.clear()
                timeline = self._history()
                plans = self._plans(timeline, self._position)
                self._look_ahead(timeline)
            while not waiting or self._may_wait(len(waiting) + 1, largest):
                plan = next(plans, None)
                if plan is None:
                    break
                portions = self._portions(plan.places)
                waiting.append(([pool.submit(self._loading.load, portion) for portion in portions], plan))
            if not waiting:
                return
            futures, plan = waiting.popleft()
            began = time.perf_counter()
            if futures:
                futures[-1].exception()  # waits for all but a few, and is woken once
            loaded = [future.result() for future in futures]
            waited = Span("wait", threading.get_native_id(), began, time.perf_counter())
            largest = max(largest, sum(one.size for one in loaded))
            with self._changing:
                if self._history() is not timeline:
                    continue  # changed by another thread just now: this batch is no longer the next
                self._check_loop(number)
                self._given = self._position, plan.end
                self._position, self._begun = plan.end, True  # from here on it is the training loop's
            if self._ahead is not None:
                self._ahead.moved(plan.end)
            self.padding = plan.padding
            self._note(loaded, waited)
            if loaded:
                yield self._collated([value for one in loaded for value in one.values])

    def _portions(self, places: list[Place]) -> Iterator[list[Place]]:
        """What a thread takes at a time: a few samples, because handing over costs, and never too few portions."""
        size = max(1, min(_PORTION, len(places) // (2 * (self._threads or _cores()))))
        return (places[at : at + size] for at in range(0, len(places), size))

    def _may_wait(self, batches: int, largest: int) -> bool:
        """Whether so many batches may wait; until one is known, its size is not, and the second waits its turn."""
        return batches <= self._prefetch and 0 < batches * largest <= self._memory

    def _check_loop(self, number: int) -> None:
        if self._loops != number:
            raise UsageError(
                "another loop over this ShardLoader has begun: a loader has one position, and one loop at a time. "
                "Make a second loader for the second loop"
            )

    def _collated(self, values: list[Any]) -> Any:
        began = time.perf_counter()
        batch = self._collate(values)
        self._counters.spent(Span("collate", threading.get_native_id(), began, time.perf_counter()))
        return batch

    def _note(self, loaded: list[Portion], waited: Span) -> None:
        counted = self._counters
        counted.batches += bool(loaded)
        counted.spent(waited)
        for one in loaded:
            counted.samples += len(one.values)
            counted.bytes_read += one.read
            counted.bytes_decoded += one.size
            for times in one.times:
                counted.loaded(one.thread, times)
            if one.bad:
                self.bad += one.bad
                self._quarantine.add(one.bad)
        if len(self.bad) > 1 + self._max_bad * counted.samples:
            last = self.bad[-1]
            raise HeadwayError(
                f"{len(self.bad)} of {counted.samples} samples could not be used, more than max_bad={self._max_bad:g}; "
                f"the last one is {last.key!r} in {last.shard}: {last.reason}"
            )

    # --- what to load

    def _plans(self, timeline: Timeline, position: int) -> Iterator[_Plan]:
        """What this rank is to load for each batch of the pass, from a position on."""
        for rows, real, end in self._passes.batches(timeline, self._epoch, position):
            mine = self._share.of(len(rows))
            places = [(row[0], row[1], row[2], row[3]) for row in rows[mine, 1:].tolist()]
            yield _Plan(places, min(len(places), max(0, mine.stop - real)), end)

    def _needed(self, timeline: Timeline, position: int) -> Iterator[Needed]:
        """The shards that this node is to read for each batch of the pass."""
        for rows, _, end in self._passes.batches(timeline, self._epoch, position):
            wanted = np.unique(rows[self._share.of_node(len(rows))][:, [1, 3]], axis=0).tolist()
            yield Needed([self._sources[dataset].paths[shard] for dataset, shard in wanted], end)

    def _look_ahead(self, timeline: Timeline) -> None:
        if self._ahead is not None:
            self._ahead.follow(self._needed(timeline, self._position), self._position)

    def _history(self) -> Timeline:
        """The weights over time. Made late: a step of the schedule is a batch of all ranks, who must have met."""
        if self._timeline is None:
            size = self._passes.size()
            planned = [Segment(step * size, weights) for step, weights in self._schedule if self._shuffle]
            self._timeline = Timeline([Segment(0, self._weights), *planned])
        return self._timeline

    # --- weights

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the next batch."""
        return self._history().weights_at(self._position)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes weights from the next batch on. Call it on all ranks after the same step, with the same numbers."""
        if not self._shuffle:
            raise UsageError("a loader with shuffle=False reads every sample once: it has no weights to set")
        with self._changing:
            self._timeline = self._history().changed(self._position, weights)

    def set_weight(self, name: str, weight: float) -> None:
        """`set_weights` for one dataset."""
        self.set_weights({name: weight})

    def counts(self) -> dict[str, int]:
        """Samples of each dataset that all ranks together have consumed."""
        return self._history().counts_at(self._position)

    def counters(self) -> dict[str, float]:
        """Totals of this rank: samples, bytes, bad samples, and seconds of each stage; and the proportions.

        `seconds/wait` is the training loop's time; `read`, `decode` and `transform` are summed over threads. Of each
        dataset, `share/NAME` is its part of the samples since weights last changed, `target/NAME` what it should be.
        `cache/...` are shards that were opened: hit or copied in the node cache, local or at their source; and bytes.
        """
        totals = self._counters.totals() | {"bad": len(self.bad)}
        if self._cache is not None:
            totals |= self._cache.totals()
        for name, (share, target) in self._history().shares_at(self._position).items():
            totals |= {f"share/{name}": round(share, 6), f"target/{name}": round(target, 6)}
        return totals

    # --- position

    def given(self) -> tuple[int, int] | None:
        """Where in the order, in samples of all ranks, the last batch lies."""
        return self._given

    def order(self) -> dict[str, Any]:
        """The order in plain values: `headway.data.order.locate` tells from it which samples a batch had."""
        counts = {source.name: source.counts for source in self._sources}
        return describe(counts, self._hows, self._history()) if self._shuffle else describe(counts, None)

    @property
    def batch_size(self) -> int | None:
        """Samples of each rank; None where `global_batch_size` counts those of all."""
        return self._share.batch_size

    per_rank = False
    """the state is one for all ranks"""

    @property
    def epoch(self) -> int:
        """The epoch of the present pass, or of the next one if none has begun."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch from its first batch; after `load_state_dict`, the restored epoch from its position."""
        if epoch < 0:
            raise UsageError(f"set_epoch({epoch}): epochs are counted from 0")
        if epoch == self._epoch and (self._restored or not self._begun):
            return  # there already; what the last pass carried over stays
        self._epoch, self._position = epoch, self._passes.start(epoch)
        self._restored = self._begun = False
        self._loops += 1

    def state_dict(self) -> dict[str, Any]:
        """What has been consumed, in samples of all ranks together, and the weights over time; equal on all ranks."""
        segments = [[segment.start, segment.weights] for segment in self._history().segments]
        return self._identity() | {"epoch": self._epoch, "position": self._position, "segments": segments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, on any number of ranks; other shards or another order are refused."""
        ours = self._identity()
        if {*state} != {*ours, "epoch", "position", "segments"}:
            raise UsageError(f"this is not the state of a ShardLoader: {dict(state)}")
        check_same_order(state, ours)
        self._timeline = Timeline(
            [Segment(int(start), dict(weights)) for start, weights in state["segments"]]
        )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._restored = True
        self._loops += 1  # a loop that is under way would go on from the old position: it ends

    def _identity(self) -> dict[str, Any]:
        how = self._how
        return {
            "version": 1,
            "seed": how.seed,
            "lanes": how.lanes,
            "window": how.window,
            "shuffle": self._shuffle,
            "datasets": {source.name: source.fingerprint() for source in self._sources},
        }


def _check(prefetch: int, threads: int | None, max_bad: float) -> None:
    if prefetch < 1 or (threads is not None and threads < 1):
        raise UsageError(f"prefetch={prefetch}, threads={threads}: both must be at least 1")
    if not 0 <= max_bad <= 1:
        raise UsageError(f"max_bad={max_bad}: give the part of samples that may be bad, from 0 to 1")


def _cores() -> int:
    """This rank's share of the processor cores it may use."""
    cores = usable_cpus()
    return max(1, cores // dist.local_world_size()) if dist.is_initialized() else cores


def _own(how: Shuffle, dataset: int) -> Shuffle:
    return Shuffle(seed=key(how.seed, dataset), lanes=how.lanes, window=how.window)
