"""One point of the loop at which all ranks stop, though none waits for the others on the way there.

The loop counts the points at which it may stop, and all ranks pass the same ones in the same order. When somebody asks
for a stop, the hub asks every rank how far it is. A thread of each rank answers with the point that comes next, and the
rank does not go beyond that one until it has heard more. The latest of the points is where all stop: every rank is told
before it gets there, and one that was early waits for a word between threads, not for another rank's work.
"""

from __future__ import annotations

import threading
from typing import final


@final
class Agreement:
    """What one rank knows about the stop. The loop calls `pass_point`, the line to the hub all else.

    >>> agreement = Agreement()
    >>> agreement.pass_point()
    >>> agreement.decide(agreement.promise(), "SIGTERM")
    >>> agreement.pass_point()
    'SIGTERM'
    """

    def __init__(self) -> None:
        self.round = 0
        """how many stops were decided: a request that comes after the decision means the last round, not a new one"""
        self._lock = threading.Lock()
        self._told = threading.Event()
        self._passed = 0
        self._limit: int | None = None  # no further than this without a word
        self._why: str | None = None

    def begin(self) -> None:
        """A run begins: its points are counted from zero, on all ranks."""
        with self._lock:
            self._passed, self._limit, self._why = 0, None, None
            self._told.clear()

    def pass_point(self) -> str | None:
        """Counts a point; says why to stop here, if all ranks stop here."""
        with self._lock:
            self._passed += 1
            if self._limit is None or self._passed < self._limit:
                return None
        self._told.wait()
        with self._lock:
            return self._why if self._passed == self._limit else None

    @property
    def decided(self) -> bool:
        """Whether the point is known."""
        return self._why is not None

    @property
    def stops_next(self) -> bool:
        """Whether the next point is the one."""
        with self._lock:
            return self._why is not None and self._passed + 1 == self._limit

    def promise(self) -> int:
        """The next point; this rank does not go beyond it until `decide` is called."""
        with self._lock:
            self._limit = self._passed + 1
            return self._limit

    def decide(self, point: int, why: str) -> None:
        """All ranks stop at `point`."""
        with self._lock:
            self._limit, self._why = point, why
            self.round += 1
            self._told.set()
