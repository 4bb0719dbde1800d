"""A pause of training in which a hook evaluates: what the training has and needs is afterwards as it was before.

The weights and the modes of the models are kept by `mode.evaluating`; here are the random numbers, the loaders, the
metrics that a step updates by itself, and what this rank is doing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from headway import dist
from headway.data.stream_cursor import EpochAware
from headway.dist.failure.capture import HEARTBEAT
from headway.errors import UsageError
from headway.train.batches import closing_loaders, set_epoch
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
    """Surrounds an evaluation by a stage: in a run that goes on after it, or alone, with loaders that end with it."""
    with ExitStack() as stack:
        stack.enter_context(rng.temporary_state(None, run.pipe.device))
        stack.callback(state.close_batches, but=state.open_batches())
        if not run.is_running:
            stack.enter_context(closing_loaders(run))
            stack.enter_context(run.timer.off())
            yield
            dist.set_phase("done")
            return
        stack.enter_context(keeping_counts(state.added_metrics()))
        stack.enter_context(run.timer.interrupted_by("validation"))
        phase, step = HEARTBEAT.phase, HEARTBEAT.step
        yield
        dist.set_phase(phase, step)  # a failure is recorded with the phase in which it was


@contextmanager
def reading_from_start(run: RunState, loaders: Iterable[Iterable[Any]]) -> Iterator[None]:
    """Sets loaders to their first epoch, and on exit to where they were: a validation may read them next."""
    with ExitStack() as stack:
        for loader in {id(each): each for each in loaders}.values():
            resumes = _resumes_in(run, loader)
            _check_unread(run.current_state, loader, resumes=resumes)
            if isinstance(loader, StatefulObject):
                stack.callback(loader.load_state_dict, position(loader, active=resumes))
            stack.callback(generators.restore, loader, generators.capture(loader))
            if any(loader is each for each in run.pipe.datasets.values()):
                # called first on exit: what the loader knows of its position is not lost
                stack.callback(set_epoch, loader, run.epoch)
            if isinstance(loader, StatefulObject):
                set_epoch(loader, 1)  # one that was just restored would stay where it is in its own epoch
            set_epoch(loader, 0)
        yield


def _resumes_in(run: RunState, loader: Iterable[Any]) -> bool:
    """Whether an epoch resumes in the middle of a loader, which was restored and not opened yet."""
    for state in run.stage_states:
        if state.status.in_epoch and any(each.loader is None and not each.done for each in state.passes):
            return not isinstance(state, TrainValState) or loader is state.stage.train_dataset()
    return False


def _check_unread(stage: LoopState | None, loader: Iterable[Any], *, resumes: bool) -> None:
    """Raises `UsageError` for a loader with one position that training is in the middle of.

    A hook that comes before the epoch may read one that `resumes` there, if it can be set to its start.
    """
    if stage is None or not isinstance(loader, StatefulObject) or not stage.status.in_epoch:
        return
    in_pass = any(each.loader is loader and not each.done for each in stage.passes)
    managed = isinstance(
        stage, TrainValState
    )  # in a loop of the user's, any loader may be the one that resumes
    if in_pass or (resumes and managed and not isinstance(loader, EpochAware)):
        raise UsageError(
            f"stage {stage.name!r} is in the middle of this {type(loader).__name__}, which has one position: evaluate "
            "on a second loader of the same dataset"
        )
