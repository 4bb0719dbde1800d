"""Agreement on one point of the loop at which all ranks act; no rank has to wait for the others before that point.

The subject is a stop, or another attempt at a save that failed. The loop counts its points, and all ranks pass the same
points in the same order. On a request, the hub asks every rank how far it is. A thread of each rank replies with the
next point, and the rank does not pass that point before the decision. All ranks act at the latest of these points. A
rank that reaches its own point early waits for a message, not for another rank's work.
"""

from __future__ import annotations

import threading
from typing import final

SUBJECTS = ("stop", "save")


@final
class Agreement:
    """The state of one subject on one rank. The loop calls `pass_point`; the connection to the hub calls the rest.

    >>> agreement = Agreement()
    >>> agreement.pass_point()
    >>> agreement.decide(agreement.propose(), "SIGTERM")
    >>> agreement.pass_point()
    'SIGTERM'
    """

    def __init__(self) -> None:
        self.round = 0
        """how many points were decided; a request with an earlier number has been decided already"""
        self._lock = threading.Lock()
        self._decision = threading.Event()
        self._passed = 0
        self._proposed: int | None = None  # the point that needs a decision before it is passed
        self._decided: dict[int, str] = {}  # a rank may be behind a point when the next one is decided

    def begin(self) -> None:
        """Starts counting the points of a run from zero. All ranks call it."""
        with self._lock:
            self._passed, self._proposed, self._decided = 0, None, {}

    def pass_point(self) -> str | None:
        """Counts a point; returns the reason if all ranks act at this point, else None."""
        with self._lock:
            self._passed += 1
            wait = self._proposed is not None and self._passed >= self._proposed
        if wait:
            self._decision.wait()
        return self._decided.get(self._passed) if self._decided else None

    @property
    def decided(self) -> bool:
        """Whether a point has been decided."""
        return bool(self._decided)

    @property
    def acts_next(self) -> bool:
        """Whether all ranks act at the next point."""
        with self._lock:
            return self._passed + 1 in self._decided

    def propose(self) -> int:
        """Returns the next point; this rank does not pass it until `decide` is called."""
        with self._lock:
            self._proposed = self._passed + 1
            self._decision.clear()
            return self._proposed

    def decide(self, point: int, why: str) -> None:
        """Makes this rank act at `point`, as all ranks do."""
        with self._lock:
            self._decided[point] = why
            self._proposed = None
            self.round += 1
            self._decision.set()
