"""`DataLoader`: any map-style dataset, in an exact order, on any number of ranks.

torch's loader does the work (workers, pinned memory, collating); what it is told to load comes from `order`. What has
been consumed is one number, the same on all ranks: a run may stop anywhere and go on with more ranks or fewer, and
no sample is lost or seen twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch.utils import data as torch_data

from headway import dist
from headway.data.order import Ints, Order, Shuffle, key
from headway.data.ranks import Share
from headway.errors import UsageError

_AHEAD = 16384  # positions that are looked up at once: one by one would cost a millisecond per batch


@final
class DataLoader:
    """Batches of a map-style dataset; a drop-in for torch's loader that knows its rank and its position.

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
        share = Share(
            batch_size=batch_size, global_batch_size=global_batch_size, rank=rank, world_size=world_size
        )
        self._course = _Course(_length(dataset), share, seed=seed, shuffle=shuffle, drop_last=drop_last)
        self._loops = 0
        self._restored = False
        self._torch: torch_data.DataLoader[Any] = torch_data.DataLoader(
            _Fetch(dataset, collate_fn or torch_data.default_collate, seed),
            batch_sampler=self._course,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=_WorkerStart(worker_init_fn),
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
        course = self._course
        if not (course.shuffle or self._restored):
            course.consumed = 0
        self._restored = False
        self._loops += 1
        if course.drop_last and course.batch() > course.length:
            raise UsageError(
                f"a global batch of {course.batch()} samples, but the dataset has {course.length}, and drop_last=True "
                "leaves nothing: take a smaller batch or drop_last=False"
            )
        return self._loop(self._loops)

    def _loop(self, number: int) -> Iterator[Any]:
        course, size = self._course, self._course.batch()
        with dist.shielded():  # workers begin life deaf to the signals that are the rank's
            batches = iter(self._torch)
        for batch in batches:
            if self._loops != number:
                raise UsageError(
                    "another loop over this DataLoader has begun: a loader has one position, and one loop at a time. "
                    "Make a second loader for the second loop"
                )
            course.consumed = min(
                course.consumed + size, course.length
            )  # from here on it is the training loop's
            yield batch
        if self._loops == number:
            course.epoch, course.consumed = course.epoch + 1, 0

    # --- position

    @property
    def epoch(self) -> int:
        """The epoch of the present pass, or of the next one if none has begun."""
        return self._course.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch from its first sample; after `load_state_dict`, the restored epoch from its position."""
        if epoch < 0:
            raise UsageError(f"set_epoch({epoch}): epochs are counted from 0")
        if not (self._restored and epoch == self._course.epoch):
            self._go_to(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """What has been consumed, not what workers have loaded ahead; in samples of all ranks together."""
        return self._identity() | {"epoch": self._course.epoch, "samples": self._course.consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, on any number of ranks; another dataset or order is refused."""
        ours = self._identity()
        if {*state} != {*ours, "epoch", "samples"}:
            raise UsageError(f"this is not the state of a DataLoader: {dict(state)}")
        other = [
            f"{name} {state[name]} there, {ours[name]} here" for name in ours if state[name] != ours[name]
        ]
        if other:
            raise UsageError(
                f"the position belongs to another order of samples: {'; '.join(other)}. Make the loader as it was, "
                "or start without its state"
            )
        self._go_to(int(state["epoch"]), int(state["samples"]))
        self._restored = True

    def _go_to(self, epoch: int, samples: int) -> None:
        self._course.epoch, self._course.consumed = epoch, samples
        self._restored = False
        self._loops += 1  # a loop that is under way would go on from the old position: it ends

    def _identity(self) -> dict[str, Any]:
        course = self._course
        return {"version": 1, "length": course.length, "seed": course.seed, "shuffle": course.shuffle}


def _length(dataset: torch_data.Dataset[Any]) -> int:
    if isinstance(dataset, torch_data.IterableDataset):
        raise UsageError(
            f"{type(dataset).__name__} is an IterableDataset: it has an order of its own, which cannot be made exact. "
            "Give a dataset with __len__ and __getitem__, or use torch's DataLoader for it"
        )
    length = len(dataset)  # type: ignore[arg-type]  # torch's Dataset leaves __len__ to its children
    if not length:
        raise UsageError(f"{type(dataset).__name__} is empty: a loader needs at least one sample")
    return length


# --- what runs in the workers


class _Request(NamedTuple):
    """What a worker is to load: part of one batch."""

    epoch: int
    samples: list[int]


@final
class _Course(torch_data.Sampler[Any]):
    """The position, and what is to be loaded from there on.

    Not part of the loader: torch's loader holds it, and in a ring of references nobody would end the workers in time.
    """

    def __init__(self, length: int, share: Share, *, seed: int, shuffle: bool, drop_last: bool) -> None:
        self.length, self.share = length, share
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.epoch = self.consumed = 0
        self._order = Order([length], Shuffle(seed=seed) if shuffle else None)

    def batch(self) -> int:
        """Samples of all ranks together in a full batch."""
        return self.share.batch(self.share.place()[1])

    def __len__(self) -> int:
        whole, rest = divmod(self.length, self.batch())
        if self.drop_last or not rest:
            return whole
        mine = self.share.of(rest)
        return whole + (mine.start < mine.stop or self.shuffle)

    def __iter__(self) -> Iterator[_Request]:
        return self._cut(self.epoch, self.consumed, *self.share.place())

    def _cut(self, epoch: int, start: int, rank: int, world_size: int) -> Iterator[_Request]:
        """This rank's part of each batch, from a position to the end of the epoch."""
        size = self.share.batch(world_size)
        mine = self.share.of(size)
        many = max(1, _AHEAD // size)
        whole = (self.length - start) // size
        for done in range(0, whole, many):
            starts = start + size * np.arange(done, min(done + many, whole))
            yield from self._requests(epoch, starts, mine)
        last = start + whole * size
        if last == self.length or self.drop_last:
            return
        mine = self.share.of(self.length - last)
        if mine.start == mine.stop and self.shuffle:
            only = rank % (
                self.length - last
            )  # a sample twice rather than a rank that is a step short of the others
            mine = slice(only, only + 1)
        if mine.start < mine.stop:
            yield from self._requests(epoch, np.array([last]), mine)

    def _requests(self, epoch: int, starts: Ints, mine: slice) -> list[_Request]:
        positions = epoch * self.length + starts[:, None] + np.arange(mine.start, mine.stop)
        samples = self._order.locate(positions.ravel()).sample.reshape(positions.shape)
        return [_Request(epoch, row.tolist()) for row in samples]


@final
class _Fetch(torch_data.Dataset[Any]):
    """The dataset as workers see it: whole batches, each sample with random numbers of its own."""

    def __init__(
        self, dataset: torch_data.Dataset[Any], collate: Callable[[list[Any]], Any], seed: int
    ) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._pure = (
            type(dataset) is torch_data.TensorDataset
        )  # draws nothing: seeding would be half of its cost

    def __getitems__(self, request: _Request) -> Any:
        if self._pure and self._collate is torch_data.default_collate:
            return self._collate([self._dataset[sample] for sample in request.samples])
        with _own_random_numbers():
            samples = []
            for sample in request.samples:
                _reseed(key(self._seed, request.epoch, sample))
                samples.append(self._dataset[sample])
            return self._collate(samples)  # with the random numbers that follow those of the last sample


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """In the training process, leaves its random numbers as they were: they belong to the model."""
    if torch_data.get_worker_info() is not None:
        yield
        return
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _reseed(seed: int) -> None:
    torch.default_generator.manual_seed(
        seed
    )  # not torch.manual_seed, which piles up work for a GPU never used
    random.seed(seed)
    np.random.seed(seed >> 32)


@final
class _WorkerStart:
    """A worker's first act; an object because it must travel to workers that are not forks."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker: int) -> None:
        dist.ignore_signals(worker)
        if self._users is not None:
            self._users(worker)


def _as_it_is(batch: Any) -> Any:
    return batch
