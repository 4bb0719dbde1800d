"""The files of the page. A request names one of them, and never becomes part of a path."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

_STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Asset(NamedTuple):
    """A file of the page."""

    data: bytes
    media_type: str


@cache
def assets() -> dict[str, Asset]:
    """Returns all files of the page by their names, `index.html` among them.

    >>> assets()["uplot/uplot.min.css"].media_type
    'text/css; charset=utf-8'
    """
    return {
        path.relative_to(_STATIC).as_posix(): Asset(path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(_STATIC.rglob("*"))
        if path.suffix in _TYPES
    }
