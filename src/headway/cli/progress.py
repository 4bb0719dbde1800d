"""Shows the progress of a long command on standard error: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.progress import track

from headway.cli.screen import EscapingConsole

T = TypeVar("T")

_LINE_INTERVAL_S = 5.0


def show_progress(
    items: Iterable[T], total: int | None, what: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[T]:
    """Yields the items, and shows how many were done.

    >>> for path in show_progress(paths, len(paths), "checking shards"):
    ...     check(path)
    """
    console = EscapingConsole(stderr=True)
    if console.is_terminal:
        yield from track(items, what, total=total, console=console, transient=True)
        return
    report = throttled_printer(clock)
    for number, item in enumerate(items):
        report(f"{what}: {number}{'' if total is None else f' of {total}'}")
        yield item


def throttled_printer(clock: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """Returns a function that prints a line to standard error, at most every few seconds.

    >>> report = throttled_printer()
    >>> report("shard-000007.tar is done")
    """
    last = clock()

    def report(line: str) -> None:
        nonlocal last
        now = clock()
        if now - last >= _LINE_INTERVAL_S:
            last = now
            print(line, file=sys.stderr, flush=True)

    return report
