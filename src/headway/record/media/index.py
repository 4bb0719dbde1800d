"""The index of a run's media: `media/rank-00000.jsonl`, with a row for each item, and the files that the rows name.

    {"kind": "image", "time": 1.7e9, "attempt": 1, "rank": 0, "step": 100, "stage": "fit", "epoch": 0,
     "name": "val/samples", "number": 0, "file": "rank-00000/val/samples/step-000000000100-000.png", "bytes": 5120,
     "caption": "the first eight", "width": 256, "height": 32}
    {"kind": "histogram", ..., "file": "....json"}      {"edges": [...], "counts": [...], "non_finite": 0}
    {"kind": "text", ..., "file": "....txt"}            UTF-8
    {"kind": "figure", ..., "file": "....png"}
    {"kind": "removed", "time": 1.7e9, "file": "..."}   to keep the total size within its limit, or since a resumed run
                                                        repeats the steps in which it was logged
    {"kind": "saved", "time": 1.7e9, "step": 60}        a run that resumes from step 60, or one after it, keeps the
                                                        items above this row

Files are named relative to `media/`, and a row follows its file. The index of a rank has one writer at a time and only
grows, so that it can be followed. Needs no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast, final, get_args

from headway.run import Run
from headway.system import files
from headway.system.jsonlines import Row, Tail, is_count, parse_json

MediaKind = Literal["image", "figure", "histogram", "text"]
_KINDS = get_args(MediaKind)
_INDEX_NAME = re.compile(r"rank-(\d{5,})\.jsonl")
_MAX_BINS = 4096
_CHUNK_BYTES = 1 << 20


@final
@dataclass(frozen=True, kw_only=True)
class MediaItem:
    """One image, figure, histogram or text of a run."""

    kind: MediaKind
    name: str
    step: int
    number: int
    """from 0; more than one item of a name may be logged in a step"""
    rank: int
    attempt: int
    time: float
    """seconds since 1970"""
    stage: str
    epoch: int
    file: str
    """relative to `media/` in the run directory"""
    bytes: int
    caption: str = ""
    width: int = 0
    height: int = 0

    @property
    def label(self) -> str:
        """The name in other systems; it begins with the rank unless that is 0."""
        return f"rank-{self.rank}/{self.name}" if self.rank else self.name

    def path(self, run: Run) -> Path:
        """Returns the file: PNG or JPEG for images and figures, JSON for histograms, text for texts."""
        return run.media_dir / self.file


@final
class MediaIndex:
    """Follows the media of all ranks of a run; reads at most the newest `most_bytes` of the indexes, if given.

    >>> index = MediaIndex(run)  # doctest: +SKIP
    >>> index.refresh()  # doctest: +SKIP
    True
    >>> [item.file for item in index.items("val/samples")]  # doctest: +SKIP
    ['rank-00000/val/samples/step-000000000100-000.png']
    """

    def __init__(self, run: Run, *, most_bytes: int | None = None) -> None:
        self._run, self._most_bytes = run, most_bytes
        self._tails: dict[int, Tail] = {}
        self._items: dict[str, MediaItem] = {}  # by file, without its ending
        self._sorted: list[MediaItem] | None = None
        self.is_partial = False
        """whether older rows were skipped"""

    def __len__(self) -> int:
        return len(self._items)

    def refresh(self) -> bool:
        """Reads new rows; returns whether any item was added or removed."""
        found = False
        ranks = indexed_ranks(self._run)
        for rank in ranks:
            if rank not in self._tails:
                self._tails[rank] = self._open(rank, len(ranks))
            tail, before = self._tails[rank], -1
            while before != tail.offset:
                before = tail.offset
                for row in tail.read():
                    found |= self._add(rank, row)
        if found:
            self._sorted = None
        return found

    def find(self, file: str) -> MediaItem | None:
        """Returns the item of a file, named as in the rows; None if there is none."""
        item = self._items.get(_stem(file))
        return item if item is not None and item.file == file else None

    def items(self, name: str | None = None) -> list[MediaItem]:
        """Returns all items, or those of a name, by step, except removed ones."""
        if self._sorted is None:
            order = sorted(
                self._items.values(), key=lambda item: (item.step, item.rank, item.name, item.number)
            )
            self._sorted = order
        return [item for item in self._sorted if name is None or item.name == name]

    def names(self) -> list[str]:
        """Returns the names of all items."""
        return sorted({item.name for item in self._items.values()})

    def _open(self, rank: int, ranks: int) -> Tail:
        """Opens the index of a rank; if the offset is within a row, the rest of that row is skipped as damaged."""
        file = self._run.media_index_file(rank)
        size = file.stat().st_size if self._most_bytes is not None else 0
        begin = 0 if self._most_bytes is None else max(0, size - self._most_bytes // ranks)
        self.is_partial |= begin > 0
        return Tail(file, begin)

    def _add(self, rank: int, row: Row) -> bool:
        if row.get("kind") == "removed":
            return self._items.pop(_stem(str(row.get("file"))), None) is not None
        item = parse_item(rank, row)
        if item is not None:
            self._items[_stem(item.file)] = item
        return item is not None


@final
class MediaTail:
    """Reads each item of a run once, as it is logged, for all ranks or one, in file order.

    `offsets` are the bytes read so far of each rank's index: pass them to the next `MediaTail` to continue there.
    """

    def __init__(self, run: Run, offsets: Mapping[int, int], *, rank: int | None = None) -> None:
        self._run, self._rank = run, rank
        self._tails = {each: self._tail(each, offset) for each, offset in offsets.items()}

    @property
    def offsets(self) -> dict[int, int]:
        return {rank: tail.offset for rank, tail in self._tails.items()}

    def read(self) -> list[MediaItem]:
        """Returns the next items; some of their files may have been removed since."""
        found = []
        for rank in indexed_ranks(self._run) if self._rank is None else [self._rank]:
            tail = self._tails.setdefault(rank, self._tail(rank, 0))
            found += [item for row in tail.read() if (item := parse_item(rank, row)) is not None]
        return found

    def read_again(self) -> list[MediaItem]:
        """Returns the items before the offsets, which an earlier process has read."""
        found = []
        for rank, end in self.offsets.items():
            tail = self._tail(rank, 0)
            while tail.offset < end and (rows := tail.read(min(_CHUNK_BYTES, end - tail.offset))):
                found += [item for row in rows if (item := parse_item(rank, row)) is not None]
        return found

    def _tail(self, rank: int, offset: int) -> Tail:
        return Tail(self._run.media_index_file(rank), offset)


def indexed_ranks(run: Run) -> list[int]:
    """Returns the ranks that have an index of media."""
    try:
        names = [path.name for path in run.media_dir.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(found[1]) for name in names if (found := _INDEX_NAME.fullmatch(name)))


def _stem(file: str) -> str:
    return file.rpartition(".")[0]


def read_media(run: Run) -> list[MediaItem]:
    """Returns the media of a run, by step.

    >>> [(item.step, item.kind) for item in read_media(Run.open("runs/digits-2026.11.15-14.30-x7k2"))]
    [(100, 'image'), (200, 'image')]
    """
    index = MediaIndex(run)
    index.refresh()
    return index.items()


def read_histogram(path: Path) -> Mapping[str, Any] | None:
    """Returns the edges, the counts and the number of non-finite values of a histogram; None if it is damaged."""
    try:
        found = parse_json(files.read_regular(path))
    except (OSError, ValueError):
        return None
    match found:
        case {"edges": list(edges), "counts": list(counts)} if len(counts) <= _MAX_BINS:
            bad = found.get("non_finite", 0)
            finite = all(isinstance(each, int | float) and math.isfinite(each) for each in edges)
            if finite and len(edges) == len(counts) + 1 and all(map(is_count, (*counts, bad))):
                return {"edges": edges, "counts": counts, "non_finite": bad}
    return None


def parse_item(rank: int, row: Row) -> MediaItem | None:
    """Returns the item of a row of the index; None if it is not an item, or has a file outside of `media/`."""
    texts = [row.get(key) for key in ("name", "stage", "file")]
    counts = [row.get(key) for key in ("step", "number", "attempt", "epoch", "bytes")]
    time, kind, width, height = (row.get(key, 0) for key in ("time", "kind", "width", "height"))
    if kind not in _KINDS or not all(isinstance(text, str) for text in texts):
        return None
    if not all(isinstance(each, int) and each >= 0 for each in (*counts, width, height)):
        return None
    if not isinstance(time, int | float):
        return None
    file = PurePosixPath(row["file"])
    if file.is_absolute() or ".." in file.parts or "\0" in row["file"] or not file.parts:
        return None
    return MediaItem(
        kind=cast(MediaKind, kind),
        name=row["name"],
        step=row["step"],
        number=row["number"],
        rank=rank,
        attempt=row["attempt"],
        time=float(time),
        stage=row["stage"],
        epoch=row["epoch"],
        file=row["file"],
        bytes=row["bytes"],
        caption=str(row.get("caption", "")),
        width=cast(int, width),
        height=cast(int, height),
    )
