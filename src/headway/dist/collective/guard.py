"""Guarded sections: work that some ranks do while the others wait.

If the working rank raises, every waiting rank raises the same exception at once, with the original traceback. If it
exits, all ranks exit with the cause (see `dist.control`), so the wait needs no timeout: a download may take an hour and
does not count as a hang.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, overload

from headway.dist.collective.exchange import FOREVER, RankExchange
from headway.dist.failure.capture import HEARTBEAT
from headway.dist.group import current
from headway.errors import BarrierTimeout
from headway.system.text import shorten_list

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def _first(channel: str, *, works: bool, waiting: int) -> Iterator[None]:
    """Runs the body first on the rank with `works`, and then on the `waiting` others."""
    exchange = RankExchange("wait for the first rank", channel=channel)
    if not works:
        with HEARTBEAT.no_hang_check():
            exchange.read(readers=waiting)
        yield
        return
    try:
        with HEARTBEAT.no_hang_check():
            yield
    except BaseException as error:
        exchange.publish(error=error, readers=waiting)
        raise
    exchange.publish(readers=waiting)


@contextmanager
def root_first() -> Iterator[None]:
    """Runs the body on rank 0 first, and on the others when rank 0 is done.

    >>> with headway.root_first():
    ...     dataset = MNIST("data", download=True)  # rank 0 downloads, the others find it there
    """
    world = current().world
    assert world is not None
    with _first("root_first", works=world.rank == 0, waiting=world.world_size - 1):
        yield


@contextmanager
def local_root_first() -> Iterator[None]:
    """Runs the body on the first rank of each node first, and on the other ranks of the node when it is done.

    >>> with headway.local_root_first():
    ...     unpack("/shared/imagenet.tar", "/local/scratch")
    """
    world = current().world
    assert world is not None
    channel = f"local_root_first/{world.node_rank}"
    with _first(channel, works=world.local_rank == 0, waiting=world.local_world_size - 1):
        yield


@overload
def root_only(function: Callable[P, T], /) -> Callable[P, T | None]: ...
@overload
def root_only(*, wait: bool = True) -> Callable[[Callable[P, T]], Callable[P, T | None]]: ...
def root_only(function: Callable[P, T] | None = None, /, *, wait: bool = True) -> Any:
    """Decorates a function so that it runs on rank 0 only, and returns None elsewhere.

    The other ranks wait until it is done, and raise what it raises: call it on all ranks. With `wait=False` they
    continue at once; such a function may be called on any rank, and its exception stays on rank 0.

    >>> @headway.root_only
    ... def write_results(path): ...
    """
    if function is None:
        return functools.partial(_root_only, wait=wait)
    return _root_only(function, wait=wait)


def _root_only(function: Callable[P, T], *, wait: bool) -> Callable[P, T | None]:
    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        group = current()
        root = group.launch.rank == 0
        if not wait:
            with HEARTBEAT.no_hang_check():
                return function(*args, **kwargs) if root else None
        with _first("root_only", works=root, waiting=group.launch.world_size - 1):
            return function(*args, **kwargs) if root else None

    return guarded


def from_root(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0; returns its result, a JSON value, on all ranks, or raises its exception on all of them."""
    group = current()
    waiting = group.launch.world_size - 1
    exchange = RankExchange("wait for rank 0", channel="from_root")
    with HEARTBEAT.no_hang_check():
        if group.launch.rank != 0:
            return exchange.read(readers=waiting)  # type: ignore[no-any-return]
        try:
            result = work()
        except BaseException as error:
            exchange.publish(error=error, readers=waiting)
            raise
    exchange.publish(result, readers=waiting)
    return result


def barrier(*, timeout: float | None = None) -> None:
    """Waits until all ranks have called it. With a timeout, the error names the ranks that are missing.

    It uses the store and not the GPUs: no stream is synchronized.

        hw.barrier(timeout=60)
    """
    group = current()
    size = group.launch.world_size
    if size == 1:
        return
    number = group.calls["barrier"] = group.calls.get("barrier", 0) + 1
    key = f"headway/barrier/{number}"
    store = group.store
    store.set(f"{key}/{group.launch.rank}", "")
    if store.add(f"{key}/count", 1) == size:
        store.set(f"{key}/open", "")
    try:
        store.wait([f"{key}/open"], FOREVER if timeout is None else timedelta(seconds=timeout))
    except RuntimeError as error:
        absent = [rank for rank in range(size) if not store.check([f"{key}/{rank}"])]
        if not absent:  # the store failed; time was not up
            raise
        raise BarrierTimeout(
            f"a barrier was not reached within {timeout:g} s by rank {shorten_list(absent)}"
            "; headway watch and their logs show where they are"
        ) from error
    if store.add(f"{key}/left", 1) == size:
        for name in (*map(str, range(size)), "count", "open", "left"):
            store.delete_key(f"{key}/{name}")
