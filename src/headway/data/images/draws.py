"""The parameters of crops, drawn for a whole batch at once: a pure function of each sample's key and the crop's number.

Random numbers are hashes of (key of the sample, crop, purpose), two of 32 bits to a hash, so nothing depends on the
other samples of the batch, on the device, on the number of ranks or on where a run resumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.data.images.transforms import CropRecipe
from headway.data.order.permutation import Ints, UInts, derive_keys, hash_streams

Floats = npt.NDArray[np.float64]

INTS, FLOATS = 12, 8  # columns of the two tables, rounded up so that rows are aligned on a device
_CROP = 3  # the purpose of these hashes; transforms and substitutes of samples have 1 and 2
_TRIES = 10  # for a box that lies within the image, as in torchvision
_UNIT = 2.0**-32


class Word(IntEnum):
    """The purpose of a random number. These numbers never change, because they make runs reproducible."""

    FLIP = 0
    JITTER = 1
    BRIGHTNESS = 2
    CONTRAST = 3
    SATURATION = 4
    HUE = 5
    ORDER = 6  # four of them
    GRAYSCALE = 10
    BLUR = 11
    SIGMA = 12
    SOLARIZE = 13
    TOP = 14
    LEFT = 15


_HASHES = 8  # for every crop; one more for each try for a box is drawn when it is needed


class Column(IntEnum):
    """Columns of the table of whole numbers."""

    TOP = 0
    LEFT = 1
    HEIGHT = 2
    WIDTH = 3
    ROWS = 4  # the size to which the box is resized
    COLUMNS = 5
    ROW = 6  # where the crop begins in it
    COLUMN = 7
    FLAGS = 8
    ORDER = 9  # of the color operations, four times three bits


class Factor(IntEnum):
    """Columns of the table of real numbers."""

    BRIGHTNESS = 0
    CONTRAST = 1
    SATURATION = 2
    HUE = 3
    SIGMA = 4  # 0: no blur


class Flag(IntFlag):
    """Operations that are either applied to a crop or not."""

    FLIP = 1
    GRAYSCALE = 2
    SOLARIZE = 4


class ColorOp(IntEnum):
    """The color operations, as `Column.ORDER` lists them."""

    NONE = 0
    BRIGHTNESS = 1
    CONTRAST = 2
    SATURATION = 3
    HUE = 4


class CropTable(NamedTuple):
    """The parameters of all crops of a batch: samples x crops x columns."""

    ints: npt.NDArray[np.int32]
    floats: npt.NDArray[np.float32]


def draw_crops(recipes: Sequence[CropRecipe], pixels: Sequence[int], keys: UInts, sizes: Ints) -> CropTable:
    """Draws the crops of a batch.

    `pixels` are the sizes of the crops, `keys` the hashes of the samples, and `sizes` rows of height and width.
    """
    count = len(keys)
    ints = np.zeros((count, len(recipes), INTS), np.int32)
    floats = np.zeros((count, len(recipes), FLOATS), np.float32)
    crops = np.arange(len(recipes), dtype=np.uint64)
    crop_keys = derive_keys(_CROP, keys[:, None], crops[None, :])
    words = uniform(crop_keys[:, :, None], np.arange(_HASHES, dtype=np.uint64))
    first = 0
    for (recipe, size), alike in groupby(zip(recipes, pixels, strict=True)):  # most crops have one recipe
        each = len(list(alike))
        here = slice(first, first + each)
        drawn, of_crops = words[:, here].reshape(count * each, -1), np.repeat(sizes, each, 0)
        of_ints = np.zeros((count * each, INTS), np.int32)
        of_floats = np.zeros((count * each, FLOATS), np.float32)
        if recipe.scale is None:
            of_ints[:, :8] = _center(of_crops, size, recipe.resize)
        else:
            of_ints[:, :4] = _boxes(recipe, recipe.scale, crop_keys[:, here].reshape(-1), drawn, of_crops)
            of_ints[:, Column.ROWS : Column.COLUMNS + 1] = size
        _draw_colors(recipe, drawn, of_ints, of_floats)
        ints[:, here], floats[:, here] = of_ints.reshape(count, each, -1), of_floats.reshape(count, each, -1)
        first += each
    return CropTable(ints, floats)


def uniform(keys: UInts, numbers: UInts) -> Floats:
    """Returns random numbers in [0, 1), two for each key and number of a hash."""
    hashes = np.ascontiguousarray(hash_streams(keys, numbers).astype("<u8", copy=False))
    found: Floats = hashes.view("<u4") * _UNIT
    return found


def _between(words: Floats, low: float, high: float) -> Floats:
    return low + words * (high - low)


def _boxes(
    recipe: CropRecipe, scale: tuple[float, float], keys: UInts, words: Floats, sizes: Ints
) -> npt.NDArray[np.int64]:
    """Returns top, left, height and width of random boxes, by the rule of torchvision's RandomResizedCrop."""
    height, width = np.ascontiguousarray(sizes[:, 0]), np.ascontiguousarray(sizes[:, 1])
    low, high = math.log(recipe.ratio[0]), math.log(recipe.ratio[1])
    boxes = np.empty((4, len(keys)), np.int64)
    left: Ints | slice = slice(None)  # samples that have no box yet
    for number in range(_TRIES):
        drawn = uniform(keys[left][:, None], np.array([_HASHES + number], np.uint64))
        area = height[left] * width[left] * _between(drawn[:, 0], *scale)
        ratio = np.exp(_between(drawn[:, 1], low, high))
        tall, wide = np.rint(np.sqrt(area / ratio)), np.rint(np.sqrt(area * ratio))
        boxes[2, left], boxes[3, left] = tall, wide
        misfit = (wide < 1) | (tall < 1) | (wide > width[left]) | (tall > height[left])
        left = np.flatnonzero(misfit) if isinstance(left, slice) else left[misfit]
        if not left.size:
            break
    boxes[2, left], boxes[3, left] = _fallback(recipe, height[left], width[left])
    # assigned to integers: fractions are cut off
    boxes[0] = words[:, Word.TOP] * (height - boxes[2] + 1)
    boxes[1] = words[:, Word.LEFT] * (width - boxes[3] + 1)
    boxes[0, left], boxes[1, left] = (height[left] - boxes[2, left]) // 2, (width[left] - boxes[3, left]) // 2
    return boxes.T


def _fallback(recipe: CropRecipe, height: Ints, width: Ints) -> tuple[Ints, Ints]:
    """Returns the largest box in the middle of the image whose ratio is allowed."""
    ratio = width / height
    narrow, wide = ratio < recipe.ratio[0], ratio > recipe.ratio[1]
    box_h = np.where(narrow, np.rint(width / recipe.ratio[0]), height)
    box_w = np.where(wide, np.rint(height * recipe.ratio[1]), width)
    return np.clip(box_h, 1, height).astype(np.int64), np.clip(box_w, 1, width).astype(np.int64)


def _center(sizes: Ints, size: int, resize: int) -> Ints:
    """Returns the first eight columns of a crop of the center, after the short side became `resize` pixels."""
    out = np.zeros((len(sizes), 8), np.int64)
    out[:, Column.HEIGHT], out[:, Column.WIDTH] = sizes[:, 0], sizes[:, 1]
    short = sizes.min(1, keepdims=True)
    resized = sizes * resize // short  # torchvision cuts the long side's fraction off
    out[:, Column.ROWS], out[:, Column.COLUMNS] = resized[:, 0], resized[:, 1]
    starts = np.rint((resized - size) / 2).astype(np.int64)
    out[:, Column.ROW], out[:, Column.COLUMN] = starts[:, 0], starts[:, 1]
    return out


def _draw_colors(
    recipe: CropRecipe, words: Floats, ints: npt.NDArray[np.int32], floats: npt.NDArray[np.float32]
) -> None:
    """Draws everything but the box, into the rows of one crop."""
    flags = Flag.FLIP * (words[:, Word.FLIP] < recipe.flip)
    flags |= Flag.GRAYSCALE * (words[:, Word.GRAYSCALE] < recipe.grayscale)
    flags |= Flag.SOLARIZE * (words[:, Word.SOLARIZE] < recipe.solarize)
    ints[:, Column.FLAGS] = flags
    blurred = words[:, Word.BLUR] < recipe.blur
    floats[:, Factor.SIGMA] = blurred * _between(words[:, Word.SIGMA], *recipe.sigma)
    amounts = (recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue)
    for column, amount in enumerate(amounts):
        middle = 0.0 if column == Factor.HUE else 1.0
        drawn = words[:, Word.BRIGHTNESS + column]
        floats[:, column] = _between(drawn, middle - amount, middle + amount)
    order = np.argsort(words[:, Word.ORDER : Word.ORDER + 4], 1)
    active = np.array(
        [op if amount else ColorOp.NONE for op, amount in enumerate(amounts, ColorOp.BRIGHTNESS)]
    )
    shifts = np.array([0, 3, 6, 9])
    ints[:, Column.ORDER] = (active[order] << shifts).sum(1) * (words[:, Word.JITTER] < recipe.jitter)
