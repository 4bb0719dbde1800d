"""Loaders that cannot save their position, like torch's: a resumed run opens and reads them as the stopped one did.

The batches of such a loader depend on the random state when a pass begins: the global state, that of its own generators
and, with persistent workers, whether the workers have started, since torch draws their seed only then. All of it is
saved. A loader, sampler or dataset may depend on more than that; so the batches that are read again are compared with
those that were trained on.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader

from headway.errors import UsageError
from headway.system.log import logger
from headway.train.batches import Pass, open_loader
from headway.train.resume import generators, rng
from headway.train.resume.state import StatefulObject

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline

_MOST_ELEMENTS = 1024
"""elements of a tensor that are compared, evenly spread"""
_START = "_get_iterator"
"""the method by which torch's loader starts its workers"""
_INSTEAD = "use hw.data.DataLoader, or give the loader state_dict() and load_state_dict()"


@final
class LoaderStates:
    """The loaders of a pipeline without `state_dict()`, and the random state in which each was opened."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._began: dict[str, Mapping[str, Any]] = {}  # by dataset: the state when its workers first started

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the generators of each loader now."""
        found: dict[str, Any] = {}
        for name, loader in self._pipe.datasets.items():
            if not isinstance(loader, StatefulObject):
                if name not in self._began and _has_workers(loader):  # a hook has read it outside a pass
                    self._began[name] = self._random_state(loader)
                found[name] = {"generators": generators.capture(loader), "began": self._began.get(name)}
        return found

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for name, loader in self._pipe.datasets.items():
            if name in saved:
                generators.restore(loader, saved[name]["generators"])
                if saved[name]["began"] is not None:
                    self._began[name] = saved[name]["began"]
                    self._keep_seed(name, loader)

    def capture(self, loader: object) -> dict[str, Any]:
        """Returns the state that determines the order of a pass that begins now."""
        name = self._name(loader)
        reopened = name in self._began or _has_workers(loader)
        return self._random_state(loader) | {"dataset": name, "reopened": reopened}

    def _random_state(self, loader: object) -> dict[str, Any]:
        return rng.random_state(self._pipe.device) | {"generators": generators.capture(loader)}

    def open(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Returns the batches of a new pass."""
        name = self._name(loader)
        if name is None or not getattr(loader, "persistent_workers", False):
            return open_loader(loader)
        if name not in self._began:
            self._began[name] = self._random_state(loader)
        else:
            self._keep_seed(name, loader)  # a hook may have registered another loader
        return open_loader(loader)

    def reopen(self, loader: Iterable[Any], progress: Pass) -> Iterator[Any]:
        """Returns the remaining batches of a pass; those that were trained on are read again and discarded."""
        began = progress.rng_state
        if began is None:  # the number of ranks has changed
            progress.rng_state = self.capture(loader)  # this attempt may be stopped in the same pass
            return _skip(self.open(loader), progress)
        if not began.get("reopened"):
            self._forget_seed(loader)  # this is the first pass
        with rng.temporary_state(began, self._pipe.device):
            now = generators.capture(loader)
            generators.restore(loader, began.get("generators", {}))
            source = _skip(self.open(loader), progress)
            generators.restore(loader, began.get("generators_now", now))
        return source

    def _keep_seed(self, name: str, loader: object) -> None:
        """Makes persistent workers that are not running start with the seed that they had in the stopped run.

        Torch draws that seed when it starts them, and not in later passes. They start when the loader is first read: in
        a pass, which pins its batches, or by a hook; in both cases after hooks have prepared what workers may need.
        """
        if not isinstance(loader, TorchDataLoader) or not loader.persistent_workers:
            return
        if not _has_workers(loader):
            vars(loader)[_START] = partial(self._start_workers, name, loader)

    def _forget_seed(self, loader: object) -> None:
        name = self._name(loader)
        if name in self._began:
            del self._began[name]
            vars(loader).pop(_START, None)

    def _start_workers(self, name: str, loader: TorchDataLoader[Any]) -> Any:
        """Returns the iterator of a loader whose workers start now, for a pass that is not its first."""
        del vars(loader)[_START]
        with rng.temporary_state(self._began[name], self._pipe.device):
            now = generators.capture(loader)
            generators.restore(loader, self._began[name]["generators"])
            iterator = loader._get_iterator()
            generators.restore(loader, now)
        iterator._reset(loader)
        if self._pipe.world.is_root:
            logger.warning(
                f"dataset {name!r}: the random state within its persistent workers was not saved: the order of its "
                "samples is kept, but random augmentation is not; use hw.data.DataLoader, or persistent_workers=False"
            )
        return iterator

    def _name(self, loader: object) -> str | None:
        if not isinstance(loader, TorchDataLoader):
            return None
        return next((name for name, each in self._pipe.datasets.items() if each is loader), None)


def _has_workers(loader: object) -> bool:
    """Whether persistent workers of a torch loader are running."""
    persistent = bool(getattr(loader, "persistent_workers", False))
    return persistent and getattr(loader, "_iterator", None) is not None


def read_stand_in(loader: Iterable[Any], device: torch.device, rank: int) -> Any:
    """Returns a batch to repeat for a rank that has had none in this attempt, while other ranks train."""
    with rng.temporary_state(None, device):
        position = loader.state_dict() if isinstance(loader, StatefulObject) else None
        batch = next(open_loader(loader), None)
        if isinstance(loader, StatefulObject):
            loader.load_state_dict(position)
    if batch is None:
        raise UsageError(
            f"rank {rank} has no batch, and other ranks need it to take part in each step: register a larger dataset"
        )
    return batch


def pass_states(passes: Sequence[Pass]) -> list[Mapping[str, Any] | None]:
    """Returns the state that determines the batches of each pass on this rank, and checksums of some of them."""
    states: list[Mapping[str, Any] | None] = []
    for each in passes:
        state = each.rng_state
        if state is not None and each.loader is not None:  # without a loader, the pass has not resumed yet
            now = {"generators_now": generators.capture(each.loader), "checksums": dict(each.checksums)}
            state = {**state, **now}
        states.append(state)
    return states


def restore_pass_states(passes: Sequence[Pass], states: Sequence[Mapping[str, Any] | None]) -> None:
    """Restores the result of `pass_states` on this rank."""
    for each, state in zip(passes, states, strict=True):
        each.rng_state = state
        each.checksums = dict(state.get("checksums", {})) if state else {}


def note_batch(progress: Pass, batch: Any) -> None:
    """Keeps a checksum of the last batch of a pass, to compare when the batch is read again."""
    found = checksum(batch)
    if found is not None:
        progress.checksums[progress.batches_given] = found


def checksum(batch: Any) -> int | None:
    """Returns a checksum of the arrays, numbers and texts in a batch; None if it has none on the CPU."""
    parts = [part for part in map(_content, _leaves(batch, 0)) if part is not None]
    return zlib.crc32(b"|".join(parts)) if parts else None


def _skip(source: Iterator[Any], progress: Pass) -> Iterator[Any]:
    """Discards the batches that were trained on; warns if they differ from those of the stopped run."""
    again = Pass()
    for again.batches_given in range(1, progress.skip + 1):
        batch = next(source, None)
        if again.batches_given in progress.checksums:
            note_batch(again, batch)
    before = progress.checksums
    if differing := [
        number for number, found in again.checksums.items() if before.get(number, found) != found
    ]:
        logger.warning(
            f"batch {differing[0]:,} of this epoch is not the one that was trained on before: samples of this "
            "epoch may come twice or not at all, because their order or augmentation depends on something that is "
            f"not saved; {_INSTEAD}"
        )
    return source


def _leaves(batch: Any, depth: int) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and depth < 8:
        for part in batch[:_MOST_ELEMENTS]:
            yield from _leaves(part, depth + 1)
    else:
        yield batch


def _content(leaf: Any) -> bytes | None:
    if isinstance(leaf, Tensor):
        if not leaf.is_cpu or leaf.layout is not torch.strided or leaf.is_quantized:
            return None
        flat = leaf.detach().reshape(-1)
        flat = flat[:: max(1, flat.numel() // _MOST_ELEMENTS)].contiguous()
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        flattened = leaf.reshape(-1)
        return flattened[:: max(1, flattened.size // _MOST_ELEMENTS)].tobytes()
    return repr(leaf).encode() if isinstance(leaf, str | bytes | int | float) else None
