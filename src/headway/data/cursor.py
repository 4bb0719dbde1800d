"""`Cursor`: the position of a `DataLoader`, and what its workers load next.

The cursor is not part of the loader, because torch's loader refers to it: in a reference cycle, workers would not be
shut down in time. `MapCursor` serves datasets with `__getitem__`, `StreamCursor` in `stream_cursor` iterable ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from torch.utils import data as torch_data
from torch.utils.data import default_convert

from headway.data.order.batch_split import BatchSplit
from headway.data.order.lookup import describe_order
from headway.data.order.order import ORDER_VERSION, Order, Shuffle, check_same_order
from headway.data.order.permutation import Ints, derive_key
from headway.data.worker_init import preserve_rng, reseed, rng_states
from headway.errors import UsageError

_MAX_POSITIONS = 16384  # located at a time: one by one would cost a millisecond per batch

Collate = Callable[[list[Any]], Any]


class Cursor(ABC):
    """The position of a loader: an epoch, and what has been consumed of it."""

    per_rank = False
    """whether each rank has its own position, instead of one for all"""
    epoch = 0

    @abstractmethod
    def torch_arguments(self) -> dict[str, Any]:
        """Returns the arguments for torch's loader that determine what it loads, and in which order."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of batches in a whole pass, on this rank."""

    @abstractmethod
    def begin_pass(self, *, restored: bool) -> None:
        """Prepares a pass; with `restored`, it begins at the position that was just loaded."""

    @abstractmethod
    def consume(self, loaded: Any) -> tuple[Any, int] | None:
        """Moves past what was loaded, and returns the batch and its number of samples; None if there is no batch."""

    @abstractmethod
    def last_span(self) -> tuple[int, int] | None:
        """Returns where in the order the latest batch lies; None if the dataset has its own order."""

    @abstractmethod
    def order(self) -> dict[str, Any] | None:
        """Describes the order in plain values, for `SampleLookup`."""

    @abstractmethod
    def begin_epoch(self, epoch: int) -> None:
        """Moves to the first sample of an epoch."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns the position in values that JSON can hold."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Moves to a saved position; refuses one that belongs to another cursor."""


class SampleRequest(NamedTuple):
    """What a worker loads for one request: this rank's part of one batch."""

    epoch: int
    samples: list[int]


@final
class MapCursor(Cursor, torch_data.Sampler[Any]):
    """The position in the exact order of a dataset with a length: one number for all ranks."""

    def __init__(
        self,
        dataset: torch_data.Dataset[Any],
        split: BatchSplit,
        *,
        collate: Collate,
        seed: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        self.length, self.split = _length(dataset), split
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.consumed = 0
        self._last_span: tuple[int, int] | None = None
        self._fetcher = _BatchFetcher(dataset, collate, seed)
        self._settings = Shuffle(seed=seed)
        self._order = Order([self.length], self._settings if self.shuffle else None)

    def torch_arguments(self) -> dict[str, Any]:
        return {"dataset": self._fetcher, "batch_sampler": self}

    def __len__(self) -> int:
        whole, rest = divmod(self.length, self.split.global_size())
        if self.drop_last or not rest:
            return whole
        mine = self.split.rank_slice(rest)
        return whole + (mine.start < mine.stop or self.shuffle)

    def begin_pass(self, *, restored: bool) -> None:
        if not (self.shuffle or restored):
            self.consumed = 0
        size = self.split.global_size()
        if self.drop_last and size > self.length:
            raise UsageError(
                f"a global batch has {size} samples, but the dataset has {self.length}, and drop_last=True "
                "leaves no batch: use a smaller batch or drop_last=False"
            )

    def consume(self, loaded: Any) -> tuple[Any, int]:
        count = min(self.split.global_size(), self.length - self.consumed)
        start = self.epoch * self.length + self.consumed
        self._last_span = start, start + count
        self.consumed += count
        mine = self.split.rank_slice(count)
        return loaded, max(mine.stop - mine.start, 1)

    def last_span(self) -> tuple[int, int] | None:
        return self._last_span

    def load_samples(self, samples: Sequence[int]) -> Any:
        return self._fetcher.__getitems__(SampleRequest(self.epoch, list(samples)))

    def order(self) -> dict[str, Any]:
        shuffles = [self._settings] if self.shuffle else None
        return describe_order({"data": [self.length]}, shuffles)

    def begin_epoch(self, epoch: int) -> None:
        self.epoch, self.consumed = epoch, 0

    def state(self) -> dict[str, Any]:
        return self._identity() | {"epoch": self.epoch, "samples": self.consumed}

    def load(self, state: Mapping[str, Any]) -> None:
        ours = self._identity()
        if {*state} != {*ours, "epoch", "samples"}:
            raise UsageError(
                f"this is not the state of a DataLoader: {dict(state)}; pass what its state_dict() returned"
            )
        check_same_order(state, ours)
        self.epoch, self.consumed = int(state["epoch"]), int(state["samples"])

    def _identity(self) -> dict[str, Any]:
        return {
            "version": ORDER_VERSION,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def __iter__(self) -> Iterator[SampleRequest]:
        return self._split_epoch(self.epoch, self.consumed, self.split.rank_and_world_size()[0])

    def _split_epoch(self, epoch: int, start: int, rank: int) -> Iterator[SampleRequest]:
        """Yields this rank's part of each batch, from a position to the end of the epoch."""
        size = self.split.global_size()
        mine = self.split.rank_slice(size)
        batches = max(1, _MAX_POSITIONS // size)
        whole = (self.length - start) // size
        for done in range(0, whole, batches):
            starts = start + size * np.arange(done, min(done + batches, whole))
            yield from self._requests(epoch, starts, mine)
        last = start + whole * size
        if last == self.length or self.drop_last:
            return
        mine = self.split.rank_slice(self.length - last)
        if mine.start == mine.stop and self.shuffle:
            # a rank without a sample would take one step fewer than the others: it repeats one
            repeated = rank % (self.length - last)
            mine = slice(repeated, repeated + 1)
        if mine.start < mine.stop:
            yield from self._requests(epoch, np.array([last]), mine)

    def _requests(self, epoch: int, starts: Ints, mine: slice) -> list[SampleRequest]:
        positions = epoch * self.length + starts[:, None] + np.arange(mine.start, mine.stop)
        samples = self._order.locate(positions.ravel()).sample.reshape(positions.shape)
        return [SampleRequest(epoch, row.tolist()) for row in samples]


def _length(dataset: torch_data.Dataset[Any]) -> int:
    length = len(dataset)  # type: ignore[arg-type]  # torch's Dataset leaves __len__ to its subclasses
    if not length:
        raise UsageError(f"{type(dataset).__name__} is empty: a loader needs at least one sample")
    return length


@final
class Unbatched:
    """The `collate_fn` of `batch_size=None`: a batch of one sample is the sample itself, converted as torch does."""

    def __init__(self, convert: Callable[[Any], Any] | None) -> None:
        self._convert = convert or default_convert

    def __call__(self, samples: list[Any]) -> Any:
        return self._convert(samples[0])


@final
class _BatchFetcher(torch_data.Dataset[Any]):
    """The dataset that torch's workers read: it returns whole batches, each sample with its own random numbers.

    `__getitems__` of a dataset fetches many samples at once, and random numbers that it draws cannot be attributed to
    one of them. So the first sample is fetched alone; if that draws any, every sample is fetched by `__getitem__`.
    """

    def __init__(self, dataset: torch_data.Dataset[Any], collate: Collate, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._fetch_all: Callable[[list[int]], Any] | None = (
            dataset.__getitems__ if _fetches_batches(dataset) else None  # type: ignore[attr-defined]
        )
        self._is_tried = False  # whether a call of `__getitems__` drew no random numbers
        # this draws no random numbers, and seeding would be half of its cost
        self._needs_no_rng = (
            type(dataset) is torch_data.TensorDataset and collate is torch_data.default_collate
        )

    def __getitems__(self, request: SampleRequest) -> Any:
        if self._needs_no_rng:
            return self._collate([self._dataset[sample] for sample in request.samples])
        with preserve_rng():
            # collated with the random numbers that follow those of the last sample
            return self._collate(self._fetch(request))

    def _fetch(self, request: SampleRequest) -> Any:
        first: Any = []
        if self._fetch_all is not None and not self._is_tried:
            first, drew = self._fetch_at_once(request, slice(0, 1))
            if not isinstance(first, list):  # already collated: a batch cannot be made of it and the rest
                return first if len(request.samples) == 1 else self._fetch_at_once(request, slice(None))[0]
            self._is_tried = not drew
            if drew:  # fetch it again by `__getitem__`, as after a resume: that may draw differently
                self._fetch_all, first = None, []
        missing = slice(len(first), None)
        if not request.samples[missing]:
            return first
        if self._fetch_all is not None:
            rest, drew = self._fetch_at_once(request, missing)
            if not isinstance(rest, list):
                return self._fetch_at_once(request, slice(None))[0] if first else rest
            if not drew:
                return first + rest
            self._fetch_all = None  # it draws only for some samples: fetch these again
        return first + [self._fetch_one(request, sample) for sample in request.samples[missing]]

    def _fetch_one(self, request: SampleRequest, sample: int) -> Any:
        reseed(derive_key(self._seed, request.epoch, sample))
        try:
            return self._dataset[sample]
        except Exception as error:
            error.add_note(f"sample {sample} of {type(self._dataset).__name__}, in epoch {request.epoch}")
            raise

    def _fetch_at_once(self, request: SampleRequest, part: slice) -> tuple[Any, bool]:
        """Returns the result of `__getitems__`, and whether it drew random numbers."""
        assert self._fetch_all is not None
        indices = request.samples[part]
        reseed(derive_key(self._seed, request.epoch, indices[-1]))
        before = rng_states()
        samples = self._fetch_all(indices)
        if isinstance(samples, list) and len(samples) != len(indices):
            raise UsageError(
                f"__getitems__ of {type(self._dataset).__name__} returned {len(samples)} samples for "
                f"{len(indices)} indices: return one for each"
            )
        return samples, rng_states() != before


def _fetches_batches(dataset: torch_data.Dataset[Any]) -> bool:
    """Whether a dataset has a `__getitems__` that saves calls, and no subclass overrides `__getitem__` alone.

    `__getitems__` of torch's `Subset`, which `random_split` returns, may call the inner dataset for each sample.
    """
    for each in type(dataset).__mro__:
        if each is torch_data.Subset:
            return _fetches_batches(dataset.dataset)  # type: ignore[attr-defined]
        if vars(each).get("__getitems__"):
            return True
        if "__getitem__" in vars(each):
            return False
    return False
