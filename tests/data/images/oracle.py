"""What crops must be, written down a second time: Pillow for resizing, plain arithmetic for the rest."""

from __future__ import annotations

import colorsys
import math
from typing import Any

import numpy as np
from PIL import Image

from headway.data.images import CropRecipe
from headway.data.order.permutation import derive_key


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    """An image with smooth areas, edges, texture and saturated colors."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [128 + 120 * np.sin(x / (9 + 5 * c) + seed) * np.cos(y / (13 - 3 * c)) for c in range(3)]
    pixels = np.stack(waves, 2) + rng.normal(0, 12, (height, width, 3))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (250, 5, 40)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def word(key: int, crop: int, number: int) -> float:
    """A random number of a crop: half of a word of the splitmix64 stream that begins at its key."""
    mask = 2**64 - 1
    state = (derive_key(3, key, crop) + (number // 2 + 1) * 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    state ^= state >> 31
    return (state >> 32 * (number % 2) & 0xFFFFFFFF) * 2.0**-32


def box(recipe: CropRecipe, key: int, crop: int, height: int, width: int) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop.get_params, a sample at a time."""
    assert recipe.scale is not None
    low, high = (math.log(value) for value in recipe.ratio)
    for number in range(10):
        first, second = (word(key, crop, 16 + 2 * number + part) for part in (0, 1))
        area = height * width * (recipe.scale[0] + first * (recipe.scale[1] - recipe.scale[0]))
        ratio = math.exp(low + second * (high - low))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = math.floor(word(key, crop, 14) * (height - h + 1))
            return top, math.floor(word(key, crop, 15) * (width - w + 1)), h, w
    if width / height < recipe.ratio[0]:
        w, h = width, min(height, max(1, round(width / recipe.ratio[0])))
    elif width / height > recipe.ratio[1]:
        h, w = height, min(width, max(1, round(height * recipe.ratio[1])))
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


def resized(pixels: np.ndarray, ints: Any, size: int, method: str = "bicubic") -> np.ndarray:
    """One crop by Pillow, height x width x 3."""
    top, left, h, w, rows, columns, row, column = (int(value) for value in ints[:8])
    kind = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}[method]
    image = Image.fromarray(pixels).crop((left, top, left + w, top + h)).resize((columns, rows), kind)
    out = np.asarray(image)[row : row + size, column : column + size]
    return out[:, ::-1] if ints[8] & 1 else out


def gray(pixels: np.ndarray) -> np.ndarray:
    return np.repeat((pixels @ np.array([0.2989, 0.587, 0.114]))[..., None], 3, 2)


def turned(pixels: np.ndarray, shift: float) -> np.ndarray:
    out = np.empty_like(pixels)
    for place in np.ndindex(pixels.shape[:2]):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixels[place] / 255))
        out[place] = colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)
    return out * 255


def blurred(pixels: np.ndarray, sigma: float) -> np.ndarray:
    places = np.arange(-4, 5)
    line = np.exp(-0.5 * (places / sigma) ** 2)
    kernel = np.outer(line, line) / line.sum() ** 2
    padded = np.pad(pixels, ((4, 4), (4, 4), (0, 0)), "reflect")
    h, w = pixels.shape[:2]
    return sum(kernel[i, j] * padded[i : i + h, j : j + w] for i in range(9) for j in range(9))


def colored(crop: np.ndarray, ints: Any, floats: Any) -> np.ndarray:
    """A crop from 0 to 255 after all that its row says about color."""
    x = crop.astype(np.float64)
    for slot in range(4):
        operation = (int(ints[9]) >> 3 * slot) & 7
        if operation == 1:
            x = np.clip(x * floats[0], 0, 255)
        elif operation == 2:
            x = np.clip(floats[1] * x + (1 - floats[1]) * gray(x)[..., 0].mean(), 0, 255)
        elif operation == 3:
            x = np.clip(floats[2] * x + (1 - floats[2]) * gray(x), 0, 255)
        elif operation == 4:
            x = turned(x, float(floats[3]))
    if ints[8] & 2:
        x = gray(x)
    if floats[4] > 0:
        x = blurred(x, float(floats[4]))
    return np.where(x >= 128, 255 - x, x) if ints[8] & 4 else x
