"""Crops on the CPU: one decoded image at a time, on the threads of the loader.

torch resizes in bytes, several times as fast as Pillow and equal to it except for rounding. Colors change in floats,
while the crop is in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from headway.data.images.color import as_floats, change_colors
from headway.data.images.draws import Column, CropTable, Factor, Flag, draw_crops
from headway.data.images.fp8 import E4M3_MAX
from headway.data.images.transforms import ImageTransform
from headway.data.images.window import enlarged_window
from headway.data.order.permutation import Ints, UInts, derive_key
from headway.data.shards.decode import Pixels

REDUCTIONS = (8, 4, 2)
"""factors by which JPEGs can be reduced when they are decoded"""
_SPARE = 2  # pixels of a reduced image for each pixel of a crop, at least
_LARGE_PIXELS = 2**24  # of an enlarged image, above which only the crop itself is computed
_AUGMENT = 7  # the purpose of a hash
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "uint8": torch.uint8,
    "fp8": torch.float8_e4m3fn,
}


def draw_groups(transform: ImageTransform, keys: UInts, sizes: Ints) -> list[CropTable]:
    """Draws the crops of a batch: a table for each group. Crops are numbered across all groups."""
    groups = transform.groups()
    recipes = [recipe for group in groups for recipe in group.recipes]
    pixels = [group.size for group in groups for _ in group.recipes]
    table, at, found = draw_crops(recipes, pixels, keys, sizes), 0, list[CropTable]()
    for group in groups:
        end = at + len(group.recipes)
        found.append(CropTable(table.ints[:, at:end], table.floats[:, at:end]))
        at = end
    return found


class DrawnImage(NamedTuple):
    """An image whose crops are drawn."""

    pixels: Pixels
    tables: list[CropTable]
    """a table for each group of crops, and in it a row for each crop"""
    key: int
    factor: int = 1
    """by which the image was reduced when it was decoded; boxes of crops refer to the whole image"""


def draw_image(transform: ImageTransform, key: int, height: int, width: int) -> list[CropTable]:
    """Draws the crops of one image."""
    tables = draw_groups(transform, np.array([key], np.uint64), np.array([(height, width)]))
    return [CropTable(table.ints[0], table.floats[0]) for table in tables]


def largest_reduction(tables: list[CropTable]) -> int:
    """Returns the factor by which an image may be reduced when it is decoded: a crop is still made of twice its rows
    and columns, as in Pillow's thumbnails, so that it hardly differs."""
    boxes = np.concatenate([table.ints for table in tables])
    spare = min(
        (boxes[:, Column.HEIGHT] // boxes[:, Column.ROWS]).min(),
        (boxes[:, Column.WIDTH] // boxes[:, Column.COLUMNS]).min(),
    )
    return next((factor for factor in REDUCTIONS if _SPARE * factor <= spare), 1)


def cut_crops(
    transform: ImageTransform, image: DrawnImage, into: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Returns the crops of one image by the names of their groups, each crops x 3 x size x size.

    They are written into `into`, if that is given.
    """
    pixels, tables, number = image.pixels, image.tables, 0
    if not pixels.flags.writeable:
        pixels = pixels.copy()  # torch accepts only writable arrays
    found, dtype = dict[str, Tensor](), DTYPES[transform.output]
    layout = torch.channels_last if transform.channels_last else torch.contiguous_format
    scale, shift = _normalization(transform)
    for group, table in zip(transform.groups(), tables, strict=True):
        shape = len(group.recipes), 3, group.size, group.size
        out = torch.empty(shape, dtype=dtype, memory_format=layout) if into is None else into[group.name]
        for slot, ints, floats in zip(out, table.ints, table.floats, strict=True):
            if image.factor > 1:
                crop = _resize_reduced(image, ints, group.size, transform.interpolation)
            else:
                crop = resize(pixels, ints, group.size, transform.interpolation)
            if ints[Column.FLAGS] & Flag.FLIP:
                crop = crop.flip(2)
            if transform.augment is not None:
                augmented = transform.augment(
                    crop.permute(1, 2, 0).numpy(), derive_key(_AUGMENT, image.key, number)
                )
                crop = torch.from_numpy(np.ascontiguousarray(augmented)).permute(2, 0, 1)
            number += 1
            if dtype is torch.uint8 and _is_plain(ints, floats):
                slot.copy_(crop)
                continue
            changed = as_floats(crop)
            change_colors(changed, ints, floats)
            if dtype is not torch.uint8:
                slot.copy_(changed.mul_(scale).add_(shift))
            else:
                slot.copy_(changed.round_())
        found[group.name] = out
    return found


def resize(pixels: Pixels, ints: npt.NDArray[np.int32], size: int, interpolation: str) -> Tensor:
    """Returns one crop of an image, resized with antialias: 3 x size x size bytes, not flipped."""
    top, left, height, width, rows, columns, row, column = (int(value) for value in ints[:8])
    part = pixels[top : top + height, left : left + width]
    if rows * columns > max(_LARGE_PIXELS, height * width):
        window = enlarged_window(part, (rows, columns), (row, column), size, interpolation)
        return torch.from_numpy(window).permute(2, 0, 1)
    box = torch.from_numpy(part).permute(2, 0, 1)[None]
    if box.shape[2:] == (rows, columns):
        resized = box[0]
    else:
        resized = F.interpolate(box, (rows, columns), mode=interpolation, antialias=True)[0]
    return resized[:, row : row + size, column : column + size]


def _resize_reduced(image: DrawnImage, ints: npt.NDArray[np.int32], size: int, interpolation: str) -> Tensor:
    """Does the same as `resize` for a reduced image, with Pillow, because boxes may begin and end within pixels."""
    from PIL import Image

    top, left, height, width, rows, columns, row, column = (int(value) for value in ints[:8])
    sides = (left, top, left + width, top + height)
    low, high = int(top / image.factor), -(-(top + height) // image.factor)  # only these rows are copied
    box = (
        sides[0] / image.factor,
        sides[1] / image.factor - low,
        sides[2] / image.factor,
        sides[3] / image.factor - low,
    )
    source = Image.fromarray(image.pixels[low:high])
    resized = source.resize((columns, rows), Image.Resampling[interpolation.upper()], box)
    cut = np.array(resized)[row : row + size, column : column + size]
    return torch.from_numpy(cut).permute(2, 0, 1)


def _is_plain(ints: npt.NDArray[np.int32], floats: npt.NDArray[np.float32]) -> bool:
    """Whether a crop keeps its colors."""
    kept = not ints[Column.FLAGS] & ~int(Flag.FLIP)
    return bool(kept and not ints[Column.ORDER] and not floats[Factor.SIGMA])


def _normalization(transform: ImageTransform) -> tuple[Tensor, Tensor]:
    """Returns factor and summand that turn bytes into normalized values, per channel."""
    factors, summands = normalization(transform)
    return torch.tensor(factors)[:, None, None], torch.tensor(summands)[:, None, None]


def normalization(transform: ImageTransform) -> tuple[list[float], list[float]]:
    """Returns factor and summand that turn values from 0 to 255 into those of the output, per channel."""
    scale = E4M3_MAX / largest_value(transform) if transform.output == "fp8" else 1.0
    factors = [scale / (255 * std) for std in transform.std]
    return factors, [-scale * mean / std for mean, std in zip(transform.mean, transform.std, strict=True)]


def largest_value(transform: ImageTransform) -> float:
    """Returns the largest absolute value that a normalized pixel can have; 2.64 by default."""
    return max(max(mean, 1 - mean) / std for mean, std in zip(transform.mean, transform.std, strict=True))
