"""`SampleReader`: reads, decodes and transforms samples in chunks, on the threads of a `ShardLoader`."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import torch

from headway.data.images.batch import IMAGE, SAMPLES, CropMemory, CropPlace, EncodedImage, own_parts
from headway.data.images.device.pinned import HostPinning, PinnedMemory
from headway.data.images.exif import orientation, turn
from headway.data.images.memory_pool import MemoryPool
from headway.data.images.transforms import ImageTransform
from headway.data.label_watch import LabelWatch
from headway.data.order.mix_order import MixOrder
from headway.data.quarantine import QuarantinedSample
from headway.data.samples.cropper import ImageCropper, ReadSample, take_image
from headway.data.samples.sample_keys import SampleKeys
from headway.data.shards.decode import (
    KEY,
    RGB_BYTES,
    Decoder,
    LatePart,
    SampleDecoder,
    decode,
    decode_rgb,
    jpeg_name,
    plain_jpeg_size,
)
from headway.data.shards.label_order import LABEL
from headway.data.shards.tar import ShardLimits
from headway.data.sources.chunk import Chunk, SampleLocation, memory_bytes
from headway.data.sources.open_shards import OpenShards
from headway.data.sources.reader_pool import MAX_DECODERS, FilledSlot, ReaderPool
from headway.data.sources.reader_process import ReaderSettings, SampleRow, SlotAnswer
from headway.errors import BadSample, BadShard, HeadwayError, UsageError
from headway.system.retries import retries_in_this_thread

Transform = Callable[[dict[str, Any], np.random.Generator], Any]


def check_transform(transform: Transform | ImageTransform | None) -> None:
    """Refuses a transform that cannot be called with a sample and its generator, such as one of torchvision's."""
    if transform is None or isinstance(transform, ImageTransform):
        return
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


_MAX_SUBSTITUTES = 8
_MIN_REQUESTED = 1000  # samples, before it is decided that processes decline most of them
_READ_BYTES = 2**20  # read by a thread before it decodes


@final
class SampleReader:
    """Reads, decodes and transforms samples; leaves out bad ones or, with `substitute`, replaces them."""

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
    ) -> None:
        images = transform if isinstance(transform, ImageTransform) else None
        self._gpu_bytes = images.crop_bytes() if gpu is not None and images is not None else 0
        self._allocate = PinnedMemory().allocate if gpu is not None else None
        self._shards, self._orders, self.keys = shards, order.orders, SampleKeys(seed, order.keys)
        self._replaces, self._watch = substitute, watch
        if images is not None:  # crops are RGB, also those of a PNG with a palette
            decoders = {"png": partial(decode_rgb, limits=limits), **decoders}
        self._transform, self._decoders, self._limits = transform, decoders, limits
        self._exif = images is not None and images.exif
        reserved = frozenset(own_parts(images) if images is not None else ())
        self._decoder = SampleDecoder(decoders, limits, reserved)
        self._pool: ReaderPool | None = None
        self._requested = 0, 0  # samples that were requested from processes, and those that they declined
        if not shards.cached and (gpu is not None or images is None):
            settings = ReaderSettings(
                shards.sources, shards.max_open, limits, reserved, frozenset(decoders), decodes=gpu is None
            )
            if gpu is not None:
                self._pool = ReaderPool(settings, HostPinning(gpu))
            else:
                self._pool = ReaderPool(settings, max_processes=MAX_DECODERS, waits=False)
        self._begin = self._begin_for_gpu if self._gpu_bytes else self._decoder.begin
        self._cropper: ImageCropper | None = None
        self._joins: ImageTransform | None = None
        if images is not None and gpu is None:
            self._cropper = ImageCropper(images, self.keys, decoders, limits)
            self._joins = images
        self.crop_pool = MemoryPool()

    def crop_memory(self, samples: int) -> CropMemory | None:
        """Returns memory for the crops of this many samples; None if each sample has its own memory."""
        return CropMemory(self._joins, samples, self.crop_pool) if self._joins is not None else None

    @property
    def has_processes(self) -> bool:
        """Whether processes should read for the threads; if a GPU decodes and there is no cache, they do in any case.

        Not if crops are made here, shards come from the node cache, a shard has no index (each process would walk it),
        or processes decline most samples.
        """
        requested, declined = self._requested
        declines_most = requested >= _MIN_REQUESTED and declined > requested // 2
        return self._pool is not None and self._pool.usable and self._shards.indexed and not declines_most

    def read(
        self,
        locations: Sequence[SampleLocation],
        first: int = 0,
        memory: CropMemory | None = None,
        *,
        by_process: bool = False,
    ) -> Chunk:
        """Loads samples, a few at a time: reads all of them, then decodes all images.

        Decoding an image evicts Python from the processor's cache, so code between two images takes several times as
        long. Crops are written into `memory`, where the first of these samples has the number `first`. With
        `by_process`, a process reads the samples, if one can.
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
        samples, before, began = list[ReadSample](), 0, time.perf_counter()
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
        """Lets another process read samples, if one is ready, and returns how many are done; reads here those that the
        process declined."""
        done = 0
        while done < len(locations):
            began = time.perf_counter()
            slot = pool.read(locations[done:])
            if slot is None:
                break
            self._count_rows(chunk, locations[done:], slot.answer)
            add = self._add_encoded_rows if self._gpu_bytes else self._add_decoded_rows
            add(chunk, locations[done:], slot, began)
            done += len(slot.answer.rows)
        return done

    def _count_rows(self, chunk: Chunk, locations: Sequence[SampleLocation], answer: SlotAnswer) -> None:
        """Adds to a chunk what reading the samples cost, and their labels."""
        chunk.busy_s += answer.busy_s
        chunk.read += sum([row[-1] for row in answer.rows if row is not None])
        if self._watch.watching:
            chunk.labels += [
                (dataset, shard, sample, row[1][LABEL])
                for (dataset, _, shard, sample), row in zip(locations, answer.rows, strict=False)
                if row is not None and type(row[1].get(LABEL)) is int
            ]

    def _add_decoded_rows(
        self, chunk: Chunk, locations: Sequence[SampleLocation], slot: FilledSlot, began: float
    ) -> None:
        rows, read_s, _ = slot.answer
        read, memory, samples = began + read_s, np.frombuffer(slot.memory, np.uint8), list[ReadSample]()
        for location, row in zip(locations, rows, strict=False):
            if row is None:
                sample = self._read_sample(location, [], chunk)
                if sample is not None:
                    samples.append(sample)
                continue
            key, value, name, start, end, height, width, _ = row
            # a copy: users may keep it, and forks of this process would see the shared memory change
            value[name] = memory[start:end].reshape(height, width, RGB_BYTES).copy()
            value[KEY] = key
            samples.append(ReadSample(location, value, [], []))
        requested, declined = self._requested
        self._requested = requested + len(rows), declined + rows.count(None)
        self._finish(chunk, samples, began, read)

    def _add_encoded_rows(
        self, chunk: Chunk, locations: Sequence[SampleLocation], slot: FilledSlot, began: float
    ) -> None:
        read = time.perf_counter()
        for location, row in zip(locations, slot.answer.rows, strict=False):
            if row is not None:
                self._add_encoded(chunk, location, row, slot.memory)
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
    ) -> ReadSample | None:
        """Reads a sample or, if it is bad, its substitute; None if it is left out."""
        while True:
            dataset, _, shard, sample = location
            source, key = None, ""
            try:
                source = self._shards.get(dataset, shard)
                key, parts = source.read(sample, self._allocate)
                value, late = self._begin(parts)
            except (BadSample, BadShard) as error:
                name = f"sample {sample}" if source is None else source.entries.key(sample)
                substitute = self._substitute(location, name, error, bad)
                if substitute is None:
                    chunk.bad += bad
                    return None
                location = substitute
                continue
            except Exception as error:
                if key:  # else no decoder was called
                    self._name_sample(error, location, key)
                raise
            chunk.read += sum([len(data) for data in parts.values()])
            if self._watch.watching and type(value.get(LABEL)) is int:
                chunk.labels.append((dataset, shard, sample, value[LABEL]))
            value[KEY] = key
            return ReadSample(location, value, late, bad)

    def _begin_for_gpu(self, parts: Mapping[str, memoryview]) -> tuple[dict[str, Any], list[LatePart]]:
        """Starts to decode a sample, except for an image that the GPU will decode."""
        name = jpeg_name(parts, self._decoders)
        image = None if name is None else self._encoded(parts[name])
        if name is None or image is None:
            return self._decoder.begin(parts)
        values, late = self._decoder.begin({part: data for part, data in parts.items() if part != name})
        return {name: image, **values}, late

    def _encoded(self, data: memoryview) -> EncodedImage | None:
        """Returns a JPEG that the GPU will decode; None for one that the CPU must decode."""
        size = plain_jpeg_size(data, self._limits)
        if size is None:
            return None
        return EncodedImage(data, *size, orientation(data) if self._exif else 1)

    def _finish(
        self, chunk: Chunk, samples: list[ReadSample], began: float, read: float | None = None
    ) -> None:
        """Decodes the images that were read as bytes, and adds the samples to the chunk; `read` is when reading ended.

        The transform of each image follows at once, while its pixels are in the processor's cache, and often makes it
        smaller.
        """
        read, transformed = read or time.perf_counter(), chunk.transform_s
        if self._cropper is not None and not self._cropper.reduces:
            self._cropper.draw(samples)
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

    def _complete(self, sample: ReadSample, chunk: Chunk, *, on_cpu: bool = False) -> ReadSample | None:
        """Decodes and transforms a sample or, if it turns out bad, its substitute; None if it is left out.

        With `on_cpu`, an image that the GPU could not decode is decoded here.
        """
        while True:
            name = sample.value[KEY]
            try:
                if self._cropper is not None and self._cropper.reduces:
                    self._cropper.decode_reduced(sample)
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
                assert substitute is not None, "bad samples are either all replaced or all left out"
                substitute.place = sample.place
                sample = substitute
            except Exception as error:
                self._name_sample(error, sample.location, name)
                raise
            else:
                return sample

    def _name_sample(self, error: Exception, location: SampleLocation, key: str) -> None:
        """Adds the sample to an exception of a decoder or a transform."""
        dataset, _, shard, _ = location
        source = self._shards.sources[dataset]
        error.add_note(f"sample {key!r} of dataset {source.name!r}, in {source.paths[shard]}")

    def _apply_transform(self, sample: ReadSample) -> Any:
        if self._cropper is not None:
            return self._cropper.crop(sample)
        assert self._transform is not None and not isinstance(self._transform, ImageTransform)
        rng = np.random.Generator(np.random.Philox(self.keys.of_transform(sample.location)))
        return self._transform(sample.value, rng)

    def _for_gpu(self, sample: ReadSample) -> dict[str, Any]:
        """Returns a sample with its image, encoded or decoded, as the part `IMAGE`."""
        assert isinstance(self._transform, ImageTransform)
        image = take_image(self._transform, sample)
        return {SAMPLES: sample.location, IMAGE: image, **sample.value}

    def decode_on_cpu(self, chunk: Chunk, number: int) -> None:
        """Decodes the image of a sample that the GPU refused; replaces the sample, or leaves it out, if it is bad."""
        value = chunk.values[number]
        sample = self._complete(ReadSample(value[SAMPLES], value, [], []), chunk, on_cpu=True)
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
        dataset, epoch, shard, _ = location
        source, order = self._shards.sources[dataset], self._orders[dataset]
        position = self.keys.of_substitute(location, len(bad)) % order.samples
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
