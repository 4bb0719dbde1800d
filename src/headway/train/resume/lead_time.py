"""`LeadTime`: how long before the end of a job its run must stop."""

from __future__ import annotations

import time
from typing import final

from headway.dist.control import stop


@final
class LeadTime:
    """How long before the end of a job to request a stop: the slowest step and save, each twice, and the exit.

    A save may have to wait for the one before it. The exit is the time that the last start needed to requeue the job.
    """

    def __init__(self) -> None:
        self.save_s = 0.0
        self.exit_s = 0.0
        self._slowest_s = 0.0
        self._steps = 0
        self._last: float | None = None

    def seconds(self) -> float:
        return 2 * self.save_s + 2 * self._slowest_s + max(stop.MARGIN_S, 1.5 * self.exit_s)

    def step(self) -> None:
        """Measures the step that has just ended."""
        now = time.monotonic()
        self._steps += 1
        if self._last is not None and self._steps > 3:  # the first ones compile and warm up
            self._slowest_s = max(self._slowest_s, now - self._last)
        self._last = now

    def pause(self) -> None:
        """Excludes what follows from the time of the next step."""
        self._last = None
