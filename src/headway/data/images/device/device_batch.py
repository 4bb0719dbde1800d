"""`GpuBatcher`: makes batches on a GPU. nvJPEG decodes and the kernels crop, each on a stream of its own.

Two threads of the loader use it: one starts to decode batches, one after the other, and the other makes crops of the
decoded images. Neither waits for the device, except until the decoder has read the batch before the last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from headway.data.feed.device_feed import StagedBatch
from headway.data.images.batch import IMAGE, SAMPLES, Batch, EncodedImage, finish_batch, parts_of
from headway.data.images.device.gpu import GpuCropper
from headway.data.images.device.image_table import ImageTable
from headway.data.images.device.nvjpeg import DecodedImages, JpegDecoder
from headway.data.images.transforms import ImageTransform
from headway.data.order.permutation import Ints, UInts


class ImageOnDevice(NamedTuple):
    """An image in the memory of a device."""

    images: DecodedImages
    number: int
    """its number among them"""


@final
class GpuBatcher:
    """Decodes the images of samples on a GPU, and makes the batch of their crops."""

    def __init__(
        self,
        transform: ImageTransform,
        device: torch.device,
        collate: Callable[[list[Any]], Any],
        keys_of: Callable[[Ints], UInts],
    ) -> None:
        self._transform, self._cropper = transform, GpuCropper(transform)
        self._collate, self._keys_of = collate, keys_of
        self._device = device

    @cached_property
    def _decoder(self) -> JpegDecoder:
        return JpegDecoder(self._device)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def decode(self, samples: list[dict[str, Any]]) -> list[int]:
        """Brings the images of samples to the device; returns the numbers of those that nvJPEG cannot decode."""
        encoded = [at for at, each in enumerate(samples) if type(each[IMAGE]) is EncodedImage]
        for sample in samples:
            if isinstance(sample[IMAGE], np.ndarray):
                sample[IMAGE] = ImageOnDevice(self._copy(sample[IMAGE]), 0)
        if not encoded:
            return []
        images: list[EncodedImage] = [samples[at][IMAGE] for at in encoded]
        decoded = self._decoder.decode(images)
        for number, at in enumerate(encoded):
            samples[at][IMAGE] = ImageOnDevice(decoded, number)
        for number in decoded.refused:
            samples[encoded[number]][IMAGE] = images[number]
        return [encoded[number] for number in decoded.refused]

    def _copy(self, pixels: np.ndarray[Any, Any]) -> DecodedImages:
        """Copies an image that the CPU has decoded and turned, height x width x 3, to the device."""
        host = torch.from_numpy(np.ascontiguousarray(pixels) if pixels.flags.writeable else pixels.copy())
        stream = self._decoder.stream
        with torch.cuda.stream(stream):
            block = self._move(host)
        return DecodedImages(ImageTable.of([block.permute(2, 0, 1)]), block, stream.record_event())

    def collate(self, samples: list[dict[str, Any]]) -> StagedBatch:
        """Returns the batch of samples whose images are on the device; the device may still be computing it."""
        images: list[ImageOnDevice] = [sample.pop(IMAGE) for sample in samples]
        rows = np.array([sample.pop(SAMPLES) for sample in samples])
        keys = self._keys_of(rows)
        sources = list({id(image.images): image.images for image in images}.values())
        starts = dict(
            zip(
                map(id, sources),
                accumulate((len(each.table.rows) for each in sources), initial=0),
                strict=False,
            )
        )
        chosen = np.array([starts[id(image.images)] + image.number for image in images])
        table = ImageTable.select([source.table for source in sources], chosen)
        tables = self._cropper.draw(keys, table.sizes)
        rest = parts_of(self._collate(samples))
        with torch.cuda.stream(self._stream):
            for source in sources:
                self._stream.wait_event(source.ready)
                source.block.record_stream(self._stream)
            crops = self._cropper.crop(table, tables)
            moved = {name: self._move(part) for name, part in rest.items()}
            batch = Batch({SAMPLES: self._move(torch.from_numpy(rows)), **crops, **moved})
            batch = finish_batch(batch, self._transform, keys)
            return StagedBatch(batch, self._stream.record_event())

    def _move(self, part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return part.pin_memory().to(self._device, non_blocking=True)
