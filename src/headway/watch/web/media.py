"""The images, figures, histograms and texts of a run, for the page.

A request names a file as the index does, and it is looked up there. What is sent is what the first bytes of a file
say that it is: a picture, or else text within JSON. A browser can execute neither.
"""

from __future__ import annotations

import stat
from dataclasses import asdict
from typing import Any, NamedTuple, final

from headway.record.media import MediaIndex, MediaItem, read_histogram
from headway.run import Run
from headway.watch.view.source import clean, clean_indented, open_regular, read_text

_INDEX_BYTES = 8 << 20
"""of a longer index the newest rows are read, some 30,000, in about a second"""
_FILE_BYTES = 32 << 20
_TEXT_BYTES = 1 << 18
_ITEM_BYTES = 1500
"""of an item in memory"""
_MAX_ITEMS = 200
_MAGIC = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


class Picture(NamedTuple):
    """The bytes of a picture."""

    data: bytes
    media_type: str


@final
class MediaShelf:
    """Follows the media of a run: the newest part of its index, as long as that is inside the run directory."""

    def __init__(self, run: Run) -> None:
        self._run, self._index = run, MediaIndex(run)
        self._end_bytes = 0  # a longer index is read anew, from its newest part on

    @property
    def size_bytes(self) -> int:
        """An estimate of the memory that this takes."""
        return len(self._index) * _ITEM_BYTES

    def page(self, name: str, search: str) -> dict[str, Any]:
        """Returns the newest items, of a name and with a text in their caption or name if these are given.

        `note` says why some or all items are left out; it is empty if none are.
        """
        note = self._refresh()
        items = self._index.items()
        wanted = search.casefold()
        chosen = [
            item
            for item in items
            if (not name or item.name == name) and wanted in f"{item.name} {item.caption}".casefold()
        ]
        shown = [_shown(item) for item in reversed(chosen[-_MAX_ITEMS:])]
        names = sorted({item.name for item in items})[:1000]
        return {"names": names, "items": shown, "count": len(chosen), "note": note}

    def find(self, file: str) -> MediaItem | None:
        """Returns the item of a file; None if the index has no such file."""
        self._refresh()
        return self._index.find(file)

    def content(self, item: MediaItem) -> Picture | dict[str, Any] | None:
        """Returns a picture, or a histogram or a text as plain values; None if it cannot be read."""
        return self._picture(item) if item.kind in ("image", "figure") else self._values(item)

    def _refresh(self) -> str:
        """Reads what is new; returns why items are left out."""
        size = self._index_bytes()
        if size is None:
            self._index, self._end_bytes = MediaIndex(self._run), 0
            return f"the media are not shown: their index in {self._run.media_dir} is not a regular file"
        if size > self._end_bytes:
            self._index = MediaIndex(self._run, most_bytes=_INDEX_BYTES)
            self._end_bytes = max(size, _INDEX_BYTES) + _INDEX_BYTES
        self._index.refresh()
        if not self._index.is_partial:
            return ""
        return f"this is the newest part of a long index; older media are in {self._run.media_dir}"

    def _index_bytes(self) -> int | None:
        """The size of the index of all ranks; None if it may not be read."""
        try:
            if self._run.media_dir.is_symlink():
                return None
            found = [path.lstat() for path in self._run.media_dir.glob("rank-*.jsonl")]
        except OSError:
            return None
        return (
            sum(each.st_size for each in found) if all(stat.S_ISREG(each.st_mode) for each in found) else None
        )

    def _picture(self, item: MediaItem) -> Picture | None:
        file = open_regular(self._run.path, item.path(self._run))
        if file is None:
            return None
        with file:
            data = file.read(_FILE_BYTES + 1)
        kind = next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), None)
        return Picture(data, kind) if kind and len(data) <= _FILE_BYTES else None

    def _values(self, item: MediaItem) -> dict[str, Any] | None:
        path = item.path(self._run)
        text = read_text(self._run.path, path, _TEXT_BYTES)
        if text is None:
            return None
        if item.kind == "text":
            return {"text": "\n".join(map(clean_indented, text.splitlines()))}
        found = read_histogram(path)
        return None if found is None else dict(found)


def _shown(item: MediaItem) -> dict[str, Any]:
    return asdict(item) | {
        "name": clean(item.name, 200),
        "caption": clean(item.caption, 1000),
        "too_large": item.kind in ("image", "figure") and item.bytes > _FILE_BYTES,
    }
