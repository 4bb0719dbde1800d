"""A smoke run: everything once, on a few batches. `headway run --smoke` sets HEADWAY_SMOKE and starts the script twice.

The first time each stage makes two steps and validates on one batch; then all is saved, and the run stops. The second
time it goes on from there, with one more step of each stage.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from headway.errors import Stopped, UsageError
from headway.system import environment
from headway.train.train_val_state import TrainValState

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline

STEPS = {"save": 2, "resume": 3}


def wanted() -> Literal["save", "resume"] | None:
    """Which part of a smoke run this is; None if it is none."""
    match os.environ.get(environment.SMOKE):
        case "save":
            return "save"
        case "resume":
            return "resume"
        case None | "":
            return None
        case other:
            raise UsageError(
                f'{environment.SMOKE}={other!r} is unknown: use "save", "resume", or headway run --smoke'
            )


def shorten(pipe: Pipeline, part: Literal["save", "resume"]) -> None:
    """Leaves of each stage what a smoke run needs; saves even if nobody asked for checkpoints."""
    if pipe._keeper is None:
        pipe.enable_checkpointing()
    for stage in pipe.stages:
        state = stage._loop
        state.max_steps, state.max_epochs = STEPS[part], 1 if part == "save" else 2
        state.log_every = 1
        if isinstance(state, TrainValState):
            state.settings = replace(
                state.settings,
                limit_train_batches=STEPS[part] * state.settings.accumulate,
                limit_val_batches=1,
                log_every=1,
                val_every="1 epoch",
            )


def end(part: Literal["save", "resume"]) -> None:
    """The first part ends as if somebody had stopped it: with a checkpoint."""
    if part == "save":
        raise Stopped("the first half of a smoke run is over; the second goes on from its checkpoint")
