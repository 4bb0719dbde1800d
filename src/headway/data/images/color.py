"""Color operations on the CPU, on one crop of 3 x height x width floats from 0 to 255, in place.

The same operations in the same order as in torchvision, without its rounding between them. The GPU's kernels follow
these functions line by line.
"""

from __future__ import annotations

import math
import threading
from functools import cache
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.data.images.draws import ColorOp, Column, Factor, Flag

GRAY = (0.2989, 0.587, 0.114)
BLUR_RADIUS = 4  # pixels: 9 taps, as in DINOv2
SOLARIZE_FROM = 128.0
_MIN_WEIGHT = 1e-4  # of a pixel in a blur: a smaller weight changes no level


@final
class Workspace(threading.local):
    """Memory of a thread that is reused for each crop: new memory costs a page fault per 4 kB, which took longer than
    the arithmetic."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str | int, ...], Tensor] = {}

    def take(self, purpose: str, *shape: int) -> Tensor:
        """Returns a tensor with any content, valid until the next call with the same purpose and shape."""
        found = self._memory.get((purpose, *shape))
        if found is None:
            found = self._memory[(purpose, *shape)] = torch.empty(shape)
        return found


_workspace = Workspace()


def as_floats(crop: Tensor) -> Tensor:
    """Returns the bytes of a crop as floats in the memory of this thread, valid until its next crop."""
    return _workspace.take("crop", *crop.shape).copy_(crop)


def change_colors(crop: Tensor, ints: npt.NDArray[np.int32], floats: npt.NDArray[np.float32]) -> None:
    """Applies all operations in a crop's row of the tables, except for the box and the flip."""
    order = int(ints[Column.ORDER])
    while order:
        operation, factor = order & 7, 0.0
        order >>= 3
        if operation:
            factor = float(floats[operation - 1])
        match operation:
            case ColorOp.BRIGHTNESS:
                crop.mul_(factor)
            case ColorOp.CONTRAST:
                crop.lerp_(_mean_gray(crop), 1 - factor)
            case ColorOp.SATURATION:
                crop.lerp_(_gray(crop), 1 - factor)
            case ColorOp.HUE:
                shift_hue(crop, factor)
        if factor > 1:  # smaller ones stay between 0 and 255
            crop.clamp_(0, 255)
    flags = int(ints[Column.FLAGS])
    if flags & Flag.GRAYSCALE:
        crop.copy_(_gray(crop).expand_as(crop))
    if floats[Factor.SIGMA] > 0:
        blur(crop, float(floats[Factor.SIGMA]))
    if flags & Flag.SOLARIZE:
        crop.copy_(torch.where(crop >= SOLARIZE_FROM, 255 - crop, crop))


def _gray(crop: Tensor) -> Tensor:
    gray = torch.mul(crop[0], GRAY[0], out=_workspace.take("gray", *crop.shape[1:]))
    return gray.add_(crop[1], alpha=GRAY[1]).add_(crop[2], alpha=GRAY[2])


def _mean_gray(crop: Tensor) -> Tensor:
    means: list[float] = crop.mean((1, 2)).tolist()
    return torch.tensor(sum(mean * share for mean, share in zip(means, GRAY, strict=True)))


def shift_hue(crop: Tensor, shift: float) -> None:
    """Turns the hue of a crop by a share of the circle from -0.5 to 0.5.

    A channel is highest within 60 degrees of its own hue, lowest beyond 120 degrees of it, and linear in between. Hues
    are in sixths of the circle and multiplied by chroma, so that nothing is divided by it.
    """
    red, green, blue = crop
    top, low, chroma, hue, spare = _workspace.take("hue", 5, *crop.shape[1:])
    torch.maximum(torch.maximum(red, green, out=top), blue, out=top)
    torch.minimum(torch.minimum(red, green, out=low), blue, out=low)
    torch.sub(top, low, out=chroma)
    places = _workspace.take("places", *crop.shape)
    by_red, by_green, by_blue = places  # the hue, if that channel is the highest
    torch.sub(green, blue, out=by_red)
    torch.sub(blue, red, out=by_green).add_(chroma, alpha=2)
    torch.sub(red, green, out=by_blue).add_(chroma, alpha=4)
    torch.lerp(by_green, by_blue, _is_positive(torch.sub(top, green, out=spare)), out=hue)
    torch.lerp(by_red, hue, _is_positive(torch.sub(top, red, out=spare)), out=hue)  # from -1 to 5
    for place, start in zip(places, (5, 3, 1), strict=True):
        torch.add(hue, chroma, alpha=(6 * shift + start) % 6 - 5, out=place)
    places.abs_().sub_(chroma, alpha=3).abs_()  # from the opposite hue, at most 3
    places.add_(torch.sub(top, chroma, alpha=2, out=spare))
    torch.clamp(places, low, top, out=crop)


def _is_positive(values: Tensor) -> Tensor:
    """Turns nonnegative numbers into 1 where they are above 0; several times as fast as a comparison."""
    return values.mul_(1e6).clamp_(max=1)


def blur_weights(sigma: float) -> list[float]:
    """Returns the nine weights of a Gaussian blur."""
    weights = [math.exp(-0.5 * (place / sigma) ** 2) for place in range(-BLUR_RADIUS, BLUR_RADIUS + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]


def blur(crop: Tensor, sigma: float) -> None:
    """Blurs a crop; beyond its border, the crop is reflected."""
    weights = [(tap, weight) for tap, weight in enumerate(blur_weights(sigma)) if weight > _MIN_WEIGHT]
    for along in (1, 2):
        padded, size = _pad(crop, along), crop.shape[along]
        (first, share), *others = weights
        torch.mul(padded.narrow(along, first, size), share, out=crop)
        for tap, weight in others:
            crop.add_(padded.narrow(along, tap, size), alpha=weight)


def _pad(crop: Tensor, along: int) -> Tensor:
    """Returns a crop continued beyond its border, above and below, or to the left and right."""
    size = crop.shape[along]
    shape = [side + 2 * BLUR_RADIUS * (at == along) for at, side in enumerate(crop.shape)]
    padded, places = _workspace.take("padded", *shape), _reflected(size)
    if along == 1:
        return torch.index_select(crop, 1, places, out=padded)
    # selecting columns takes ten times as long as copying them
    padded.narrow(along, BLUR_RADIUS, size).copy_(crop)
    for start in (0, size + BLUR_RADIUS):
        border = crop.index_select(along, places.narrow(0, start, BLUR_RADIUS))
        padded.narrow(along, start, BLUR_RADIUS).copy_(border)
    return padded


@cache
def _reflected(size: int) -> Tensor:
    """Returns the row numbers of an image of this size, continued beyond its first and last row by reflection; several
    times, if the image is tiny."""
    period = max(1, 2 * (size - 1))
    places = torch.arange(-BLUR_RADIUS, size + BLUR_RADIUS).remainder(period)
    return torch.minimum(places, period - places)
