"""Small words between ranks, as JSON through the store: all succeed, or all raise what one of them raised.

No collective is involved, so ranks may talk here while they train. A rank that dies takes all others with it
(`dist.control`); one that is stopped or stuck does not, so nobody waits here for ever: `BarrierTimeout` names it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, final

import torch.distributed as c10d

from headway import dist
from headway.dist.group import current
from headway.dist.failure.remote import pack, unpack
from headway.errors import BarrierTimeout, UsageError

T = TypeVar("T")
R = TypeVar("R")

PATIENCE = 1800.0
"""seconds that ranks wait for one that says nothing"""


def place() -> tuple[int, int]:
    """This process's rank, and how many there are. Without a group there is one."""
    if dist.is_initialized():
        return dist.rank(), dist.world_size()
    if c10d.is_available() and c10d.is_initialized() and c10d.get_world_size() > 1:
        raise UsageError("checkpoints of several ranks need headway's group: call headway.init() first")
    return 0, 1


@final
class Line:
    """One conversation of all ranks; each makes its lines in the same order as the others.

    `doing` says in words what it is about. A line that is used by another thread needs a store of its own (`store`):
    a connection to the store serves one wait at a time.
    """

    def __init__(self, doing: str, *, store: c10d.Store | None = None, patience: float | None = None) -> None:
        self.rank, self.size = place()
        self.doing = doing
        self.patience = PATIENCE if patience is None else patience
        self._phases = 0
        if self.size > 1:
            group = current()
            number = group.calls["checkpoint"] = group.calls.get("checkpoint", 0) + 1
            self._store = c10d.PrefixStore(f"headway/checkpoint/{number}", store or group.store)

    def phase(
        self,
        work: Callable[[], T],
        conclude: Callable[[list[T]], Sequence[R]],
        undo: Callable[[], None] = lambda: None,
    ) -> R:
        """Every rank works; rank 0 concludes from all results and answers each rank. Results and answers are JSON.

        If the work fails on any rank, nothing is concluded; if that or the conclusion fails, rank 0 undoes what was
        done, and then every rank raises.
        """
        if self.size == 1:
            try:
                return conclude([work()])[0]
            except BaseException:
                undo()
                raise
        self._phases += 1
        word, failure = _attempt(work, self.rank)
        if self.rank == 0:
            answers, concluding = self._conclude(word, conclude)
            if "error" in answers[0]:
                undo()
            for other in range(1, self.size):
                self._store.set(f"{self._phases}/to/{other}", json.dumps(answers[other]))
            mine, failure = answers[0], failure or concluding
        else:
            self._store.set(f"{self._phases}/from/{self.rank}", json.dumps(word))
            mine = self._take({0: f"{self._phases}/to/{self.rank}"})[0]
        if failure is not None:
            raise failure
        if "error" in mine:
            raise unpack(mine["error"])
        return mine["value"]  # type: ignore[no-any-return]

    def each(self, work: Callable[[], T]) -> list[T]:
        """Every rank works and gets the results of all, in the order of ranks."""
        return self.phase(work, lambda results: [results] * len(results))

    def from_root(self, work: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Rank 0 works, and every rank gets its result."""
        return self.phase(lambda: None, lambda nothing: [work()] * len(nothing), undo)

    def _conclude(
        self, own: dict[str, Any], conclude: Callable[[list[Any]], Sequence[object]]
    ) -> tuple[list[dict[str, Any]], BaseException | None]:
        keys = {other: f"{self._phases}/from/{other}" for other in range(1, self.size)}
        heard, silence = _attempt(lambda: self._take(keys), 0)
        if silence is not None:
            return [heard] * self.size, silence
        words = [own, *heard["value"]]
        errors = [word for word in words if "error" in word]
        if errors:
            return [errors[0]] * self.size, None
        word, failure = _attempt(lambda: conclude([word["value"] for word in words]), 0)
        if failure is not None:
            return [word] * self.size, failure
        return [{"value": value} for value in word["value"]], None

    def _take(self, keys: dict[int, str]) -> list[dict[str, Any]]:
        """What these ranks have said, once all have."""
        deadline = time.monotonic() + self.patience
        for key in keys.values():
            left = max(0.001, deadline - time.monotonic())
            try:
                self._store.wait([key], timedelta(seconds=left))
            except RuntimeError as error:
                silent = [rank for rank, key in keys.items() if not self._store.check([key])]
                if not silent:  # not a matter of time
                    raise
                raise BarrierTimeout(self._complaint(silent)) from error
        words: list[dict[str, Any]] = [json.loads(self._store.get(key)) for key in keys.values()]
        for key in keys.values():
            self._store.delete_key(key)
        return words

    def _complaint(self, silent: list[int]) -> str:
        names = ", ".join(map(str, silent[:16]))
        return (
            f"rank {names} said nothing for {self.patience:g} s while the ranks tried to {self.doing}: "
            "it is stopped, stuck, or elsewhere in the script; look at its log and its stack"
        )


def _attempt(work: Callable[[], object], rank: int) -> tuple[dict[str, Any], BaseException | None]:
    try:
        return {"value": work()}, None
    except Exception as error:  # noqa: BLE001  it is raised here and on all other ranks, once they know
        return {"error": pack(error, rank)}, error
