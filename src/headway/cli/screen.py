"""Output of verbs: the console, and times and numbers as people read them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from headway.errors import escape_controls
from headway.system.jsonlines import to_finite
from headway.system.log import logger
from headway.system.text import TIME_UNITS


@final
class EscapingConsole(Console):
    """Prints texts with their control characters escaped: names in tables come from files."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_controls(segment.text))


def console(*, stderr: bool = False) -> Console:
    """Returns a console as wide as the terminal; lines written to a file or a pipe are never wrapped."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 10_000
    # no markup: a pattern of files may contain [a-f]
    return EscapingConsole(
        stderr=stderr, width=wide, highlight=False, soft_wrap=False, markup=False, emoji=False
    )


def print_json(facts: object) -> None:
    """Prints one JSON document, with NaN and infinities as text, as in the files of a run."""
    # JSON leaves DEL as it is
    print(json.dumps(to_finite(facts), indent=2, allow_nan=False).replace("\x7f", "\\u007f"))


def plain_table(*titles: str, numbers: Collection[str] = ()) -> Table:
    """Returns a table without lines, whose columns fold; the columns in `numbers` are right-aligned."""
    made = Table(box=None, pad_edge=False)
    for title in titles:
        made.add_column(title, justify="right" if title in numbers else "left", overflow="fold")
    return made


def ago(moment: datetime, now: datetime) -> str:
    """Formats how long ago something was, in the largest unit.

    >>> ago(datetime(2026, 11, 15, 10), datetime(2026, 11, 15, 13, 59))
    '3h ago'
    """
    seconds = max(0.0, (now - moment).total_seconds())
    unit, name = next(((unit, name) for unit, name in TIME_UNITS if seconds >= unit), (1, "s"))
    return f"{int(seconds // unit)}{name} ago"


def number(value: float | str | None) -> str:
    """Formats a number with four digits, an integer with all of them.

    >>> number(0.123456), number(1200), number(3e-7), number(None), number("nan")
    ('0.1235', '1200', '3e-07', '-', 'nan')
    """
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def warn(text: str) -> None:
    """Logs a warning about files of other users, with control characters escaped."""
    logger.warning("%s", safe(text))


def safe(text: str) -> str:
    """Escapes the control characters of text from a file, so that it cannot control the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
