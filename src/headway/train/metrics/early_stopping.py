"""Early stopping: a stage ends when a metric has not improved for a number of epochs or validations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, final


@final
class EarlyStopping:
    """Watches one metric, whose values are the same on all ranks; its state is part of a checkpoint.

    >>> stopping = EarlyStopping("val/loss", mode="min", patience=2, min_delta=0.0)
    >>> [stopping.observe(value, 1) for value in (0.5, 0.6, 0.4, 0.7, 0.6)]
    [False, False, False, False, True]
    """

    def __init__(self, name: str, *, mode: Literal["min", "max"], patience: int, min_delta: float) -> None:
        self.name, self.mode, self.patience, self.min_delta = name, mode, patience, min_delta
        self.best: float | None = None
        self.best_epoch = 0
        """counted from 1"""
        self.waited = 0
        """values since the best one"""
        self.in_validations = False
        """whether the metric is one of validations within epochs, so that these count instead of epochs"""

    def observe(self, value: float, epoch: int) -> bool:
        """Observes the next value of the metric, in an epoch counted from 1; returns whether the stage ends."""
        if self._is_better(value):
            self.best, self.best_epoch, self.waited = value, epoch, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        return (
            value > self.best + self.min_delta if self.mode == "max" else value < self.best - self.min_delta
        )

    def describe(self) -> str:
        """Returns why the stage ends."""
        best = (
            "has no value"
            if self.best is None
            else f"has not improved on {self.best:.6g} of epoch {self.best_epoch}"
        )
        return f"{self.name} {best} in {self.waited} {'validations' if self.in_validations else 'epochs'}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "waited": self.waited,
            "in_validations": self.in_validations,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; a state of another metric does not count."""
        if state["name"] == self.name:
            self.best, self.best_epoch = state["best"], state["best_epoch"]
            self.waited, self.in_validations = state["waited"], state["in_validations"]
