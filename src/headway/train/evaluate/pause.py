"""A pause of training in which a hook evaluates; afterwards, the state of training is as before.

`mode.evaluating` keeps the weights and modes of models; this module keeps random numbers, loaders, the metrics that
steps update, and the phase of this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from headway import dist
from headway.data import DataLoader
from headway.data.stream_cursor import EpochAware
from headway.dist.failure.capture import HEARTBEAT
from headway.errors import UsageError
from headway.train.batches import closing_loaders, set_epoch
from headway.train.evaluate.mode import begin_first_epoch
from headway.train.metrics.epoch_metrics import keeping_counts
from headway.train.resume import generators, rng
from headway.train.resume.positions import position
from headway.train.resume.state import StatefulObject
from headway.train.train_val_state import TrainValState

if TYPE_CHECKING:
    from headway.train.loop_state import LoopState
    from headway.train.run_state import RunState


@contextmanager
def pausing(run: RunState, state: LoopState) -> Iterator[None]:
    """Surrounds an evaluation: within a run, which continues afterwards, or outside one, and then closes loaders."""
    with ExitStack() as stack:
        stack.enter_context(rng.temporary_state(None, run.pipe.device))
        stack.callback(state.close_batches, but=state.open_batches())
        if not run.is_running:
            every = run.pipe.datasets.values()  # the script may be in a loop over one of them
            stack.enter_context(
                closing_loaders(run, but=[each for each in every if isinstance(each, DataLoader)])
            )
            stack.enter_context(run.timer.off())
            yield
            dist.set_phase("done")
            return
        stack.enter_context(keeping_counts(state.added_metrics()))
        stack.enter_context(run.timer.interrupted_by("validation"))
        phase, step = HEARTBEAT.phase, HEARTBEAT.step
        yield
        dist.set_phase(phase, step)  # not after a failure, which is recorded with its own phase


@contextmanager
def reading_from_start(run: RunState, loaders: Iterable[Iterable[Any]]) -> Iterator[None]:
    """Sets loaders to their first epoch, and restores their positions on exit: a validation may read them next."""
    with ExitStack() as stack:
        for loader in {id(each): each for each in loaders}.values():
            resumes = _resumes_in(run, loader)
            _check_unread(run.current_state, loader, resumes=resumes)
            if isinstance(loader, StatefulObject):
                stack.callback(loader.load_state_dict, position(loader, active=resumes))
            stack.callback(generators.restore, loader, generators.capture(loader))
            if any(loader is each for each in run.pipe.datasets.values()):
                # called first on exit, so that the position is restored after it
                stack.callback(set_epoch, loader, run.epoch)
            begin_first_epoch(loader)
        yield


def _resumes_in(run: RunState, loader: Iterable[Any]) -> bool:
    """Whether an epoch resumes in the middle of this loader, which is restored and not open yet."""
    for state in run.stage_states:
        if state.status.in_epoch and any(each.loader is None and not each.done for each in state.passes):
            return not isinstance(state, TrainValState) or loader is state.stage.train_dataset()
    return False


def _check_unread(state: LoopState | None, loader: Iterable[Any], *, resumes: bool) -> None:
    """Raises `UsageError` for a loader with one position if training is in the middle of it.

    If the epoch `resumes` in it, a hook before the epoch may still read it, provided it has `set_epoch`.
    """
    if state is None or not isinstance(loader, StatefulObject) or not state.status.in_epoch:
        return
    in_pass = any(each.loader is loader and not each.done for each in state.passes)
    managed = isinstance(state, TrainValState)  # in a user's loop, any loader may be the one that resumes
    if in_pass or (resumes and managed and not isinstance(loader, EpochAware)):
        raise UsageError(
            f"stage {state.name!r} is in the middle of this {type(loader).__name__}, which has one position: evaluate "
            "on a second loader of the same dataset"
        )
