"""`DataLoader`: any map-style dataset, in an exact order, on any number of ranks.

torch's loader does the work (workers, pinned memory, collating); what it is told to load comes from `order`. What has
been consumed is one number, the same on all ranks: a run may stop anywhere and go on with more ranks or fewer, and
no sample is lost or seen twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch.utils import data as torch_data

from headway.data.counters import Counters, Span
from headway.data.cursor import Course, MapCourse
from headway.data.order.share import Share
from headway.data.streams import StreamCourse
from headway.data.worker_init import WorkerStart
from headway.dist.control.signals import block_signals
from headway.errors import UsageError


@final
class DataLoader:
    """Batches of a dataset; a drop-in for torch's loader that knows its rank and its position.

        train = hw.data.DataLoader(dataset, batch_size=64, shuffle=True, seed=0, num_workers=4)
        for epoch in range(10):
            for images, labels in train:
                ...
                state = train.state_dict()        # a few numbers, equal on all ranks

    `batch_size` counts the samples of one rank, `global_batch_size` those of all ranks together; with the latter,
    batches do not depend on the number of ranks. Every pass visits every sample once: the last batch may be short, and
    the ranks then get equal parts of it, nothing padded, so that a validation average is exact. `drop_last=True`
    leaves a short batch out.

    A shuffled loader is a stream: after a `break`, the next loop goes on where the last one stopped. One without
    shuffle starts from the top. Either way a pass that ends begins the next epoch, and `set_epoch` any other.

    Random numbers drawn for a sample, with torch, numpy or `random`, are a function of seed, epoch and sample: neither
    workers nor ranks nor a restart change them.

    An `IterableDataset` with `state_dict` and `load_state_dict` is taken as it is: it has an order of its own and deals
    its samples to ranks and workers itself, so its state is each rank's own and holds for the same number of both.
    """

    def __init__(
        self,
        dataset: torch_data.Dataset[Any],
        batch_size: int | None = None,
        shuffle: bool = False,
        *,
        global_batch_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0.0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if batch_size is None and global_batch_size is None:
            batch_size = 1
        self.dataset = dataset
        self.batch_size = batch_size
        """samples of each rank; None where `global_batch_size` counts those of all"""
        share = Share(
            batch_size=batch_size, global_batch_size=global_batch_size, rank=rank, world_size=world_size
        )
        self._course = _course(
            dataset,
            share,
            collate=collate_fn or torch_data.default_collate,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            workers=num_workers,
            persistent=persistent_workers,
        )
        self._loops = 0
        self._restored = False
        self._counters = Counters()
        self._torch: torch_data.DataLoader[Any] = torch_data.DataLoader(
            **self._course.torch_arguments(),
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=WorkerStart(worker_init_fn),
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            generator=torch.Generator(),  # or torch would take a number from the model's for its workers
        )

    # --- iterating

    def __len__(self) -> int:
        """Batches of a whole pass, on this rank."""
        return len(self._course)

    def __iter__(self) -> Iterator[Any]:
        self._course.begin_pass(restored=self._restored)
        self._restored = False
        self._loops += 1
        return self._loop(self._loops)

    def _loop(self, number: int) -> Iterator[Any]:
        course = self._course
        with block_signals():  # workers begin life deaf to the signals that are the rank's
            batches = iter(self._torch)
        while True:
            began = time.perf_counter()
            loaded = next(batches, _END)
            waited = Span("wait", threading.get_native_id(), began, time.perf_counter())
            if loaded is _END:
                break
            if self._loops != number:
                raise UsageError(
                    "another loop over this DataLoader has begun: a loader has one position, and one loop at a time. "
                    "Make a second loader for the second loop"
                )
            taken = course.took(loaded)  # from here on it is the training loop's
            if taken is None:
                continue
            batch, samples = taken
            self._counters.samples += samples
            self._counters.batches += 1
            self._counters.spent(waited)
            yield batch
        if self._loops == number:
            course.begin_epoch(course.epoch + 1)

    def counters(self) -> dict[str, float]:
        """What this rank has done so far: batches and samples taken, and seconds that the loop waited for them."""
        totals = self._counters.totals()
        return {name: totals[name] for name in ("samples", "batches", "seconds/wait") if name in totals}

    # --- position

    def given(self) -> tuple[int, int] | None:
        """Where in the order, in samples of all ranks, the last batch lies; None for an iterable dataset."""
        return self._course.given()

    def order(self) -> dict[str, Any] | None:
        """The order in plain values: `headway.data.order.locate` tells from it which samples a batch had."""
        return self._course.order()

    @property
    def per_rank(self) -> bool:
        """Whether the state is this rank's own, as with an iterable dataset, instead of one for all ranks."""
        return self._course.per_rank

    @property
    def epoch(self) -> int:
        """The epoch of the present pass, or of the next one if none has begun."""
        return self._course.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch from its first sample; after `load_state_dict`, the restored epoch from its position."""
        if epoch < 0:
            raise UsageError(f"set_epoch({epoch}): epochs are counted from 0")
        if not (self._restored and epoch == self._course.epoch):
            self._course.begin_epoch(epoch)
            self._moved(restored=False)

    def state_dict(self) -> dict[str, Any]:
        """What has been consumed, not what workers have loaded ahead; in samples of all ranks together."""
        return self._course.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, on any number of ranks; another dataset or order is refused."""
        self._course.load(state)
        self._moved(restored=True)

    def _moved(self, *, restored: bool) -> None:
        self._restored = restored
        self._loops += 1  # a loop that is under way would go on from the old position: it ends


_END = object()


def _course(
    dataset: torch_data.Dataset[Any],
    share: Share,
    *,
    collate: Callable[[list[Any]], Any],
    seed: int,
    shuffle: bool,
    drop_last: bool,
    workers: int,
    persistent: bool,
) -> Course:
    if not isinstance(dataset, torch_data.IterableDataset):
        return MapCourse(dataset, share, collate=collate, seed=seed, shuffle=shuffle, drop_last=drop_last)
    if shuffle or persistent:
        raise UsageError(
            f"{type(dataset).__name__} is an IterableDataset: its order is its own, and each pass has new workers; "
            "leave out shuffle=True and persistent_workers=True"
        )
    return StreamCourse(dataset, share, collate=collate, seed=seed, drop_last=drop_last, workers=workers)


def _as_it_is(batch: Any) -> Any:
    return batch
