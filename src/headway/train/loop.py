"""The training loop, all of it. `Pipeline.run` calls it; your step is at most four calls below that.

for _ in epochs(stage):             # hooks, set_epoch, the epoch's metrics
    for _ in train(stage):          # steps; pauses where a validation is due
        validate(stage)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING

from headway.dist import set_phase
from headway.failpoints import armed, failpoint

if TYPE_CHECKING:
    from torch import Tensor

    from headway.train.stage import Stage
    from headway.train.trainval import TrainValStage

# what a rank may want at a log point: to stop, one is enough; when to save, rank 0 says
STOP, SAVE = 1, 2
_WHOLE = (None,)


def epochs(stage: Stage) -> Iterator[None]:
    """Around each epoch of a stage: the epoch itself is what the caller does at the `yield`."""
    pipe, keeper = stage.pipe, stage.pipe.keeper
    stage.may_fail = armed()
    while stage.in_epoch or not stage.finished:  # after a restart, the rest of an epoch may be left
        pipe.begin_epoch(stage)
        set_phase(stage.name, pipe.step)
        yield
        stage.check_progress(stage.steps - stage.epoch_began)
        log_point(stage)
        pipe.end_epoch(stage, stage.epoch_values())
        pipe.call("post_epoch", stage)
        stage.stopped |= any(word & STOP for word in stage.meter.reduce(flags=stage.wishes).flags)
        if keeper:
            keeper.after_epoch(stage)


def train(stage: TrainValStage) -> Iterator[None]:
    """One epoch of training."""
    settings, split, precision = stage.settings, stage.pipe.split, stage.precision
    accumulate, autocast, between_steps = settings.accumulate, precision.autocast, bool(settings.val_steps)
    loader, limit = stage.train_dataset(), settings.limit_train_batches
    batches = stage.feed(loader, limit, progress=stage.begin_pass(loader, limit))
    stage.check_lengths()
    stage.zero_grad()
    while True:
        if between_steps and stage.validation_due(epoch_ends=False):
            yield
        window = () if stage.ended else tuple(islice(batches, accumulate))  # the last one may be short
        if not window:
            break
        shares: Sequence[Tensor | float | None] = _WHOLE  # torch's own average over ranks
        if accumulate > 1:
            split.mark("backward")  # `shares` waits for other ranks, as the backward pass does
            shares = stage.shares(window)
        losses = []
        for number, (batch, share) in enumerate(zip(window, shares, strict=True), start=1):
            split.mark("compute")
            stage.batch = batch
            if accumulate > 1:
                stage.let_gradients_travel(number == len(window))  # once per step, with the last batch
            if autocast is None:
                loss = stage.check_loss(stage.train_step(batch))
            else:
                with autocast:
                    loss = stage.check_loss(stage.train_step(batch))
            split.mark("backward")
            precision.backward(loss if share is None else loss * share)
            losses.append((loss.detach(), stage.count_samples(batch)))
        split.mark("optimizer")
        if stage.step_optimizers():
            stage.note_losses(losses)
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
    if keeper:
        keeper.before_validation()
    with stage.evaluating():
        for batch in stage.val_batches(loader):
            split.mark("validation")
            stage.batch = batch
            set_phase("validation", stage.pipe.step)
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
    stage.val_meter.finish_epoch()
    stage.validated(point.values)
    stage.pipe.note(stage, "validation", point)
    if keeper:
        keeper.after_validation(stage)


def finish_step(stage: Stage) -> bool:
    """Counts a step, holds the log point if one is due, and tells whether the stage ends here."""
    pipe = stage.pipe
    stage.steps += 1
    pipe.step += 1
    set_phase(stage.name, pipe.step)
    if pipe.ledger:
        pipe.ledger.step(stage)
    if stage.may_fail:
        failpoint("train.step")
    if stage.steps % stage.log_every == 0:
        log_point(stage)
    if pipe.keeper:
        pipe.keeper.after_step(stage)
    return stage.ended


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
    if keeper := stage.pipe.keeper:
        keeper.due |= bool(point.flags[0] & SAVE)
        keeper.settle()
