"""Batches between a loader and the step: opened and closed, counted, and ordered by the epoch."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, repeat
from numbers import Number
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset

from headway.data import DataLoader
from headway.data.feed.nested import find_tensors, is_record, parts_of
from headway.data.stream_cursor import EpochAware
from headway.data.worker_init import WorkerInit, open_workers
from headway.errors import UsageError
from headway.train.uneven import BatchAgreement

if TYPE_CHECKING:
    from headway.train.run_state import RunState
    from headway.train.stage import Stage

_CLOSE_S = 3.0
"""how long a run that ends waits for its loaders; a failure reaches the other ranks only afterwards"""


def set_epoch(loader: object, epoch: int, *, in_place: bool = False) -> None:
    """Calls `set_epoch` of a loader, its samplers and its dataset, if defined: without it, the order never changes.

    If `in_place`, the loader has restored its position within the epoch, and only its parts are called.
    """
    parts: list[object] = [None if in_place else loader]
    for name in ("sampler", "batch_sampler", "dataset"):
        parts.append(getattr(loader, name, None))
    parts.append(getattr(parts[2], "sampler", None))
    for part in {id(part): part for part in parts}.values():
        if isinstance(part, EpochAware):
            part.set_epoch(epoch)


def open_loader(loader: Iterable[Any]) -> Iterator[Any]:
    """Returns `iter(loader)`; the workers of torch's own loader ignore stop signals, as those of `hw.data` do."""
    if not isinstance(loader, TorchDataLoader) or not loader.num_workers:
        return iter(loader)
    if not isinstance(loader.worker_init_fn, WorkerInit):
        loader.worker_init_fn = WorkerInit(loader.worker_init_fn)
    return open_workers(loader)


@contextmanager
def closing_loaders(run: RunState, *, but: Collection[DataLoader] = ()) -> Iterator[None]:
    """Ends threads and workers of loaders on every exit of the block: an exception keeps their iterators alive.

    It does not wait for a worker that is busy or stuck in a file system, which ends with the process. Loaders in `but`
    stay open unless the block reads them, which ends the loop that they were in.
    """
    loops = [(loader, loader.loops_begun) for loader in but]
    try:
        yield
    finally:
        kept = [loader for loader, begun in loops if loader.loops_begun == begun]
        closing = threading.Thread(target=_close_loaders, args=(run, kept), name="headway close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def _close_loaders(run: RunState, kept: Collection[DataLoader]) -> None:
    for stage in run.stage_states:
        stage.close_batches()
    for loader in run.pipe.datasets.values():
        if isinstance(loader, DataLoader) and not any(loader is each for each in kept):
            loader.close()


@dataclass
class Pass:
    """The progress of one pass over a dataset within an epoch."""

    total_batches: int | None = None
    """batches of a whole pass; None if the loader does not know"""
    batches_given: int = 0
    """batches that the loop has taken"""
    done: bool = False
    rng_state: Mapping[str, Any] | None = None
    """the state of the random number generators when it was opened, for a loader that cannot save its position"""
    checksums: dict[int, int] = field(default_factory=dict)
    """checksums of batch 1, 2, 4, 8 and so on of such a loader"""
    skip: int = 0
    """batches to read again and discard, to get back to the position"""
    loader: object = None
    agreement: BatchAgreement | None = None
    """if ranks may have different numbers of batches: how many each takes"""
    ranks_changed: bool = False
    """whether it began on another number of ranks: some ranks may have one batch fewer left than others, although they
    have equally many in a whole pass"""

    @property
    def ends_here(self) -> bool:
        return self.total_batches is not None and self.batches_given >= self.total_batches

    def rescale(self, total: int | None) -> None:
        """Sets the number of batches, and scales the position if it has changed with the number of ranks.

        The number of samples used stays the same. `total` is equal on all ranks, so that they have one position.
        """
        before, self.total_batches = self.total_batches, total
        if before and total and before != total:
            self.batches_given = round(self.batches_given * total / before)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"of": self.total_batches, "given": self.batches_given, "done": self.done}
        return state | ({"ranks_changed": True} if self.ranks_changed else {})

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Pass:
        return cls(
            total_batches=state["of"],
            batches_given=state["given"],
            done=state["done"],
            ranks_changed=state.get("ranks_changed", False),
        )


def missing_dataset(stage: Stage, name: str) -> UsageError:
    known = ", ".join(map(repr, stage.datasets)) or "none"
    return UsageError(
        f"stage {stage.name!r} needs the dataset {name!r}; registered: {known}. Call "
        f"pipe.register_dataset({name!r}, loader) before run(), or in pre_run"
    )


def count_batches(loader: Iterable[Any], limit: int | None) -> int | None:
    """Returns the number of batches that a loader yields, which may be an estimate; None if it does not know."""
    try:
        count = len(loader)  # type: ignore[arg-type]
    except TypeError:
        return limit
    return count if limit is None else min(count, limit)


def exact_count(loader: Iterable[Any], limit: int | None = None) -> int | None:
    """Returns the number of batches that a loader yields if ranks can rely on it; None if it does not know.

    The length of torch's loader of an iterable dataset is an estimate: with several workers, each may have a short
    last batch, and the dataset may count the samples of all ranks.
    """
    estimated = isinstance(loader, TorchDataLoader) and isinstance(loader.dataset, IterableDataset)
    if estimated or count_batches(loader, None) is None:
        return None
    return count_batches(loader, limit)


@final
class FirstBatch:
    """Yields a loader's first batch as many times as the loader has batches, which removes the cost of loading.

    If training is not faster with it, loading data is not the bottleneck. HEADWAY_FAKE_DATA=1 wraps every dataset of a
    pipeline in it.

    >>> list(FirstBatch([1, 2, 3]))
    [1, 1, 1]
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._first: list[Any] = []

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if not self._first:
            self._first = list(islice(self._loader, 1))
        count = count_batches(self._loader, None)
        for first in self._first:  # none, if the loader is empty
            yield from repeat(first) if count is None else repeat(first, count)


def first_tensor(batch: Any) -> Tensor | None:
    """Returns the first tensor in a batch, however deeply it is nested; None if there is none."""
    return next(find_tensors(batch), None)


def count_rows(batch: Any) -> int | None:
    """Returns the number of samples in a batch, the length of its first tensor; None if its structure does not show it.

    Tensors in a list within the batch may be those of single samples, or views of all samples: they do not show it.
    Neither do the dicts or records of a list.

    >>> count_rows(([torch.ones(5, 3), torch.ones(5, 3)], torch.ones(5)))
    5
    """
    if isinstance(batch, Tensor | np.ndarray):
        return len(batch) if batch.ndim else 1
    if batch is None or _is_plain(batch):
        return 1
    parts = parts_of(batch)
    if isinstance(batch, list | tuple) and _are_alike(parts):
        return None
    for part in parts:
        if isinstance(part, Tensor | np.ndarray) and part.ndim:
            return len(part)
    for part in parts:
        nested = not isinstance(part, list | tuple) or hasattr(part, "_fields")
        if nested and parts_of(part) and (count := count_rows(part)) is not None:
            return count
    columns = [batch] if isinstance(batch, list | tuple) else parts
    lists = [each for each in columns if isinstance(each, list) and each and all(map(_is_plain, each))]
    return len(lists[0]) if lists else None


def _are_alike(parts: list[Any]) -> bool:
    """Whether several parts are dicts with the same keys, or records of one class: samples, or views of all of them."""
    if len(parts) < 2 or len({type(part) for part in parts}) > 1:
        return False
    first = parts[0]
    if isinstance(first, Mapping):
        return all(part.keys() == first.keys() for part in parts)
    return is_record(first) or hasattr(first, "_fields")


def _is_plain(part: object) -> bool:
    return isinstance(part, str | bytes | Number)
