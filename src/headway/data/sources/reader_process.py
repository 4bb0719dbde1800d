"""The program of a reader process: it reads samples for a rank, into memory that both share.

Threads of one interpreter read 10,000 photos a second, however many they are; a GPU decodes three times as many. A
reader process has an interpreter of its own. It reads what is as usual: a JPEG for the GPU, with numbers or text beside
it. For all else it returns nothing, and the rank reads that sample itself: what becomes of a sample does not depend on
who read it.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import pickle
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from headway.data.shards.decode import SampleDecoder, jpeg_name, plain_jpeg_size
from headway.data.shards.tar import ShardLimits
from headway.data.sources.open_shards import OpenShards, Source
from headway.errors import HeadwayError
from headway.system import retries

SLOT_BYTES = 2**23
"""of the shared memory that one answer fills"""
EncodedRow = tuple[str, dict[str, Any], int, int, int, int, int]
"""a sample: its key; its parts but the JPEG; where that begins and ends in the slot; its height and width; and the
bytes of all parts. A plain tuple, because one is made for each sample."""


class ReaderSettings(NamedTuple):
    """What a reader process must know of its loader."""

    sources: Sequence[Source]
    max_open: int
    """shards"""
    limits: ShardLimits
    reserved: frozenset[str]
    """names that no part of a sample may have"""
    decoders: frozenset[str]
    """extensions that the rank decodes by functions of its own"""

    def to_json(self) -> str:
        sources = [(each.name, [*map(str, each.paths)], [*map(int, each.counts)]) for each in self.sources]
        names = sorted(self.reserved), sorted(self.decoders)
        return json.dumps([sources, self.max_open, asdict(self.limits), *names])

    @classmethod
    def from_json(cls, text: str) -> ReaderSettings:
        sources, max_open, limits, reserved, decoders = json.loads(text)
        found = [Source(name, [*map(Path, paths)], counts) for name, paths, counts in sources]
        return cls(found, max_open, ShardLimits(**limits), frozenset(reserved), frozenset(decoders))


class _SlotFull(Exception):
    """There is no room for another sample."""


@final
class SlotReader:
    """Reads samples into slots of a shared memory."""

    def __init__(self, settings: ReaderSettings, memory: memoryview) -> None:
        self._shards = OpenShards(settings.sources, settings.max_open, settings.limits)
        self._limits, self._decoded_there = settings.limits, settings.decoders
        self._decoder = SampleDecoder({}, settings.limits, settings.reserved)
        self._memory, self._slot, self._used = memory, memory[:0], 0

    def read(self, slot: int, locations: Sequence[tuple[int, int, int, int]]) -> list[EncodedRow | None]:
        """Reads as many of some samples as the slot has room for, given their dataset, epoch, shard and number."""
        rows = list[EncodedRow | None]()
        self._slot, self._used = self._memory[slot * SLOT_BYTES :][:SLOT_BYTES], 0
        for dataset, _, shard, number in locations:
            try:
                rows.append(self._read(dataset, shard, number))
            except _SlotFull:
                if rows:
                    break
                rows.append(None)
            except (HeadwayError, OSError):
                rows.append(None)  # the rank finds out why
        return rows

    def _read(self, dataset: int, shard: int, number: int) -> EncodedRow | None:
        key, parts = self._shards.get(dataset, shard).read(number, self._allocate)
        name = jpeg_name(parts, self._decoded_there)
        if name is None or not self._decoded_there.isdisjoint(parts):
            return None
        image = parts[name]
        size = plain_jpeg_size(image, self._limits)
        values, late = self._decoder.begin({part: parts[part] for part in parts if part != name})
        start = _address(image) - _address(self._slot)
        inside = 0 <= start <= len(self._slot) - len(image)
        if size is None or late or not inside or any(type(value) is np.ndarray for value in values.values()):
            return None
        return key, values, start, start + len(image), *size, sum([len(data) for data in parts.values()])

    def _allocate(self, count: int) -> memoryview:
        start = self._used
        if start + count > len(self._slot):
            raise _SlotFull
        self._used += count
        return self._slot[start : self._used]


def _address(data: memoryview) -> int:
    found: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return found


def send_rows(rank: Connection, rows: Sequence[EncodedRow | None]) -> None:
    """Sends what was read; leaves those samples to the rank whose JSON is nested more deeply than pickle can follow."""
    try:
        rank.send(rows)
    except RecursionError:  # before anything is sent
        rank.send([row if _is_flat(row) else None for row in rows])


def _is_flat(row: EncodedRow | None) -> bool:
    try:
        pickle.dumps(row)
    except RecursionError:
        return False
    return True


def main() -> None:
    """Answers a rank until that ends. The arguments are the descriptors of the connection, settings and memory.

    Signals that are meant for the rank are blocked since the start.
    """
    connection, settings, memory = map(int, sys.argv[1:])
    retries.WAITS_S = ()  # the rank tries again, and counts that
    with os.fdopen(settings) as file:
        given = ReaderSettings.from_json(file.read())
    reader = SlotReader(given, memoryview(mmap.mmap(memory, 0)))
    gc.freeze()
    with suppress(EOFError, ConnectionError), Connection(connection) as rank:  # the rank has ended
        rank.send(None)
        while True:
            send_rows(rank, reader.read(*rank.recv()))


if __name__ == "__main__":
    main()
