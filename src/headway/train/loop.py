"""The whole training loop. `Pipeline.run` calls it; your step is at most five calls below that.

for _ in epochs(state):             # hooks, set_epoch, the epoch's metrics
    for _ in train(state):          # steps; pauses where a validation is due
        validate(state)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING

from torch import Tensor

from headway.dist.failure.capture import HEARTBEAT
from headway.system.failpoints import failpoint
from headway.train.evaluate.mode import shares_batches, val_batches
from headway.train.loop_state import LoopState, StageStatus
from headway.train.model.losses import not_a_loss, weighted
from headway.train.model.precision import copy_loss
from headway.train.resume.ledger_writer import stage_losses

if TYPE_CHECKING:
    from headway.train.train_val_state import TrainValState


def epochs(state: LoopState) -> Iterator[None]:
    """Surrounds each epoch of a stage: the caller runs the epoch itself at the `yield`."""
    run = state.run
    while state.status.in_epoch or state.more_epochs:  # after a resume, the rest of an epoch may be left
        run.begin_epoch(state)
        yield
        HEARTBEAT.set_ended_epoch(state.epoch + 1)
        state.check_progress()
        log_point(state)
        run.end_epoch(state, state.epoch_values())
        run.run_hook("post_epoch", state.stage)
        state.log_after_epoch()
        run.apply_metrics(state)
        if run.checkpointer:
            run.checkpointer.after_epoch(state)


def train(state: TrainValState) -> Iterator[None]:
    """Runs one epoch of training; yields where a validation is due."""
    stage, run, timer = state.stage, state.run, state.run.timer
    settings, losses, update = state.settings, state.recent_losses, state.optimizer_step
    autocast, backward, accumulate = state.precision.autocast, state.precision.backward, settings.accumulate
    last = math.inf if state.max_steps is None else state.max_steps
    progress, batches = state.train_batches()
    train_step, count_samples, uneven = state.step_functions(progress.agreement)
    keep = copy_loss if run.outputs_are_reused else Tensor.detach  # losses are read at log points
    stage.zero_grad()
    while True:
        if settings.validates_in_epoch and state.validation_due(epoch_ends=False):
            yield
            timer.mark_step("data")
        ended = state.status is StageStatus.STOPPING or state.steps_done >= last
        window = () if ended else tuple(islice(batches, accumulate))  # the last one may be short
        if not window:
            break
        for number, batch in enumerate(window):
            timer.mark_step("compute")
            state.batch, state.in_step, weight = batch, True, None
            if accumulate > 1:
                update.set_gradient_sync(number + 1 == len(window))  # once per step, with the last batch
            if autocast is None:
                loss = train_step(batch)
            else:
                with autocast:
                    loss = train_step(batch)
            if type(loss) is tuple:
                loss, weight = weighted(stage, loss)
            if not (isinstance(loss, Tensor) and loss.requires_grad and loss.ndim == 0):
                raise not_a_loss(stage, loss)
            timer.mark_step("backward")
            if update.weighs is None:  # at the first batch of an epoch
                update.agree_on_weights(weight is not None)
            scaled = weight is not None or accumulate > 1 or update.weighs or (uneven and uneven.repeating)
            backward(update.scale(loss, weight, window, number) if scaled else loss)  # else torch's average
            losses.append((run.steps_done + 1, keep(loss), count_samples(batch), weight))
        timer.mark_step("optimizer")
        if not update.apply_update():
            del losses[-len(window) :]
        finish_step(state)
    state.end_pass(progress)
    if state.validation_due(epoch_ends=True):
        yield


def validate(state: TrainValState) -> None:
    """Runs one validation, in the precision of training; ranks may have different numbers of batches."""
    stage, run, timer = state.stage, state.run, state.run.timer
    if not (loaders := state.val_loaders()):
        return state.note_validation()
    log_point(state)  # reports the training so far, so that its time does not count as validation
    with run.checkpointer.validating(state) if run.checkpointer else nullcontext(), state.validating(loaders):
        for batch in val_batches(state, loaders):
            timer.mark("validation")
            state.batch = batch
            HEARTBEAT.move("validation", run.steps_done)
            with state.precision.autocast or nullcontext():
                loss = stage.val_step(batch)
            state.log_val_loss(loss, batch)
            if run.checkpointer and run.checkpointer.stops_in_validation and not shares_batches(stage.pipe):
                break
    timer.mark("wait")
    point = state.reduce_validation()
    timer.mark("other")
    state.end_validation(point)


def finish_step(state: LoopState) -> None:
    """Counts a step, and holds a log point if one is due."""
    run, timer = state.run, state.run.timer
    state.steps_done, run.steps_done, state.in_step = state.steps_done + 1, run.steps_done + 1, False
    HEARTBEAT.move(state.name, run.steps_done)
    if run.ledger:
        run.ledger.end_step(run.steps_done, epoch=state.epoch)
    if state.failpoints_armed:
        failpoint("train.step")
    if state.steps_done % state.log_every == 0:
        log_point(state)
    if run.checkpointer:
        run.checkpointer.after_step(state)
    # if steps are short, one in many is measured, but not the first after a log point, when the device is idle
    measured = state.steps_done % timer.every == timer.every // 5
    if measured or timer.measuring:
        timer.begin_step(timer.every if measured else 0)


def log_point(state: LoopState) -> None:
    """Brings all ranks together: reduces metrics, waits for the device once, and agrees on requests to stop or save."""
    run, timer = state.run, state.run.timer
    state.before_log_point()
    timer.mark("wait")
    point = state.meter.reduce(flags=state.log_point_flags(), busy=run.busy_s)
    HEARTBEAT.set_ended_epoch(None)  # all ranks have met
    timer.mark("other")
    state.apply_flags(point.flags)
    run.record_log_point(state, "train", point)
    if run.ledger:
        run.ledger.write(state.name, stage_losses(state))
    state.examine(point)
    state.samples, state.logged_at = 0, state.steps_done
    if run.checkpointer:
        run.checkpointer.after_log_point(point)
