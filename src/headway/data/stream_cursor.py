"""`StreamCursor`: the position of an iterable dataset, whose state accompanies every batch from worker to loop.

Such a dataset defines its own order, and distributes its samples to ranks and workers itself. So its position consists
of one state per worker of this rank, and is valid only for the same number of ranks and workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

from torch.utils import data as torch_data

from headway.data.cursor import Collate, Cursor
from headway.data.order.batch_split import BatchSplit
from headway.data.order.order import list_differences
from headway.data.order.permutation import derive_key
from headway.data.worker_init import preserve_rng, reseed
from headway.errors import UsageError
from headway.system.log import logger


@runtime_checkable
class StatefulDataset(Protocol):
    """A dataset whose next `iter` continues from the state that was loaded."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class EpochAware(Protocol):
    """A loader, sampler or dataset whose order depends on the epoch."""

    def set_epoch(self, epoch: int, /) -> object: ...


def _is_hugging_face(dataset: object) -> bool:
    return type(dataset).__module__.startswith("datasets.")


def _is_unsplit(dataset: object) -> bool:
    """Whether a dataset is a Hugging Face stream that is not split between ranks."""
    return _is_hugging_face(dataset) and getattr(dataset, "_distributed", dataset) is None


def _loses_samples(dataset: object) -> bool:
    """Whether a dataset is a Hugging Face stream with a shuffle buffer, whose samples are not part of its state."""
    sources = [getattr(dataset, "_ex_iterable", None)] if _is_hugging_face(dataset) else []
    while sources:
        source = sources.pop()
        if "BufferShuffled" in type(source).__name__:
            return True
        sources += [each for each in (getattr(source, "ex_iterable", None),) if each is not None]
        sources += getattr(source, "ex_iterables", ())
    return False


class _StreamBatch(NamedTuple):
    """A batch from a worker, and the state of the worker's dataset after it."""

    batch: Any
    samples: int
    worker: int
    state: dict[str, Any]


@final
class StreamCursor(Cursor):
    """The position of an iterable dataset on this rank."""

    per_rank = True

    def __init__(
        self,
        dataset: torch_data.IterableDataset[Any],
        split: BatchSplit,
        *,
        collate: Collate,
        seed: int,
        drop_last: bool,
        workers: int,
    ) -> None:
        if not isinstance(dataset, StatefulDataset):
            raise UsageError(
                f"{type(dataset).__name__} is an IterableDataset without state_dict and load_state_dict, so its "
                "position cannot be resumed. Implement both, or use a dataset with __getitem__"
            )
        if split.batch_size is None:
            raise UsageError(
                f"global_batch_size={split.global_batch_size} with {type(dataset).__name__}: an iterable dataset "
                "distributes its samples to ranks itself; give batch_size, the samples of each rank"
            )
        self._dataset, self._split, self._workers = dataset, split, max(1, workers)
        self._warned = False
        self._stream = _BatchStream(dataset, collate, seed, split.batch_size, drop_last)

    def torch_arguments(self) -> dict[str, Any]:
        return {"dataset": self._stream, "batch_size": None}

    def __len__(self) -> int:
        raise TypeError("the DataLoader of an iterable dataset has no length")

    def begin_pass(self, *, restored: bool) -> None:
        if not restored:
            self.begin_epoch(self.epoch)
        rank, world_size = self._split.rank_and_world_size()
        if world_size > 1 and not self._warned and _is_unsplit(self._dataset):
            self._warn_unsplit(world_size)
        if isinstance(self._dataset, EpochAware):
            # its order depends on the epoch, and it may check that its state belongs to the same one
            self._dataset.set_epoch(self.epoch)
        self._stream.rank = rank

    def _warn_unsplit(self, world_size: int) -> None:
        """Warns that ranks may read the same samples, unless each has its own files or its own shard."""
        self._warned = True
        logger.warning(
            f"{type(self._dataset).__name__} of Hugging Face gives all of its samples to each of {world_size} ranks, "
            "unless it was made from other files or another .shard() on each: pass "
            "datasets.distributed.split_dataset_by_node(dataset, rank=hw.rank(), world_size=hw.world_size())"
        )

    def consume(self, loaded: Any) -> tuple[Any, int] | None:
        if loaded is None:
            return None
        taken, stream = _StreamBatch(*loaded), self._stream
        stream.states[taken.worker] = taken.state
        stream.batches[taken.worker] = stream.batches.get(taken.worker, 0) + 1
        stream.first = (taken.worker + 1) % self._workers
        return taken.batch, taken.samples

    def last_span(self) -> None:
        return None

    def order(self) -> None:
        return None

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = self._stream.epoch = epoch
        self._stream.states, self._stream.batches, self._stream.first = {}, {}, 0

    def state(self) -> dict[str, Any]:
        stream = self._stream
        places = {
            str(worker): {"batches": stream.batches[worker], "state": state}
            for worker, state in sorted(stream.states.items())
        }
        return self._identity() | {"epoch": self.epoch, "next": stream.first, "places": places}

    def load(self, state: Mapping[str, Any]) -> None:
        ours = self._identity()
        if {*state} != {*ours, "epoch", "next", "places"}:
            raise UsageError(
                f"this is not the state of a DataLoader of an iterable dataset: {dict(state)}"
                "; pass what its state_dict() returned"
            )
        if differences := list_differences(state, ours):
            raise UsageError(
                "the position of an iterable dataset is valid for the same rank, number of ranks and workers only: "
                f"{differences}. Start with the same numbers, or use a dataset with __getitem__"
            )
        self.begin_epoch(int(state["epoch"]))
        self._stream.first = int(state["next"])
        for worker, place in state["places"].items():
            self._stream.states[int(worker)] = place["state"]
            self._stream.batches[int(worker)] = int(place["batches"])
        again = sum(self._stream.batches.values())
        if again and self._stream.replays and ours["rank"] == 0:
            logger.info(
                f"the state of {type(self._dataset).__name__} does not have the samples in its shuffle buffer: "
                f"{again:,} batches are read again and skipped"
            )

    def _identity(self) -> dict[str, Any]:
        rank, world_size = self._split.rank_and_world_size()
        return {"version": 1, "rank": rank, "world_size": world_size, "workers": self._workers}


@final
class _BatchStream(torch_data.IterableDataset[Any]):
    """The dataset that torch's workers read: it yields whole batches, each with the state after it.

    torch takes batches from its workers in turn, beginning with worker 0. To resume at another worker's turn, the
    workers before it yield None once.
    """

    def __init__(
        self,
        dataset: torch_data.IterableDataset[Any],
        collate: Collate,
        seed: int,
        size: int,
        drop_last: bool,
    ) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._size, self._drop_last = size, drop_last
        self.rank = self.epoch = self.first = 0
        self.replays = _loses_samples(dataset)
        """whether a resume reads the epoch again from its beginning, because the state of the dataset is not enough"""
        self.states: dict[int, dict[str, Any]] = {}
        self.batches: dict[int, int] = {}

    def __iter__(self) -> Iterator[_StreamBatch | None]:
        info = torch_data.get_worker_info()
        worker = 0 if info is None else info.id
        if worker < self.first:
            yield None
        done = self.batches.get(worker, 0)
        stateful: Any = self._dataset
        if worker in self.states and not self.replays:
            stateful.load_state_dict(deepcopy(self.states[worker]))
        samples = iter(self._dataset)
        for number in range(done if self.replays else 0):
            with preserve_rng():
                reseed(derive_key(self._seed, self.epoch, self.rank, worker, number))
                list(islice(samples, self._size))
        while True:
            with preserve_rng():
                reseed(derive_key(self._seed, self.epoch, self.rank, worker, done))
                batch = list(islice(samples, self._size))
                if not batch or (self._drop_last and len(batch) < self._size):
                    return
                collated = self._collate(batch)
            done += 1
            yield _StreamBatch(collated, len(batch), worker, deepcopy(stateful.state_dict()))
