"""Small words between ranks, as JSON through the store: all succeed, or all raise what one of them raised.

No collective is involved, so ranks may talk here while others train.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as c10d

from headway import dist
from headway.dist.group import current
from headway.dist.remote import pack, unpack
from headway.errors import UsageError

T = TypeVar("T")
R = TypeVar("R")

_FOREVER = timedelta(days=365)  # a rank that dies takes all others with it: see dist.control


def place() -> tuple[int, int]:
    """This process's rank, and how many there are. Without a group there is one."""
    if dist.is_initialized():
        return dist.rank(), dist.world_size()
    if c10d.is_available() and c10d.is_initialized() and c10d.get_world_size() > 1:
        raise UsageError("checkpoints of several ranks need headway's group: call headway.init() first")
    return 0, 1


def phase(work: Callable[[], T], conclude: Callable[[list[T]], Sequence[R]]) -> R:
    """Every rank works; rank 0 concludes from all results and answers each rank. Results and answers are JSON.

    If the work fails on any rank, nothing is concluded; if that or the conclusion fails, every rank raises.
    """
    rank, size = place()
    if size == 1:
        return conclude([work()])[0]
    group = current()
    number = group.calls["checkpoint"] = (
        group.calls.get("checkpoint", 0) + 1
    )  # in the same order on all ranks
    store = c10d.PrefixStore(f"headway/checkpoint/{number}", group.store)
    word, failure = _attempt(work, rank)
    if rank == 0:
        words = [word, *(_take(store, f"from/{other}") for other in range(1, size))]
        answer, concluding = _conclude(words, conclude)
        for other in range(1, size):
            store.set(f"to/{other}", json.dumps(answer[other]))
        mine, failure = answer[0], failure or concluding
    else:
        store.set(f"from/{rank}", json.dumps(word))
        mine = _take(store, f"to/{rank}")
    if failure is not None:
        raise failure
    if "error" in mine:
        raise unpack(mine["error"])
    return mine["value"]  # type: ignore[no-any-return]


def each(work: Callable[[], T]) -> list[T]:
    """Every rank works and gets the results of all, in the order of ranks."""
    return phase(work, lambda results: [results] * len(results))


def from_root(work: Callable[[], T]) -> T:
    """Rank 0 works, and every rank gets its result."""
    return phase(lambda: None, lambda nothing: [work()] * len(nothing))


def _attempt(work: Callable[[], object], rank: int) -> tuple[dict[str, Any], BaseException | None]:
    try:
        return {"value": work()}, None
    except Exception as error:  # noqa: BLE001  it is raised here and on all other ranks, once they know
        return {"error": pack(error, rank)}, error


def _conclude(
    words: list[dict[str, Any]], conclude: Callable[[list[Any]], Sequence[object]]
) -> tuple[list[dict[str, Any]], BaseException | None]:
    errors = [word for word in words if "error" in word]
    if errors:
        return [errors[0]] * len(words), None
    word, failure = _attempt(lambda: conclude([word["value"] for word in words]), 0)
    if failure is not None:
        return [word] * len(words), failure
    return [{"value": value} for value in word["value"]], None


def _take(store: c10d.Store, key: str) -> dict[str, Any]:
    store.wait([key], _FOREVER)
    word: dict[str, Any] = json.loads(store.get(key))
    store.delete_key(key)
    return word
