"""`TrainValState`: the state that the managed loop keeps for a `TrainValStage`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from numbers import Real
from types import MethodType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from headway.dist.collective.exchange import gather_rows
from headway.errors import HeadwayError, UsageError
from headway.system.text import shorten_list
from headway.train.batches import Pass, count_batches, exact_count
from headway.train.checks import check_equal, check_optimizers, check_train_dataset
from headway.train.diagnose import evidence
from headway.train.evaluate.mode import evaluating, repeating
from headway.train.evaluate.val_schedule import ValSchedule
from headway.train.loop_state import VALIDATE, LoopState
from headway.train.metrics.bad_samples import BadSamples
from headway.train.metrics.epoch_metrics import EpochMetric, compute_metrics, metrics_of_set
from headway.train.metrics.meter import LogPoint, MetricAccumulator, Reduction, Scope
from headway.train.model.losses import weighs_some, weighted
from headway.train.model.optimizer_step import OptimizerStep, followers_of
from headway.train.model.precision import MixedPrecision, deterministic
from headway.train.resume.unsaved import find_unregistered
from headway.train.settings import TrainSettings, limit_batches
from headway.train.uneven import BatchAgreement, Repeated, gather_lengths

if TYPE_CHECKING:
    from headway.train.train_val import TrainValStage


@final
class TrainValState(LoopState):
    """The progress of a `TrainValStage`: precision, updates, validation."""

    stage: TrainValStage
    loop_is_users = False
    advice_for_uneven = 'give all ranks the same number, or pass uneven="longest"'

    def __init__(self, stage: TrainValStage, settings: TrainSettings, *, base: type[TrainValStage]) -> None:
        super().__init__(stage, log_every=settings.log_every)
        self.settings, self.batches_per_step = settings, settings.accumulate
        self.early_stopping = settings.make_early_stopping()
        self.columns = [
            prefix + stage.loss_metric_name()
            for prefix in (stage.train_metric_prefix(), stage.val_metric_prefix())
        ]
        self.val_prefix: str | None = None
        """the prefix of metrics of the dataset that is being validated"""
        self.val_metrics: dict[str, EpochMetric] = {}
        """metrics that steps update in validations, by the names under which they were added"""
        self.set_metrics: dict[str, EpochMetric] = {}
        """the same metrics for each set of this validation, by the names of their results"""
        self._set_weighs: dict[str | None, bool] = {}  # by prefix: whether steps on that set return weights
        self._own_names: set[str] = set()  # names of metrics that the loop itself logs
        self._base = base
        self._optimizing = False  # whether the stage's `optimize` is called
        self.optimizer_step = OptimizerStep(self)
        self._val_values: dict[str, Any] = {}

    @cached_property
    def precision(self) -> MixedPrecision:
        return MixedPrecision(self.settings.precision, self.device)

    @cached_property
    def _val_schedule(self) -> ValSchedule:
        return ValSchedule(self.settings)  # not before the run: a smoke run replaces the settings

    @cached_property
    def val_meter(self) -> MetricAccumulator:
        return MetricAccumulator(self.device, repeats_batches=self.run.repeats_batches)

    @cached_property
    def only_optimizer(self) -> Sequence[Optimizer]:
        """The registered optimizer, in a list; raises `UsageError` if there is not exactly one."""
        registered = self.pipe.optimizers
        if len(registered) != 1:
            names = ", ".join(repr(name) for name in registered) or "none"
            raise UsageError(
                f"stage {self.name!r} cannot choose an optimizer; registered: {names}. Register one, or override "
                "optimizers() to return those of this stage"
            )
        return list(registered.values())

    def log(
        self, name: str, value: Tensor | float, weight: Tensor | float, reduce: Reduction, scope: Scope
    ) -> None:
        if not self._counts:
            return
        meter, full = self._meter_and_name(name)
        if full in self._own_names:
            raise self._is_own(name)
        meter.log(full, value, weight=weight, reduce=reduce, scope=scope, group=self.val_prefix or "")

    def log_own(
        self, name: str, value: Tensor | float, *, weight: Tensor | float = 1.0, reduce: Reduction = "mean"
    ) -> None:
        """Logs a metric of the loop itself; raises `UsageError` if a step has logged one under the same name."""
        if not self._counts:
            return
        meter, full = self._meter_and_name(name)
        if full not in self._own_names and meter.has_logged(full):
            raise self._is_own(name)
        self._own_names.add(full)
        meter.log(full, value, weight=weight, reduce=reduce, group=self.val_prefix or "")

    def _meter_and_name(self, name: str) -> tuple[MetricAccumulator, str]:
        if self.training:
            return self.meter, self.stage.train_metric_prefix() + name
        prefix = self.stage.val_metric_prefix() if self.val_prefix is None else self.val_prefix
        return self.val_meter, prefix + name

    def media_name(self, name: str) -> str | None:
        return self._meter_and_name(name)[1] if self._counts else None

    def _is_own(self, name: str) -> UsageError:
        what = (
            "the loss that step() returns"
            if name == self.stage.loss_metric_name()
            else "a metric of the loop"
        )
        return UsageError(f"{name!r} is the name of {what}: log your value under another name")

    def add_metric(self, name: str, metric: EpochMetric) -> None:
        train, val = self.stage.train_metric_prefix(), self.stage.val_metric_prefix()
        if name == train + self.stage.loss_metric_name():
            raise UsageError(
                f"{name!r} is the name of the loss that step() returns: add the metric under another name"
            )
        prefixes = (val, *self.val_loaders()) if "pipe" in vars(self.stage) else (val,)
        if any(prefix and name.startswith(prefix) for prefix in prefixes):
            self.val_metrics[name] = metric
            return
        if self.settings.validates_between_steps and not name.startswith(train):
            raise UsageError(
                f"metric {name!r} would mix the validations of an epoch: call it {val + name!r} to compute it in each, "
                f"or {train + name!r} if you update it in training"
            )
        super().add_metric(name, metric)

    # --- before training

    def check(self) -> None:
        super().check()
        if self.is_default("step"):
            validates = self.settings.validates and self.is_default("val_step")
            if self.is_default("train_step") or (validates and self.stage.val_dataset() is not None):
                raise self.no_step()
        self._train_limit(self._train_dataset())
        check_optimizers(self.stage, self.stage.optimizers())

    def no_step(self) -> UsageError:
        if self.is_default("train_step"):
            return UsageError(
                f"stage {self.name!r} has no step: define step(self, batch) that returns the loss"
            )
        return UsageError(
            f"stage {self.name!r} has no step for validation: define val_step(self, batch), or pass val_every=None"
        )

    def check_modules(self) -> None:
        name = find_unregistered(self.stage)
        if name is not None:
            raise UsageError(
                f"stage {self.name!r} has a module with trainable parameters that is not registered, {name!r}: call "
                f"pipe.register_model({name!r}, ...) to train it, or requires_grad_(False) to freeze it"
            )

    def train_batches(self) -> tuple[Pass, Iterator[Any]]:
        """Begins the pass over the training data, and returns its batches on the device."""
        loader = self._train_dataset()
        limit, uneven = self._train_limit(loader), self.settings.uneven
        lengths = gather_lengths(exact_count(loader, limit), self.device)
        if uneven is None:
            check_equal(self.stage, lengths)
        progress = self.begin_pass(loader, limit, lengths, uneven or "shortest")
        return progress, self.device_batches(loader, limit, progress=progress)

    def _train_dataset(self) -> Iterable[Any]:
        loader = self.stage.train_dataset()
        check_train_dataset(self.stage, loader)
        return loader

    def _train_limit(self, loader: Iterable[Any]) -> int | None:
        """Returns the most batches of an epoch; raises `UsageError` for a fraction of an unknown number."""
        limit, part = limit_batches(self.settings, "limit_train_batches", loader), self.settings.val_part
        if part is not None and limit is None and exact_count(loader) is None:
            raise UsageError(
                f"val_every={part} is a part of an epoch, and a {type(loader).__name__} has no exact length: give "
                'steps, such as "500 steps", or limit_train_batches as a number'
            )
        return limit

    def step_functions(
        self, agreement: BatchAgreement | None
    ) -> tuple[Callable[[Any], Any], Callable[[Any], int], BatchAgreement | None]:
        """Returns the functions that run a step and count samples, and the agreement if batches may be repeated."""
        if agreement is None or not agreement.longest:
            return self.stage.train_step, self.stage.count_samples, None
        return self._train_step, self.checked_count, agreement

    def _train_step(self, batch: Any) -> Any:
        """Calls `train_step` of the stage; a repeated batch takes part in the step, but is not logged and weighs 0."""
        if type(batch) is not Repeated:
            return self.stage.train_step(batch)
        self.batch = batch.batch
        with self.not_counted():
            returned: object = self.stage.train_step(batch.batch)
        return (returned[0], 0.0) if type(returned) is tuple and returned else returned

    def after_pre_epoch(self) -> None:
        for model in self.pipe.registered_models.values():
            model.train_if_unfrozen(self.pipe.optimizers.values())
        self.optimizer_step.begin_epoch()  # the hooks may have assigned methods of the stage

    def check_progress(self) -> None:
        # a validation before the first step of the epoch may have ended the stage
        if self.steps_done == self.epoch_start and not self.status.stop_agreed:
            raise self.no_batch()

    def total_steps(self) -> int | None:
        loader = self._train_dataset()
        batches = count_batches(loader, self._train_limit(loader))
        known = [self.max_steps] if self.max_steps is not None else []
        if batches is not None and self.max_epochs is not None:
            known.append(math.ceil(batches / self.settings.accumulate) * self.max_epochs)
        return min(known, default=None)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._val_schedule.start_clock()
        for model in self.pipe.registered_models.values():
            model.begin_training(self.pipe.optimizers.values())  # pre_stage may set parts to eval mode again
        with super().running(), self.computing():
            yield

    @contextmanager
    def computing(self) -> Iterator[None]:
        with (
            super().computing(),
            self.precision.matmul_precision(),
            deterministic(self.settings.deterministic),
        ):
            yield

    def added_metrics(self) -> list[EpochMetric]:
        return [*super().added_metrics(), *self.val_metrics.values()]

    # --- a step

    def stepped_optimizers(self) -> Mapping[str, Optimizer]:
        mine = self.stage.optimizers()
        return {name: each for name, each in self.pipe.optimizers.items() if any(each is one for one in mine)}

    def optimize(self) -> None:
        """Calls the stage's `optimize`, in which `step_optimizer` leaves what the loop does to the loop."""
        self._optimizing = True
        try:
            self.stage.optimize()
        finally:
            self._optimizing = False

    def step_optimizer(self, optimizer: Optimizer) -> None:
        """Steps an optimizer; within `optimize`, the loop steps what follows those that `optimizers()` returns."""
        if not self._optimizing:  # of a hook that trains by itself
            super().step_optimizer(optimizer)
            return
        self.precision.step(optimizer)
        if not any(optimizer is each for each in self.stage.optimizers()):
            for follow in followers_of(self.run, [optimizer]):
                follow()

    def is_default(self, name: str) -> bool:
        """Whether a method is headway's own: neither overridden in a subclass nor assigned to the stage."""
        return bool(getattr(self.stage, name) == MethodType(getattr(self._base, name), self.stage))

    # --- a log point

    @cached_property
    def bad_samples(self) -> BadSamples:
        return self._bad_samples(in_validation=False)

    @cached_property
    def val_bad_samples(self) -> BadSamples:
        """The bad samples of the datasets that are validated on, counted at the end of each validation."""
        return self._bad_samples(in_validation=True)

    def _bad_samples(self, *, in_validation: bool) -> BadSamples:
        val = {id(loader) for loader in self.val_loaders().values()}
        datasets = self.stage.datasets.items()
        return BadSamples({name: each for name, each in datasets if (id(each) in val) is in_validation})

    def settle(self) -> None:
        self.optimizer_step.settle()

    def before_log_point(self) -> None:
        self.settle()
        super().before_log_point()
        if recent := self.recent_losses:
            recent.drop_empty()
            if not all(isinstance(count, Real) for count in recent.samples()):
                self.checked_count(self.batch)  # raises if the count of this batch is not a number
            self.samples = sum(recent.samples())
            mean, weight = recent.mean()  # of weight 0 if no batch is left, so that ranks log the same names
            self.log_own(self.stage.loss_metric_name(), mean, weight=weight)
        if self.precision.scaler is not None and self.steps_done != self.logged_at:
            self.log_own("loss_scale", self.precision.scaler.get_scale(), reduce="last")

    def examine(self, point: LogPoint) -> None:
        """Raises on all ranks if the loss of any rank is non-finite, with the first such step and the evidence."""
        super().examine(point)
        prefix = self.stage.train_metric_prefix()
        if ranks := point.not_finite.get(prefix + self.stage.loss_metric_name()):
            bad = (step for step, loss, _, _ in self.recent_losses if not loss.isfinite())
            steps = gather_rows(torch.tensor([next(bad, evidence.UNKNOWN_STEP)], device=self.device))[:, 0]
            first = int(steps.min())
            # the other ranks follow, through gradients
            began = [rank for rank in ranks if steps[rank] == first] or ranks
            norm = point.values.get(prefix + "grad_norm")
            known = evidence.explain_non_finite_loss(self, first, began[0], norm)
            raise HeadwayError(
                f"the loss of stage {self.name!r} became non-finite at step {first:,}, on rank {shorten_list(began)}"
                f"{known}: lower the learning rate, set gradient_clip, check the data of that step, "
                'or pass on_nan="skip"'
            )
        self.recent_losses.clear()

    def begin_epoch(self) -> None:
        if not self.status.in_epoch:
            self._val_schedule.begin_epoch()
        super().begin_epoch()
        self._own_names.add(self.stage.train_metric_prefix() + self.stage.loss_metric_name())

    # --- validation

    def validation_due(self, *, epoch_ends: bool) -> bool:
        """Whether a validation is due after this step, or, if `epoch_ends`, at the end of this epoch."""
        if epoch_ends:
            return self._val_schedule.is_due_after(self.epoch + 1)
        return self._val_schedule.is_due(self.steps_done, self.passes[-1] if self.passes else None)

    def log_point_flags(self) -> int:
        late = self._val_schedule.is_late() and self.stage.val_dataset() is not None
        return super().log_point_flags() | (VALIDATE if late else 0)

    def apply_flags(self, flags: Sequence[int]) -> None:
        super().apply_flags(flags)
        if flags[0] & VALIDATE:  # rank 0 has the clock
            self._val_schedule.request()

    def pause_follows(self) -> bool:
        return super().pause_follows() or self.validation_due(epoch_ends=False)

    def val_loaders(self) -> dict[str, Iterable[Any]]:
        """Returns the loaders to validate on, by the prefix of their metrics."""
        given = self.stage.val_dataset()
        if given is None:
            return {}
        named = given if isinstance(given, Mapping) else {"val": given}
        return {self.prefix_of(name): loader for name, loader in named.items()}

    def prefix_of(self, name: str) -> str:
        """Returns the prefix of the metrics of a dataset that is evaluated under this name."""
        if name == "val":
            return self.stage.val_metric_prefix()
        if f"{name}/" == self.stage.train_metric_prefix():
            raise UsageError(
                f"a validation under the name {name!r} would mix its metrics with those of training: choose another"
            )
        return f"{name}/"

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Validates within the context: models in eval mode, metrics under the names of the validation."""
        for metric in self.val_metrics.values():
            metric.reset()  # a validation that was stopped is repeated from its beginning
        self.set_metrics, self._set_weighs = {}, {}
        before, self._counts = self._counts, True  # also in a hook whose own logs do not count
        try:
            with evaluating(self):
                yield
        finally:
            self._counts = before

    @contextmanager
    def validating(self, loaders: Mapping[str, Iterable[Any]]) -> Iterator[None]:
        """The same for a validation between steps, which draws the same random numbers each time."""
        with repeating(self.run, loaders.values()), self.evaluating():
            yield

    def end_set(self, prefix: str, prefixes: Collection[str]) -> None:
        """Keeps the state of metrics after one validation set; they are computed when all ranks have ended the last."""
        default = self.stage.val_metric_prefix()
        found = metrics_of_set(self.val_metrics, prefix, prefixes=prefixes, default=default)
        if prefix == [*prefixes][-1]:
            self.set_metrics |= found
            return
        self.set_metrics |= deepcopy(found)  # steps on the next set update the same objects
        for metric in self.val_metrics.values():
            metric.reset()

    def log_val_loss(self, returned: Any, batch: Any) -> None:
        """Logs the loss that `val_step` returned: a mean over the samples of the batch, or a mean and its weight."""
        if returned is None:
            return
        weighs = type(returned) is tuple
        loss, weight = weighted(self.stage, returned) if weighs else (returned, self.checked_count(batch))
        if self._set_weighs.setdefault(self.val_prefix, weighs) is not weighs:
            raise weighs_some(self.stage)
        self.log_own(self.stage.loss_metric_name(), loss, weight=weight)

    def reduce_validation(self) -> LogPoint:
        """Reduces what all ranks have logged in a validation, and counts their bad samples."""
        self.val_bad_samples.log(self.val_meter)
        return self.val_meter.reduce()

    def end_validation(self, point: LogPoint) -> None:
        """Records the result of a validation in a row of its own, and keeps it for the row of the epoch."""
        self.val_meter.finish_epoch()
        if self.set_metrics:
            point = replace(point, values=compute_metrics(self.set_metrics, point.values))
        # a validation before the first step is not part of the epoch
        self._val_values = dict(point.values) if self.steps_done else {}
        self.note_validation()
        self.run.record_log_point(self, "validation", point)
        if self.settings.validates_between_steps and self.steps_done:
            self.stop_early(point.values, in_validation=True)
        if self.run.checkpointer:
            self.run.checkpointer.after_validation(self)
        self.run.timer.stop()
        self.val_bad_samples.check(point)

    def note_validation(self) -> None:
        """Marks the validation that was due as done, even if there is nothing to validate on."""
        self._val_schedule.end_validation(self.steps_done, self.passes[-1] if self.passes else None)

    @property
    def has_validated(self) -> bool:
        validates = self.settings.validates and bool(self.val_loaders())
        return not validates or self._val_schedule.validated_at > 0

    def epoch_values(self) -> dict[str, Any]:
        values = super().epoch_values() | self._val_values
        self._val_values = {}
        if self.val_metrics and (not self.settings.validates or self.stage.val_dataset() is None):
            return compute_metrics(self.val_metrics, values)  # the user validates
        return values

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "precision": self.precision.state_dict(),
            **self.optimizer_step.state_dict(),
            "validated": self._val_values,
            **self._val_schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.precision.load_state_dict(state["precision"])
        self.optimizer_step.load_state_dict(state)
        self._val_values = state["validated"]
        self._val_schedule.load_state_dict(state)
