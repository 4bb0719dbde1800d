"""`ShardLoader`: batches from tar shards, in an exact order and exact proportions, at the speed of the decoder.

A few threads read and decode; decoders release the interpreter lock. If a GPU decodes, or samples are so small that
Python is the limit, processes read for the threads, into shared memory. The position determines what they load: a
`Timeline` chooses the dataset, an `Order` the sample, and the samples of a batch are split between ranks by lane, so
that a node reads few shards. The position and the changes of weights are the whole state.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from headway import dist
from headway.data.cache.node_cache import CachedShards, NodeCache
from headway.data.cache.prefetch import BatchShards, Prefetcher
from headway.data.catalog.shard_files import ShardSpec
from headway.data.counters import Counters, Span, SpanListener
from headway.data.feed.device_feed import DeviceFeed, StagedBatch
from headway.data.images.device.availability import usable_gpu
from headway.data.images.transforms import ImageTransform
from headway.data.label_watch import LabelWatch
from headway.data.order.batch_split import BatchSplit
from headway.data.order.batching import EpochBatcher, TailPolicy
from headway.data.order.lookup import describe_order
from headway.data.order.mix_order import MixOrder, datasets_changed
from headway.data.order.order import ORDER_VERSION, Shuffle, check_same_order, whole_number
from headway.data.order.timeline import Timeline, WeightSegment
from headway.data.quarantine import Quarantine, QuarantinedSample
from headway.data.samples.assembly import AssembledBatch, make_assembler
from headway.data.samples.loader_threads import LoaderThreads, PendingBatch, RankBatch, quick_switches
from headway.data.samples.sample_reader import SampleReader, Transform, check_transform
from headway.data.shards.decode import Decoder
from headway.data.shards.tar import ShardLimits
from headway.data.sources.chunk import SampleLocation
from headway.data.sources.mix import Mix
from headway.data.sources.open_shards import OpenShards, find_sources
from headway.data.sources.read_mode import ReadModeChooser
from headway.errors import UsageError


@final
class ShardLoader:
    """Loads batches from tar shards, for training (shuffled, endless) or validation (`shuffle=False`, in order).

        mix = hw.data.Mix({"laion": 0.5, "datacomp": 0.3}, shards=...)           # or a directory, a pattern, a list
        loader = hw.data.ShardLoader(mix, batch_size=256, transform=augment, seed=0)
        for batch in loader:
            ...
        loader.set_weights({"laion": 0.2})       # on all ranks; applies from the next batch on

    A pass is an epoch: as many samples as all datasets have together, or `steps_per_epoch` batches. `tail` decides what
    happens to the last samples, which do not fill a batch: `"carry"` begins the next pass with them (without shuffle,
    the last batch is short), `"drop"` omits them, and `"pad"` fills the batch with the first samples of the pass; the
    last `padding` samples of the current batch are such padding.

    `transform` is called with a decoded sample and a random generator that depends on seed, dataset, epoch and sample.
    Or it is an image transform (`MultiCrop`, `RandomResizedCrop`, `CenterCrop`), and each batch is a `Batch`. With
    `device="cuda"`, images are decoded and cropped there; if that is not possible, on the CPU, with a message.
    `collate_fn` then gets all parts of the samples but the images, and returns a dict, to which crops are added.

    A sample that cannot be decoded is listed in `bad`. In training, another sample of its dataset replaces it, always
    the same one; with `shuffle=False` it is left out (with `"drop"` and `"pad"`, its substitute counts as padding). The
    run stops if the share of bad samples on all ranks exceeds `max_bad` by more than chance.

    Prefetched batches take at most `memory` bytes; one batch is always prefetched.
    `cache=hw.data.NodeCache()` copies shards to the memory of the node before they are needed.
    `trace="traces/train.json"` writes a trace of what the threads do, a file per rank, for Perfetto or chrome://tracing;
    within a run, the path is relative to the run directory.
    """

    def __init__(
        self,
        source: Mix | ShardSpec,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        lanes: int = 24,
        window: int = 4096,
        tail: TailPolicy = "carry",
        steps_per_epoch: int | None = None,
        transform: Transform | ImageTransform | None = None,
        decoders: Mapping[str, Decoder] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        threads: int | None = None,
        prefetch: int = 4,
        memory: int = 2**30,
        max_bad: float = 0.001,
        limits: ShardLimits | None = None,
        cache: NodeCache | None = None,
        device: str | torch.device | None = None,
        trace: str | Path | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._split = BatchSplit(
            batch_size=batch_size, global_batch_size=global_batch_size, rank=rank, world_size=world_size
        )
        _check(prefetch, threads, max_bad)
        mix = source if isinstance(source, Mix) else Mix({"data": 1.0}, shards={"data": source})
        self._limits = limits or ShardLimits()
        shared = rank is None and dist.is_initialized()
        self._sources = find_sources(mix, self._limits, shared=shared, max_bad=max_bad)
        self._mix, self._shuffle, self._tail, self._steps = mix, shuffle, tail, steps_per_epoch
        self._timeline: Timeline | None = None
        self._feed: DeviceFeed | None = None
        self._prefetcher: Prefetcher | None = None
        self._chooser: ReadModeChooser | None = None
        self._cache = CachedShards(cache, self._limits) if cache else None
        check_transform(transform)
        self._transform, self._decoders = transform, dict(decoders or {})
        self._gpu, self._collate = usable_gpu(device, transform), collate_fn
        self._label_watch = LabelWatch(watching=shuffle)
        self._arrange(Shuffle(seed=whole_number("seed", seed), lanes=lanes, window=window))
        self.samples, self.in_order = self._batcher.samples, not shuffle and tail == "carry"
        self._threads, self._prefetch, self._memory = threads, prefetch, memory
        self._epoch = self._position = self._loops = self.padding = self._seen = self._seen_here = 0
        self._restored = self._begun = False
        self._last_span: tuple[int, int] | None = None
        self._trace_path, self._counters, self._position_lock = trace, Counters(), threading.Lock()
        self._quarantine = Quarantine(max_bad, self.samples)

    def _arrange(self, settings: Shuffle) -> None:
        """Numbers the datasets, and creates everything that depends on these numbers."""
        counts = {source.name: source.counts for source in self._sources}
        self._settings, self._order = settings, MixOrder(counts, settings, shuffle=self._shuffle)
        self._sources.sort(key=lambda source: self._order.names.index(source.name))
        options: dict[str, Any] = {"shuffle": self._shuffle, "tail": self._tail, "steps": self._steps}
        self._batcher = EpochBatcher(self._order.orders, self._split, **options)
        max_open = sum(order.max_open_shards() for order in self._order.orders)
        self._shards = OpenShards(self._sources, max_open, self._limits, self._cache)
        self._reader = SampleReader(
            self._shards,
            self._order,
            seed=settings.seed,
            substitute=self._shuffle or self._tail != "carry",
            watch=self._label_watch,
            transform=self._transform,
            decoders=self._decoders,
            limits=self._limits,
            gpu=self._gpu,
        )
        roles = {"validates": not self._shuffle, "drops": self._tail == "drop"}
        self._assembler = make_assembler(self._reader, self._transform, self._collate, self._gpu, **roles)

    # --- iterating

    def __len__(self) -> int:
        """Returns the number of batches in the current pass from its beginning, on this rank."""
        return self._batcher.length(self._epoch)

    def __iter__(self) -> Iterator[Any]:
        self._split.separate_streams()
        self._batcher.check()
        if not (self._shuffle or self._restored):
            self._position = self._batcher.start(self._epoch)
        self._restored = False
        self._loops += 1
        return self._loop(self._loops)

    def feed_to(self, feed: DeviceFeed | None) -> None:
        """Sets the feed to which later passes give their batches as soon as they are loaded; None ends that."""
        self._feed = feed

    def _loop(self, number: int) -> Iterator[Any]:
        self._counters.open_trace(self._trace_path, rank=self._split.rank_and_world_size()[0])
        self._label_watch.watching &= self._split.rank_and_world_size()[0] == 0  # one warning is enough
        if self._chooser is None:  # only now the number of ranks is known
            self._chooser = ReadModeChooser(self._threads, self._gpu)
        chooser = self._chooser
        chooser.begin_pass()
        prefetcher = self._prefetcher = (
            None if self._cache is None else Prefetcher(self._cache, self._shards.keep)
        )
        try:
            with LoaderThreads(chooser, self._feed) as threads, quick_switches(active=self._gpu is not None):
                yield from self._load(threads, chooser, number)
        finally:
            if prefetcher is not None:
                prefetcher.stop()
            self._reader.crop_pool.clear()
            self._counters.save_trace()
        if self._loops == number:
            self._label_watch.end_pass(self._order.names)
            self._epoch, self._begun = self._epoch + 1, False
            if not self._batcher.carries():
                self._position = self._batcher.start(self._epoch)

    def _load(self, threads: LoaderThreads, chooser: ReadModeChooser, number: int) -> Iterator[Any]:
        """Yields batches and prefetches the next ones; when weights change, prefetched batches are loaded again."""
        waiting: deque[PendingBatch] = deque()
        timeline, largest = self._mix_timeline(), 0
        upcoming = self._rank_batches(timeline, self._position)
        self._prefetch_shards(timeline)
        while True:
            if self._mix_timeline() is not timeline:
                for pending in waiting:
                    pending.cancel()
                waiting.clear()
                timeline = self._mix_timeline()
                upcoming = self._rank_batches(timeline, self._position)
                self._prefetch_shards(timeline)
            while not waiting or self._may_prefetch(len(waiting) + 1, largest):
                batch = next(upcoming, None)
                if batch is None:
                    break
                waiting.append(threads.load(batch, self._reader, self._assembler))
            if not waiting:
                return
            batch, _, result = waiting.popleft()
            began = time.perf_counter()
            assembled = result.result()
            waited = Span("wait", threading.get_native_id(), began, time.perf_counter())
            largest = max(largest, sum(chunk.size for chunk in assembled.chunks))
            chooser.observe(assembled.chunks, waited, processes=self._reader.has_processes)
            with self._position_lock:
                if self._mix_timeline() is not timeline:
                    continue  # another thread has just changed weights: this batch is no longer the next
                self._check_loop(number)
                self._last_span = self._position, batch.end
                self._seen += batch.end - self._position
                # from here on, the position is after this batch
                self._position, self._begun = batch.end, True
            if self._prefetcher is not None:
                self._prefetcher.advance(batch.end)
            self._count(assembled, waited, len(batch.locations))
            self.padding = assembled.padding
            if assembled.value is not None:
                staged = isinstance(assembled.value, StagedBatch)
                yield assembled.value.hand_over() if staged else assembled.value

    def _may_prefetch(self, batches: int, largest: int) -> bool:
        """Whether this many batches fit in memory; only one, until the size of a batch is known."""
        return batches <= self._prefetch and 0 < batches * largest <= self._memory

    def _check_loop(self, number: int) -> None:
        if self._loops != number:
            raise UsageError(
                "another loop over this ShardLoader has begun, and a loader has one position: "
                "create a second loader for the second loop"
            )

    def _count(self, assembled: AssembledBatch, waited: Span, wanted: int) -> None:
        """Adds a batch to the counters and its bad samples to the quarantine; raises if there are too many."""
        counted = self._counters
        counted.batches += bool(assembled.chunks)
        counted.add(waited)
        if assembled.collate is not None:
            counted.add(assembled.collate)
        self._seen_here += wanted
        for chunk in assembled.chunks:
            counted.samples += chunk.count
            counted.bytes_read += chunk.read
            counted.bytes_decoded += chunk.size
            counted.read_retries += chunk.read_retries
            for times in chunk.times:
                counted.add_phases(chunk.thread, times)
            if chunk.labels:
                self._label_watch.add(chunk.labels, self._order.names)
            if chunk.bad:
                self._quarantine.add(chunk.bad)
        self._quarantine.check(self._seen_here, self._seen)

    # --- bad samples

    @property
    def bad(self) -> list[QuarantinedSample]:
        """The bad samples that this rank has found, in order."""
        return self._quarantine.samples

    def take_bad(self) -> int:
        """Returns how many bad samples this rank has found since the last call."""
        return self._quarantine.take()

    def check_bad(self, new: int) -> None:
        """Raises on all ranks if they have too many bad samples; `new` counts those of all since the last call."""
        self._quarantine.check_all_ranks(new, self._seen, self._split.rank_and_world_size()[0])

    # --- what to load

    def _rank_batches(self, timeline: Timeline, position: int) -> Iterator[RankBatch]:
        """Yields what this rank loads for each batch of the pass, from a position on."""
        for rows, real, end in self._batcher.batches(timeline, self._epoch, position):
            mine = self._split.rank_slice(len(rows))
            locations: list[SampleLocation] = [*map(tuple, rows[mine, 1:].tolist())]
            yield RankBatch(locations, min(len(locations), max(0, mine.stop - real)), end)

    def _node_shards(self, timeline: Timeline, position: int) -> Iterator[BatchShards]:
        """Yields the shards that this node reads for each batch of the pass."""
        for rows, _, end in self._batcher.batches(timeline, self._epoch, position):
            wanted = np.unique(rows[self._split.node_slice(len(rows))][:, [1, 3]], axis=0).tolist()
            yield BatchShards([self._sources[dataset].paths[shard] for dataset, shard in wanted], end)

    def _prefetch_shards(self, timeline: Timeline) -> None:
        if self._prefetcher is not None:
            self._prefetcher.follow(self._node_shards(timeline, self._position), self._position)

    def _mix_timeline(self) -> Timeline:
        """Returns the timeline. Created late: steps count global batches, whose size is known only after `init()`."""
        if self._timeline is None:
            self._timeline = Timeline(self._mix_segments(0), self._order.names)
        return self._timeline

    def _mix_segments(self, position: int) -> list[WeightSegment]:
        """Returns the weights of the mix from a position on."""
        size, current, later = self._batcher.size(), self._mix.weights, list[WeightSegment]()
        for step, weights in self._mix.schedule if self._shuffle else ():
            if step * size <= position:
                current = weights
            else:
                later.append(WeightSegment(step * size, weights))
        return [WeightSegment(position, current), *later]

    # --- weights

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the next batch."""
        return self._mix_timeline().weights_at(self._position)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes weights from the next batch on. Call it on all ranks after the same step, with the same weights."""
        if not self._shuffle:
            raise UsageError("shuffle=False reads each sample once and has no weights: use shuffle=True")
        with self._position_lock:
            self._timeline = self._mix_timeline().with_weights(self._position, weights)

    def set_weight(self, name: str, weight: float) -> None:
        """Changes the weight of one dataset, as `set_weights` does."""
        self.set_weights({name: weight})

    def weights_checksum(self) -> int | None:
        """Returns a checksum of all weights, equal on all ranks; None if there are none, or ranks need not agree."""
        return self._mix_timeline().checksum if self._shuffle and self._split.rank is None else None

    def counts(self) -> dict[str, int]:
        """Returns the number of samples of each dataset that all ranks together have consumed."""
        return self._mix_timeline().counts_at(self._position)

    def observe_spans(self, listener: SpanListener | None) -> None:
        """Calls `listener` with each span from now on; None ends that."""
        self._counters.listener = listener

    def counters(self) -> dict[str, float]:
        """Returns totals of this rank (samples, bytes, bad samples, repeated reads, seconds) and the proportions.

        `seconds/wait` is the training loop's time; `read`, `decode` and `transform` are summed over threads. For each
        dataset, `share/NAME` is its share of the samples since weights last changed, and `target/NAME` its weight.
        `cache/...` counts opened shards (`hit` or `copied` in the node cache; `local` or `source` if read in place) and
        copied `bytes`.
        """
        totals = self._counters.totals() | {"bad": len(self.bad)}
        if self._cache is not None:
            totals |= self._cache.totals()
        for name, (share, target) in self._mix_timeline().shares_at(self._position).items():
            totals |= {f"share/{name}": round(share, 6), f"target/{name}": round(target, 6)}
        return totals

    # --- position

    def last_span(self) -> tuple[int, int] | None:
        """Returns where the latest batch lies in the order, in samples of all ranks."""
        return self._last_span

    def order(self) -> dict[str, Any]:
        """Describes the order in plain values, from which `SampleLookup` finds the samples of any batch."""
        counts = {source.name: source.counts for source in self._sources}
        if not self._shuffle:
            return describe_order(counts, None)
        return describe_order(counts, self._order.shuffles, self._mix_timeline())

    @property
    def batch_size(self) -> int | None:
        """Samples of each rank; None if `global_batch_size` was given."""
        return self._split.batch_size

    per_rank = False
    """whether each rank has its own state; this loader has one for all ranks"""

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or of the next one if none has begun."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Moves to the first batch of an epoch; an epoch that was just restored keeps its restored position."""
        if epoch < 0:
            raise UsageError(f"set_epoch({epoch}): epochs are counted from 0")
        if epoch == self._epoch and (self._restored or not self._begun):
            return  # already there: the samples that the last pass carried over stay
        self._epoch, self._position = epoch, self._batcher.start(epoch)
        self._restored = self._begun = False
        self._loops += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, in samples of all ranks together, and all weights; equal on all ranks."""
        segments = [[segment.start, segment.weights] for segment in self._mix_timeline().segments]
        state = self._identity() | {"epoch": self._epoch, "position": self._position, "segments": segments}
        return state | {"samples": self._batcher.pass_samples(), "anchor": list(self._batcher.anchor)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes where `state_dict` was taken, on any number of ranks; refuses other shards or another order.

        The datasets may differ if the mix states the changes (`Mix(added=..., removed=...)`).
        """
        ours, mix = self._identity(), self._mix
        if {*state} != {*ours, "epoch", "position", "segments", "samples", "anchor"}:
            raise UsageError(f"this is not the state of a ShardLoader: {dict(state)}")
        saved, here = state["datasets"], ours["datasets"]
        changed = datasets_changed(saved, here, mix.added, mix.removed)
        check_same_order(
            {**state, "datasets": {name: saved[name] for name in here if name in saved}},
            {**ours, "datasets": {name: here[name] for name in here if name in saved}},
        )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        segments = [WeightSegment(int(start), dict(weights)) for start, weights in state["segments"]]
        self._timeline = Timeline(segments, self._order.names)
        self._batcher.anchor = epoch, position = int(state["anchor"][0]), int(state["anchor"][1])
        begun = position + (self._epoch - epoch) * int(state["samples"])
        if changed:
            self._change_datasets(self._timeline, begun)
        elif int(state["samples"]) != self._batcher.pass_samples():
            self._continue_epoch(begun)
        if not changed and self._shuffle and self._split.rank_and_world_size()[0] == 0:
            mix.warn_of_edits([segment.weights for segment in segments], self.weights)
        self._restored, self._loops = True, self._loops + 1  # a loop in progress ends with an error

    def _change_datasets(self, timeline: Timeline, begun: int) -> None:
        """Continues with the datasets of the mix; those that are in the checkpoint continue where they were.

        The current epoch began at position `begun`, and ends when it has as many samples as there are now. Without
        shuffle, it starts again.
        """
        if self._shuffle:
            self._continue_epoch(begun)
        else:
            self._position, self._batcher.anchor = self._epoch * self.samples, (0, 0)
        self._timeline = timeline.until(self._position, self._mix_segments(self._position), self._order.names)

    def _continue_epoch(self, begun: int) -> None:
        """Makes the current epoch, which began at position `begun`, end after the samples or steps of an epoch now.

        An epoch that has had more ends here: if it ended earlier, the next one would repeat samples or have too few.
        """
        self._batcher.anchor = self._epoch, max(begun, self._position - self._batcher.pass_samples())

    def _identity(self) -> dict[str, Any]:
        return {
            "version": ORDER_VERSION,
            "seed": self._settings.seed,
            "lanes": self._settings.lanes,
            "window": self._settings.window,
            "shuffle": self._shuffle,
            "datasets": {source.name: source.fingerprint() for source in self._sources},
        }


def _check(prefetch: int, threads: int | None, max_bad: float) -> None:
    if prefetch < 1 or (threads is not None and threads < 1):
        raise UsageError(f"prefetch={prefetch}, threads={threads}: both must be at least 1")
    if not 0 <= max_bad <= 1:
        raise UsageError(f"max_bad={max_bad}: give the share of samples that may be bad, from 0 to 1")
