"""Agreement on one point of the loop at which all ranks stop, without any rank waiting for the others before it.

The loop counts the points at which it may stop, and all ranks pass the same points in the same order. On a request to
stop, the hub asks every rank how far it is. A thread of each rank answers with the next point, and the rank does not
pass that point until the decision is known. All ranks stop at the latest of these points. A rank that reaches its own
point early waits for a message, not for another rank's work.
"""

from __future__ import annotations

import threading
from typing import final


@final
class Agreement:
    """What one rank knows about a stop. The loop calls `pass_point`; the connection to the hub calls the rest.

    >>> agreement = Agreement()
    >>> agreement.pass_point()
    >>> agreement.decide(agreement.propose(), "SIGTERM")
    >>> agreement.pass_point()
    'SIGTERM'
    """

    def __init__(self) -> None:
        self.round = 0
        """how many stops were decided; a request that arrives after the decision belongs to the last round"""
        self._lock = threading.Lock()
        self._decision = threading.Event()
        self._passed = 0
        self._limit: int | None = None  # not beyond this point without a decision
        self._why: str | None = None

    def begin(self) -> None:
        """Starts counting the points of a run from zero. All ranks call it."""
        with self._lock:
            self._passed, self._limit, self._why = 0, None, None
            self._decision.clear()

    def pass_point(self) -> str | None:
        """Counts a point; returns why to stop if all ranks stop at this point, else None."""
        with self._lock:
            self._passed += 1
            if self._limit is None or self._passed < self._limit:
                return None
        self._decision.wait()
        with self._lock:
            return self._why if self._passed == self._limit else None

    @property
    def decided(self) -> bool:
        """Whether the point to stop at is known."""
        return self._why is not None

    @property
    def stops_next(self) -> bool:
        """Whether all ranks stop at the next point."""
        with self._lock:
            return self._why is not None and self._passed + 1 == self._limit

    def propose(self) -> int:
        """Returns the next point; this rank does not pass it until `decide` is called."""
        with self._lock:
            self._limit = self._passed + 1
            return self._limit

    def decide(self, point: int, why: str) -> None:
        """Makes this rank stop at `point`, as all ranks do."""
        with self._lock:
            self._limit, self._why = point, why
            self.round += 1
            self._decision.set()
