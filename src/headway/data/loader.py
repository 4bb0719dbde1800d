"""`DataLoader`: any map-style dataset, in an exact order, on any number of ranks.

torch's loader does the work (workers, pinned memory, collation); a `Cursor` decides what it loads. The position is one
number, the same on all ranks: a run may stop anywhere and resume with more or fewer ranks, and no sample is lost or
seen twice.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, final

import torch
from torch.utils import data as torch_data
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from headway.data.counters import Counters, Span, SpanListener
from headway.data.cursor import Collate, Cursor, MapCursor, Unbatched
from headway.data.feed.device_feed import DeviceFeed
from headway.data.order.batch_split import BatchSplit
from headway.data.order.order import whole_number
from headway.data.stream_cursor import StreamCursor
from headway.data.worker_init import WorkerInit, open_workers
from headway.errors import UsageError


@final
class DataLoader:
    """Loads batches of a dataset; a drop-in for torch's loader that splits batches between ranks and can be resumed.

        train = hw.data.DataLoader(dataset, batch_size=64, shuffle=True, seed=0, num_workers=4)
        for epoch in range(10):
            for images, labels in train:
                ...
                state = train.state_dict()        # a few numbers, equal on all ranks

    `batch_size` counts the samples of one rank, `global_batch_size` those of all ranks together; with the latter,
    batches do not depend on the number of ranks. Every pass visits every sample once: the last batch may be short, and
    the ranks then get equal parts of it without padding, so that a validation average is exact. `drop_last=True` omits
    a short batch. `batch_size=None` yields samples instead of batches, as torch's loader does.

    A shuffled loader is a stream: after a `break`, the next loop continues where the last one stopped. Without shuffle,
    every loop starts from the first sample. A pass that ends begins the next epoch; `set_epoch` begins any other.

    Random numbers drawn for a sample, with torch, numpy or `random`, are a function of seed, epoch and sample: neither
    workers nor ranks nor a restart change them. If a dataset has `__getitems__`, it is called for whole batches.

    An `IterableDataset` with `state_dict` and `load_state_dict` keeps its own order and distributes its samples to
    ranks and workers itself, so its state belongs to one rank and is valid for the same number of both.
    """

    def __init__(
        self,
        dataset: torch_data.Dataset[Any],
        batch_size: int | EllipsisType | None = ...,
        shuffle: bool | None = False,
        *,
        global_batch_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        timeout: float = 0.0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        sampler: None = None,
        batch_sampler: None = None,
        generator: None = None,
        in_order: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        _refuse(in_order, sampler=sampler, batch_sampler=batch_sampler, generator=generator)
        if batch_size is ...:
            batch_size = 1 if global_batch_size is None else None
        unbatched = batch_size is None and global_batch_size is None
        self.dataset, self.drop_last, self.collate_fn = dataset, drop_last, collate_fn
        self.batch_size = batch_size
        """samples of each rank; None if `global_batch_size` was given, or if samples are not batched"""
        size = 1 if unbatched else batch_size
        self._split = split = BatchSplit(
            batch_size=size, global_batch_size=global_batch_size, rank=rank, world_size=world_size
        )
        self._cursor = _make_cursor(
            dataset,
            split,
            collate=Unbatched(collate_fn) if unbatched else collate_fn or torch_data.default_collate,
            seed=whole_number("seed", seed),
            shuffle=bool(shuffle),
            drop_last=drop_last,
            workers=num_workers,
            persistent=persistent_workers,
        )
        self._restored, self._counters, self._pinned = False, Counters(), pin_memory
        self._loops = self._closed = 0  # `_closed` is the number of the loop that `close` has ended
        self._torch_iterator: Callable[[], object] = lambda: None
        self._torch: torch_data.DataLoader[Any] = torch_data.DataLoader(
            **self._cursor.torch_arguments(),
            collate_fn=_identity,
            num_workers=num_workers,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=WorkerInit(worker_init_fn),
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            generator=torch.Generator(),  # else torch draws its workers' seed from the model's generator
        )

    # --- iterating

    def __len__(self) -> int:
        """Returns the number of batches in a whole pass, on this rank."""
        return len(self._cursor)

    def __iter__(self) -> Iterator[Any]:
        self._split.separate_streams()
        self._cursor.begin_pass(restored=self._restored)
        self._restored = False
        self._loops += 1
        return self._loop(self._loops)

    @property
    def loops_begun(self) -> int:
        """How many loops over this loader have begun."""
        return self._loops

    def feed_to(self, feed: DeviceFeed | None) -> None:
        """Makes torch pin the batches of workers that start from now on; None ends that."""
        if self._torch.num_workers:
            self._torch.pin_memory = self._pinned or feed is not None

    def _loop(self, number: int) -> Iterator[Any]:
        cursor = self._cursor
        batches = open_workers(self._torch)
        self._torch_iterator = weakref.ref(batches)  # the iterator ends its workers when the loop drops it
        while self._closed != number:
            began = time.perf_counter()
            loaded = next(batches, _END)
            waited = Span("wait", threading.get_native_id(), began, time.perf_counter())
            if loaded is _END:
                if self._loops == number:
                    cursor.begin_epoch(cursor.epoch + 1)
                return
            if self._loops != number:
                raise UsageError(
                    "another loop over this DataLoader has begun, and a loader has one position: "
                    "create a second loader for the second loop"
                )
            consumed = cursor.consume(loaded)  # from here on, the position is after this batch
            if consumed is None:
                continue
            batch, samples = consumed
            self._counters.samples += samples
            self._counters.batches += 1
            self._counters.add(waited)
            yield batch

    def load_samples(self, samples: Sequence[int]) -> Any:
        """Loads the batch of these samples in this process; the position does not change."""
        if not isinstance(self._cursor, MapCursor):
            raise UsageError(
                f"a {type(self.dataset).__name__} has no samples by number: iterate over the loader"
            )
        return self._cursor.load_samples(samples)

    def close(self) -> None:
        """Ends the loop in progress, as a `break` does, and all worker processes. The next loop starts new ones."""
        self._closed = self._loops
        iterator = self._torch_iterator()
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            iterator._shutdown_workers()
        self._torch._iterator = None

    def observe_spans(self, listener: SpanListener | None) -> None:
        """Calls `listener` with each wait for a batch from now on; None ends that."""
        self._counters.listener = listener

    def counters(self) -> dict[str, float]:
        """Returns the totals of this rank: batches and samples consumed, and seconds that the loop waited for them."""
        totals = self._counters.totals()
        return {name: totals[name] for name in ("samples", "batches", "seconds/wait") if name in totals}

    # --- position

    def last_span(self) -> tuple[int, int] | None:
        """Returns where the latest batch lies in the order, in samples of all ranks; None for an iterable dataset."""
        return self._cursor.last_span()

    def order(self) -> dict[str, Any] | None:
        """Describes the order in plain values, from which `SampleLookup` finds the samples of any batch."""
        return self._cursor.order()

    @property
    def per_rank(self) -> bool:
        """Whether each rank has its own state, as with an iterable dataset, instead of one for all ranks."""
        return self._cursor.per_rank

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or of the next one if none has begun."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Moves to the first sample of an epoch; an epoch that was just restored keeps its restored position."""
        if epoch < 0:
            raise UsageError(f"set_epoch({epoch}): epochs are counted from 0")
        if not (self._restored and epoch == self._cursor.epoch):
            self._cursor.begin_epoch(epoch)
            self._moved(restored=False)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, in samples of all ranks together; batches that workers have prefetched do not count."""
        return self._cursor.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes where `state_dict` was taken, on any number of ranks; refuses another dataset or order."""
        self._cursor.load(state)
        self._moved(restored=True)

    def _moved(self, *, restored: bool) -> None:
        self._restored = restored
        self._loops += 1  # a loop in progress would continue from the old position: it ends with an error


_END = object()
_INSTEAD = {
    "sampler": "this loader shuffles and distributes samples to ranks itself, with shuffle=True and seed; to choose "
    "samples, pass torch.utils.data.Subset(dataset, indices)",
    "batch_sampler": "this loader makes batches itself, by batch_size or global_batch_size; for batches of your own, "
    "pass a dataset whose items are batches, and batch_size=None",
    "generator": "random numbers are derived from seed, epoch and sample, so that runs can be resumed: pass seed=0",
}


def _refuse(in_order: bool, **given: object) -> None:
    """Refuses arguments of torch's loader that contradict an exact order; the message says what to use instead."""
    if not in_order:
        raise UsageError(
            "in_order=False: the position of a loader is one number, so batches must come in order; remove it"
        )
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name}={type(value).__name__}: {_INSTEAD[name]}")


def _make_cursor(
    dataset: torch_data.Dataset[Any],
    split: BatchSplit,
    *,
    collate: Collate,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    workers: int,
    persistent: bool,
) -> Cursor:
    if not isinstance(dataset, torch_data.IterableDataset):
        return MapCursor(dataset, split, collate=collate, seed=seed, shuffle=shuffle, drop_last=drop_last)
    if shuffle or persistent:
        raise UsageError(
            f"{type(dataset).__name__} is an IterableDataset, which has its own order and new workers for each pass: "
            "remove shuffle=True and persistent_workers=True"
        )
    return StreamCursor(dataset, split, collate=collate, seed=seed, drop_last=drop_last, workers=workers)


def _identity(batch: Any) -> Any:
    return batch
