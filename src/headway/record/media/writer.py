"""`MediaWriter`: writes the media that a stage logs, in its own thread, within a limit on their total size."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Self, final
from urllib.parse import quote

from headway.dist import World
from headway.errors import RunLocked, Stopped, StorageError, UsageError
from headway.record.media.content import ImageFormat, MediaContent
from headway.record.media.encoding import check_jpeg
from headway.record.media.index import MediaItem, indexed_ranks, parse_item
from headway.run import Run
from headway.system import files, jsonlines
from headway.system.jsonlines import JsonLinesWriter
from headway.system.log import logger
from headway.system.redact import redact
from headway.system.text import format_bytes

_PENDING_BYTES = 1 << 28
"""how much memory media that are not encoded yet may take; beyond this, training waits"""
_CLOSE_S = 5.0
"""how long a failed run waits for its media"""
_SAVE_S = 60.0
"""how long a checkpoint waits for the media logged before it"""
_LONGEST_PART = 200
_THINNED_TO = 0.9
"""the fraction of the limit that is left after thinning, so that not every new item removes another one"""


@final
@dataclass(frozen=True, kw_only=True)
class MediaSettings:
    """How images, figures, histograms and texts are kept: `pipe.set_media(max_gb=5, format="jpeg")`."""

    max_gb: float = 1.0
    """of all files together, in units of 1e9 bytes; beyond it, some older items of the names that take the most space
    are removed"""
    format: ImageFormat = "png"
    """"png", or "jpeg", which is smaller but not exact"""
    ranks: tuple[int, ...] | Literal["all"] = (0,)
    """the ranks that keep what they log; on the others, logging does nothing"""

    def __post_init__(self) -> None:
        if not isinstance(self.max_gb, int | float) or isinstance(self.max_gb, bool) or not self.max_gb > 0:
            raise UsageError(f"max_gb={self.max_gb!r}: give a size above 0, in units of 1e9 bytes")
        if self.format not in ("png", "jpeg"):
            raise UsageError(f'format={self.format!r} is not a valid format of images: use "png" or "jpeg"')
        if self.format == "jpeg":
            check_jpeg()
        if self.ranks != "all":
            given: object = self.ranks  # a caller without a type checker may give anything
            ranks = tuple(given) if isinstance(given, Iterable) else (None,)
            if not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
                raise UsageError(f'ranks={given!r}: give numbers of ranks, such as (0, 1), or "all"')
            object.__setattr__(self, "ranks", ranks)

    def limit_bytes(self, rank: int, world_size: int) -> int:
        """Returns how many bytes a rank may keep; 0 if it keeps nothing."""
        ranks = range(world_size) if self.ranks == "all" else self.ranks
        return int(self.max_gb * 1e9) // len(ranks) if rank in ranks else 0


@final
@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A row to write, and the content of its file; the mark of a checkpoint has none."""

    facts: dict[str, Any]
    content: MediaContent | None


@final
class MediaWriter:
    """Writes the media of one rank. `add` returns at once, unless 256 MiB wait to be encoded.

    A write that fails loses items, but never the run.
    """

    def __init__(self, run: Run, settings: MediaSettings, *, world: World, attempt: int) -> None:
        self._run, self._rank, self._attempt = run, world.rank, attempt
        self._format, self._world_size = settings.format, world.world_size
        self._limit = settings.limit_bytes(world.rank, world.world_size)
        self.is_open = self._limit > 0
        """whether this rank keeps what it logs"""
        self._numbers: dict[tuple[str, int], int] = {}  # of the next item of a name in a step
        self._changed = threading.Condition()
        self._queue: deque[_Entry] = deque()
        self._added = self._written = 0  # entries of the queue; those that could not be written count, too
        self._pending_bytes, self._busy, self._closing = 0, False, False
        self._unsaved = False  # whether anything was added since the last checkpoint
        self._thread: threading.Thread | None = None
        self._rows: JsonLinesWriter | None = None
        self._kept = KeptFiles(self._limit)
        self._warned: set[str] = set()

    # --- on the training thread

    def begin(self, step: int) -> None:
        """Removes items that earlier attempts logged after the checkpoint of `step`, from which this one starts."""
        ranks = [self._rank] if self.is_open else []
        if self._rank == 0:  # also for ranks that no longer exist
            ranks += [rank for rank in indexed_ranks(self._run) if rank >= self._world_size]
        for rank in ranks:
            try:
                kept = self._drop_repeated(rank, step)
            except (OSError, StorageError) as error:
                self._warn("begin", f"media of rank {rank} could not be read: {error}")
                continue
            if rank == self._rank:
                for item in kept:
                    self._kept.insert(item)
                    if item.step >= step:
                        self._numbers[item.name, item.step] = max(
                            self._numbers.get((item.name, item.step), 0), item.number + 1
                        )

    def add(self, name: str, content: MediaContent, *, step: int, stage: str, epoch: int) -> None:
        """Hands an item to the thread that encodes and writes it."""
        path = _checked(name := redact(name) if isinstance(name, str) else name)
        number = self._numbers.get((name, step), 0)
        if (name, step) not in self._numbers and len(self._numbers) > 1000:
            self._numbers = {key: value for key, value in self._numbers.items() if key[1] >= step}
        self._numbers[name, step] = number + 1
        facts = {
            "kind": content.kind,
            "time": time.time(),
            "attempt": self._attempt,
            "rank": self._rank,
            "step": step,
            "stage": stage,
            "epoch": epoch,
            "name": name,
            "number": number,
            "file": f"rank-{self._rank:05d}/{path}/step-{step:012d}-{number:03d}",
        }
        if content.caption:
            facts["caption"] = content.caption
        with self._changed:
            if self._pending_bytes > _PENDING_BYTES:
                self._warn(
                    "slow",
                    f"{format_bytes(self._pending_bytes)} of media wait to be encoded, and training waits for them: "
                    "log fewer or smaller ones",
                )
                self._changed.wait_for(lambda: self._pending_bytes <= _PENDING_BYTES or not self.is_open)
            self._unsaved = True
            self._put(_Entry(facts=facts, content=content))

    def save_point(self, step: int) -> None:
        """Marks the items so far as part of the checkpoint of `step`: a run that resumes from it keeps only these.

        A validation begins with a mark, too, since a checkpoint that is written during it has the state before it.
        """
        if self._unsaved:
            self._unsaved = False
            with self._changed:
                self._put(_Entry(facts={"kind": "saved", "time": time.time(), "step": step}, content=None))

    def flush_before(self, step: int) -> Callable[[], None]:
        """Returns a function to call before the checkpoint of `step` is written: it waits for the items so far."""
        until = self._added

        def wait() -> None:
            with self._changed:
                written = self._changed.wait_for(lambda: self._written >= until, _SAVE_S)
            if not written:
                self._warn(
                    "save",
                    f"media logged before the checkpoint of step {step:,} have not been written after {_SAVE_S:.0f} s: "
                    "if the run is killed now, they are lost",
                )

        return wait

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all added items are on disk; returns whether they are. May be called from any thread."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def close(self, *, failed: bool = False) -> None:
        """Writes the remaining items; a failed run waits only a few seconds for them."""
        if self._thread is not None:
            if not self.flush(_CLOSE_S if failed else None):
                self._warn("close", f"{len(self._queue):,} media items were not written: the run failed")
            with self._changed:
                self._closing, self.is_open = True, False
                self._changed.notify_all()
            self._thread.join(_CLOSE_S)
        if self._rows is not None:
            self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None and not issubclass(kind, Stopped))

    def _put(self, entry: _Entry) -> None:
        self._queue.append(entry)
        self._added += 1
        self._pending_bytes += entry.content.bytes if entry.content else 0
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="headway-media", daemon=True)
            self._thread.start()

    # --- on the writer's own thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                entry, self._busy = self._queue.popleft(), True
            try:
                self._write(entry)
            except RunLocked as error:  # another process trains here, and writes its own media
                self._warn("locked", str(error))
            except StorageError as error:
                self._warn("storage", f"media are being lost: {error}")
            except Exception as error:  # noqa: BLE001  an item that a user logged must not end the run
                name, step = entry.facts.get("name"), entry.facts["step"]
                self._warn(f"item {name}", f"{name!r} of step {step:,} was not kept: {error}")
            finally:
                with self._changed:
                    self._busy = False
                    self._written += 1
                    self._pending_bytes -= entry.content.bytes if entry.content else 0
                    self._changed.notify_all()

    def _write(self, entry: _Entry) -> None:
        if entry.content is None:
            self._open_rows().write(entry.facts)
            return
        encoded = entry.content.encode(self._format)
        self._run.check_owner()
        file = f"{entry.facts['file']}.{encoded.ending}"
        path = self._run.media_dir / file
        with files.storage(f"write {path}"):
            _make_dirs(self._run, path.parent.relative_to(self._run.path).parts)
            files.write_atomic(path, encoded.data)
        facts = entry.facts | {"file": file, "bytes": len(encoded.data)}
        if encoded.width:
            facts |= {"width": encoded.width, "height": encoded.height}
        rows = self._open_rows()
        rows.write(facts)
        item = parse_item(self._rank, facts)
        assert item is not None, facts
        if thinned := self._kept.add(item):
            self._warn(
                "limit",
                f"media have reached {format_bytes(self._limit)}: from now on, some older items of the names that take "
                "the most space are removed; pipe.set_media(max_gb=...) keeps more",
            )
            self._remove(thinned, rows)

    def _open_rows(self) -> JsonLinesWriter:
        if self._rows is None:
            with files.storage(f"write to {self._run.media_dir}"):
                _make_dirs(self._run, ("media",))
            self._rows = self._run.open_rows(self._run.media_index_file(self._rank), content="media")
        return self._rows

    def _drop_repeated(self, rank: int, step: int) -> list[MediaItem]:
        """Removes the items logged after the checkpoint of `step`; returns the others."""
        index = self._run.media_index_file(rank)
        before: dict[str, MediaItem] = {}
        after: dict[str, MediaItem] = {}
        for row in jsonlines.read(index):
            item = parse_item(rank, row)
            if item is not None:
                after[item.file] = item
            elif row.get("kind") == "removed":
                before.pop(str(row.get("file")), None)
                after.pop(str(row.get("file")), None)
            elif row.get("kind") == "saved" and row.get("step", step + 1) <= step:
                before |= after
                after = {}
        if after:
            self._run.check_owner()
            with self._run.open_rows(index, content="media") as rows:
                self._remove(after.values(), rows)
        return list(before.values())

    def _remove(self, items: Iterable[MediaItem], rows: JsonLinesWriter) -> None:
        """Removes the files of items, after recording it: a reader may have a row without a file."""
        gone = list(items)
        rows.write_all({"kind": "removed", "time": time.time(), "file": item.file} for item in gone)
        with files.storage(f"remove files in {self._run.media_dir}"):
            for item in gone:
                item.path(self._run).unlink(missing_ok=True)

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning("%s", text)


@final
class KeptFiles:
    """The items of a rank, and the choice of those to remove when they exceed the limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self.total = limit_bytes, 0
        self._items: dict[str, list[MediaItem]] = {}  # by name, the oldest first
        self._sizes: dict[str, int] = {}

    def add(self, item: MediaItem) -> list[MediaItem]:
        """Adds an item; returns those to remove if the total exceeds the limit.

        These are, of the name whose items take the most space, every second item in the older half. So the older items
        of a name are sparser than the newer ones. The newest item of each name stays.
        """
        self.insert(item)
        gone: list[MediaItem] = []
        if self.total > self._limit:
            while self.total > _THINNED_TO * self._limit:
                thinned = self._thin()
                if not thinned:
                    break  # each name has only one item
                gone += thinned
        return gone

    def insert(self, item: MediaItem) -> None:
        """Adds an item, without a check of the limit."""
        self._items.setdefault(item.name, []).append(item)
        self._sizes[item.name] = self._sizes.get(item.name, 0) + item.bytes
        self.total += item.bytes

    def _thin(self) -> list[MediaItem]:
        several = [name for name, items in self._items.items() if len(items) > 1]
        if not several:
            return []
        name = max(several, key=self._sizes.__getitem__)
        items = self._items[name]
        older = max(1, len(items) // 2)
        gone = list(islice(items, 1, older, 2)) or items[:1]
        left = set(map(id, gone))
        self._items[name] = [item for item in items if id(item) not in left]
        size = sum(item.bytes for item in gone)
        self._sizes[name] -= size
        self.total -= size
        return gone


def _checked(name: str) -> str:
    """Returns the directory of a name, below that of its rank; raises `UsageError` if the name is not valid."""
    parts = name.split("/") if isinstance(name, str) else [""]
    path = quote(name, safe="/ ") if isinstance(name, str) else ""
    if not all(part.strip(". ") for part in parts) or re.search(r"[\x00-\x1f]", path):
        raise UsageError(
            f"{name!r:.80} is not a valid name of media: give text, such as 'samples' or 'gan/fake'"
        )
    if max(map(len, path.split("/"))) > _LONGEST_PART or len(path) > 4 * _LONGEST_PART:
        raise UsageError(f"{name!r:.80} is too long for a name of media: give a shorter one")
    return path


def _make_dirs(run: Run, parts: Iterable[str]) -> None:
    path = run.path
    for part in parts:
        path = path / part
        if not path.is_dir():
            files.make_dir(path)
