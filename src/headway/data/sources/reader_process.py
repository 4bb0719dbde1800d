"""The program of a reader process: it reads samples for a rank, into memory that both share.

The threads of one interpreter, however many, read 10,000 photos a second, and a GPU decodes three times as many; they
read and decode 30,000 thumbnails a second, and two cores decode 80,000. So a reader process has its own interpreter. It
reads ordinary samples: a JPEG with numbers or text beside it, which it decodes unless a GPU does. It declines all
others, and the rank reads those itself: the result does not depend on which process read a sample.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from headway.data.shards.decode import (
    RGB_BYTES,
    HeaderCache,
    SampleDecoder,
    decode_jpeg_into,
    is_jpeg,
    jpeg_name,
    plain_jpeg_size,
)
from headway.data.shards.tar import ShardLimits
from headway.data.sources.open_shards import OpenShards, Source
from headway.errors import HeadwayError
from headway.system import retries

SLOT_BYTES = 2**23
"""shared memory for one answer"""
_MAX_READ_BYTES = 2**22  # read before these samples are decoded
# after which no further sample of a request is read: shards may have to be opened for them
_ANSWER_S = 5.0
_ALIGNMENT_BYTES = 64
_MIN_GARBAGE = 100_000  # objects; looking for cycles among the indexes of shards took a sixth of the time
SampleRow = tuple[str, dict[str, Any], str, int, int, int, int, int]
"""a sample: its key; its parts; which of them is the image, and where that begins and ends in the slot; its height and
width; and the bytes of all parts in the shard. A plain tuple, because one is made for each sample."""


class SlotAnswer(NamedTuple):
    """What a reader process returns about the samples in a slot."""

    rows: list[SampleRow | None]
    """for the first of the requested samples; None for each that the process declined"""
    read_s: float
    """time for reading, without decoding"""
    busy_s: float
    """CPU time"""


class ReaderSettings(NamedTuple):
    """The settings of a loader that its reader processes need."""

    sources: Sequence[Source]
    max_open: int
    """shards"""
    limits: ShardLimits
    reserved: frozenset[str]
    """names that no part of a sample may have"""
    decoders: frozenset[str]
    """extensions for which the user gave decoders, which run in the rank"""
    decodes: bool
    """whether images are decoded; otherwise they stay encoded, for a GPU"""

    def to_json(self) -> str:
        sources = [(each.name, [*map(str, each.paths)], [*map(int, each.counts)]) for each in self.sources]
        names = sorted(self.reserved), sorted(self.decoders)
        return json.dumps([sources, self.max_open, asdict(self.limits), *names, self.decodes])

    @classmethod
    def from_json(cls, text: str) -> ReaderSettings:
        sources, max_open, limits, reserved, decoders, decodes = json.loads(text)
        found = [Source(name, [*map(Path, paths)], counts) for name, paths, counts in sources]
        return cls(found, max_open, ShardLimits(**limits), frozenset(reserved), frozenset(decoders), decodes)


class _SlotFull(Exception):
    """There is no room for another sample."""


@final
class SlotReader:
    """Reads samples into slots of a shared memory."""

    def __init__(self, settings: ReaderSettings, memory: memoryview) -> None:
        self._shards = OpenShards(settings.sources, settings.max_open, settings.limits)
        self._limits, self._decoded_there = settings.limits, settings.decoders
        self._decoder, self._sizes = SampleDecoder({}, settings.limits, settings.reserved), HeaderCache()
        self._rows = self._decoded_rows if settings.decodes else self._encoded_rows
        self._memory, self._slot, self._used, self._deadline = memory, memory[:0], 0, 0.0

    def read(self, slot: int, locations: Sequence[tuple[int, int, int, int]]) -> SlotAnswer:
        """Reads as many of the samples as the slot has room for, given their dataset, epoch, shard and number."""
        self._slot, self._used = self._memory[slot * SLOT_BYTES :][:SLOT_BYTES], 0
        began, busy = time.perf_counter(), time.process_time()
        self._deadline = began + _ANSWER_S
        rows, read = self._rows(locations)
        return SlotAnswer(rows, read - began, time.process_time() - busy)

    def _encoded_rows(
        self, locations: Sequence[tuple[int, int, int, int]]
    ) -> tuple[list[SampleRow | None], float]:
        """Returns samples with their images still encoded, and when reading ended."""
        rows = list[SampleRow | None]()
        for dataset, _, shard, number in locations:
            if rows and time.perf_counter() > self._deadline:
                break
            try:
                rows.append(self._read_encoded(dataset, shard, number))
            except _SlotFull:
                if rows:
                    break
                rows.append(None)
            except (HeadwayError, OSError):
                rows.append(None)  # the rank reads it, and reports why it fails
        return rows, time.perf_counter()

    def _read_encoded(self, dataset: int, shard: int, number: int) -> SampleRow | None:
        key, parts = self._shards.get(dataset, shard).read(number, self._allocate)
        name = jpeg_name(parts, self._decoded_there)
        if name is None or not self._decoded_there.isdisjoint(parts):
            return None
        image = parts[name]
        size = plain_jpeg_size(image, self._limits)
        values, late = self._decoder.begin({part: parts[part] for part in parts if part != name})
        start = _address(image) - _address(self._slot)
        inside = 0 <= start <= len(self._slot) - len(image)
        if size is None or late or not inside or _has_arrays(values):
            return None
        return (
            key,
            values,
            name,
            start,
            start + len(image),
            *size,
            sum([len(data) for data in parts.values()]),
        )

    def _decoded_rows(
        self, locations: Sequence[tuple[int, int, int, int]]
    ) -> tuple[list[SampleRow | None], float]:
        """Returns samples with decoded images, and when reading ended.

        All are read first, because decoding an image evicts Python from the processor's cache.
        """
        begun, count = list[tuple[SampleRow, memoryview] | None](), 0
        for dataset, _, shard, number in locations:
            if begun and (count > _MAX_READ_BYTES or time.perf_counter() > self._deadline):
                break
            try:
                sample, read = self._begin(dataset, shard, number)
            except _SlotFull:
                if begun:
                    break
                sample, read = None, 0
            except (HeadwayError, OSError):
                sample, read = None, 0  # the rank reads it, and reports why it fails
            begun.append(sample)
            count += read
        ended = time.perf_counter()
        return [None if each is None else _decode(*each, self._slot) for each in begun], ended

    def _begin(
        self, dataset: int, shard: int, number: int
    ) -> tuple[tuple[SampleRow, memoryview] | None, int]:
        """Returns a sample with the JPEG that `_decode` decodes, or None to decline it; and its size in bytes."""
        key, parts = self._shards.get(dataset, shard).read(number)
        count = sum([len(data) for data in parts.values()])
        if not self._decoded_there.isdisjoint(parts):
            return None, count
        values, late = self._decoder.begin(parts)
        if len(late) != 1 or _has_arrays(values):
            return None, count
        name, data, _ = late[0]
        size = self._sizes.size(data) if is_jpeg(name) else None
        if size is None:
            return None, count
        height, width = size
        self._used = -(-self._used // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        start = self._used
        self._allocate(RGB_BYTES * height * width)
        return ((key, values, name, start, self._used, height, width, count), data), count

    def _allocate(self, count: int) -> memoryview:
        start = self._used
        if start + count > len(self._slot):
            raise _SlotFull
        self._used += count
        return self._slot[start : self._used]


def _decode(row: SampleRow, data: memoryview, slot: memoryview) -> SampleRow | None:
    _, _, _, start, end, height, width, _ = row
    return row if decode_jpeg_into(slot[start:end], data, height, width) else None


def _has_arrays(values: Mapping[str, Any]) -> bool:
    return np.ndarray in map(type, values.values())


def _address(data: memoryview) -> int:
    found: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return found


def send_answer(rank: Connection, answer: SlotAnswer) -> None:
    """Sends an answer; declines samples whose JSON is nested too deeply for pickle."""
    try:
        rank.send(tuple(answer))
    except RecursionError:  # raised before anything is sent
        rows = [row if _is_flat(row) else None for row in answer.rows]
        rank.send((rows, *answer[1:]))


def _is_flat(row: SampleRow | None) -> bool:
    try:
        pickle.dumps(row)
    except RecursionError:
        return False
    return True


def main() -> None:
    """Answers requests until the rank ends. The arguments are descriptors of the connection, settings and memory.

    Signals that are meant for the rank are blocked from the start.
    """
    connection, settings, memory = map(int, sys.argv[1:])
    retries.WAITS_S = ()  # the rank retries, and counts that
    with os.fdopen(settings) as file:
        given = ReaderSettings.from_json(file.read())
    reader = SlotReader(given, memoryview(mmap.mmap(memory, 0)))
    gc.freeze()
    gc.set_threshold(_MIN_GARBAGE)
    with suppress(EOFError, ConnectionError), Connection(connection) as rank:  # the rank has ended
        rank.send(None)
        while True:
            send_answer(rank, reader.read(*rank.recv()))


if __name__ == "__main__":
    main()
