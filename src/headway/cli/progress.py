"""How far a long command is: a bar on a terminal, a plain line every few seconds elsewhere. On standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")

_EVERY = 5.0  # seconds between plain lines


def watched(
    items: Iterable[T], total: int | None, what: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[T]:
    """The items, while their number is shown.

    >>> for path in watched(paths, len(paths), "checking shards"):
    ...     check(path)
    """
    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(items, what, total=total, console=console, transient=True)
        return
    say = sayer(clock)
    for number, item in enumerate(items):
        say(f"{what}: {number}{'' if total is None else f' of {total}'}")
        yield item


def sayer(clock: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """Says what it is told on standard error, but not more often than every few seconds.

    >>> say = sayer()
    >>> say("shard-000007.tar is done")
    """
    said = clock()

    def say(line: str) -> None:
        nonlocal said
        now = clock()
        if now - said >= _EVERY:
            said = now
            print(line, file=sys.stderr, flush=True)

    return say
