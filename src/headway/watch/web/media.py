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
from headway.watch.view.run_view import clean_indented
from headway.watch.view.source import clean, open_regular, read_text

_INDEX_BYTES = 64 << 20
_FILE_BYTES = 32 << 20
_TEXT_BYTES = 1 << 18
_MAX_ITEMS = 200
_MAGIC = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


class Picture(NamedTuple):
    """The bytes of a picture."""

    data: bytes
    media_type: str


@final
class MediaShelf:
    """Follows the media of a run, as long as its index has a sane size and is inside the run directory."""

    def __init__(self, run: Run) -> None:
        self._run, self._index = run, MediaIndex(run)

    def page(self, name: str, search: str) -> dict[str, Any]:
        """Returns the newest items, of a name and with a text in their caption or name if these are given."""
        items = self._items()
        wanted = search.casefold()
        chosen = [
            item
            for item in items
            if (not name or item.name == name) and wanted in f"{item.name} {item.caption}".casefold()
        ]
        shown = [
            asdict(item) | {"name": clean(item.name, 200), "caption": clean(item.caption, 1000)}
            for item in reversed(chosen[-_MAX_ITEMS:])
        ]
        names = sorted({item.name for item in items})[:1000]
        return {"names": names, "items": shown, "count": len(chosen)}

    def content(self, file: str) -> Picture | dict[str, Any] | None:
        """Returns a picture, or a histogram or a text as plain values; None if the index has no such file."""
        item = next((item for item in self._items() if item.file == file), None)
        if item is None:
            return None
        return self._picture(item) if item.kind in ("image", "figure") else self._values(item)

    def _items(self) -> list[MediaItem]:
        if not self._is_sane():
            return []
        self._index.refresh()
        return self._index.items()

    def _is_sane(self) -> bool:
        try:
            if self._run.media_dir.is_symlink():
                return False
            found = [path.lstat() for path in self._run.media_dir.glob("rank-*.jsonl")]
        except OSError:
            return False
        return all(stat.S_ISREG(each.st_mode) for each in found) and (
            sum(each.st_size for each in found) <= _INDEX_BYTES
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
