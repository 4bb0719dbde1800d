"""The settings of checkpointing: when to save, what to keep, what to resume from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, final

from headway.checkpoint.retention import Retention
from headway.errors import UsageError
from headway.system.interval import Interval


def parse_metric(setting: str, value: object) -> tuple[str, Literal["min", "max"] | None]:
    """Returns the metric that a setting names, and whether "min" or "max" is the best, if that is given.

    >>> parse_metric("keep_best", "val/loss"), parse_metric("keep_best", "max:val/accuracy")
    (('val/loss', None), ('val/accuracy', 'max'))
    """
    which, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if which not in ("", "min", "max") or name in ("", "min", "max"):
        raise UsageError(
            f'{setting}={value!r} is not valid: give a metric such as "val/loss" or "max:val/accuracy"'
        )
    return name, "max" if which == "max" else "min" if which else None


@final
@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """How a pipeline saves its state: the keyword arguments of `pipe.enable_checkpointing`."""

    resume: str | Path = "auto"
    """"auto", "never", "must", or the directory of the run to resume; with a checkpoint, a new run starts from it"""
    every: str | int = "10min"
    """a time ("10min", "2h"; checked when metrics are logged), steps (500) or epochs ("1 epoch")"""
    keep_last: int = 3
    keep_every: int | None = None
    keep_best: str | None = None
    """a metric such as "val/loss", whose smallest value is the best, or "max:val/accuracy" """
    background: bool = True
    """whether to write while training continues"""

    def __post_init__(self) -> None:
        given: dict[str, object] = vars(self)  # a caller without a type checker may pass anything
        resume = given["resume"]
        word = isinstance(resume, str) and "/" not in resume and resume not in ("auto", "never", "must")
        if not isinstance(resume, str | Path) or (word and not Path(resume).exists()):
            raise UsageError(
                f'resume={self.resume!r} is not valid: use "auto", "never", "must" or a run directory'
            )
        if not isinstance(given["background"], bool):
            raise UsageError(f"background={self.background!r} is not valid: give True or False")
        _ = self.interval, self.retention

    @cached_property
    def interval(self) -> Interval:
        return Interval.parse(self.every)

    @cached_property
    def retention(self) -> Retention:
        name, best = (None, None) if self.keep_best is None else parse_metric("keep_best", self.keep_best)
        return Retention(
            keep_last=self.keep_last, keep_every=self.keep_every, keep_best=name, best=best or "min"
        )

    def better(self, metrics: Mapping[str, float], before: float | None) -> float | None:
        """Returns the value of the `keep_best` metric if it is better than `before`, else None."""
        value = metrics.get(self.retention.keep_best or "")
        if value is None or not math.isfinite(value):  # manifests have only finite values
            return None
        if before is None:
            return value
        return value if (value > before if self.retention.best == "max" else value < before) else None
