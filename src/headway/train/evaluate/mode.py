"""Eval mode: models and batches for a validation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from headway.data import DataLoader
from headway.data.feed.device_feed import to_device
from headway.dist import set_phase
from headway.dist.collective.exchange import gather_rows
from headway.errors import UsageError
from headway.train.batches import set_epoch
from headway.train.model.modes import restore_modes
from headway.train.model.named_parts import NamedParts
from headway.train.resume import generators, rng
from headway.train.resume.replay import read_stand_in
from headway.train.resume.state import StatefulObject
from headway.train.resume.unsaved import own_modules
from headway.train.settings import limit_batches

if TYPE_CHECKING:
    from headway.train.loop_state import LoopState
    from headway.train.pipeline import Pipeline
    from headway.train.run_state import RunState
    from headway.train.train_val_state import TrainValState


@contextmanager
def evaluating(state: LoopState) -> Iterator[None]:
    """Sets models to eval mode, without wrappers and with averaged weights, within the context."""
    registered = state.pipe.registered_models
    models = [*(model.bare for model in registered.values()), *own_modules(state.stage).values()]
    modes = [(part, part.training) for module in models for part in module.modules()]
    before = state.models, state.training
    state.models = NamedParts("model", {name: model.evaluated for name, model in registered.items()})
    state.training = False
    set_phase("validation", state.run.steps_done)
    try:
        with ExitStack() as stack:
            for model in registered.values():
                stack.enter_context(model.evaluating())
            # after the weights are in place: `eval()` of a module may merge some, and `train()` undoes it
            stack.callback(restore_modes, modes)
            for module in models:
                module.eval()
            stack.enter_context(torch.no_grad())
            yield
    finally:
        state.models, state.training = before


@contextmanager
def repeating(run: RunState, loaders: Iterable[Iterable[Any]]) -> Iterator[None]:
    """Makes loaders and steps draw the same random numbers in each validation: those of their first epoch."""
    with ExitStack() as stack:
        stack.enter_context(rng.fixed_state(run.pipe.device))
        for loader in {id(each): each for each in loaders}.values():
            stack.callback(set_epoch, loader, run.epoch)
            stack.callback(generators.restore, loader, generators.capture(loader))
            begin_first_epoch(loader)
        yield


def begin_first_epoch(loader: Iterable[Any]) -> None:
    """Sets a loader to the beginning of its first epoch."""
    if isinstance(loader, StatefulObject):
        # a loader that was just restored ignores `set_epoch` of its current epoch
        set_epoch(loader, 1)
    set_epoch(loader, 0)


def shares_batches(pipe: Pipeline) -> bool:
    """Whether all ranks must take part in each batch of a validation."""
    return any(model.sharded for model in pipe.registered_models.values())


def val_batches(state: TrainValState, loaders: Mapping[str, Iterable[Any]]) -> Iterator[Any]:
    """Yields the batches of one loader after the other, and sets the prefix of its metrics."""
    try:
        for state.val_prefix, loader in loaders.items():
            yield from _batches_of(state, loader)
            state.end_set(state.val_prefix, loaders)
    finally:
        state.val_prefix = None


def until_all_end(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yields batches until no rank has any left, and None on a rank that has none while others do."""
    while True:
        batch = next(batches, None)
        if not gather_rows(torch.tensor([float(batch is not None)], device=device)).any():
            return
        yield batch


def stand_in(state: LoopState, loader: Iterable[Any]) -> Any:
    """Returns a batch for a rank that has none, for the forward pass of a sharded model on all ranks."""
    if not isinstance(loader, DataLoader) or loader.per_rank:
        return to_device(read_stand_in(loader, state.device, state.pipe.world.rank), state.device)
    with rng.temporary_state(None, state.device):
        batch = loader.load_samples([0])  # another rank has a batch, so there is a sample
    return to_device(batch, state.device)


def _batches_of(state: TrainValState, loader: Iterable[Any]) -> Iterator[Any]:
    """Yields the batches of one loader.

    A sharded model needs all ranks for each batch: a rank without more data repeats its last batch, or one of another
    rank, and its logs for that batch do not count.
    """
    limit = limit_batches(state.settings, "limit_val_batches", loader)
    batches, mark = state.device_batches(loader, limit), state.run.timer.mark
    mark("data")
    if not shares_batches(state.pipe):
        for batch in batches:
            yield batch
            mark("data")
        return
    last = None
    for batch in until_all_end(batches, state.device):
        if batch is None and state.val_metrics:
            raise UsageError(
                f"metric {min(state.val_metrics)!r} would count a batch twice, since ranks have different numbers "
                "of validation batches and a sharded model needs all ranks: pass limit_val_batches, or log means "
                "with self.log()"
            )
        if batch is None and last is None:
            last = stand_in(state, loader)
        last = last if batch is None else batch
        with state.not_counted() if batch is None else nullcontext():
            yield last
        mark("data")
