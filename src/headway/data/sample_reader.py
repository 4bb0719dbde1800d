"""What the threads of a `ShardLoader` do: read, decode and transform samples in chunks, and replace bad ones."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch

from headway.data.images.batch import (
    IMAGE,
    PLACE,
    SAMPLES,
    CropMemory,
    CropPlace,
    EncodedImage,
    own_parts,
)
from headway.data.images.cpu import (
    DrawnImage,
    cut_crops,
    draw_groups,
    draw_image,
    largest_reduction,
)
from headway.data.images.device.pinned import HostPinning, PinnedMemory
from headway.data.images.draws import CropTable
from headway.data.images.exif import orientation, turn
from headway.data.images.memory_pool import MemoryPool
from headway.data.images.transforms import ImageTransform
from headway.data.label_watch import LabelWatch
from headway.data.order.mix_order import MixOrder
from headway.data.order.permutation import Ints, UInts, as_uints, derive_key, derive_keys
from headway.data.quarantine import QuarantinedSample
from headway.data.shards.decode import (
    IMAGES,
    RGB_BYTES,
    Decoder,
    LatePart,
    SampleDecoder,
    decode,
    decode_reduced,
    decode_rgb,
    image_name,
    jpeg_name,
    plain_jpeg_size,
)
from headway.data.shards.label_order import LABEL
from headway.data.shards.tar import ShardLimits
from headway.data.sources.chunk import Chunk, SampleLocation, memory_bytes
from headway.data.sources.open_shards import OpenShards
from headway.data.sources.reader_pool import MAX_DECODERS, ReadAnswer, ReaderPool
from headway.data.sources.reader_process import ReaderSettings, SampleRow, SlotAnswer
from headway.errors import BadSample, BadShard, HeadwayError, UsageError
from headway.system.retries import retries_in_this_thread

Transform = Callable[[dict[str, Any], np.random.Generator], Any]


def checked_transform(transform: Transform | ImageTransform | None) -> Transform | ImageTransform | None:
    """Returns a transform; refuses one that cannot be called with a sample and its generator, as those of others."""
    if transform is not None and not isinstance(transform, ImageTransform):
        try:
            inspect.signature(transform).bind({}, None)
        except TypeError as error:
            name = getattr(transform, "__name__", type(transform).__name__)
            raise UsageError(
                f"transform {name} cannot be called with a sample and its generator ({error}): write "
                f"transform=lambda sample, rng: {name if name.isidentifier() else 'augment'}(sample)"
            ) from error
        except ValueError:
            pass  # a builtin without a signature
    return transform


KEY = "__key__"
"""the part of a sample that has its name"""
_MAX_SUBSTITUTES = 8
_MIN_ASKED = 1000  # samples, before processes that decline most of them are asked no more
_READ_BYTES = 2**20  # that a thread reads before it decodes
_MAX_SIDE_PIXELS = 2**31 - 1  # the tables of crops have 32 bits
_TRANSFORM, _SUBSTITUTE = 1, 2  # the purpose of a key: part of what is hashed


@dataclass(slots=True)
class _ReadSample:
    """A sample that was read and decoded, except for its images."""

    location: SampleLocation
    value: Any
    """its parts by extension, until it is transformed"""
    late: list[LatePart]
    bad: list[QuarantinedSample]
    place: CropPlace | None = None
    """where its crops go; None for memory of their own"""
    drawn: tuple[tuple[int, int], list[CropTable]] | None = None
    """its crops for an image of this height and width, if they are drawn already"""


@final
class SampleReader:
    """Reads, decodes and transforms samples; leaves out bad ones, or with `substitute` replaces them."""

    def __init__(
        self,
        shards: OpenShards,
        order: MixOrder,
        *,
        seed: int,
        substitute: bool,
        watch: LabelWatch,
        transform: Transform | ImageTransform | None,
        decoders: dict[str, Decoder],
        limits: ShardLimits,
        gpu: torch.device | None = None,
        joins: bool = False,
    ) -> None:
        """With `joins`, `collate_crops` makes the batches, and a batch may have its crops in one memory."""
        on_gpu = gpu is not None
        self._gpu_bytes = transform.crop_bytes() if on_gpu and isinstance(transform, ImageTransform) else 0
        self._allocate = PinnedMemory().allocate if on_gpu else None
        self._shards, self._orders, self._keys, self._seed = shards, order.orders, order.keys, seed
        self._replaces, self._watch = substitute, watch
        if isinstance(transform, ImageTransform):  # crops are of colors, also where a PNG has a palette
            decoders = {"png": partial(decode_rgb, limits=limits), **decoders}
        self._transform, self._decoders, self._limits = transform, decoders, limits
        self._exif = isinstance(transform, ImageTransform) and transform.exif
        own = own_parts(transform) if isinstance(transform, ImageTransform) else set[str]()
        self._decoder = SampleDecoder(decoders, limits, {KEY, *own})
        self._pool: ReaderPool | None = None
        self._asked = 0, 0  # samples that processes were asked for, and those that they declined
        if not shards.cached and on_gpu == isinstance(transform, ImageTransform):
            names = frozenset({KEY, *own}), frozenset(decoders)
            settings = ReaderSettings(shards.sources, shards.max_open, limits, *names, decodes=not on_gpu)
            if gpu is not None:
                self._pool = ReaderPool(settings, HostPinning(gpu))
            else:
                self._pool = ReaderPool(settings, max_processes=MAX_DECODERS, waits=False)
        self._begin = self._begin_for_gpu if self._gpu_bytes else self._decoder.begin
        crops = transform if isinstance(transform, ImageTransform) and not on_gpu else None
        self._reduces = crops is not None and crops.scaled_decode
        self._draws = crops if not self._reduces else None
        self._joins = crops if joins else None
        self.crop_pool = MemoryPool()

    def crop_memory(self, samples: int) -> CropMemory | None:
        """Returns memory for the crops of so many samples; None if those of each have memory of their own."""
        return CropMemory(self._joins, samples, self.crop_pool) if self._joins is not None else None

    @property
    def has_processes(self) -> bool:
        """Whether processes should read for the threads: not where crops are made here, nor from a node's cache, nor
        shards without an index, which each of them would walk, nor samples most of which they leave to this one."""
        asked, declined = self._asked
        declines_most = asked >= _MIN_ASKED and declined > asked // 2
        return self._pool is not None and self._pool.usable and self._shards.indexed and not declines_most

    def read(
        self,
        locations: Sequence[SampleLocation],
        first: int = 0,
        memory: CropMemory | None = None,
        *,
        by_process: bool = False,
    ) -> Chunk:
        """Loads samples, a few at a time: all are read, then all images are decoded. Decoding an image evicts Python
        from the processor's cache, and whatever runs between two of them takes several times as long.

        Crops are written into `memory`, in which the first of these samples has the number `first`. With `by_process`,
        a process reads them, if one can.
        """
        chunk, retries = Chunk(threading.get_native_id()), retries_in_this_thread()
        busy = time.thread_time()
        pool = self._pool if by_process else None
        done = self._read_by_process(pool, locations, chunk) if pool is not None else 0
        if done < len(locations):
            self._read_each(locations[done:], chunk, first + done, memory)
        if self._gpu_bytes:
            chunk.size += len(chunk.values) * self._gpu_bytes + chunk.read
        chunk.read_retries = retries_in_this_thread() - retries
        chunk.busy_s += time.thread_time() - busy
        return chunk

    def _read_each(
        self, locations: Sequence[SampleLocation], chunk: Chunk, first: int, memory: CropMemory | None
    ) -> None:
        samples, before, began = list[_ReadSample](), 0, time.perf_counter()
        for number, location in enumerate(locations, first):
            sample = self._read_sample(location, [], chunk)
            if sample is not None:
                if memory is not None:
                    sample.place = CropPlace(memory, number)
                samples.append(sample)
            if chunk.read - before > _READ_BYTES:
                self._finish(chunk, samples, began)
                samples, before, began = [], chunk.read, time.perf_counter()
        if samples:
            self._finish(chunk, samples, began)

    def _read_by_process(self, pool: ReaderPool, locations: Sequence[SampleLocation], chunk: Chunk) -> int:
        """Has samples read by another process, if one is ready, and returns how many were; reads those itself that
        the process left to it."""
        done = 0
        while done < len(locations):
            began = time.perf_counter()
            answer = pool.read(locations[done:])
            if answer is None:
                break
            self._note_rows(chunk, locations[done:], answer.told)
            add = self._add_encoded_rows if self._gpu_bytes else self._add_decoded_rows
            add(chunk, locations[done:], answer, began)
            done += len(answer.told.rows)
        return done

    def _note_rows(self, chunk: Chunk, locations: Sequence[SampleLocation], told: SlotAnswer) -> None:
        """Notes what reading samples took, and their labels."""
        chunk.busy_s += told.busy_s
        chunk.read += sum([row[-1] for row in told.rows if row is not None])
        if self._watch.watching:
            chunk.labels += [
                (dataset, shard, sample, row[1][LABEL])
                for (dataset, _, shard, sample), row in zip(locations, told.rows, strict=False)
                if row is not None and type(row[1].get(LABEL)) is int
            ]

    def _add_decoded_rows(
        self, chunk: Chunk, locations: Sequence[SampleLocation], answer: ReadAnswer, began: float
    ) -> None:
        rows, read_s, _ = answer.told
        read, memory, samples = began + read_s, np.frombuffer(answer.memory, np.uint8), list[_ReadSample]()
        for location, row in zip(locations, rows, strict=False):
            if row is None:
                sample = self._read_sample(location, [], chunk)
                if sample is not None:
                    samples.append(sample)
                continue
            key, value, name, start, end, height, width, _ = row
            # a copy: users may keep it, and forks of this process see memory that is shared change
            value[name] = memory[start:end].reshape(height, width, RGB_BYTES).copy()
            value[KEY] = key
            samples.append(_ReadSample(location, value, [], []))
        asked, declined = self._asked
        self._asked = asked + len(rows), declined + rows.count(None)
        self._finish(chunk, samples, began, read)

    def _add_encoded_rows(
        self, chunk: Chunk, locations: Sequence[SampleLocation], answer: ReadAnswer, began: float
    ) -> None:
        read = time.perf_counter()
        for location, row in zip(locations, answer.told.rows, strict=False):
            if row is not None:
                self._add_encoded(chunk, location, row, answer.memory)
                continue
            end = time.perf_counter()
            chunk.times.append((began, read, end, end))
            self._read_each([location], chunk, 0, None)  # which adds its own times
            began = read = time.perf_counter()
        end = time.perf_counter()
        chunk.times.append((began, read, end, end))

    def _add_encoded(
        self, chunk: Chunk, location: SampleLocation, row: SampleRow, memory: memoryview
    ) -> None:
        """Adds a sample to a chunk as `_finish` does. Optimized, because it runs for each sample."""
        key, value, _, start, end, height, width, _ = row
        data = memory[start:end]
        value[KEY], value[SAMPLES] = key, location
        value[IMAGE] = EncodedImage(data, height, width, orientation(data) if self._exif else 1)
        chunk.values.append(value)

    def _read_sample(
        self, location: SampleLocation, bad: list[QuarantinedSample], chunk: Chunk
    ) -> _ReadSample | None:
        """Reads a sample or, if it is bad, its substitute; None if it is left out."""
        while True:
            dataset, _, shard, sample = location
            source = None
            try:
                source = self._shards.get(dataset, shard)
                name, parts = source.read(sample, self._allocate)
                value, late = self._begin(parts)
            except (BadSample, BadShard) as error:
                name = f"sample {sample}" if source is None else source.entries.key(sample)
                substitute = self._substitute(location, name, error, bad)
                if substitute is None:
                    chunk.bad += bad
                    return None
                location = substitute
                continue
            chunk.read += sum([len(data) for data in parts.values()])
            if self._watch.watching and type(value.get(LABEL)) is int:
                chunk.labels.append((dataset, shard, sample, value[LABEL]))
            value[KEY] = name
            return _ReadSample(location, value, late, bad)

    def _begin_for_gpu(self, parts: Mapping[str, memoryview]) -> tuple[dict[str, Any], list[LatePart]]:
        """Begins to decode a sample, except for an image that the GPU is to decode."""
        name = jpeg_name(parts, self._decoders)
        image = None if name is None else self._encoded(parts[name])
        if name is None or image is None:
            return self._decoder.begin(parts)
        values, late = self._decoder.begin({part: data for part, data in parts.items() if part != name})
        return {name: image, **values}, late

    def _encoded(self, data: memoryview) -> EncodedImage | None:
        """Returns a JPEG that the GPU is to decode; None for one that the CPU decodes."""
        size = plain_jpeg_size(data, self._limits)
        if size is None:
            return None
        return EncodedImage(data, *size, orientation(data) if self._exif else 1)

    def _finish(
        self, chunk: Chunk, samples: list[_ReadSample], began: float, read: float | None = None
    ) -> None:
        """Decodes images, unless they are since they were `read`. A transform follows each at once, while it is in the
        cache, and often makes it smaller."""
        read, transformed = read or time.perf_counter(), chunk.transform_s
        if self._draws is not None:
            self._draw(samples, self._draws)
        finished = [sample for each in samples if (sample := self._complete(each, chunk)) is not None]
        end = time.perf_counter()
        if self._transform is None:
            chunk.size += sum([memory_bytes(sample.value) for sample in finished])
            chunk.times.append((began, read, end))
        else:
            chunk.times.append((began, read, end - (chunk.transform_s - transformed), end))
        for sample in finished:
            if sample.bad:
                chunk.bad += sample.bad
                chunk.substitutes.add(len(chunk.values))
            chunk.values.append(sample.value)

    def _complete(self, sample: _ReadSample, chunk: Chunk, *, on_cpu: bool = False) -> _ReadSample | None:
        """Decodes and transforms a sample or, if that finds it bad, its substitute; None if it is left out.

        With `on_cpu`, an image that was set apart for the GPU is decoded here.
        """
        while True:
            name = sample.value[KEY]
            try:
                if self._reduces:
                    self._decode_reduced(sample)
                self._decoder.finish(sample.late, sample.value)
                if self._gpu_bytes:
                    sample.value = self._for_gpu(sample) if IMAGE not in sample.value else sample.value
                elif self._transform is not None:
                    began, size = time.perf_counter(), memory_bytes(sample.value)
                    sample.value = self._apply_transform(sample)
                    chunk.size += max(size, memory_bytes(sample.value))
                    chunk.transform_s += time.perf_counter() - began
                if on_cpu:
                    self._decode_encoded(sample.value)
            except (BadSample, BadShard) as error:
                location = self._substitute(sample.location, name, error, sample.bad)
                if location is None:
                    chunk.bad += sample.bad
                    return None
                substitute = self._read_sample(location, sample.bad, chunk)
                assert substitute is not None, "they are left out all or none"
                substitute.place = sample.place
                sample = substitute
            else:
                return sample

    def _draw(self, samples: list[_ReadSample], transform: ImageTransform) -> None:
        """Draws the crops of several images whose headers say their size: drawn for each alone, they take twenty times
        as long."""
        sized = [(sample, size) for sample in samples if (size := self._jpeg_size(sample)) is not None]
        if not sized:
            return
        keys = self.transform_keys(np.array([sample.location for sample, _ in sized]))
        tables = draw_groups(transform, keys, np.array([size for _, size in sized]))
        for number, (sample, size) in enumerate(sized):
            sample.drawn = size, [CropTable(ints[number], floats[number]) for ints, floats in tables]

    def _jpeg_size(self, sample: _ReadSample) -> tuple[int, int] | None:
        """Returns height and width of the image of a sample, if it is a JPEG that any decoder can decode."""
        name = jpeg_name(sample.value, self._decoders)
        if name is None:
            return None
        return next(plain_jpeg_size(data, self._limits) for part, data, _ in sample.late if part == name)

    def _decode_reduced(self, sample: _ReadSample) -> None:
        """Decodes the image of a sample at the smallest size that its crops allow, if it is a JPEG that can be."""
        transform, name = self._transform, jpeg_name(sample.value, self._decoders)
        assert isinstance(transform, ImageTransform)
        late = next((each for each in sample.late if each[0] == name), None)
        if late is None:
            return
        size = plain_jpeg_size(late[1], self._limits)
        if size is None:
            return
        tag, key = orientation(late[1]) if transform.exif else 1, self._key(sample)
        tables = draw_image(transform, key, *(size[::-1] if tag >= 5 else size))
        factor = largest_reduction(tables)
        while tag > 1 and (size[0] % factor or size[1] % factor):
            factor //= 2  # a last pixel that is not whole would come first
        sample.late.remove(late)
        pixels = turn(decode_reduced(late[1], size, factor), tag)
        sample.value[late[0]] = DrawnImage(pixels, tables, key, factor)

    def _key(self, sample: _ReadSample) -> int:
        """Returns what the random numbers of a sample are derived from."""
        dataset, *where = sample.location
        return derive_key(self._seed, _TRANSFORM, self._keys[dataset], *where)

    def _apply_transform(self, sample: _ReadSample) -> Any:
        assert self._transform is not None
        if isinstance(self._transform, ImageTransform):
            image, place = _take_image(self._transform, sample), sample.place
            if not isinstance(image, DrawnImage):
                image = DrawnImage(image, self._drawn(sample, *image.shape[:2]), self._key(sample))
            into = place.memory.of_sample(place.number) if place is not None else None
            own = {SAMPLES: sample.location} | ({PLACE: place} if place is not None else {})
            return {**own, **cut_crops(self._transform, image, into), **sample.value}
        return self._transform(sample.value, np.random.Generator(np.random.Philox(self._key(sample))))

    def _drawn(self, sample: _ReadSample, height: int, width: int) -> list[CropTable]:
        """Returns the crops of a sample, drawn now unless they were drawn for an image of this size."""
        assert isinstance(self._transform, ImageTransform)
        if sample.drawn is not None and sample.drawn[0] == (height, width):
            return sample.drawn[1]
        return draw_image(self._transform, self._key(sample), height, width)

    def _for_gpu(self, sample: _ReadSample) -> dict[str, Any]:
        """Returns a sample with its image set apart, encoded or decoded, for the GPU."""
        assert isinstance(self._transform, ImageTransform)
        image = _take_image(self._transform, sample)
        return {SAMPLES: sample.location, IMAGE: image, **sample.value}

    def transform_keys(self, rows: Ints) -> UInts:
        """Returns what the random numbers of samples are derived from, given rows of dataset, epoch, shard, sample."""
        columns = [as_uints(rows[:, number]) for number in (1, 2, 3)]
        datasets = np.array(self._keys, np.uint64)[rows[:, 0]]
        return derive_keys(self._seed, np.full(1, _TRANSFORM, np.uint64), datasets, *columns)

    def decode_on_cpu(self, chunk: Chunk, number: int) -> None:
        """Decodes the image of a sample that the GPU refused; replaces the sample, or leaves it out, if it is bad."""
        value = chunk.values[number]
        sample = self._complete(_ReadSample(value[SAMPLES], value, [], []), chunk, on_cpu=True)
        if sample is None:
            del chunk.values[number]
            return
        chunk.values[number] = sample.value
        if sample.bad:
            chunk.substitutes.add(number)
            chunk.bad += sample.bad

    def _decode_encoded(self, value: dict[str, Any]) -> None:
        image = value[IMAGE]
        if isinstance(image, EncodedImage):
            pixels = decode({"jpg": image.data}, limits=self._limits)["jpg"]
            value[IMAGE] = turn(pixels, image.turn)

    def _substitute(
        self, location: SampleLocation, name: str, error: HeadwayError, bad: list[QuarantinedSample]
    ) -> SampleLocation | None:
        """Records a bad sample, and returns the location of its substitute: the same on every rank, in every run."""
        dataset, epoch, shard, sample = location
        source, order = self._shards.sources[dataset], self._orders[dataset]
        position = derive_key(self._seed, _SUBSTITUTE, epoch, shard, sample, len(bad)) % order.samples
        bad.append(QuarantinedSample(source.name, str(source.paths[shard]), name, str(error)))
        if not self._replaces:
            return None
        if len(bad) == _MAX_SUBSTITUTES:
            raise HeadwayError(
                f"{_MAX_SUBSTITUTES} consecutive samples could not be used; the last is {name!r} in "
                f"{source.paths[shard]}: {error}"
            )
        found = order.locate(np.array([position]))
        return dataset, epoch, int(found.shard[0]), int(found.sample[0])


def _take_image(transform: ImageTransform, sample: _ReadSample) -> Any:
    """Takes the image out of a sample: its pixels, turned if asked, or an `EncodedImage`."""
    value = sample.value
    name = image_name(value)
    if name is None:
        raise BadSample(f"it has no image (a part called {', '.join(sorted(IMAGES))}) but {', '.join(value)}")
    image = value.pop(name)
    if isinstance(image, EncodedImage | DrawnImage):
        return image  # JPEGs, whose sides have less than 2**16 pixels
    if transform.exif:
        image = turn(image, next(orientation(data) for part, data, _ in sample.late if part == name))
    short, long = sorted(image.shape[:2])
    longest = max([recipe.resize for group in transform.groups() for recipe in group.recipes]) * long // short
    if longest > _MAX_SIDE_PIXELS:
        raise BadSample(
            f"{long} x {short} pixels would be resized to {longest} in the long side: cut the image"
        )
    return image
