"""Color operations on the CPU, on one crop of 3 x height x width floats from 0 to 255.

The same operations in the same order as in torchvision, without its rounding between them. The GPU's kernels follow
these functions line by line.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.data.images.draws import ColorOp, Column, Factor, Flag

GRAY = (0.2989, 0.587, 0.114)
BLUR_RADIUS = 4  # pixels: 9 taps, as in DINOv2
SOLARIZE_FROM = 128.0


def change_colors(crop: Tensor, ints: npt.NDArray[np.int32], floats: npt.NDArray[np.float32]) -> Tensor:
    """Applies to a crop all that its row of the tables says, except for the box and the flip; may work in place."""
    order = int(ints[Column.ORDER])
    while order:
        operation, factor = order & 7, 0.0
        order >>= 3
        if operation:
            factor = float(floats[operation - 1])
        match operation:
            case ColorOp.BRIGHTNESS:
                crop.mul_(factor).clamp_(0, 255)
            case ColorOp.CONTRAST:
                mean = _gray(crop).mean()
                crop.mul_(factor).add_((1 - factor) * mean).clamp_(0, 255)
            case ColorOp.SATURATION:
                gray = _gray(crop)
                crop.mul_(factor).add_(gray, alpha=1 - factor).clamp_(0, 255)
            case ColorOp.HUE:
                shift_hue(crop, factor)
    flags = int(ints[Column.FLAGS])
    if flags & Flag.GRAYSCALE:
        crop.copy_(_gray(crop).expand_as(crop))
    if floats[Factor.SIGMA] > 0:
        crop = blur(crop, float(floats[Factor.SIGMA]))
    if flags & Flag.SOLARIZE:
        crop = torch.where(crop >= SOLARIZE_FROM, 255 - crop, crop)
    return crop


def _gray(crop: Tensor) -> Tensor:
    gray = crop[:1] * GRAY[0]
    return gray.add_(crop[1:2], alpha=GRAY[1]).add_(crop[2:], alpha=GRAY[2])


def shift_hue(crop: Tensor, shift: float) -> None:
    """Turns the hue of a crop, in place, by a share of the circle from -0.5 to 0.5."""
    red, green, blue = crop
    top = torch.maximum(torch.maximum(red, green), blue)
    chroma = top - torch.minimum(torch.minimum(red, green), blue)
    divisor = torch.where(chroma > 0, chroma, 1)
    hue = torch.where(top == green, (blue - red) / divisor + 2, (red - green) / divisor + 4)
    hue = torch.where(top == red, (green - blue) / divisor, hue).add_(6 * shift + 6)
    for channel, start in enumerate((5, 3, 1)):
        place = (hue + start).remainder_(6)
        share = torch.minimum(place, 4 - place).clamp_(0, 1)
        torch.addcmul(top, chroma, share, value=-1, out=crop[channel])


def blur_weights(sigma: float) -> Tensor:
    """Returns the nine weights of a Gaussian blur."""
    places = torch.arange(-BLUR_RADIUS, BLUR_RADIUS + 1, dtype=torch.float32)
    weights = torch.exp(-0.5 * (places / sigma) ** 2)
    return weights / weights.sum()


def blur(crop: Tensor, sigma: float) -> Tensor:
    """Returns the blurred crop; beyond its border, the crop is reflected."""
    height, width = crop.shape[1:]
    weights = blur_weights(sigma)
    rows, columns = _reflected(height), _reflected(width)
    padded = crop[:, rows]
    across = padded[:, :height] * weights[0]
    for tap in range(1, 2 * BLUR_RADIUS + 1):
        across.add_(padded[:, tap : tap + height], alpha=float(weights[tap]))
    padded = across[:, :, columns]
    out = padded[:, :, :width] * weights[0]
    for tap in range(1, 2 * BLUR_RADIUS + 1):
        out.add_(padded[:, :, tap : tap + width], alpha=float(weights[tap]))
    return out


def _reflected(size: int) -> Tensor:
    """Returns the rows of an image with a reflected border; those of a tiny image are reflected several times."""
    period = max(1, 2 * (size - 1))
    places = torch.arange(-BLUR_RADIUS, size + BLUR_RADIUS).remainder(period)
    return torch.minimum(places, period - places)
