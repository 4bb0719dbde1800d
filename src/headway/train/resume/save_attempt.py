"""The record of a save: its place in the run, its result, and the metrics of its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from headway.checkpoint.settings import CheckpointSettings
from headway.train.metrics.meter import Value


@final
@dataclass(frozen=True, kw_only=True)
class Place:
    """The progress of a run: a validation and the ends of epochs and stages change the state, but not the step."""

    step: int
    epoch: int
    stages_ended: int
    validated_at: int
    """the step of the last validation between two steps that this attempt has made, -1 before the first"""


NOWHERE = Place(step=-1, epoch=-1, stages_ended=-1, validated_at=-1)


@final
@dataclass(kw_only=True)
class SaveAttempt:
    """The last save that all ranks have begun; equal on all ranks."""

    place: Place
    scheduled: bool
    """whether it was due, rather than a retry"""
    replaces: bool = False
    """whether it replaces an earlier checkpoint of the same step, if there is one"""
    failed: bool = False

    @property
    def step(self) -> int:
        return self.place.step


@final
class StepMetrics:
    """The metrics of the last step that has any, and the best value so far of the one that `keep_best` names."""

    def __init__(self, settings: CheckpointSettings) -> None:
        self._settings = settings
        self._step, self._values = -1, dict[str, Value]()
        self._best = list[tuple[int, float]]()
        """the last values that were the best so far, with their steps: at most one of them is still being saved"""

    def add(self, step: int, values: Mapping[str, Value]) -> None:
        """Adds the metrics of an epoch or a validation."""
        known = self._values if self._step == step else {}
        self._step, self._values = step, {**known, **values}

    def scalars(self, step: int) -> dict[str, float]:
        """Returns the numbers among the metrics of a step."""
        known = self._values if self._step == step else {}
        return {name: float(value) for name, value in known.items() if isinstance(value, float | int)}

    def improve(self, step: int) -> bool:
        """Returns whether the metrics of a step are better than all before; they are the best from then on."""
        better = self._settings.better(self.scalars(step), self.best)
        if better is not None:
            self._best = [*self._best[-1:], (step, better)]
        return better is not None

    @property
    def best(self) -> float | None:
        return self._best[-1][1] if self._best else None

    def forget_best(self, step: int | None = None) -> None:
        """Forgets the best value if it is of this step, whose save has failed; by default whatever it is.

        Otherwise a later value that is better than those of all checkpoints would not be saved.
        """
        self._best = [(each, value) for each, value in self._best if step is not None and each != step]

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "keep_best": self._settings.keep_best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the best value, if it is of the same metric, which older checkpoints do not name."""
        same = state.get("keep_best", self._settings.keep_best) == self._settings.keep_best
        self._best = [(-1, state["best"])] if same and state["best"] is not None else []
