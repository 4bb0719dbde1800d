"""`JpegDecoder`: calls nvJPEG, the hardware decoder of a GPU, for whole batches.

torchvision uses the same library, but parses every header three times, allocates every image and waits for the device
before it returns: on an H200 it decodes 23,000 photos a second, this module 39,000. The library comes with torchvision,
with NVIDIA's wheels, or with CUDA.
"""

from __future__ import annotations

import ctypes
import sysconfig
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from headway.data.images.batch import EncodedImage
from headway.data.images.device.image_table import ImageTable
from headway.data.order.permutation import UInts
from headway.errors import HeadwayError

_HARDWARE, _DEFAULT = 3, 0  # back ends
_PLANES = 3  # the format of the output: red, green and blue, one after the other
_IMAGE_WORDS, _PITCH = 8, 4  # of nvjpegImage_t: four addresses, four distances from row to row
_ALIGNMENT_BYTES = 256
_MEMORY_STEP_BYTES = 2**25  # batches of about one size take blocks of one size, which torch uses again
_STATES = 2  # while the device reads the input of one batch, the next one is prepared
_WHEELS = ("torchvision.libs/libnvjpeg*.so*", "nvidia/*/lib/libnvjpeg.so*")
_SYSTEM = ("libnvjpeg.so.13", "libnvjpeg.so.12", "libnvjpeg.so.11", "libnvjpeg.so")


@cache
def find_library() -> ctypes.CDLL | None:
    """Returns nvJPEG; None if it is not installed."""
    packages = Path(sysconfig.get_path("platlib"))
    wheels = chain.from_iterable(sorted(packages.glob(pattern)) for pattern in _WHEELS)
    for name in (*map(str, wheels), *_SYSTEM):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(library, "nvjpegDecodeBatched"):
            return library
    return None


class DecodedImages(NamedTuple):
    """Images in the memory of a device."""

    table: ImageTable
    block: Tensor
    """the memory that they are in"""
    ready: torch.cuda.Event
    """recorded when they are decoded"""
    refused: Sequence[int] = ()
    """the numbers of those that could not be decoded"""


@dataclass(slots=True)
class _State:
    """nvJPEG's state for a batch that is being decoded, and the input that must stay in memory until then."""

    handle: ctypes.c_void_p
    done: torch.cuda.Event
    batch: int = 0
    """images for which it is prepared"""
    input: Any = field(default=None, repr=False)


@final
class JpegDecoder:
    """Decodes batches of JPEGs on a stream of its own. Use it on one thread only.

    The JPEGs must be plain (`plain_jpeg_size` says which are), and of the stated sizes: nvJPEG writes as many pixels as
    the header says.
    """

    def __init__(self, device: torch.device) -> None:
        library = find_library()
        assert library is not None
        self._library, self._device = library, device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._create()
            self._states = [self._new_state() for _ in range(_STATES)]
        weakref.finalize(self, _destroy, library, self._handle, self._states).atexit = False

    def _create(self) -> None:
        create, handle = self._library.nvjpegCreateEx, ctypes.byref(self._handle)
        if create(_HARDWARE, None, None, 0, handle):  # many GPUs have no hardware decoder
            self._check(create(_DEFAULT, None, None, 0, handle))

    def _new_state(self) -> _State:
        state = _State(ctypes.c_void_p(), torch.cuda.Event())  # type: ignore[no-untyped-call]
        self._check(self._library.nvjpegJpegStateCreate(self._handle, ctypes.byref(state.handle)))
        return state

    def decode(self, images: Sequence[EncodedImage]) -> DecodedImages:
        """Starts to decode JPEGs, one after the other into one block of device memory."""
        sizes = np.array([(image.height, image.width) for image in images])
        area = sizes[:, 0] * sizes[:, 1]
        ends = np.cumsum(-(-3 * area // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        total = -(-int(ends[-1]) // _MEMORY_STEP_BYTES) * _MEMORY_STEP_BYTES
        with torch.cuda.stream(self.stream):
            block = torch.empty(total, dtype=torch.uint8, device=self._device)
        firsts = block.data_ptr() + np.concatenate([[0], ends[:-1]])
        planes = np.zeros((len(images), _IMAGE_WORDS), np.uint64)
        planes[:, :3] = firsts[:, None] + area[:, None] * np.arange(3)
        planes[:, _PITCH : _PITCH + 3] = sizes[:, 1:]
        addresses = np.array([image.address for image in images], np.uint64)
        lengths = np.array([len(image.data) for image in images], np.uint64)
        refused = self._decode(images, addresses, lengths, planes)
        rows = np.stack([firsts, area, sizes[:, 1], np.ones_like(area)], 1)
        table = ImageTable(rows, sizes, self._device).turned(np.array([image.turn for image in images]))
        return DecodedImages(table, block, self.stream.record_event(), refused)

    def _decode(self, images: Any, addresses: UInts, lengths: UInts, planes: UInts) -> list[int]:
        """Starts to decode, and returns the numbers of the images that nvJPEG refuses.

        One such image fails the whole call, which is then repeated for each half.
        """
        count = len(addresses)
        state = self._states.pop(0)
        self._states.append(state)
        state.done.synchronize()  # nearly always done long ago, so this does not wait
        if state.batch != count:
            self._check(
                self._library.nvjpegDecodeBatchedInitialize(self._handle, state.handle, count, 1, _PLANES)
            )
            state.batch = count
        state.input = images, addresses, lengths, planes
        words = [ctypes.c_void_p(each.ctypes.data) for each in (addresses, lengths, planes)]
        stream = ctypes.c_void_p(self.stream.cuda_stream)
        status = self._library.nvjpegDecodeBatched(self._handle, state.handle, *words, stream)
        state.done.record(self.stream)
        if not status:
            return []
        if count == 1:
            return [0]
        half = count // 2
        first = self._decode(images, addresses[:half], lengths[:half], planes[:half])
        second = self._decode(images, addresses[half:], lengths[half:], planes[half:])
        return [*first, *(half + at for at in second)]

    def _check(self, status: int) -> None:
        if status:
            raise HeadwayError(
                f"nvJPEG returned status {status} on {self._device}: remove device= from the loader, and images are "
                "decoded on the CPU"
            )


def _destroy(library: ctypes.CDLL, handle: ctypes.c_void_p, states: list[_State]) -> None:
    for state in states:
        state.done.synchronize()
        library.nvjpegJpegStateDestroy(state.handle)
    library.nvjpegDestroy(handle)
