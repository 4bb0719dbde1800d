"""The images, figures, histograms and texts of a run, for the page.

A request names a file of the index, and it is looked up there. The first bytes of a file decide whether it is sent as a
picture; other files are sent as text within JSON. A browser can execute neither.
"""

from __future__ import annotations

import stat
from dataclasses import asdict
from typing import Any, NamedTuple, final

from headway.record.media import MediaIndex, MediaItem, read_histogram
from headway.run import Run
from headway.watch.view.source import clean, clean_indented, open_regular, read_text

_INDEX_BYTES = 8 << 20
"""of a longer index, only the newest rows are read: some 30,000, in about a second"""
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
    """The media of a run, from the newest part of its index; an index that is a link is not read."""

    def __init__(self, run: Run) -> None:
        self._run, self._index = run, MediaIndex(run)
        self._end_bytes = 0  # an index that grows beyond is read again, from its newest part

    @property
    def size_bytes(self) -> int:
        """An estimate of the memory that the index uses."""
        return len(self._index) * _ITEM_BYTES

    def page(self, name: str, search: str) -> dict[str, Any]:
        """Returns the newest items; with `name` or `search`, those of that name or with that text in name or caption.

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
        """Reads what was added to the index; returns why items are left out."""
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
        """Returns the size of the index of all ranks; None if it must not be read."""
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
