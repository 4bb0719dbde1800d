"""Smoke runs: everything once, on a few batches. `headway run --smoke` sets HEADWAY_SMOKE and starts the script twice.

In the first part each stage runs two steps and validates on one batch; then the run saves a checkpoint and stops. The
second part resumes from it and runs one more step of each stage.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from headway.errors import Stopped, UsageError
from headway.system import environment
from headway.train.train_val_state import TrainValState

if TYPE_CHECKING:
    from headway.train.run_state import RunState

Part: TypeAlias = Literal["save", "resume"]
_STEPS = {"save": 2, "resume": 3}


def requested_part() -> Part | None:
    """Returns the part of a smoke run that HEADWAY_SMOKE sets; None for a normal run."""
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


def shorten(run: RunState, part: Part) -> None:
    """Limits each stage to a few steps, and enables checkpointing if the script does not."""
    if run.checkpointer is None:
        run.pipe.enable_checkpointing()
    for state in run.stage_states:
        state.max_steps, state.max_epochs = _STEPS[part], 1 if part == "save" else 2
        state.log_every = 1
        if isinstance(state, TrainValState):
            state.settings = replace(
                state.settings,
                limit_train_batches=_STEPS[part] * state.settings.accumulate,
                limit_val_batches=1,
                log_every=1,
                val_every=None if state.settings.val_every is None else "1 epoch",
            )


def end(part: Part) -> None:
    """Ends the first part as a stop signal would: with a checkpoint."""
    if part == "save":
        raise Stopped(
            "the first part of the smoke run is complete; the second part resumes from its checkpoint"
        )
