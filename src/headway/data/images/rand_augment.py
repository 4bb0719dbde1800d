"""RandAugment and TrivialAugment: random operations on the bytes of a crop, as Pillow computes them.

Operations, ranges and defaults follow the papers (arXiv 1909.13719, 2103.10158) as torchvision implements them. Random
numbers are a pure function of the crop's key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from headway.data.images.draws import uniform
from headway.data.shards.decode import Pixels
from headway.errors import UsageError

_BINS = 31  # levels of magnitude, in both papers


class _Operation(NamedTuple):
    """One operation: what it does to a crop, and its argument at each magnitude."""

    apply: Callable[[Pixels, float], Pixels]
    weakest: float
    strongest: float
    signed: bool
    """whether the argument is negative half of the time"""
    of_side: bool = False
    """whether the argument is a share of the side of the crop"""

    def argument(self, magnitude: float, side: int, *, negative: bool) -> float:
        """Returns the argument for a magnitude from 0 to 1."""
        value = self.weakest + magnitude * (self.strongest - self.weakest)
        value *= side if self.of_side else 1
        return -value if negative and self.signed else value


@final
@dataclass(frozen=True)
class RandAugment:
    """Applies `operations` random operations of equal strength to every crop (arXiv 1909.13719).

    hw.data.RandomResizedCrop(224, augment=hw.data.RandAugment(operations=2, magnitude=9))
    """

    operations: int = 2
    magnitude: int = 9
    """from 0 to 30"""

    def __post_init__(self) -> None:
        if self.operations < 1 or not 0 <= self.magnitude < _BINS:
            raise UsageError(
                f"operations={self.operations}, magnitude={self.magnitude}: give at least one operation, and a "
                f"magnitude from 0 to {_BINS - 1}"
            )

    def __call__(self, crop: Pixels, key: int) -> Pixels:
        table = _table(shear=0.3, translate=150 / 331, rotate=30, color=0.9, bits=4)
        words = _words(key, 2 * self.operations)
        for at in range(self.operations):
            operation = table[int(words[2 * at] * len(table))]
            share, negative = self.magnitude / (_BINS - 1), bool(words[2 * at + 1] < 0.5)
            crop = operation.apply(crop, operation.argument(share, crop.shape[1], negative=negative))
        return crop


@final
@dataclass(frozen=True)
class TrivialAugment:
    """Applies one random operation of random strength to every crop (arXiv 2103.10158, the wide ranges).

    hw.data.RandomResizedCrop(224, augment=hw.data.TrivialAugment())
    """

    def __call__(self, crop: Pixels, key: int) -> Pixels:
        table = _table(shear=0.99, translate=32 / crop.shape[1], rotate=135, color=0.99, bits=6)
        words = _words(key, 3)
        operation, magnitude = table[int(words[0] * len(table))], int(words[2] * _BINS) / (_BINS - 1)
        side, negative = crop.shape[1], bool(words[1] < 0.5)
        return operation.apply(crop, operation.argument(magnitude, side, negative=negative))


def _words(key: int, count: int) -> npt.NDArray[np.float64]:
    """Returns at least `count` random numbers in [0, 1) from the stream that begins at a key."""
    return uniform(np.array([key], np.uint64), np.arange(-(-count // 2), dtype=np.uint64))


def _table(*, shear: float, translate: float, rotate: float, color: float, bits: int) -> list[_Operation]:
    """Returns the operations, given the strongest of each kind. Their order must not change: draws refer to it."""
    return [
        _Operation(_identity, 0, 0, False),
        _Operation(lambda crop, by: _affine(crop, (1, by, 0, 0, 1, 0)), 0, shear, True),
        _Operation(lambda crop, by: _affine(crop, (1, 0, 0, by, 1, 0)), 0, shear, True),
        _Operation(lambda crop, by: _affine(crop, (1, 0, int(by), 0, 1, 0)), 0, translate, True, True),
        _Operation(lambda crop, by: _affine(crop, (1, 0, 0, 0, 1, int(by))), 0, translate, True, True),
        _Operation(_rotate, 0, rotate, True),
        _Operation(_brightness, 0, color, True),
        _Operation(_saturation, 0, color, True),
        _Operation(_contrast, 0, color, True),
        _Operation(_sharpness, 0, color, True),
        _Operation(_posterize, 8, 8 - bits, False),
        _Operation(_solarize, 255, 0, False),
        _Operation(_autocontrast, 0, 0, False),
        _Operation(_equalize, 0, 0, False),
    ]


# --- the operations


def _identity(crop: Pixels, _: float) -> Pixels:
    return crop


def _affine(crop: Pixels, matrix: tuple[float, ...]) -> Pixels:
    """Takes each pixel from the nearest place that a matrix maps it to; black where that is outside."""
    height, width = crop.shape[:2]
    y, x = np.arange(height)[:, None] + 0.5, np.arange(width)[None, :] + 0.5
    a, b, c, d, e, f = matrix
    column = np.floor(a * x + b * y + c).astype(np.int64)
    row = np.floor(d * x + e * y + f).astype(np.int64)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    found = crop[np.where(inside, row, 0), np.where(inside, column, 0)]
    return np.where(inside[..., None], found, np.uint8(0))


def _rotate(crop: Pixels, degrees: float) -> Pixels:
    """Turns a crop counterclockwise around its center."""
    height, width = crop.shape[:2]
    cosine, sine = math.cos(math.radians(-degrees)), math.sin(math.radians(-degrees))
    x, y = width / 2, height / 2
    return _affine(crop, (cosine, sine, x - cosine * x - sine * y, -sine, cosine, y + sine * x - cosine * y))


def _blend(other: npt.NDArray[np.float32], crop: Pixels, change: float) -> Pixels:
    """Blends a crop with another image; with a change above 0, away from it. Fractions are cut off."""
    mixed = other + np.float32(1 + change) * (crop - other)
    return np.clip(mixed, 0, 255).astype(np.uint8)


def _gray(crop: Pixels) -> npt.NDArray[np.float32]:
    """Returns the brightness of each pixel in Pillow's whole numbers: height x width x 1."""
    weighted = crop.astype(np.int32) @ np.array([19595, 38470, 7471], np.int32)
    return ((weighted + 0x8000) >> 16).astype(np.float32)[..., None]


def _brightness(crop: Pixels, change: float) -> Pixels:
    return _blend(np.zeros(1, np.float32), crop, change)


def _saturation(crop: Pixels, change: float) -> Pixels:
    return _blend(_gray(crop), crop, change)


def _contrast(crop: Pixels, change: float) -> Pixels:
    mean = np.floor(_gray(crop).mean(dtype=np.float64) + 0.5)
    return _blend(np.array([mean], np.float32), crop, change)


def _sharpness(crop: Pixels, change: float) -> Pixels:
    """Blends a crop with a smooth one, whose border is not smoothed."""
    height, width = crop.shape[:2]
    smooth = crop.astype(np.float32)
    if min(height, width) > 2:
        around = sum(
            crop[y : height - 2 + y, x : width - 2 + x].astype(np.int32) for y in range(3) for x in range(3)
        )
        smooth[1:-1, 1:-1] = np.floor((around + 4 * crop[1:-1, 1:-1].astype(np.int32)) / 13 + 0.5)
    return _blend(smooth, crop, change)


def _posterize(crop: Pixels, bits: float) -> Pixels:
    kept = 8 - round(8 - bits)
    return crop & np.uint8(256 - 2 ** (8 - kept))


def _solarize(crop: Pixels, threshold: float) -> Pixels:
    return np.where(crop >= threshold, 255 - crop, crop)


def _autocontrast(crop: Pixels, _: float) -> Pixels:
    """Stretches each channel to all values."""
    tables = []
    for channel in range(3):
        low, high = int(crop[..., channel].min()), int(crop[..., channel].max())
        scale = 255.0 / (high - low) if high > low else 1.0
        offset = -low * scale if high > low else 0.0
        tables.append(np.clip((np.arange(256) * scale + offset).astype(np.int64), 0, 255))
    return _by_tables(crop, tables)


def _equalize(crop: Pixels, _: float) -> Pixels:
    """Makes all values of each channel about equally frequent."""
    tables = []
    for channel in range(3):
        counts = np.bincount(crop[..., channel].ravel(), minlength=256)
        used = counts[counts > 0]
        step = int(used[:-1].sum()) // 255
        if step:
            before = np.concatenate([[0], np.cumsum(counts)[:-1]])
            tables.append(np.minimum((step // 2 + before) // step, 255))
        else:
            tables.append(np.arange(256))
    return _by_tables(crop, tables)


def _by_tables(crop: Pixels, tables: list[npt.NDArray[np.int64]]) -> Pixels:
    return np.stack([table.astype(np.uint8)[crop[..., at]] for at, table in enumerate(tables)], 2)
