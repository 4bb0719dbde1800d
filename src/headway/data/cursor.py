"""Where a `DataLoader` is, and what its workers are to load from there on.

A `Course` is not part of the loader: torch's loader holds it, and in a ring of references nobody would end the workers
in time. `MapCourse` is that of a dataset with `__getitem__`; the one of an iterable dataset is in `streams`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, final

import numpy as np
from torch.utils import data as torch_data

from headway.data.order.locate import describe
from headway.data.order.order import Ints, Order, Shuffle, check_same_order, key
from headway.data.order.share import Share
from headway.data.worker_init import own_random_numbers, reseed
from headway.errors import UsageError

_AHEAD = 16384  # positions that are looked up at once: one by one would cost a millisecond per batch

Collate = Callable[[list[Any]], Any]


class Course(ABC):
    """The position of a loader: an epoch, and what has been consumed of it."""

    per_rank = False
    """whether each rank has a position of its own, instead of one for all"""
    epoch = 0

    @abstractmethod
    def torch_arguments(self) -> dict[str, Any]:
        """What torch's loader is to load, and in which order."""

    @abstractmethod
    def __len__(self) -> int:
        """Batches of a whole pass, on this rank."""

    @abstractmethod
    def begin_pass(self, *, restored: bool) -> None:
        """Before a loop; `restored`: the position was just put back, and holds."""

    @abstractmethod
    def took(self, loaded: Any) -> tuple[Any, int] | None:
        """The training loop takes what was loaded: the batch, and how many samples it has; None: it was none."""

    @abstractmethod
    def given(self) -> tuple[int, int] | None:
        """Where in the order the batch lies that was taken last; None where there is no order of ours."""

    @abstractmethod
    def order(self) -> dict[str, Any] | None:
        """The order in plain values, for `which`."""

    @abstractmethod
    def begin_epoch(self, epoch: int) -> None:
        """To the first sample of an epoch."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The position as JSON can say it."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Back to a position; refuses one that is not of this course."""


class Request(NamedTuple):
    """What a worker is to load: part of one batch."""

    epoch: int
    samples: list[int]


@final
class MapCourse(Course, torch_data.Sampler[Any]):
    """The exact order of a dataset with a length, dealt to ranks; one number for all of them."""

    def __init__(
        self,
        dataset: torch_data.Dataset[Any],
        share: Share,
        *,
        collate: Collate,
        seed: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        self.length, self.share = _length(dataset), share
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.consumed = 0
        self._given: tuple[int, int] | None = None
        self._fetch = _Fetch(dataset, collate, seed)
        self._order = Order([self.length], Shuffle(seed=seed) if shuffle else None)

    def torch_arguments(self) -> dict[str, Any]:
        return {"dataset": self._fetch, "batch_sampler": self}

    def batch(self) -> int:
        """Samples of all ranks together in a full batch."""
        return self.share.batch(self.share.place()[1])

    def __len__(self) -> int:
        whole, rest = divmod(self.length, self.batch())
        if self.drop_last or not rest:
            return whole
        mine = self.share.of(rest)
        return whole + (mine.start < mine.stop or self.shuffle)

    def begin_pass(self, *, restored: bool) -> None:
        if not (self.shuffle or restored):
            self.consumed = 0
        if self.drop_last and self.batch() > self.length:
            raise UsageError(
                f"a global batch of {self.batch()} samples, but the dataset has {self.length}, and drop_last=True "
                "leaves nothing: take a smaller batch or drop_last=False"
            )

    def took(self, loaded: Any) -> tuple[Any, int]:
        count = min(self.batch(), self.length - self.consumed)
        start = self.epoch * self.length + self.consumed
        self._given = start, start + count
        self.consumed += count
        mine = self.share.of(count)
        return loaded, max(mine.stop - mine.start, 1)

    def given(self) -> tuple[int, int] | None:
        return self._given

    def order(self) -> dict[str, Any]:
        return describe({"data": [self.length]}, [Shuffle(seed=self.seed)] if self.shuffle else None)

    def begin_epoch(self, epoch: int) -> None:
        self.epoch, self.consumed = epoch, 0

    def state(self) -> dict[str, Any]:
        return self._identity() | {"epoch": self.epoch, "samples": self.consumed}

    def load(self, state: Mapping[str, Any]) -> None:
        ours = self._identity()
        if {*state} != {*ours, "epoch", "samples"}:
            raise UsageError(f"this is not the state of a DataLoader: {dict(state)}")
        check_same_order(state, ours)
        self.epoch, self.consumed = int(state["epoch"]), int(state["samples"])

    def _identity(self) -> dict[str, Any]:
        return {"version": 1, "length": self.length, "seed": self.seed, "shuffle": self.shuffle}

    def __iter__(self) -> Iterator[Request]:
        return self._cut(self.epoch, self.consumed, *self.share.place())

    def _cut(self, epoch: int, start: int, rank: int, world_size: int) -> Iterator[Request]:
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
            only = rank % (self.length - last)  # twice, rather than a rank that is a step short of the others
            mine = slice(only, only + 1)
        if mine.start < mine.stop:
            yield from self._requests(epoch, np.array([last]), mine)

    def _requests(self, epoch: int, starts: Ints, mine: slice) -> list[Request]:
        positions = epoch * self.length + starts[:, None] + np.arange(mine.start, mine.stop)
        samples = self._order.locate(positions.ravel()).sample.reshape(positions.shape)
        return [Request(epoch, row.tolist()) for row in samples]


def _length(dataset: torch_data.Dataset[Any]) -> int:
    length = len(dataset)  # type: ignore[arg-type]  # torch's Dataset leaves __len__ to its children
    if not length:
        raise UsageError(f"{type(dataset).__name__} is empty: a loader needs at least one sample")
    return length


@final
class _Fetch(torch_data.Dataset[Any]):
    """The dataset as workers see it: whole batches, each sample with random numbers of its own."""

    def __init__(self, dataset: torch_data.Dataset[Any], collate: Collate, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        # draws nothing: seeding would be half of its cost
        self._pure = type(dataset) is torch_data.TensorDataset and collate is torch_data.default_collate

    def __getitems__(self, request: Request) -> Any:
        if self._pure:
            return self._collate([self._dataset[sample] for sample in request.samples])
        with own_random_numbers():
            samples = []
            for sample in request.samples:
                reseed(key(self._seed, request.epoch, sample))
                samples.append(self._dataset[sample])
            return self._collate(samples)  # with the random numbers that follow those of the last sample
