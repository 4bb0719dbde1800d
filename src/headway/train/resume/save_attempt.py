"""`SaveAttempt`: a save that was begun, and the place in the run whose state it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True)
class Place:
    """How far a run has come: when an epoch or a stage ends, the state changes, though the step does not."""

    step: int
    epoch: int
    stages_ended: int


NOWHERE = Place(step=-1, epoch=-1, stages_ended=-1)


@final
@dataclass(kw_only=True)
class SaveAttempt:
    """The last save that all ranks have begun; equal on all ranks."""

    place: Place
    scheduled: bool
    """whether it was due, and not the retry of another"""
    replaces: bool = False
    """whether there may be an earlier checkpoint of the same step, which it takes the place of"""
    failed: bool = False

    @property
    def step(self) -> int:
        return self.place.step
