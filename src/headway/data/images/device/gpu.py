"""`GpuCropper`: turns images of any sizes in device memory into the crops of a batch, in five launches.

The parameters of all crops, the addresses of all images and the sums that the kernels need go to the device as one
buffer. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from headway.data.images.cpu import DTYPES, draw_groups, normalization
from headway.data.images.device import kernels
from headway.data.images.device.image_table import ImageTable
from headway.data.images.draws import CropTable
from headway.data.images.transforms import CropGroup, ImageTransform
from headway.data.order.permutation import Ints, UInts

# the fastest values on an H200 with photos of 500 x 375 pixels; one warp needs no barriers
_RESIZE_TILE, _RESIZE_STEP, _FINISH_TILE = 16, 16, 64  # pixels
_RESIZE_WARPS, _FINISH_WARPS = 1, 4
# programs on each multiprocessor: few, so that the decoder's kernels need not wait for ours. On an H200, ours then take
# 4.9 ms instead of 3.3 for a batch of 256, and the decoder beside them 8.3 ms instead of 12.
_RESIZE_PROGRAMS, _FINISH_PROGRAMS = 8, 1
_ALIGNMENT_BYTES = 16


@final
class GpuCropper:
    """Cuts the crops of a transform on a GPU, on the current stream."""

    def __init__(self, transform: ImageTransform) -> None:
        self._transform, self._groups = transform, transform.groups()
        factors, summands = normalization(transform)
        if transform.output == "uint8":
            factors, summands = [1.0] * 3, [0.0] * 3
        self._norms = np.array([*factors, *summands, 0, 0], np.float32)

    def draw(self, keys: UInts, sizes: Ints) -> list[CropTable]:
        """Draws the parameters of a batch, given each sample's key, height and width."""
        return draw_groups(self._transform, keys, sizes)

    def crop(self, images: ImageTable, tables: Sequence[CropTable]) -> dict[str, Tensor]:
        """Returns the crops by the names of their groups, crops x images x 3 x size x size.

        The images must stay in memory until the device has finished.
        """
        host: list[np.ndarray[Any, Any]] = [images.rows, self._norms]
        for table in tables:
            crops = table.ints.shape[0] * table.ints.shape[1]
            host += [
                table.ints.reshape(crops, -1),
                table.floats.reshape(crops, -1),
                np.zeros(crops, np.int64),
            ]
        found = _to_device(host, images.device)
        of_images, norms = found[0], found[1]
        return {
            group.name: self._cut(group, of_images, norms, found[2 + 3 * at : 5 + 3 * at])
            for at, group in enumerate(self._groups)
        }

    def _cut(self, group: CropGroup, images: Tensor, norms: Tensor, table: Sequence[Tensor]) -> Tensor:
        """Launches the two kernels of a group."""
        ints, floats, sums = table
        each, size = len(group.recipes), group.size
        count = len(images) * each
        resized = torch.empty((count, 3, size, size), dtype=torch.float16, device=images.device)
        shape = [each, len(images), 3, size, size]
        if self._transform.channels_last:
            shape = [each, len(images), size, size, 3]
        out = torch.empty(shape, dtype=DTYPES[self._transform.output], device=images.device)
        if self._transform.channels_last:
            out = out.permute(0, 1, 4, 2, 3)
        total = count * _tiles(size, _RESIZE_TILE) ** 2
        _launch(kernels.resize_tiles, total, _RESIZE_PROGRAMS, images.device)(
            images, ints, floats, resized, sums, each, total,
            SIZE=size, TILE=_RESIZE_TILE, K=_RESIZE_STEP, CUBIC=self._transform.interpolation == "bicubic",
            num_warps=_RESIZE_WARPS,
        )  # fmt: skip
        total = count * _tiles(size, _FINISH_TILE - 8) ** 2
        _launch(kernels.finish_tiles, total, _FINISH_PROGRAMS, images.device)(
            ints, floats, resized, sums, norms, out, each, total, *out.stride(),
            SIZE=size, TILE=_FINISH_TILE, ROUND=self._transform.output == "uint8", num_warps=_FINISH_WARPS,
        )  # fmt: skip
        return out[0] if group.name == "images" else out


def _launch(kernel: Any, total: int, programs: int, device: torch.device) -> Any:
    """Returns a kernel that computes `total` tiles with this many programs on each multiprocessor."""
    return kernel[(min(total, programs * _multiprocessors(device)),)]


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def _to_device(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device) -> list[Tensor]:
    """Copies arrays to the device in one transfer, from pinned memory."""
    starts, total = list[int](), 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    host = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = host.numpy()
    for array, at in zip(arrays, starts, strict=True):
        view[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[at : at + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, at in zip(arrays, starts, strict=True)
    ]
