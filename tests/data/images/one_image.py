"""The crops of one image on the CPU, drawn and cut at once, as a loader does it for a sample."""

from __future__ import annotations

from torch import Tensor

from headway.data.images.cpu import DrawnImage, cut_crops, draw_image
from headway.data.images.transforms import ImageTransform
from headway.data.shards.decode import Pixels


def crop_image(transform: ImageTransform, pixels: Pixels, key: int) -> dict[str, Tensor]:
    """Returns the crops by the names of their groups, each crops x 3 x size x size."""
    return cut_crops(transform, DrawnImage(pixels, draw_image(transform, key, *pixels.shape[:2]), key))
