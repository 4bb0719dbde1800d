"""The training loop, all of it. `Pipeline.run` calls it; your step is at most four calls below that.

for _ in epochs(stage):             # hooks, set_epoch, the epoch's metrics
    for _ in train(stage):          # steps; pauses where a validation is due
        validate(stage)
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
from headway.train.model.precision import copied

if TYPE_CHECKING:
    from headway.train.stage import Stage
    from headway.train.train_val import TrainValStage

# what a rank may want at a log point: to stop, one is enough; when to save, rank 0 says
STOP, SAVE = 1, 2


def epochs(stage: Stage) -> Iterator[None]:
    """Around each epoch of a stage: the epoch itself is what the caller does at the `yield`."""
    pipe = stage.pipe
    while stage.in_epoch or not stage.finished:  # after a restart, the rest of an epoch may be left
        pipe.begin_epoch(stage)
        yield
        stage.check_progress(stage.steps - stage.epoch_began)
        log_point(stage)
        pipe.end_epoch(stage, stage.epoch_values())
        pipe.call("post_epoch", stage)
        stage.stopped |= any(word & STOP for word in stage.meter.reduce(flags=stage.wishes).flags)
        if pipe.keeper:
            pipe.keeper.after_epoch(stage)


def train(stage: TrainValStage) -> Iterator[None]:
    """One epoch of training."""
    pipe, settings, split, precision = stage.pipe, stage.settings, stage.pipe.split, stage.precision
    accumulate, autocast, between_steps = settings.accumulate, precision.autocast, bool(settings.val_steps)
    loader, limit, losses = stage.train_dataset(), settings.limit_train_batches, stage.recent_losses
    last = math.inf if stage.max_steps is None else stage.max_steps
    batches = stage.feed(loader, limit, progress=stage.begin_pass(loader, limit))
    train_step, backward, count_samples = stage.train_step, precision.backward, stage.count_samples
    keep = copied if pipe.outputs_are_reused else Tensor.detach  # losses are read at log points
    stage.check_lengths()
    stage.zero_grad()
    while True:
        if between_steps and stage.validation_due(epoch_ends=False):
            yield
        if weight := stage.weight:  # of this step in the split of time; most brief ones have none
            split.mark("data", weight)
        ended = stage.stopped or stage.steps >= last
        window = () if ended else tuple(islice(batches, accumulate))  # the last one may be short
        if not window:
            break
        shares = stage.shares(window) if accumulate > 1 else ()  # (): torch's own average over ranks
        for number, batch in enumerate(window):
            if weight:
                split.mark("compute", weight)
            stage.batch = batch
            if shares:
                stage.let_gradients_travel(number + 1 == len(window))  # once per step, with the last batch
            if autocast is None:
                loss = train_step(batch)
            else:
                with autocast:
                    loss = train_step(batch)
            if not (isinstance(loss, Tensor) and loss.requires_grad and loss.ndim == 0):
                raise stage.not_a_loss(loss)
            if weight:
                split.mark("backward", weight)
            backward(loss * shares[number] if shares else loss)
            losses.append((pipe.step + 1, keep(loss), count_samples(batch)))
        if weight:
            split.mark("optimizer", weight)
        if not stage.step_optimizers():
            del losses[-len(window) :]
        finish_step(stage)
    if stage.validation_due(epoch_ends=True):
        yield


def validate(stage: TrainValStage) -> None:
    """One validation, in the same precision, over whatever number of batches each rank has."""
    loader = stage.val_dataset()
    if loader is None:
        return
    log_point(stage)  # what was trained so far is told first, and its time is not the validation's
    loss_name, split, keeper = stage.loss_metric_name(), stage.pipe.split, stage.pipe.keeper
    with stage.evaluating():
        for batch in stage.val_batches(loader):
            split.mark("validation")
            stage.batch = batch
            HEARTBEAT.move("validation", stage.pipe.step)
            with stage.precision.autocast or nullcontext():
                loss = stage.val_step(batch)
            if loss is not None:
                stage.log(loss_name, loss, weight=stage.count_samples(batch))
            if keeper and keeper.leaves_validation and not stage.shares_batches:
                break
    if keeper:
        keeper.in_validation(stage)
    split.mark("wait")
    point = stage.val_meter.reduce()
    split.mark("other")
    stage.validated(point)


def finish_step(stage: Stage) -> None:
    """Counts a step, and holds the log point if one is due."""
    pipe, split = stage.pipe, stage.pipe.split
    stage.steps, pipe.step = stage.steps + 1, pipe.step + 1
    HEARTBEAT.move(stage.name, pipe.step)
    if pipe.ledger:
        pipe.ledger.step(stage)
    if stage.may_fail:
        failpoint("train.step")
    if stage.steps % stage.log_every == 0:
        log_point(stage)
    if pipe.keeper:
        pipe.keeper.after_step(stage)
    # one of many brief ones is measured, but not the first after a log point, which finds the device idle
    stage.weight = split.every if stage.steps % split.every == split.every // 5 else 0
    if split.measuring and not stage.weight:
        split.rest()


def log_point(stage: Stage) -> None:
    """Where ranks meet: metrics come together, the device is waited for once, and a wish to stop is heard by all."""
    stage.before_log_point()
    stage.pipe.split.mark("wait")
    point = stage.meter.reduce(flags=stage.wishes, busy=stage.pipe.busy)
    stage.pipe.split.mark("other")
    stage.stopped |= any(word & STOP for word in point.flags)
    stage.pipe.note(stage, "train", point)
    if stage.pipe.ledger:
        stage.pipe.ledger.write(stage)
    stage.examine(point)
    stage.samples, stage.logged_at = 0, stage.steps
    if stage.pipe.keeper:
        stage.pipe.keeper.after_log_point(point)
