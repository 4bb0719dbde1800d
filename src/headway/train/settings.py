"""Settings of training and of checkpointing, checked on construction.

Each set of settings is a frozen dataclass, with the defaults and the checks, and a `TypedDict` with the same fields, so
that editors complete keyword arguments and mypy rejects unknown ones. A test compares the two.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict, final

import numpy as np

from headway.checkpoint.settings import CheckpointSettings, parse_metric
from headway.errors import UsageError, unknown_name
from headway.system import environment
from headway.system.interval import Interval
from headway.system.text import plural
from headway.train.batches import exact_count
from headway.train.metrics.early_stopping import EarlyStopping
from headway.train.model import precision
from headway.train.model.optimizer_step import check_norm
from headway.train.uneven import Uneven

LOG_EVERY = 50


def check_whole(name: str, value: object) -> None:
    """Raises `UsageError` unless the value of a setting is a whole number of at least 1."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name}={value!r}: give a whole number of at least 1")


def _check_limit(name: str, limit: object) -> None:
    """Raises `UsageError` unless the value of a setting is a number of batches, a part of them, or None."""
    if limit is None:
        return
    whole = isinstance(limit, int | np.integer) and not isinstance(limit, bool) and limit >= 1
    if not whole and not (isinstance(limit, float | np.floating) and 0 < limit <= 1):
        none = ", or val_every=None for no validation" if name == "limit_val_batches" and not limit else ""
        raise UsageError(
            f"{name}={limit!r}: give a whole number of batches of at least 1, a part of them such as 0.1, or None for "
            f"all{none}"
        )


def limit_batches(
    settings: TrainSettings, name: Literal["limit_train_batches", "limit_val_batches"], loader: Iterable[Any]
) -> int | None:
    """Returns the most batches to take from a loader; a part of them is rounded down, as in Lightning.

    >>> limit_batches(TrainSettings(limit_val_batches=0.29), "limit_val_batches", range(100))
    29
    """
    limit = getattr(settings, name)
    if limit is None or not isinstance(limit, float | np.floating):
        return None if limit is None else int(limit)
    if limit == 1:
        return None
    count = exact_count(loader)
    if count is None:
        raise UsageError(
            f"{name}={limit} is a part of all batches, and a {type(loader).__name__} has no exact length: give "
            "a number of batches"
        )
    batches = math.floor(count * limit + 1e-9)  # 100 times 0.29 is a little less than 29
    if count and not batches:
        raise UsageError(
            f"{name}={limit} of {plural(count, 'batch', 'batches')} is less than one batch: give a larger part, or a "
            "number of batches"
        )
    return batches


@final
@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The settings of a `TrainValStage`, passed to its constructor: `Classify(precision="bf16", gradient_clip=1.0)`.

    class Classify(hw.TrainValStage):
        ...

    pipe.append_stage(Classify(precision="bf16", accumulate=4, gradient_clip=1.0), max_epochs=10)
    """

    precision: precision.Name = "fp32"
    """fp32, tf32, bf16 or fp16 (fp16 with a loss scale)"""
    accumulate: int = 1
    """batches per optimizer step; the gradient is that of the mean over all their samples, on all ranks"""
    gradient_clip: float | None = None
    """largest total norm of the gradients; the norm is logged as train/grad_norm"""
    val_every: str | float | None = "1 epoch"
    """between validations: "1 epoch", a part of an epoch such as 0.25, "500 steps", or a time such as "30min" (rank
    0's clock); None for no validation"""
    val_at_start: bool = False
    """whether to validate before the first step, too, which measures the initial weights"""
    limit_train_batches: float | None = None
    """batches per epoch, for quick trials: a whole number, or a fraction of all such as 0.1"""
    limit_val_batches: float | None = None
    """batches per validation: a whole number, or a fraction of all such as 0.1"""
    uneven: Uneven | None = None
    """if ranks have different numbers of batches: with "shortest", all ranks stop when the first has no more; with
    "longest", ranks that have no more repeat a batch, which does not count, until the last has none; None means
    "shortest" if lengths are not known, and an error if they are"""
    log_every: int = LOG_EVERY
    """steps between log points, where ranks exchange metrics and requests to stop"""
    on_nan: Literal["stop", "skip"] = "stop"
    """"stop": a non-finite loss stops the run at the next log point; "skip": each step with a non-finite loss or
    gradient is skipped, which makes the host wait for the device in every step"""
    max_skips: int = 10
    """steps in a row that may be skipped before the run stops"""
    early_stop: str | None = None
    """the metric by which the stage ends early: "val/loss", or "max:val/accuracy" if the largest value is the best"""
    patience: int = 3
    """for early_stop: epochs in a row without a better value, or validations if they come within epochs"""
    min_delta: float = 0.0
    """for early_stop: how much better than the best so far a value must be to count"""
    mode: Literal["min", "max"] | None = None
    """for early_stop: whether the smallest ("min", the default) or the largest value is the best"""
    deterministic: bool = False
    """use deterministic kernels; torch raises an error for operations that have none"""

    def __post_init__(self) -> None:
        precision.check_name(self.precision)
        for name in ("accumulate", "log_every", "max_skips", "patience"):
            check_whole(name, getattr(self, name))
        for name in ("limit_train_batches", "limit_val_batches"):
            _check_limit(name, getattr(self, name))
        if type(self.val_at_start) is not bool:
            raise UsageError(f"val_at_start={self.val_at_start!r}: give True or False")
        check_norm("gradient_clip", self.gradient_clip)
        if self.uneven not in (None, "shortest", "longest"):
            raise UsageError(f'uneven={self.uneven!r} is unknown: use "shortest", "longest" or None')
        if self.on_nan not in ("stop", "skip"):
            raise UsageError(f'on_nan={self.on_nan!r} is unknown: use "stop" or "skip"')
        _ = self.val_interval
        self._check_early_stop()

    def _check_early_stop(self) -> None:
        delta: object = self.min_delta
        if (
            not isinstance(delta, int | float | np.number)
            or isinstance(delta, bool)
            or not 0 <= delta < math.inf
        ):
            raise UsageError(f"min_delta={delta!r}: give a number of at least 0")
        if self.mode not in (None, "min", "max"):
            raise UsageError(f'mode={self.mode!r} is unknown: use "min" or "max"')
        if self.early_stop is None:
            for name, default in (("patience", 3), ("min_delta", 0.0), ("mode", None)):
                if getattr(self, name) != default:
                    raise UsageError(
                        f"{name}={getattr(self, name)!r} does nothing without early_stop: pass the metric, such as "
                        'early_stop="val/loss"'
                    )
            return
        _, best = parse_metric("early_stop", self.early_stop)
        if best is not None and self.mode is not None and best != self.mode:
            raise UsageError(
                f"early_stop={self.early_stop!r} and mode={self.mode!r} differ: give one of them"
            )

    def make_early_stopping(self) -> EarlyStopping | None:
        """Returns the early stopping by the metric of `early_stop`; None without one."""
        if self.early_stop is None:
            return None
        name, best = parse_metric("early_stop", self.early_stop)
        mode = self.mode or best or "min"
        return EarlyStopping(name, mode=mode, patience=self.patience, min_delta=self.min_delta)

    @property
    def validates(self) -> bool:
        """Whether there are validations at all."""
        return self.val_every is not None

    @cached_property
    def val_part(self) -> float | None:
        """The part of an epoch between validations; None if they come another way."""
        every = self.val_every
        return float(every) if isinstance(every, float | np.floating) and 0 < every < 1 else None

    @cached_property
    def val_interval(self) -> Interval | None:
        """The interval between validations; None for no validation, or for a part of an epoch."""
        every: object = self.val_every  # a caller without a type checker may pass a number
        if every is None or self.val_part is not None:
            return None
        if isinstance(every, float) and every == 1:  # a whole one, as in Lightning
            return Interval(epochs=1)
        if type(every) is int and every > 0:
            raise UsageError(
                f'val_every={every!r} could mean steps or epochs: give "{every:g} steps" or "{every:g} epochs", '
                "a part of an epoch such as 0.25, or None for no validation"
            )
        try:
            return Interval.parse(every if isinstance(every, str) else "", name="val_every")
        except UsageError:
            raise UsageError(
                f'val_every={every!r:.80} is not a valid interval: give "500 steps", "2 epochs", "30min", a part of '
                "an epoch such as 0.25, or None for no validation"
            ) from None

    @cached_property
    def validates_between_steps(self) -> bool:
        """Whether validations happen within epochs rather than at their ends."""
        in_epochs = self.val_interval is not None and self.val_interval.epochs is not None
        return self.validates and not in_epochs

    @cached_property
    def validates_in_epoch(self) -> bool:
        """Whether a validation may be due before the end of an epoch."""
        return self.validates_between_steps or self.val_at_start


class TrainOptions(TypedDict, total=False):
    """The fields of `TrainSettings`, for type checkers."""

    precision: precision.Name
    accumulate: int
    gradient_clip: float | None
    val_every: str | float | None
    val_at_start: bool
    limit_train_batches: float | None
    limit_val_batches: float | None
    uneven: Uneven | None
    log_every: int
    on_nan: Literal["stop", "skip"]
    max_skips: int
    early_stop: str | None
    patience: int
    min_delta: float
    mode: Literal["min", "max"] | None
    deterministic: bool


class CheckpointOptions(TypedDict, total=False):
    """The fields of `headway.checkpoint.settings.CheckpointSettings`, for type checkers."""

    resume: str | Path
    every: str | int
    keep_last: int
    keep_every: int | None
    keep_best: str | None
    background: bool


def check_setting_names(
    owner: str, given: Iterable[str], settings: type[TrainSettings | CheckpointSettings]
) -> None:
    """Raises `UsageError` for a name that is not one of the settings."""
    known = [field.name for field in fields(settings)]
    for name in given:
        if name not in known:
            raise unknown_name(f"setting of {owner}", name, known)


def checkpoint_settings(options: CheckpointOptions) -> CheckpointSettings:
    """Returns the settings for the arguments of `enable_checkpointing`, with overrides from the environment."""
    check_setting_names("enable_checkpointing", options, CheckpointSettings)
    if environment.SAVE_EVERY in os.environ:
        options["every"] = os.environ[environment.SAVE_EVERY]
    if not environment.is_on(environment.SAVE_IN_BACKGROUND, default=True):
        options["background"] = False
    return CheckpointSettings(**options)
