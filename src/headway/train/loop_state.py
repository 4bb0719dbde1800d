"""`LoopState`: the state that the loop keeps for a stage, in its `_loop`, so that all other names are the user's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.data.feed.batch_mover import moving
from headway.dist import set_phase
from headway.dist.failure.capture import HEARTBEAT
from headway.dist.objects import report_root
from headway.errors import UsageError
from headway.record.media.content import MediaContent
from headway.system.failpoints import armed
from headway.system.log import logger
from headway.train.batches import Pass, open_loader
from headway.train.diagnose.same_batches import SameBatches
from headway.train.diagnose.same_mixes import check_mixes, mix_checksum
from headway.train.metrics.bad_samples import BadSamples
from headway.train.metrics.early_stopping import EarlyStopping
from headway.train.metrics.epoch_metrics import AddedMetrics, EpochMetric, check_names
from headway.train.metrics.learning_rates import log_learning_rates
from headway.train.metrics.meter import LogPoint, MetricAccumulator, Reduction, Scope, Value
from headway.train.model.losses import RecentLosses
from headway.train.model.optimizer_step import followers_of
from headway.train.model.precision import copy_loss
from headway.train.resume.positions import splits_evenly
from headway.train.resume.replay import note_batch, read_stand_in
from headway.train.resume.state import StatefulObject
from headway.train.resume.unsaved import find_unregistered
from headway.train.settings import check_whole
from headway.train.uneven import BatchAgreement, Repeated, Uneven, report_left

if TYPE_CHECKING:
    from headway.train.diagnose.profiler import ProfilerSettings, StageProfiler
    from headway.train.pipeline import Pipeline
    from headway.train.run_state import RunState
    from headway.train.stage import Stage

STOP, SAVE, VALIDATE, POST_STAGE = 1, 2, 4, 8
"""requests at a log point: any rank may request a stop or `post_stage`; rank 0 a save or validation, by its clock"""


class StageStatus(Enum):
    """The progress of a stage."""

    NEW = "no epoch has begun"
    IN_EPOCH = "an epoch is under way"
    STOPPING = "an epoch is under way and is the last, because all ranks have agreed to stop"
    BETWEEN_EPOCHS = "an epoch has ended"
    STOPPED = "all ranks have agreed to stop, and the epoch has ended"

    @property
    def in_epoch(self) -> bool:
        return self in (StageStatus.IN_EPOCH, StageStatus.STOPPING)

    @property
    def stop_agreed(self) -> bool:
        return self in (StageStatus.STOPPING, StageStatus.STOPPED)


class LoopState:
    """The progress of one stage, and the operations of the loop on it. Users never see it."""

    loop_is_users = True
    advice_for_uneven = "give all ranks the same number"  # if they have different numbers of batches

    def __init__(self, stage: Stage, *, log_every: int) -> None:
        check_whole("log_every", log_every)
        self.stage, self.log_every = stage, log_every
        self.name = type(stage).__name__.lower()
        self.max_epochs: int | None = None
        self.max_steps: int | None = None
        self.status = StageStatus.NEW
        self.post_stage_due = False  # whether a `post_stage` of the user is still to be called, on any rank
        self.stop_requested = False
        """whether `stop_stage` was called on this rank; `status` changes when all ranks have agreed"""
        self.epoch = 0
        """finished epochs, which is also the number of the current epoch, from 0"""
        self.steps_done = 0
        self.samples = 0
        """samples that this rank has trained on since the last log point"""
        self.step_left_open, self.open_passes = False, list[Pass]()
        """whether a step ended with `break` and is not counted yet; passes of a user's loop whose batches are in use"""
        self.batch: Any = None
        """the last batch that the loop has taken"""
        self.in_step = False
        """whether a batch was taken whose step is not counted yet"""
        self.failpoints_armed = False
        self.columns, self.epoch_metrics = list[str](), AddedMetrics()
        self.epoch_start = 0
        """`steps_done` when the epoch began"""
        self.logged_at = -1
        """`steps_done` at the last log point"""
        self.recent_losses = RecentLosses()
        self.passes: list[Pass] = []
        """the passes over datasets in this epoch, in the order in which they began"""
        self._passes_begun = 0  # by this process
        self._open_batches: WeakSet[Generator[Any]] = WeakSet()
        self.same_batches = SameBatches()
        self._warned = self._uneven_reported = False
        self.early_stopping: EarlyStopping | None = None
        self.batches_per_step = 1
        self._counts = True  # whether values that are logged now count
        self.profiler_settings: ProfilerSettings | None = None
        self.training = True  # false in validations, evaluations and predictions
        self.profiler: StageProfiler | None = None

    def set_limits(self, *, max_epochs: int | None, max_steps: int | None) -> None:
        """Sets the number of epochs or steps after which the stage ends, whichever comes first."""
        if max_epochs is None and max_steps is None:
            raise UsageError(f"stage {self.name!r} would never end: give max_epochs or max_steps")
        for name, limit in (("max_epochs", max_epochs), ("max_steps", max_steps)):
            if limit is not None:
                check_whole(name, limit)
        self.max_epochs, self.max_steps = max_epochs, max_steps

    @property
    def pipe(self) -> Pipeline:
        return self.stage.pipe

    @cached_property
    def run(self) -> RunState:
        """The state of the run that this stage is part of."""
        return self.stage.pipe._state

    @property
    def device(self) -> torch.device:
        return self.stage.pipe.device

    @cached_property
    def models(self) -> Mapping[str, nn.Module]:
        """The models that the stage calls: wrapped in training, bare in validation."""
        return self.pipe.models

    @cached_property
    def meter(self) -> MetricAccumulator:
        return MetricAccumulator(self.device, repeats_batches=self.run.repeats_batches)

    def log(
        self, name: str, value: Tensor | float, weight: Tensor | float, reduce: Reduction, scope: Scope
    ) -> None:
        if self._counts:
            self.meter.log(name, value, weight=weight, reduce=reduce, scope=scope)

    def log_loss(self, name: str, value: Tensor | float, weight: Tensor | float) -> None:
        """Keeps the loss of the current step for the ledger; several in one step are averaged."""
        if not self.loop_is_users or not self.in_step:
            raise UsageError(
                f"log({name!r}, ledger=True) is for the steps of a loop of your own: a TrainValStage records the loss "
                "that step() returns"
            )
        if isinstance(value, Tensor) and value.ndim:
            raise UsageError(
                f"log({name!r}, ledger=True) got a tensor of shape {tuple(value.shape)}: give the mean loss of the step"
            )
        if self.run.ledger and self._counts:
            loss, given = (
                copy_loss(each) if isinstance(each, Tensor) else torch.tensor(float(each), device=self.device)
                for each in (value, weight)
            )
            self.recent_losses.append((self.run.steps_done + 1, loss, 1, given))

    def media_name(self, name: str) -> str | None:
        """Returns the full name of an item that is logged under `name`; None if it does not count."""
        return name if self._counts else None

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """Discards what is logged within the context: for a repeated or replayed batch, and in a prediction."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def log_media(self, name: str, take: Callable[[], MediaContent]) -> None:
        """Keeps the content that `take` returns, if this rank keeps media. An evaluation outside a run keeps none."""
        media = self.run.media
        if media is None or not media.is_open or (full := self.media_name(name)) is None:
            return
        step = self.run.steps_done + self.in_step  # as the loss of the same step
        media.add(full, take(), step=step, stage=self.name, epoch=self.epoch)

    def add_metric(self, name: str, metric: EpochMetric) -> None:
        self.epoch_metrics[name] = metric

    def checked_count(self, batch: Any) -> int:
        """Returns the number of samples of a batch; raises `UsageError` if `count_samples` does not return a number."""
        if type(batch) is Repeated:
            return 0
        count: object = self.stage.count_samples(batch)  # a caller without a type checker may return anything
        if not isinstance(count, int | float | np.number):
            raise UsageError(
                f"count_samples of stage {self.name!r} returned a {type(count).__name__}: return a number, such as "
                "len(batch), or int(mask.sum())"
            )
        return count  # type: ignore[return-value]

    def check_modules(self) -> None:
        """Warns about a module that is not registered; in a loop of the user's, it may still be trained."""
        name = find_unregistered(self.stage)
        if name is not None and self.pipe.world.is_root and not self._warned:
            self._warned = True
            logger.warning(
                f"stage {self.name!r} has a module with trainable parameters that is not registered, {name!r}: it is "
                f"not saved, and not averaged over ranks; call pipe.register_model({name!r}, ...)"
            )

    # --- progress

    @property
    def more_steps(self) -> bool:
        """Whether another step may begin."""
        return not self.status.stop_agreed and (self.max_steps is None or self.steps_done < self.max_steps)

    @property
    def more_epochs(self) -> bool:
        """Whether another epoch may begin."""
        return self.more_steps and (self.max_epochs is None or self.epoch < self.max_epochs)

    @property
    def ended(self) -> bool:
        """Whether the stage is complete: no epoch is left, and no `post_stage` of the user."""
        epochs_left = self.status is StageStatus.NEW or self.status.in_epoch or self.more_epochs
        return not epochs_left and not self.post_stage_due

    def pause_follows(self) -> bool:
        """Whether a validation or the end of the epoch follows the step that has just ended."""
        return not self.more_steps or any(each.ends_here and not each.done for each in self.passes[-1:])

    def log_point_flags(self) -> int:
        """Returns the requests of this rank at a log point."""
        flags = STOP if self.stop_requested else 0
        flags |= POST_STAGE if self.run.has_post_stage(self.stage) else 0
        return flags | (self.run.checkpointer.log_point_flags() if self.run.checkpointer else 0)

    def apply_flags(self, flags: Sequence[int]) -> None:
        """Applies the requests of all ranks: one rank is enough to stop."""
        self.post_stage_due = any(word & POST_STAGE for word in flags)
        if any(word & STOP for word in flags):
            self.status = StageStatus.STOPPING if self.status.in_epoch else StageStatus.STOPPED

    def begin_epoch(self) -> None:
        """Begins an epoch, unless one was under way when the run was stopped."""
        self.failpoints_armed = armed()
        self.check_modules()  # pre_stage may have assigned some
        if not self.status.in_epoch:
            self.status, self.epoch_start, self.passes = StageStatus.IN_EPOCH, self.steps_done, []
        self._passes_begun, self.in_step, self.open_passes = 0, False, []

    def after_pre_epoch(self) -> None:
        """Applies what hooks have changed before an epoch."""

    def end_epoch(self) -> None:
        self.epoch += 1
        self.status = StageStatus.STOPPED if self.status.stop_agreed else StageStatus.BETWEEN_EPOCHS

    # --- batches

    def begin_pass(
        self,
        loader: Iterable[Any],
        total: int | None,
        lengths: Sequence[int] | None,
        uneven: Uneven = "shortest",
    ) -> Pass:
        """Returns the next pass of this epoch: a new one, or one that had begun when the run was stopped.

        `lengths` are the batches of all ranks; None if any does not know, and each has at most `total`. Unless all are
        equal, ranks agree on the batches of each step.
        """
        if lengths is not None:
            total = max(lengths) if uneven == "longest" else min(lengths)
        if self._passes_begun == len(self.passes):
            self.passes.append(Pass(total_batches=total))
        progress = self.passes[self._passes_begun]
        progress.rescale(total)
        progress.loader = loader
        progress.skip = 0 if isinstance(loader, StatefulObject) else progress.batches_given
        self._passes_begun += 1
        if progress.ranks_changed and not splits_evenly(loader):
            lengths = None  # they are those of whole passes, and do not show what is left of this one
        self.run.timer.begin_step(1)  # the first batch, for which the loader starts, is always measured
        if (lengths is None and self.pipe.world.world_size > 1) or len(set(lengths or ())) > 1:
            progress.agreement = BatchAgreement(
                uneven, window=self.batches_per_step, lengths=lengths, given=progress.batches_given
            )
        return progress

    def device_batches(
        self, loader: Iterable[Any], limit: int | None = None, *, progress: Pass | None = None
    ) -> Iterator[Any]:
        """Yields the batches of a loader, on the device."""
        batches = self._device_batches(loader, limit, progress)
        self._open_batches.add(batches)
        if self.profiler is not None and progress is not None:  # not a validation
            return self.profiler.wrap(batches, self.batches_per_step)
        return batches

    def open_batches(self) -> Set[Generator[Any]]:
        """Returns the iterations over loaders that have begun and may not have ended."""
        return set(self._open_batches)

    def close_batches(self, *, but: Set[Generator[Any]] = frozenset()) -> None:
        """Ends the iterations over loaders that are left open, and with them their threads and workers."""
        for batches in self.open_batches() - but:
            batches.close()

    def _device_batches(
        self, loader: Iterable[Any], limit: int | None, progress: Pass | None
    ) -> Generator[Any]:
        training = progress is not None
        ledger = self.run.ledger if training else None  # a validation is not a step
        progress = progress or Pass()
        if progress.done or (training and not self.more_steps):
            return
        if training:
            self.run.separate_streams(loader)
        with moving(loader, self.device) as mover:
            opened = self._open(loader, progress)
            source = mover.read(opened)
            if limit is not None:
                source = islice(source, max(0, limit - progress.batches_given))
            if progress.agreement is not None:
                stand_in = partial(read_stand_in, loader, self.device, self.pipe.world.rank)
                source = progress.agreement.batches(source, stand_in, one_pass=opened is loader)
            for batch in source:
                given = progress.batches_given = progress.batches_given + 1
                repeated = type(batch) is Repeated
                if not given & (given - 1) and not repeated:  # batch 1, 2, 4, 8 and so on
                    if progress.rng_state is not None:
                        note_batch(progress, batch)
                    if training:
                        self.same_batches.note(loader, batch)
                if ledger and not repeated:
                    ledger.add_batch(loader, batch)
                yield Repeated(mover.move(batch.batch)) if repeated else mover.move(batch)
        progress.done = True

    def _open(self, loader: Iterable[Any], progress: Pass) -> Iterator[Any]:
        """Returns an iterator over the remaining batches of a pass."""
        if self.run.checkpointer is None:
            return open_loader(loader)
        loaders = self.run.checkpointer.rank_state.loaders
        if not progress.skip:
            if progress.loader is not None and not isinstance(loader, StatefulObject):  # not a validation
                # only now: a validation may have drawn random numbers since the pass began
                progress.rng_state = loaders.capture(loader)
            return loaders.open(loader)
        report_root(
            f"headway: {type(loader).__name__} has no state_dict(): "
            f"{progress.skip:,} batches are read again and skipped"
        )
        return loaders.reopen(loader, progress)

    def end_pass(self, progress: Pass) -> None:
        """Reports once how many batches other ranks had left when the shortest rank ended. Call it on all ranks."""
        if self.profiler is not None:
            self.profiler.stop_if_over()
        HEARTBEAT.set_ended_epoch(self.epoch + 1)  # the others may have batches left, and wait for this rank
        if progress.agreement is not None and not self._uneven_reported:
            where = f"epoch {self.epoch + 1} of stage {self.name!r} ended at step {self.run.steps_done:,}"
            self._uneven_reported = report_left(progress.agreement, where, self.advice_for_uneven)

    # --- around a run, an epoch and a log point

    def check(self) -> None:
        """Raises `UsageError` for a stage that cannot run, before the run starts."""
        self.check_modules()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surrounds all epochs of the stage."""
        set_phase(self.name)
        yield
        set_phase("between stages")

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Sets the precision of all computation within, in training or in an evaluation."""
        yield

    def added_metrics(self) -> list[EpochMetric]:
        """Returns the metrics that the user's steps update."""
        return list(self.epoch_metrics.values())

    def total_steps(self) -> int | None:
        """Returns the number of steps of the whole stage, if it is known."""
        return self.max_steps

    def check_progress(self) -> None:
        """Raises `UsageError` for an epoch without a step if only steps would end the stage."""
        if self.steps_done == self.epoch_start and self.max_epochs is None:
            raise self.no_batch()

    def no_batch(self) -> UsageError:
        return UsageError(
            f"stage {self.name!r} got no batch in epoch {self.epoch + 1}: register a dataset that is not empty and "
            "can be iterated over again"
        )

    @cached_property
    def bad_samples(self) -> BadSamples:
        """The bad samples that are counted at the log points of training."""
        return BadSamples(self.stage.datasets)

    def step_optimizer(self, optimizer: Optimizer) -> None:
        """Steps an optimizer, its schedulers and the averages of its models."""
        optimizer.step()
        for follow in followers_of(self.run, [optimizer]):
            follow()

    def settle(self) -> None:
        """Finishes work of the last step that was deferred to the next one, before its results are read or saved."""

    def before_log_point(self) -> None:
        """Logs values that are collected only at log points."""
        self.meter.first_batch = self.same_batches.number
        self.meter.mixes = mix_checksum(self.stage.datasets)
        if self.steps_done != self.logged_at:
            self.bad_samples.log(self.meter)
            for name, optimizer in self.stepped_optimizers().items():
                schedule = self.run.schedules.get(name)
                log_learning_rates(name, optimizer, self.meter, used=schedule.used if schedule else ())

    def stepped_optimizers(self) -> Mapping[str, Optimizer]:
        """Returns the optimizers whose learning rates are logged, by name."""
        return self.pipe.optimizers

    def examine(self, point: LogPoint) -> None:
        """Checks the result of a log point; may raise."""
        self.same_batches.check(point, is_root=self.pipe.world.is_root)
        check_mixes(self.stage.datasets, point, self.run.steps_done)
        self.bad_samples.check(point)
        check_names(self.epoch_metrics, point.values)
        if self.loop_is_users:
            self.recent_losses.clear()

    def log_after_epoch(self) -> None:
        """Holds a log point after an epoch: adds what hooks have logged since to its metrics, and shows them."""
        point = self.epoch_metrics.compute_late(self.meter.reduce(flags=self.log_point_flags()))
        self.meter.finish_epoch()
        self.logged_at = self.steps_done
        self.apply_flags(point.flags)
        if point.values or point.local:
            self.run.extend_epoch(self, point)
        self.run.reporter.show_epoch()

    def epoch_values(self) -> dict[str, Any]:
        """Returns the metrics of the finished epoch, the same on all ranks."""
        return self.epoch_metrics.compute(self.meter.finish_epoch(), self.device)

    def stop_early(self, values: Mapping[str, Value], *, in_validation: bool = False) -> None:
        """Ends the stage if its `early_stop` metric has not improved for long. Call it on all ranks, with equal values.

        A metric of validations within epochs is observed in each validation, any other at the end of each epoch.
        """
        stopping = self.early_stopping
        if stopping is None or self.status.stop_agreed or (stopping.in_validations and not in_validation):
            return
        value = values.get(stopping.name)
        if not isinstance(value, float | int):
            return  # an epoch without a validation
        stopping.in_validations = in_validation
        epoch = self.epoch + 1 if self.status.in_epoch else self.epoch
        if stopping.observe(value, epoch):
            self.status = StageStatus.STOPPING if self.status.in_epoch else StageStatus.STOPPED
            if self.pipe.world.is_root:
                logger.info(
                    f"stage {self.name!r} ends early, in epoch {epoch} at step {self.run.steps_done:,}: "
                    f"{stopping.describe()}"
                )

    @property
    def has_validated(self) -> bool:
        """Whether all metrics of an epoch should have appeared by now."""
        return True

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of the stage, with the sums of metrics in an unfinished epoch."""
        in_epoch = self.status.in_epoch
        return {
            "epoch": self.epoch,
            "steps": self.steps_done,
            "stopped": self.status.stop_agreed,
            "stop_requested": self.stop_requested,  # by a callback at the log point before this save, say
            "post_stage_due": self.post_stage_due,
            "in_epoch": in_epoch,
            "epoch_began": self.epoch_start,
            "passes": [each.state_dict() for each in self.passes] if in_epoch else [],
            "meter": self.meter.state_dict(),
            "early_stopping": None if self.early_stopping is None else self.early_stopping.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.steps_done, self.epoch_start = state["epoch"], state["steps"], state["epoch_began"]
        if state["in_epoch"]:
            self.status = StageStatus.STOPPING if state["stopped"] else StageStatus.IN_EPOCH
        elif self.epoch:
            self.status = StageStatus.STOPPED if state["stopped"] else StageStatus.BETWEEN_EPOCHS
        self.post_stage_due = state.get("post_stage_due", False)  # older checkpoints do not have it
        self.stop_requested = state.get("stop_requested", False)
        self.logged_at = self.steps_done or -1  # a log point comes before each save
        self.passes = [Pass.from_state_dict(each) for each in state["passes"]]
        self.meter.load_state_dict(state["meter"])
        stopping = state.get("early_stopping")  # older checkpoints have none
        if self.early_stopping is not None and stopping is not None:
            self.early_stopping.load_state_dict(stopping)
