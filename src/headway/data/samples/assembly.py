"""`BatchAssembler`: turns chunks of samples into batches, on two threads, ahead of the training loop.

The first thread gathers the chunks of a batch and, with a GPU, starts to decode their images there; the second makes
the batch. So the GPU's decoder need not wait: while it decodes a batch, the crops of the previous one are made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from headway.data.counters import Span
from headway.data.feed.device_feed import DeviceFeed, StagedBatch
from headway.data.images.transforms import ImageTransform
from headway.data.samples.collate import collate, collate_crops
from headway.data.samples.sample_reader import SampleReader, Transform
from headway.data.sources.chunk import Chunk

if TYPE_CHECKING:
    from headway.data.images.device.device_batch import GpuBatcher


class AssembledBatch(NamedTuple):
    """A finished batch, with the chunks that it was made of, whose values are cleared."""

    chunks: list[Chunk]
    value: Any
    """the batch; None if no sample is left, a `StagedBatch` if it is copied to a device"""
    padding: int
    """how many of the last samples are padding"""
    collate: Span | None


@final
class BatchAssembler:
    """Gathers the chunks of a batch and collates them.

    In validation (`validates`), substitutes of bad samples count as padding; with `drops`, they are left out.
    `prepare` may change the values of the chunks first: with a GPU, it decodes images there.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        prepare: Callable[[list[Chunk]], None] | None = None,
        *,
        validates: bool,
        drops: bool,
    ) -> None:
        self._collate, self._prepare, self._validates, self._drops = collate, prepare, validates, drops

    def gather(self, results: Sequence[Callable[[], Chunk]]) -> list[Chunk]:
        """Returns the prepared chunks of a batch; each call in `results` waits for a chunk, or loads it here."""
        last = [result() for result in results[-1:]]  # one wait covers nearly all chunks
        chunks = [result() for result in results[:-1]] + last
        if self._prepare is not None:
            self._prepare(chunks)
        return chunks

    def assemble(
        self, gathered: Future[list[Chunk]], padding: int, feed: DeviceFeed | None = None
    ) -> AssembledBatch:
        """Returns the batch of chunks whose last `padding` samples are padding; with `feed`, copies it to a device."""
        chunks = gathered.result()
        began = time.perf_counter()
        values, padding = self._values(chunks, padding)
        for chunk in chunks:
            chunk.count = len(chunk.values)
            chunk.values.clear()
        if not values:
            return AssembledBatch(chunks, None, padding, None)
        value = self._collate(values)
        if feed is not None and not isinstance(value, StagedBatch):
            value = feed.stage(value)
        return AssembledBatch(
            chunks, value, padding, Span("collate", threading.get_native_id(), began, time.perf_counter())
        )

    def _values(self, chunks: list[Chunk], padding: int) -> tuple[list[Any], int]:
        """Returns the samples of a batch, and how many of the last ones are padding."""
        values = [value for chunk in chunks for value in chunk.values]
        if not self._validates or not any(chunk.substitutes for chunk in chunks):
            return values, padding
        starts = np.cumsum([0, *(len(chunk.values) for chunk in chunks)]).tolist()
        replaced = {
            at + number for at, chunk in zip(starts, chunks, strict=False) for number in chunk.substitutes
        }
        real = range(len(values) - padding)
        good = [values[number] for number in real if number not in replaced]
        if self._drops and good:
            return good, padding
        # all ranks take equally many steps, so a batch is never empty
        rest = [values[number] for number in real if number in replaced] + values[len(real) :]
        return good + rest, len(rest)


def make_assembler(
    reader: SampleReader,
    transform: Transform | ImageTransform | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    gpu: torch.device | None,
    *,
    validates: bool,
    drops: bool,
) -> BatchAssembler:
    """Returns the assembler for a loader's settings; with `gpu`, one that decodes and crops images there."""
    if not isinstance(transform, ImageTransform):
        return BatchAssembler(collate_fn or collate, validates=validates, drops=drops)
    if gpu is None:
        by_crops = partial(collate_crops, transform, collate_fn or collate, reader.keys.of_transforms)
        return BatchAssembler(by_crops, validates=validates, drops=drops)
    from headway.data.images.device.device_batch import GpuBatcher  # needs Triton

    batcher = GpuBatcher(transform, gpu, collate_fn or collate, reader.keys.of_transforms)
    prepare = partial(_decode_on_gpu, batcher, reader)
    return BatchAssembler(batcher.collate, prepare, validates=validates, drops=drops)


def _decode_on_gpu(batcher: GpuBatcher, reader: SampleReader, chunks: list[Chunk]) -> None:
    """Brings the images of all samples to the GPU; those that it cannot decode are decoded on the CPU, or replaced."""
    places = [(chunk, number) for chunk in chunks for number in range(len(chunk.values))]
    failed = batcher.decode([chunk.values[number] for chunk, number in places])
    for at in reversed(failed):
        reader.decode_on_cpu(*places[at])
    if failed:
        batcher.decode([value for chunk in chunks for value in chunk.values])
