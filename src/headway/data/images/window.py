"""Computes a window of a resized image without the rest of it, for images of extreme aspect ratios on the CPU.

An image of 60000 x 1 pixels whose short side becomes 256 has 4 billion pixels, of which a crop of the center needs few.
The result equals torch's and Pillow's resizing of bytes with antialiasing to the last bit: weights are whole numbers,
columns come first, and each pass rounds to bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.data.shards.decode import Pixels

_Floats = npt.NDArray[np.float64]

_WEIGHT_BITS = 14  # of enlarged images: the largest weight, at an edge, is from 1 to 2
_CUBIC = -0.5  # the coefficient of the cubic, as in Pillow


def enlarged_window(
    pixels: Pixels, shape: tuple[int, int], corner: tuple[int, int], size: int, interpolation: str
) -> Pixels:
    """Returns `size` x `size` pixels, from `corner` on, of an image, height x width x 3, that is enlarged to `shape`.

    >>> enlarged_window(np.zeros((1, 60_000, 3), np.uint8), (256, 15_360_000), (16, 7_679_888), 224, "bilinear").shape
    (224, 224, 3)
    """
    rows, columns = (
        _filter(pixels.shape[axis], shape[axis], corner[axis], size, interpolation) for axis in (0, 1)
    )
    first, last = rows.taps.min(), rows.taps.max()  # the rows that are needed
    wide = _apply(columns, pixels[first : last + 1].transpose(1, 0, 2)).transpose(1, 0, 2)
    return _apply(_Filter(rows.taps - first, rows.weights), wide)


class _Filter(NamedTuple):
    """Which pixels along an axis, with which weights, make each pixel of a window: pixels x taps."""

    taps: npt.NDArray[np.int64]
    weights: npt.NDArray[np.int64]


def _filter(count: int, length: int, first: int, size: int, interpolation: str) -> _Filter:
    """Returns the filter that enlarges `count` pixels to `length`, of which `size` are computed."""
    support = 2 if interpolation == "bicubic" else 1
    center = count / length * (np.arange(first, first + size) + 0.5)
    low = np.maximum((center - support + 0.5).astype(np.int64), 0)
    high = np.minimum((center + support + 0.5).astype(np.int64), count)
    taps = low[:, None] + np.arange(2 * support + 1)
    distances = np.abs(taps - center[:, None] + 0.5)
    weights = np.where(taps < high[:, None], _cubic(distances) if support == 2 else _linear(distances), 0.0)
    weights /= weights.sum(1, keepdims=True)
    whole = np.trunc(weights * 2**_WEIGHT_BITS + np.copysign(0.5, weights)).astype(np.int64)
    return _Filter(np.minimum(taps, count - 1), whole)


def _apply(along: _Filter, pixels: Pixels) -> Pixels:
    """Applies a filter to the first axis of pixels."""
    taken = pixels[along.taps].astype(np.int64)
    sums: npt.NDArray[np.int64] = np.einsum("pt,pt...->p...", along.weights, taken) + 2 ** (_WEIGHT_BITS - 1)
    found: Pixels = np.clip(sums >> _WEIGHT_BITS, 0, 255).astype(np.uint8)
    return found


def _linear(distances: _Floats) -> _Floats:
    found: _Floats = np.maximum(1 - distances, 0)
    return found


def _cubic(distances: _Floats) -> _Floats:
    near = ((_CUBIC + 2) * distances - (_CUBIC + 3)) * distances**2 + 1
    far = (((distances - 5) * distances + 8) * distances - 4) * _CUBIC
    return np.where(distances < 1, near, np.where(distances < 2, far, 0.0))
