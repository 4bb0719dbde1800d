"""Transforms of whole batches, for supervised training: erasing, Mixup and CutMix.

All random numbers are derived from the hashes of the samples. Transforms that mix samples depend on the whole batch, so
results are the same after a resume, and on other numbers of ranks only if the batches of each rank are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headway.data.images.batch import Batch
from headway.data.images.draws import draw_crops
from headway.data.images.transforms import BatchTransform, CropRecipe, Range, check_probability
from headway.data.order.permutation import UInts, derive_keys
from headway.errors import UsageError

_ERASE, _MIX, _CHOOSE = 4, 5, 6  # the purpose of a hash


@final
@dataclass(frozen=True, kw_only=True)
class RandomErasing:
    """Sets a random box of some images to 0: the mean of all images if they are normalized, black if they are uint8.

    hw.data.RandomResizedCrop(size=224, then=(hw.data.RandomErasing(probability=0.25),))
    """

    probability: float = 0.25
    scale: Range = (0.02, 0.33)
    ratio: Range = (0.3, 3.3)

    def __post_init__(self) -> None:
        check_probability("probability", self.probability)
        CropRecipe(scale=self.scale, ratio=self.ratio)  # checks the rest

    def __call__(self, batch: Batch, keys: UInts) -> Batch:
        images = batch.images
        height, width = images.shape[2:]
        own = derive_keys(_ERASE, keys)
        recipe = CropRecipe(scale=self.scale, ratio=self.ratio, flip=self.probability)
        table = draw_crops([recipe], [1], own, np.full((len(own), 2), (height, width))).ints[:, 0]
        chosen = torch.from_numpy(table).to(images.device, non_blocking=True)
        top, left, tall, wide, erased = (chosen[:, column, None] for column in (0, 1, 2, 3, 8))
        rows = torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device)
        in_rows = (rows >= top) & (rows < top + tall) & (erased > 0)
        in_columns = (columns >= left) & (columns < left + wide)
        filled = images.view(torch.uint8) if images.dtype is torch.float8_e4m3fn else images  # 0 is 0 in both
        filled.masked_fill_((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0)
        return batch


@final
@dataclass(frozen=True, kw_only=True)
class Mixup:
    """Blends each image, and its label, with its neighbor in the batch (arXiv 1710.09412). Labels become shares.

    hw.data.RandomResizedCrop(size=224, then=(hw.data.Mixup(classes=1000, alpha=0.2),))
    """

    classes: int
    alpha: float = 0.2

    def __post_init__(self) -> None:
        _check(self.classes, self.alpha)

    def __call__(self, batch: Batch, keys: UInts) -> Batch:
        share = float(_generator(keys).beta(self.alpha, self.alpha))
        images = batch.images
        if not images.is_floating_point():
            raise UsageError(
                'Mixup cannot blend images of output="uint8": give the transform output="bf16", "fp16" or "fp32"'
            )
        if images.dtype is torch.float8_e4m3fn:  # in which torch does not compute
            whole = images.to(torch.float32)
            batch["images"] = torch.lerp(whole.roll(1, 0), whole, share).to(images.dtype)
        else:
            batch["images"] = torch.lerp(images.roll(1, 0), images, share)
        batch["cls"] = _mixed_labels(batch.labels, self.classes, share)
        return batch


@final
@dataclass(frozen=True, kw_only=True)
class CutMix:
    """Replaces a random box of each image by that of its neighbor in the batch (arXiv 1905.04899).

    hw.data.RandomResizedCrop(size=224, then=(hw.data.CutMix(classes=1000),))
    """

    classes: int
    alpha: float = 1.0

    def __post_init__(self) -> None:
        _check(self.classes, self.alpha)

    def __call__(self, batch: Batch, keys: UInts) -> Batch:
        generator, images = _generator(keys), batch.images
        height, width = images.shape[2:]
        half = 0.5 * math.sqrt(1 - generator.beta(self.alpha, self.alpha))
        y, x = int(generator.integers(height)), int(generator.integers(width))
        top, bottom = max(y - int(half * height), 0), min(y + int(half * height), height)
        left, right = max(x - int(half * width), 0), min(x + int(half * width), width)
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = images.roll(1, 0)[:, :, top:bottom, left:right]
        batch["images"] = mixed
        share = 1 - (bottom - top) * (right - left) / (height * width)
        batch["cls"] = _mixed_labels(batch.labels, self.classes, share)
        return batch


@final
@dataclass(frozen=True)
class RandomChoice:
    """Applies one of several transforms to each batch, all equally often.

    hw.data.RandomChoice((hw.data.Mixup(classes=1000), hw.data.CutMix(classes=1000)))
    """

    transforms: tuple[BatchTransform, ...]

    def __call__(self, batch: Batch, keys: UInts) -> Any:
        chosen = int(_generator(keys, _CHOOSE).integers(len(self.transforms)))
        return self.transforms[chosen](batch, keys)


def _check(classes: int, alpha: float) -> None:
    if classes < 1 or alpha <= 0:
        raise UsageError(
            f"classes={classes}, alpha={alpha}: give the number of classes, and an alpha above 0"
        )


def _generator(keys: UInts, purpose: int = _MIX) -> np.random.Generator:
    """Returns the random number generator of a batch, which depends on its samples but not on their order."""
    seed = np.bitwise_xor.reduce(derive_keys(purpose, keys))
    return np.random.Generator(np.random.Philox(int(seed)))


def _mixed_labels(labels: Tensor, classes: int, share: float) -> Tensor:
    if not labels.is_cuda and len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise UsageError(  # on a GPU, reading the labels would wait for it
            f"a batch has labels from {int(labels.min())} to {int(labels.max())}, and classes={classes} allows 0 to "
            f"{classes - 1}: give the number of classes of the dataset"
        )
    whole = F.one_hot(labels, classes).to(torch.float32)
    return torch.lerp(whole.roll(1, 0), whole, share)
