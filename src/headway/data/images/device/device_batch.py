"""Batches that are made on a GPU: decoded by nvJPEG, cropped by the kernels, on a stream of the loader.

Two threads of the loader do this, each with a stream: one has batches decoded, one after the other, and the other makes
crops of what is decoded.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from headway.data.images.batch import IMAGE, SAMPLES, Batch, EncodedImage, finish_batch
from headway.data.images.device.gpu import GpuCropper
from headway.data.images.device.nvjpeg import as_tensor, decode_batch
from headway.data.images.transforms import ImageTransform
from headway.data.order.permutation import Ints, UInts

_MAX_BATCHES_HELD = 4  # whose images are in memory because the device may still read them


class ImageOnDevice(NamedTuple):
    """The pixels of an image on the device, 3 x height x width, and how they must be turned."""

    pixels: Tensor
    turn: int
    ready: torch.cuda.Event
    """after which the pixels are there"""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, after turning."""
        _, height, width = self.pixels.shape
        return (width, height) if self.turn >= 5 else (height, width)


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
        self._device = torch.empty(0, device=device).device  # with its number
        self._local = threading.local()
        self._held: deque[tuple[list[Tensor], torch.cuda.Event]] = deque()
        self._lock = threading.Lock()

    @property
    def _stream(self) -> torch.cuda.Stream:
        """The stream of this thread."""
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._local.stream
        return stream

    def decode(self, samples: list[dict[str, Any]]) -> list[int]:
        """Brings the images of samples to the device; returns the numbers of those that nvJPEG cannot decode."""
        encoded = [at for at, each in enumerate(samples) if isinstance(each[IMAGE], EncodedImage)]
        with torch.cuda.stream(self._stream):
            found = decode_batch([as_tensor(samples[at][IMAGE].data) for at in encoded], self._device)
            copied = {
                at: self._copy(sample[IMAGE])
                for at, sample in enumerate(samples)
                if isinstance(sample[IMAGE], np.ndarray)
            }
            ready = self._stream.record_event()
        for at, pixels in copied.items():
            samples[at][IMAGE] = ImageOnDevice(pixels, 1, ready)
        failed = []
        for at, decoded in zip(encoded, found, strict=True):
            if decoded is None:
                failed.append(at)
            else:
                samples[at][IMAGE] = ImageOnDevice(decoded, samples[at][IMAGE].turn, ready)
        return failed

    def _copy(self, pixels: np.ndarray[Any, Any]) -> Tensor:
        """Copies an image, height x width x 3, to the device."""
        host = torch.from_numpy(np.ascontiguousarray(pixels) if pixels.flags.writeable else pixels.copy())
        return host.pin_memory().to(self._device, non_blocking=True).permute(2, 0, 1)

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        """Returns the batch of samples whose images are on the device. It is finished when its event is."""
        images: list[ImageOnDevice] = [sample.pop(IMAGE) for sample in samples]
        rows = np.array([sample.pop(SAMPLES) for sample in samples])
        keys = self._keys_of(rows)
        tables = self._cropper.draw(keys, np.array([image.size for image in images]))
        rest = self._collate(samples)
        pixels = [image.pixels for image in images]
        with torch.cuda.stream(self._stream):
            for event in {image.ready for image in images}:
                self._stream.wait_event(event)
            crops = self._cropper.crop(pixels, tables, [image.turn for image in images])
            moved = {name: self._move(part) for name, part in rest.items()}
            batch = Batch({SAMPLES: self._move(torch.from_numpy(rows)), **crops, **moved})
            batch = finish_batch(batch, self._transform, keys)
            batch.ready = self._stream.record_event()
        self._hold(pixels, batch.ready)
        return batch

    def _move(self, part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return part.pin_memory().to(self._device, non_blocking=True)

    def _hold(self, pixels: list[Tensor], event: torch.cuda.Event) -> None:
        """Keeps images until the device has read them. torchvision decodes on a stream of its own, which does not wait
        for ours, so the memory of an image must not be free while a kernel reads it (pytorch/vision#9606)."""
        with self._lock:
            self._held.append((pixels, event))
            while len(self._held) > 1 and self._held[0][1].query():  # type: ignore[no-untyped-call]
                self._held.popleft()
            oldest = self._held.popleft() if len(self._held) > _MAX_BATCHES_HELD else None
        if oldest is not None:
            oldest[1].synchronize()
