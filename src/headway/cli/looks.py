"""How verbs print: the console, states in colour, times and numbers as people read them."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from itertools import pairwise

from rich.console import Console

_COLOURS = {
    "running": "green",
    "queued": "cyan",
    "failed": "red",
    "lost": "red",
    "stopped": "yellow",
    "interrupted": "yellow",
    "cancelled": "yellow",
}
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def console() -> Console:
    """As wide as the terminal. Into a file or a pipe lines are as long as they need to be: programs do not wrap."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 10_000
    return Console(width=wide, highlight=False, soft_wrap=False)


def state_style(state: str) -> str:
    """The colour of a state, if it has one."""
    return _COLOURS.get(state, "")


def duration(seconds: float) -> str:
    """A time in its two largest units.

    >>> duration(0.4), duration(95), duration(7300), duration(200000)
    ('0s', '1m35s', '2h01m', '2d07h')
    """
    for (unit, name), (next_unit, next_name) in pairwise(_UNITS):
        if seconds >= unit:
            return f"{int(seconds // unit)}{name}{int(seconds % unit // next_unit):02d}{next_name}"
    return f"{int(seconds)}s"


def ago(moment: datetime, now: datetime) -> str:
    """How long ago, in its largest unit.

    >>> ago(datetime(2026, 11, 15, 10), datetime(2026, 11, 15, 13, 59))
    '3h ago'
    """
    seconds = max(0.0, (now - moment).total_seconds())
    unit, name = next(((unit, name) for unit, name in _UNITS if seconds >= unit), (1, "s"))
    return f"{int(seconds // unit)}{name} ago"


def number(value: float | str | None) -> str:
    """A number in four digits, a whole one in all of them.

    >>> number(0.123456), number(1200), number(3e-7), number(None), number("nan")
    ('0.1235', '1200', '3e-07', '-', 'nan')
    """
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def many(count: int, thing: str, things: str = "") -> str:
    """How many of something there are.

    >>> many(1, "shard"), many(2000, "shard"), many(2, "index", "indexes")
    ('1 shard', '2,000 shards', '2 indexes')
    """
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def size(count: int) -> str:
    """Bytes for people.

    >>> size(512), size(16_640)
    ('512 B', '16.6 kB')
    """
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def safe(text: str) -> str:
    """Text from a file, without what would command the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
