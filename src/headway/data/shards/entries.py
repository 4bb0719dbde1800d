"""The samples of a shard: consecutive files with the same key, and where the bytes of each are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, final, overload

from headway.data.shards.tar import BLOCK_BYTES, TarMember
from headway.errors import BadShard


class SamplePart(NamedTuple):
    """One part of a sample: `jpg` of `a.jpg`, with the location of its bytes in the shard."""

    extension: str
    offset: int
    size: int


@dataclass(frozen=True)
class SampleEntry:
    """One sample in the index of a shard."""

    key: str
    parts: tuple[SamplePart, ...]


StoredSample = tuple[str, Sequence[str], Sequence[int], bool]
"""the key of a sample; the extension of each part; offset and size of each part, one after the other; and whether one
read can get all of them. A plain tuple, because one is made for each sample that is read."""

MAX_GAP_BYTES = 4 * BLOCK_BYTES
"""between two parts that are read at once: the rest of a block, a header, a long name"""


def store(key: str, parts: Sequence[SamplePart]) -> StoredSample:
    """Returns where a sample is stored. Checks whether parts are contiguous, because an index may state anything."""
    gaps = [after.offset - part.offset - part.size for part, after in pairwise(parts)]
    spans = [number for part in parts for number in part[1:]]
    return key, [part.extension for part in parts], spans, all(0 <= gap <= MAX_GAP_BYTES for gap in gaps)


def group_samples(files: Iterable[TarMember], where: str) -> EntryTable:
    """Groups files by key, the path up to the first dot of its last part: `dir/a.seg.png` is `seg.png` of `dir/a`."""
    return EntryTable(iterate_samples(files, where))


def iterate_samples(files: Iterable[TarMember], where: str) -> Iterator[SampleEntry]:
    """Yields the samples that `group_samples` finds, one by one."""
    key, parts = "", dict[str, SamplePart]()
    for name, offset, size in files:
        directory, slash, base = name.rpartition("/")
        stem, dot, extension = base.partition(".")
        if not stem or not dot or (stem.startswith("__") and stem.endswith("__")):
            continue  # hidden files, and metadata of other tools
        if directory + slash + stem != key:
            if parts:
                yield SampleEntry(key, tuple(parts.values()))
            key, parts = directory + slash + stem, {}
        extension = extension.lower()
        if extension in parts:
            raise BadShard(f"{where}: {name!r} occurs twice in one sample; give every sample its own key")
        parts[extension] = SamplePart(extension, offset, size)
    if parts:
        yield SampleEntry(key, tuple(parts.values()))


class ShardEntries(Sequence[SampleEntry], ABC):
    """The samples of a shard, by number."""

    @overload
    def __getitem__(self, number: int) -> SampleEntry: ...
    @overload
    def __getitem__(self, number: slice) -> list[SampleEntry]: ...
    def __getitem__(self, number: int | slice) -> SampleEntry | list[SampleEntry]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        return SampleEntry(self.key(number), tuple(self.parts(number)))

    @abstractmethod
    def key(self, number: int) -> str:
        """Returns the name that the files of a sample have in common."""

    @abstractmethod
    def parts(self, number: int) -> list[SamplePart]:
        """Returns the parts of a sample."""

    def locate(self, number: int) -> StoredSample:
        """Returns where a sample is stored."""
        return store(self.key(number), self.parts(number))

    def _check(self, number: int) -> None:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")


@final
class EntryTable(ShardEntries):
    """Entries in a few arrays: as objects, the samples of a hundred open shards would take a gigabyte."""

    def __init__(self, entries: Iterable[SampleEntry]) -> None:
        numbers: dict[str, int] = {}
        self._extension, self._offset, self._size = array("q"), array("q"), array("q")
        self._first, self._key_end, self._keys = array("q", [0]), array("q", [0]), bytearray()
        for entry in entries:
            for extension, offset, size in entry.parts:
                self._extension.append(numbers.setdefault(extension, len(numbers)))
                self._offset.append(offset)
                self._size.append(size)
            self._keys += entry.key.encode("utf-8", "surrogateescape")
            self._first.append(len(self._offset))
            self._key_end.append(len(self._keys))
        self._extensions = list(numbers)

    def __len__(self) -> int:
        return len(self._first) - 1

    def key(self, number: int) -> str:
        self._check(number)
        name = self._keys[self._key_end[number] : self._key_end[number + 1]]
        return name.decode("utf-8", "surrogateescape")

    def parts(self, number: int) -> list[SamplePart]:
        self._check(number)
        names, extensions, offsets, sizes = self._extensions, self._extension, self._offset, self._size
        rows = range(self._first[number], self._first[number + 1])
        return [SamplePart(names[extensions[row]], offsets[row], sizes[row]) for row in rows]

    def cut(self, number: int, shard: memoryview) -> dict[str, memoryview]:
        """Slices the parts of a sample out of a shard's bytes. Optimized: copying a photo takes ten microseconds."""
        parts: dict[str, memoryview] = {}
        first = self._first
        if not 0 <= number < len(first) - 1:
            self._check(number)
        for row in range(first[number], first[number + 1]):
            start = self._offset[row]
            parts[self._extensions[self._extension[row]]] = shard[start : start + self._size[row]]
        return parts
