"""Command lines by tyro; a mistake in them is one sentence, like every other."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr
from pathlib import Path
from stat import S_ISDIR
from typing import Any, TypeVar

import tyro

from headway.errors import UsageError

T = TypeVar("T")


def parse(settings: type[T], argv: list[str], *, prog: str, **more: Any) -> T:
    """What `tyro.cli` gives; `UsageError` where it would draw a box and leave.

    >>> options = parse(Show, argv, prog="headway checkpoint show")
    """
    drawn = io.StringIO()
    try:
        with redirect_stderr(drawn):
            options: T = tyro.cli(settings, args=argv, prog=prog, **more)
            return options
    except SystemExit as left:
        if not left.code:
            raise
        raise UsageError(f"{sentence(drawn.getvalue())}; see: {prog} --help") from None


def there(path: Path, kind: str) -> Path:
    """The path, if there is something at it; what cannot be looked at is left to whoever reads it."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"there is no {kind} {str(path)!r}") from None
    except OSError:
        return path
    if kind == "folder" and not S_ISDIR(mode):
        raise UsageError(f"{str(path)!r} is no folder")
    return path


def sentence(box: str) -> str:
    """What a box of tyro's says, and what it would take instead.

    >>> sentence('''╭─ Unrecognized options ────────────╮
    ... │ Unrecognized options: --nod, h200 │
    ... │ ───────────────────────────────── │
    ... │ Perhaps you meant:                │
    ... │     --node STR                    │
    ... ╰───────────────────────────────────╯''')
    'Unrecognized options: --nod, h200; perhaps you meant --node STR'
    """
    lines = [line.strip("│ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    parts: list[list[str]] = [[]]
    for line in lines:
        if line.startswith(("──", "--")) and not line.strip("─-"):
            parts.append([])
        elif line and line[0] not in "╭╰":
            parts[-1].append(line)
    if "╭" not in box:  # where the terminal has no UTF-8, the title stands above a line of its own
        parts = parts[1:]
    what = " ".join(parts[0]).partition(" Got errors:")[0].rstrip(" .")
    what = what.replace(" (required) ", " (required), ")  # each missing argument had a line of its own
    what = re.sub(r"^Error parsing (?!-)[\w.]+: ", "", what)  # a group of options, which nobody has typed
    for part in parts[1:]:
        match part:
            case ["Perhaps you meant:", option, *_]:
                return f"{what}; perhaps you meant {option}"
            case ["Argument helptext:", option, *_]:
                return f"{what}; expected {option}"
    return what
