"""Masks of patches, for iBOT, BEiT and DINOv2: blocks of an image that a student does not see."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from headway.data.images.batch import Batch
from headway.data.images.transforms import Range
from headway.data.order.permutation import UInts, derive_key
from headway.errors import UsageError

_MASK = 8  # the purpose of a hash
_TRIES = 10  # for a block that hides further patches, as in BEiT
_MIN_BLOCK_PATCHES = 4
_MAX_BLOCK_SHARE = 0.5


@final
@dataclass(frozen=True, kw_only=True)
class BlockMasks:
    """Adds masks of the patches of global crops to a batch: `batch.masks`, crops x samples x patches.

        hw.data.MultiCrop(then=(hw.data.BlockMasks(patch=14),))

    With `probability`, a crop gets a mask that hides a share of its patches within `share`, in blocks whose sides have
    a ratio within `ratio`. A mask depends only on seed, epoch, sample and crop.
    """

    patch: int = 14
    """pixels; patches are squares"""
    probability: float = 0.5
    share: Range = (0.1, 0.5)
    ratio: Range = (0.3, 1 / 0.3)

    def __post_init__(self) -> None:
        if self.patch < 1 or not 0 <= self.probability <= 1:
            raise UsageError(
                f"patch={self.patch}, probability={self.probability}: give pixels, and a probability from 0 to 1"
            )
        if not 0 <= self.share[0] <= self.share[1] <= 1 or not 0 < self.ratio[0] <= self.ratio[1]:
            raise UsageError(
                f"share={self.share}, ratio={self.ratio}: give the smaller number first, above 0"
            )

    def __call__(self, batch: Batch, keys: UInts) -> Batch:
        if "masks" in batch:
            raise UsageError("samples have a part 'masks', where BlockMasks puts its own: rename that part")
        crops = batch["global_crops"] if "global_crops" in batch else batch["images"][None]
        size = int(crops.shape[-1])
        if size % self.patch:
            raise UsageError(
                f"crops of {size} pixels do not divide into patches of {self.patch}: change patch= or the size"
            )
        side = size // self.patch
        masks = [[self.draw(int(key), crop, side).ravel() for key in keys] for crop in range(len(crops))]
        host = torch.from_numpy(np.array(masks))
        if crops.is_cuda:
            host = host.pin_memory().to(crops.device, non_blocking=True)
        batch["masks"] = host
        return batch

    def draw(self, key: int, crop: int, side: int) -> npt.NDArray[np.bool_]:
        """Draws the mask of one crop of `side` x `side` patches."""
        rng = np.random.Generator(np.random.Philox(derive_key(_MASK, key, crop)))
        mask = np.zeros((side, side), np.bool_)
        if rng.random() >= self.probability:
            return mask
        wanted = int(side * side * rng.uniform(*self.share))
        while (left := wanted - int(mask.sum())) > 0:
            if not self._hide_block(mask, left, rng):
                break
        return mask

    def _hide_block(self, mask: npt.NDArray[np.bool_], left: int, rng: np.random.Generator) -> bool:
        """Hides a block that adds at most `left` patches; returns whether one was found."""
        side = len(mask)
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        most = max(_MIN_BLOCK_PATCHES, min(left, int(_MAX_BLOCK_SHARE * side * side)))
        for _ in range(_TRIES):
            area, ratio = rng.uniform(_MIN_BLOCK_PATCHES, most), math.exp(rng.uniform(low, high))
            height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if not (0 < height < side and 0 < width < side):
                continue
            top, start = int(rng.integers(side - height + 1)), int(rng.integers(side - width + 1))
            block = mask[top : top + height, start : start + width]
            if 0 < int((~block).sum()) <= left:
                block[:] = True
                return True
        return False
