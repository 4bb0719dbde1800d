"""How samples become a batch, on two threads of their own: the training loop finds it finished.

The first gathers the chunks of a batch and, with a GPU, has their images decoded there; the second makes the batch. It
is the GPU's decoder that must never wait: while it works on a batch, the crops of the one before are made.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from headway.data.counters import Span
from headway.data.feed.device_feed import DeviceFeed, StagedBatch
from headway.data.images.batch import PLACE, SAMPLES, Batch, finish_batch, join_crops
from headway.data.images.transforms import ImageTransform
from headway.data.order.permutation import Ints, UInts
from headway.data.sample_reader import KEY, SampleReader, Transform
from headway.data.sources.chunk import Chunk, SampleLocation
from headway.errors import HeadwayError

if TYPE_CHECKING:
    from headway.data.images.device.device_batch import GpuBatcher


_NUMBERS = int, float
_MIN_INT, _MAX_INT = -(2**63), 2**63 - 1
_MAX_EXACT_FLOAT = 2**53  # up to which float64 has all whole numbers
_SWITCH_S = 0.0001


class RankBatch(NamedTuple):
    """This rank's part of a batch."""

    locations: list[SampleLocation]
    padding: int
    """how many of the last ones are padding"""
    end: int
    """the position after the batch"""


class AssembledBatch(NamedTuple):
    """A finished batch, with the chunks that it was made of; their values are gone."""

    chunks: list[Chunk]
    value: Any
    """None if no sample is left; a `StagedBatch` if it goes to a device"""
    padding: int
    """how many of the last samples are padding"""
    collate: Span | None


class PendingBatch(NamedTuple):
    """A batch that threads are loading."""

    batch: RankBatch
    tasks: list[Future[Any]]
    result: Future[AssembledBatch]

    def cancel(self) -> None:
        for task in (*self.tasks, self.result):
            task.cancel()


@final
class BatchAssembler:
    """Gathers the chunks of a batch and collates them.

    In validation (`validates`), substitutes of bad samples are padding; with `drops`, they are left out.
    `prepare` may change the values of the chunks first: on a GPU, images are decoded there.
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
        """Gets chunks, which threads load or these calls do, and prepares them."""
        last = [result() for result in results[-1:]]  # one wait covers nearly all chunks
        chunks = [result() for result in results[:-1]] + last
        if self._prepare is not None:
            self._prepare(chunks)
        return chunks

    def assemble(
        self, gathered: Future[list[Chunk]], padding: int, feed: DeviceFeed | None = None
    ) -> AssembledBatch:
        """Returns the batch of some chunks, whose last samples are `padding`; with `feed`, on its way to a device."""
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
        by_crops = collate_fn or partial(collate_crops, transform, reader.transform_keys)
        return BatchAssembler(by_crops, validates=validates, drops=drops)
    from headway.data.images.device.device_batch import GpuBatcher  # needs Triton

    batcher = GpuBatcher(transform, gpu, collate_fn or collate, reader.transform_keys)
    prepare = partial(_decode_on_gpu, batcher, reader)
    return BatchAssembler(batcher.collate, prepare, validates=validates, drops=drops)


def _decode_on_gpu(batcher: GpuBatcher, reader: SampleReader, chunks: list[Chunk]) -> None:
    """Brings the images of all samples to the GPU; those that it cannot decode are decoded here, or replaced."""
    places = [(chunk, number) for chunk in chunks for number in range(len(chunk.values))]
    failed = batcher.decode([chunk.values[number] for chunk, number in places])
    for at in reversed(failed):
        reader.decode_on_cpu(*places[at])
    if failed:
        batcher.decode([value for chunk in chunks for value in chunk.values])


def loader_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Returns a pool whose threads compute on one core each, while torch's other threads keep theirs.

    Operations of torch would start a team of threads for each thread of the loader, whose members wait for each other
    by spinning: on two cores, crops took nine times as much CPU time.
    """
    return ThreadPoolExecutor(threads, name, initializer=_use_one_core, initargs=(torch.get_num_threads(),))


def _use_one_core(others: int) -> None:
    torch.get_num_threads()  # a thread takes over the common number when it first asks or computes
    torch.set_num_threads(1)  # of this thread, and the common number
    restorer = threading.Thread(target=torch.set_num_threads, args=(others,))
    restorer.start()
    restorer.join()


@contextmanager
def quick_switches(*, active: bool) -> Iterator[None]:
    """Lets threads wait for the interpreter at most a tenth of a millisecond, where Python's default is five.

    The thread that feeds the GPU's decoder needs the interpreter once a batch, and a decoder that waits five
    milliseconds for it loses a third of its time.
    """
    before = sys.getswitchinterval()
    if active:
        sys.setswitchinterval(min(before, _SWITCH_S))
    try:
        yield
    finally:
        if active:
            sys.setswitchinterval(before)


# --- default batches


def collate(samples: list[Any]) -> Any:
    """Collates dicts to a dict of batches: numbers and arrays of one shape become a tensor, all else a list.

    Samples must have the same parts: one that lacks a part would remove it from the whole batch.
    """
    if not isinstance(samples[0], dict):
        return _collate(samples)
    names = samples[0].keys()
    if any(sample.keys() != names for sample in samples):
        names = dict.fromkeys(name for sample in samples for name in sample).keys()
    for sample in samples if len(names) > min(map(len, samples)) else ():
        if missing := [name for name in names if name not in sample]:
            raise HeadwayError(
                f"sample {sample.get(KEY)!r} has no {missing[0]!r}, as other samples of its batch have: add it, "
                "raise headway.errors.BadSample in a transform to replace such samples, or pass collate_fn"
            )
    return {name: _collate([sample[name] for sample in samples]) for name in names}


def collate_crops(
    transform: ImageTransform, keys_of: Callable[[Ints], UInts], samples: list[dict[str, Any]]
) -> Batch:
    """Collates samples with the crops of a transform."""
    own = {SAMPLES, PLACE, *(group.name for group in transform.groups())}
    rest = collate([{name: part for name, part in each.items() if name not in own} for each in samples])
    rows = np.array([each[SAMPLES] for each in samples])
    batch = Batch({SAMPLES: torch.from_numpy(rows), **join_crops(transform, samples), **rest})
    return finish_batch(batch, transform, keys_of(rows))


def _collate(samples: list[Any]) -> Any:
    first = samples[0]
    if isinstance(first, dict) and all(
        isinstance(each, dict) and each.keys() == first.keys() for each in samples
    ):
        return {name: _collate([sample[name] for sample in samples]) for name in first}
    if isinstance(first, _NUMBERS) and all(isinstance(each, _NUMBERS) for each in samples):
        return _join_numbers(samples)
    if isinstance(first, np.ndarray) and _are_alike(samples) and _has_tensors(first.dtype):
        if first.ndim == 0:
            return torch.from_numpy(np.stack(samples))
        joined = np.concatenate(samples)  # a stack of the same bytes, without a new view of each
        return torch.from_numpy(joined.reshape(len(samples), *first.shape))
    if isinstance(first, torch.Tensor) and _are_alike(samples):
        return torch.stack(samples)
    return samples


def _join_numbers(samples: list[int | float]) -> Any:
    """Returns a tensor of 64 bits each, as torch's own loader does; a list if that would change a number."""
    whole = [each for each in samples if not isinstance(each, float)]
    if len(whole) == len(samples):
        fit, dtype = all(_MIN_INT <= each <= _MAX_INT for each in whole), None
    else:
        fit, dtype = all(abs(each) <= _MAX_EXACT_FLOAT for each in whole), torch.float64
    return torch.tensor(samples, dtype=dtype) if fit else samples


@lru_cache(256)
def _has_tensors(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of a type can become tensors: not those of text, dates or records."""
    try:
        torch.from_numpy(np.empty(0, dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True


def _are_alike(samples: list[Any]) -> bool:
    kind = type(samples[0])
    return len({(each.shape, each.dtype) if type(each) is kind else None for each in samples}) == 1
