"""Indexes of shards that others write: DALI's text (`shard.idx`), which `pack` writes too, and energon's binary one.

    v1.2 2                                       DALI: how many samples
    jpg 512 70412 a.jpg cls 71680 1 a.cls        one line each: extension, offset, size, name (v1.1: no name)
    ...

energon's `shard.tar.idx` has where the header of each sample is and where the last one ends, as 64-bit numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from headway.data.entries import Component, Entries, Entry
from headway.data.tar import BLOCK, Limits, beyond
from headway.errors import BadShard

_LONGEST_LINE = 2**20
_WIDTH = {"v1.1": 3, "v1.2": 4}


def stated_count(path: Path, limits: Limits) -> int | None:
    """How many samples the index of a shard says that there are; None without an index."""
    dali, energon = _dali_file(path), _energon_file(path)
    if dali is not None:
        with dali.open("rb") as file:
            words = file.readline(64).split()
        if len(words) == 2 and words[1].isdigit():
            return int(words[1])
    return len(_energon_offsets(energon, limits)) - 1 if energon is not None else None


def read_dali(path: Path, size: int, limits: Limits) -> Entries | None:
    """The entries of DALI's index beside a shard of `size` bytes; None where there is none."""
    index = _dali_file(path)
    if index is None:
        return None
    with index.open(encoding="utf-8", errors="surrogateescape") as file:
        version, _, count = file.readline(64).strip().partition(" ")
        width = _WIDTH.get(version)
        if width is None:
            return None  # of another day; the shard itself knows
        entries = Entries(_parsed(iter(lambda: file.readline(_LONGEST_LINE), ""), width, size, path, limits))
    if not count.isdigit() or int(count) != len(entries):
        raise stale(path)
    return entries


def stale(path: Path) -> BadShard:
    """An index that says something else than its shard."""
    return BadShard(
        f"{_dali_file(path) or path.with_suffix('.idx')} does not belong to {path}; remove it, or make it again with "
        f"hw.data.index({str(path)!r}, overwrite=True)"
    )


def _parsed(lines: Iterator[str], width: int, size: int, path: Path, limits: Limits) -> Iterator[Entry]:
    for number, line in enumerate(lines):
        entry = _entry(line.split(), width, size)
        if entry is None:
            raise stale(path)
        if number >= limits.members or any(part.size > limits.member_bytes for part in entry.parts):
            raise beyond(f"{path}: sample {number}, {entry.key!r},", limits)
        yield entry


def _entry(words: list[str], width: int, size: int) -> Entry | None:
    parts = []
    for at in range(0, len(words), width):
        group = words[at : at + width]
        if len(group) < width or not (group[1].isdigit() and group[2].isdigit()):
            return None
        part = Component(group[0].lower(), int(group[1]), int(group[2]))
        if part.offset % BLOCK or part.offset < BLOCK or part.offset + part.size > size:
            return None
        parts.append(part)
    if not parts:
        return None
    name = words[3] if width == 4 else ""
    return Entry(name.removesuffix("." + words[0]), tuple(parts))


def _dali_file(path: Path) -> Path | None:
    """The text index of a shard, by what is in it; `wds2idx` lets its users choose the name."""
    for index in (path.with_suffix(".idx"), path.with_name(path.name + ".idx")):
        if index.is_file():
            with index.open("rb") as file:
                if file.read(3) == b"v1.":
                    return index
    return None


def _energon_file(path: Path) -> Path | None:
    index = path.with_name(path.name + ".idx")
    return index if index.is_file() and index != _dali_file(path) else None


def _energon_offsets(index: Path, limits: Limits) -> list[int]:
    """Where the header of each sample is, and where the last sample ends."""
    size = index.stat().st_size
    raw = index.read_bytes() if size <= 8 * (limits.members + 1) else b""
    offsets = list(struct.unpack(f"={len(raw) // 8}Q", raw[: len(raw) // 8 * 8]))
    if len(raw) % 8 or not offsets or any(low >= high for low, high in pairwise(offsets)):
        raise BadShard(f"{index} is not an index of energon's; remove it")
    return offsets


def compare_with_energon(path: Path, entries: Sequence[Entry], limits: Limits) -> None:
    """Refuses an index of energon's with another number of samples than the shard has."""
    index = _energon_file(path)
    if index is not None and len(_energon_offsets(index, limits)) - 1 != len(entries):
        raise BadShard(f"{index} does not belong to {path}, which has {len(entries)} samples; remove it")


def index_text(entries: Sequence[Entry]) -> str | None:
    """DALI's text index of a shard; None where a name has a space, which that format cannot say."""
    lines = [
        " ".join(
            f"{part.extension} {part.offset} {part.size} {entry.key}.{part.extension}" for part in entry.parts
        )
        for entry in entries
    ]
    if any(len(line.split()) != 4 * len(entry.parts) for line, entry in zip(lines, entries, strict=True)):
        return None
    return "\n".join([f"v1.2 {len(entries)}", *lines, ""])
