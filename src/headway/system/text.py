"""Text for people: sizes, durations, counts, and long lists."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

TIME_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def format_bytes(count: float) -> str:
    """Formats a number of bytes with decimal units.

    >>> format_bytes(512), format_bytes(16_640), format_bytes(3e12)
    ('512 B', '16.6 kB', '3.0 TB')
    """
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def format_duration(seconds: float) -> str:
    """Formats a duration with its two largest units.

    >>> format_duration(0.4), format_duration(95), format_duration(7300), format_duration(200_000)
    ('0s', '1m35s', '2h01m', '2d07h')
    """
    for (unit, name), (next_unit, next_name) in pairwise(TIME_UNITS):
        if seconds >= unit:
            return f"{int(seconds // unit)}{name}{int(seconds % unit // next_unit):02d}{next_name}"
    return f"{int(seconds)}s"


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """Formats a count with its noun, in singular or plural.

    >>> plural(1, "shard"), plural(2000, "shard"), plural(2, "index", "indexes")
    ('1 shard', '2,000 shards', '2 indexes')
    """
    return f"{count:,} {noun if count == 1 else plural_noun or noun + 's'}"


def shorten_list(items: Collection[object], limit: int = 16) -> str:
    """Joins items with commas; names at most `limit` of them and counts the rest.

    >>> shorten_list([0, 1, 2]), shorten_list(range(20), limit=2)
    ('0, 1, 2', '0, 1, ... and 18 more')
    """
    shown = ", ".join(str(item) for item, _ in zip(items, range(limit), strict=False))
    return f"{shown}, ... and {len(items) - limit:,} more" if len(items) > limit else shown
