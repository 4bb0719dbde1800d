"""The exchange between ranks: JSON values through the store, and rows of numbers in one collective.

A `RankExchange` moves small values without any collective, so ranks may use it while they train. All ranks succeed, or
all raise what one of them raised. A rank that exits ends all others (`dist.control`); one that is stopped or stuck does
not, so every wait has a deadline, and `BarrierTimeout` names the ranks that are missing.

`gather_rows` is for numbers that are already on a device: one all-gather, and one wait for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, final

import torch.distributed as c10d
from torch import Tensor

from headway.dist.failure.remote import pack, unpack
from headway.dist.group import current, is_initialized
from headway.errors import BarrierTimeout, UsageError
from headway.system.text import shorten_list

T = TypeVar("T")
R = TypeVar("R")
Message = dict[str, Any]
"""{"value": ...} or {"error": ...}"""

TIMEOUT_S = 1800.0
"""how long ranks wait for one that does not respond"""
_ANSWER_GRACE_S = 5.0
"""how much longer they wait for rank 0, whose reply names the rank that is missing"""
FOREVER = timedelta(days=365)


def rank_and_size() -> tuple[int, int]:
    """This process's rank, and the number of ranks. Without a process group it is rank 0 of 1."""
    if c10d.is_available() and c10d.is_initialized():
        return c10d.get_rank(), c10d.get_world_size()
    return 0, 1


@final
class RankExchange:
    """A series of rounds in which all ranks exchange JSON values; every rank makes its exchanges in the same order.

    `doing` completes the sentence "the ranks tried to ..." in errors. An exchange in another thread needs a `store` of
    its own, because a connection to the store serves one wait at a time. `channel` separates sequences of exchanges in
    which not all ranks take part.

    >>> hosts = RankExchange("list their hosts").all_gather(socket.gethostname)
    """

    def __init__(
        self,
        doing: str,
        *,
        channel: str = "exchange",
        store: c10d.Store | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.rank, self.size = rank_and_size()
        self.doing = doing
        self.timeout_s = timeout_s
        self._rounds = 0
        if self.size == 1:
            return
        if store is None and not is_initialized():
            raise UsageError("an exchange between ranks needs headway's group: call headway.init() first")
        calls = current().calls if is_initialized() else {}
        number = calls[channel] = calls.get(channel, 0) + 1  # in the same order on all ranks
        self._store = c10d.PrefixStore(f"headway/{channel}/{number}", store or current().store)

    def round(
        self,
        work: Callable[[], T],
        decide: Callable[[list[T]], Sequence[R]],
        undo: Callable[[], None] = lambda: None,
    ) -> R:
        """Runs `work` on every rank and `decide` on rank 0, which turns all results into one answer for each rank.

        If the work fails on any rank, nothing is decided. If the work or the decision fails, rank 0 calls `undo`, and
        then every rank raises.
        """
        if self.size == 1:
            try:
                return decide([work()])[0]
            except BaseException:
                undo()
                raise
        self._rounds += 1
        message, failure = _attempt(work, self.rank)
        if self.rank == 0:
            answers, undecided = self._decide(message, decide)
            if "error" in answers[0]:
                undo()
            for other in range(1, self.size):
                self._store.set(f"{self._rounds}/to/{other}", json.dumps(answers[other]))
            answer, failure = answers[0], failure or undecided
        else:
            self._store.set(f"{self._rounds}/from/{self.rank}", json.dumps(message))
            own = {0: f"{self._rounds}/to/{self.rank}"}
            answer = self._collect(own, self.timeout_s + _ANSWER_GRACE_S)[0]
        if failure is not None:
            raise failure
        return _open(answer)  # type: ignore[no-any-return]

    def all_gather(self, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank and returns all results, in the order of ranks, on every rank."""
        return self.round(work, lambda results: [results] * len(results))

    def from_root(self, work: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Runs `work` on rank 0 when all ranks are here, and returns its result on every rank."""
        return self.round(lambda: None, lambda results: [work()] * len(results), undo)

    def arrive(self) -> None:
        """Announces that this rank has arrived. Rank 0 waits until all others have; they do not wait."""
        if self.rank:
            self._store.set(f"from/{self.rank}", json.dumps({}))
        else:
            self._collect({other: f"from/{other}" for other in range(1, self.size)}, self.timeout_s)

    def publish(self, value: object = None, *, error: BaseException | None = None, readers: int) -> None:
        """Publishes a value, or an exception to raise, for `readers` other ranks to `read`. Does not wait for them."""
        if readers:
            message = {"value": value} if error is None else {"error": pack(error, self.rank)}
            self._store.set("published", json.dumps(message))

    def read(self, *, readers: int) -> Any:
        """Waits without a limit for what another rank publishes; returns the value or raises the exception."""
        self._store.wait(["published"], FOREVER)
        message = json.loads(self._store.get("published"))
        if self._store.add("reads", 1) == readers:  # the last reader removes the keys
            self._store.delete_key("published")
            self._store.delete_key("reads")
        return _open(message)

    def _decide(
        self, own: Message, decide: Callable[[list[Any]], Sequence[object]]
    ) -> tuple[list[Message], BaseException | None]:
        keys = {other: f"{self._rounds}/from/{other}" for other in range(1, self.size)}
        collected, timeout = _attempt(lambda: self._collect(keys, self.timeout_s), 0)
        if timeout is not None:
            return [collected] * self.size, timeout
        messages = [own, *collected["value"]]
        errors = [message for message in messages if "error" in message]
        if errors:
            return [errors[0]] * self.size, None
        decision, failure = _attempt(lambda: decide([message["value"] for message in messages]), 0)
        if failure is not None:
            return [decision] * self.size, failure
        return [{"value": value} for value in decision["value"]], None

    def _collect(self, keys: Mapping[int, str], timeout_s: float) -> list[Message]:
        """Waits for the messages of these ranks, and removes them from the store."""
        self._wait(keys, timeout_s)
        messages: list[Message] = [json.loads(self._store.get(key)) for key in keys.values()]
        for key in keys.values():
            self._store.delete_key(key)
        return messages

    def _wait(self, keys: Mapping[int, str], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for key in keys.values():
            left = max(0.001, deadline - time.monotonic())
            try:
                self._store.wait([key], timedelta(seconds=left))
            except RuntimeError as error:
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                if not missing:  # the store failed; time was not up
                    raise
                raise BarrierTimeout(self._timeout_message(missing, timeout_s)) from error

    def _timeout_message(self, missing: Sequence[int], timeout_s: float) -> str:
        return (
            f"rank {shorten_list(missing)} did not respond within {timeout_s:g} s while the ranks tried to "
            f"{self.doing}: "
            "it is stopped, stuck, or elsewhere in the script; look at its log and its stack"
        )


def gather_rows(vector: Tensor) -> Tensor:
    """Collects the equally long vectors of all ranks as the rows of a table on the host: one collective, one wait."""
    _, size = rank_and_size()
    if size == 1:
        alone = vector[None].cpu()
        return alone.double() if alone.is_floating_point() else alone  # counts stay exact
    table = vector.new_empty(size, len(vector))
    c10d.all_gather(list(table), vector)
    return table.cpu()


def _attempt(work: Callable[[], object], rank: int) -> tuple[Message, BaseException | None]:
    try:
        return {"value": work()}, None
    except Exception as error:  # noqa: BLE001  it is raised on all ranks once they have received it
        return {"error": pack(error, rank)}, error


def _open(message: Message) -> Any:
    if "error" in message:
        raise unpack(message["error"])
    return message["value"]
