"""Detects that this process itself was suspended: no heartbeat could arrive in that time, so none is late."""

from __future__ import annotations

import math
import time
from typing import final


@final
class Standstill:
    """Detects, from the time between two calls, that this process did not run for a while.

    `scontrol suspend` and SIGSTOP stop the agents and the ranks together, while the clock continues. How long ago the
    others sent a message is then no evidence that they are lost.

    >>> standstill = Standstill(longest_s=5.0)
    >>> standstill.ended()  # often
    -inf
    """

    def __init__(self, *, longest_s: float) -> None:
        self._longest_s = longest_s
        self._called: float | None = None
        self._ended = -math.inf

    def ended(self) -> float:
        """Returns when the last standstill ended, on the monotonic clock; minus infinity if there was none."""
        now = time.monotonic()
        if self._called is not None and now - self._called > self._longest_s:
            self._ended = now
        self._called = now
        return self._ended
