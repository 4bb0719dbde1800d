"""When a validation is due: by steps, epochs, parts of an epoch or time, and before the first step if requested."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, final

from headway.train.batches import Pass
from headway.train.settings import TrainSettings

_ROUNDING = 1e-9  # 3 times 0.1 is a little more than 0.3, and 0.3 of an epoch is reached nevertheless


@final
class ValSchedule:
    """Decides when a stage validates, the same on all ranks and in a resumed run."""

    def __init__(self, settings: TrainSettings) -> None:
        self._settings = settings
        self.validated_at = 0
        """the stage's `steps_done` at the last validation"""
        self._validated_at_start = False
        self._part_validated = 0.0  # the part of this epoch that was done at the last validation
        self._requested = False  # by rank 0's clock, at a log point
        self._clock: float | None = None  # when the last validation ended; None until the stage runs
        self._carried_s = 0.0  # the time since the last validation in earlier attempts

    def start_clock(self) -> None:
        self._clock = time.monotonic() - self._carried_s

    def begin_epoch(self) -> None:
        self._part_validated = 0.0

    def is_due(self, steps: int, progress: Pass | None) -> bool:
        """Whether a validation is due after this many steps, at this progress of the epoch."""
        if self._settings.val_at_start and not steps:
            return not self._validated_at_start
        every, part = self._settings.val_interval, self._settings.val_part
        if part is not None and progress is not None:
            return _count_parts(_done(progress), part) > _count_parts(self._part_validated, part)
        if every is None or every.epochs is not None:
            return False
        if every.steps is not None:
            return steps % every.steps == 0 and self.validated_at != steps
        return self._requested

    def is_due_after(self, epochs: int) -> bool:
        """Whether a validation is due at the end of the epoch with this number, from 1."""
        every = self._settings.val_interval
        return every is not None and every.epochs is not None and epochs % every.epochs == 0

    def is_late(self) -> bool:
        """Whether, by the clock of this rank, a validation is due."""
        every = self._settings.val_interval
        return every is not None and every.seconds is not None and self._since() >= every.seconds

    def request(self) -> None:
        """Makes a validation due by the clock."""
        self._requested = True

    def end_validation(self, steps: int, progress: Pass | None) -> None:
        self.validated_at, self._validated_at_start = steps, True
        self._part_validated = 0.0 if progress is None else _done(progress)
        self._requested, self._clock = False, time.monotonic()

    def _since(self) -> float:
        """Returns the seconds of training since the last validation, including those of earlier attempts."""
        return self._carried_s if self._clock is None else time.monotonic() - self._clock

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"validated_at": self.validated_at}
        if self._settings.val_part is not None:
            state["val_part"] = self._part_validated
        every = self._settings.val_interval
        if every is not None and every.seconds is not None:
            state["val_clock"] = {"requested": self._requested, "since_s": self._since()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.validated_at = state["validated_at"]
        self._part_validated = state.get("val_part", 0.0)  # only if val_every is a part of an epoch
        if clock := state.get("val_clock"):  # only if it is a time
            self._requested, self._carried_s = clock["requested"], clock["since_s"]


def _done(progress: Pass) -> float:
    """Returns the part of its batches that a pass has given."""
    return progress.batches_given / progress.total_batches if progress.total_batches else 0.0


def _count_parts(done: float, part: float) -> int:
    return math.floor(done / part + _ROUNDING)
