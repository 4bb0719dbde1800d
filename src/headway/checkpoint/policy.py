"""When to save, what to keep, what to go on from: the settings, and what follows from them alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, final

from headway.checkpoint.retention import Retention
from headway.errors import UsageError

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_EVERY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h|d|ep|steps?)")


@final
@dataclass(frozen=True, kw_only=True)
class Every:
    """How often: one of the three is set."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, setting: str | int) -> Every:
        """What a setting means.

        >>> Every.of("10min"), Every.of(500), Every.of("1ep")
        (Every(steps=None, epochs=None, seconds=600.0), Every(steps=500, epochs=None, seconds=None), \
Every(steps=None, epochs=1, seconds=None))
        """
        text = f"{setting} steps" if type(setting) is int else setting
        match = _EVERY.fullmatch(text) if isinstance(text, str) else None
        number, unit = (float(match[1]), match[2]) if match else (0.0, "")
        if unit in _SECONDS and number > 0:
            return cls(seconds=number * _SECONDS[unit])
        if number >= 1 and number.is_integer():
            return cls(epochs=int(number)) if unit == "ep" else cls(steps=int(number))
        raise UsageError(
            f'every={setting!r}: give steps such as 500, epochs such as "1ep", or a time such as "10min" or "2h"'
        )


@final
@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a pipeline keeps its state: given to `pipe.enable_checkpointing` by name."""

    resume: str | Path = "auto"
    """"auto", "never", "must", or the directory of the run to go on with"""
    every: str | int = "10min"
    """a time ("10min", "2h"; looked at when metrics are logged), steps (500) or epochs ("1ep")"""
    keep_last: int = 3
    keep_every: int | None = None
    keep_best: str | None = None
    """a metric such as "val/loss", whose smallest value is the best, or "max:val/accuracy" """
    background: bool = True
    """write while training goes on"""

    def __post_init__(self) -> None:
        _ = self.interval, self.retention

    @cached_property
    def interval(self) -> Every:
        return Every.of(self.every)

    @cached_property
    def retention(self) -> Retention:
        which, _, name = (self.keep_best or "").rpartition(":")
        if which not in ("", "min", "max"):
            raise UsageError(
                f'keep_best={self.keep_best!r}: give a metric, such as "val/loss" or "max:val/accuracy"'
            )
        best: Literal["min", "max"] = "max" if which == "max" else "min"
        return Retention(
            keep_last=self.keep_last, keep_every=self.keep_every, keep_best=name or None, best=best
        )

    def better(self, metrics: Mapping[str, float], before: float | None) -> float | None:
        """The value of the metric to keep the best of, if there is one and it is better than `before`."""
        value = metrics.get(self.retention.keep_best or "")
        if value is None or value != value:
            return None
        if before is None:
            return value
        return value if (value > before if self.retention.best == "max" else value < before) else None
