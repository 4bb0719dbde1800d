"""Image transforms: settings for the crops of a batch, the same for the CPU and the GPU.

hw.data.ShardLoader(shards, batch_size=64, transform=hw.data.MultiCrop())
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Real
from typing import Any, Literal, final, get_args

import numpy as np
import numpy.typing as npt

from headway.data.shards.decode import Pixels
from headway.errors import UsageError

Range = tuple[float, float]
BatchTransform = Callable[[Any, npt.NDArray[np.uint64]], Any]
"""takes a `Batch` and a hash of each sample, from which all random numbers must be derived; returns the batch"""
Augment = Callable[[Pixels, int], Pixels]
"""takes a crop, height x width x 3, and a hash of its sample and number, from which all random numbers are derived"""
Output = Literal["bf16", "fp16", "fp32", "uint8", "fp8"]
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "uint8": 1, "fp8": 1}
Interpolation = Literal["bicubic", "bilinear"]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _are_numbers(values: object, count: int) -> bool:
    """Whether `values` is a tuple or a list of `count` numbers."""
    return (
        isinstance(values, tuple | list)
        and len(values) == count
        and all(isinstance(each, Real) and not isinstance(each, bool) for each in values)
    )


def check_probability(name: str, value: Any) -> None:
    """Refuses a value that is not a number from 0 to 1."""
    _check_number(name, value, 1, "a probability, from 0 to 1")


def _check_number(name: str, value: Any, most: float, wanted: str) -> None:
    if not _are_numbers((value,), 1) or not 0 <= value <= most:
        raise UsageError(f"{name}={value!r}: give {wanted}")


def _check_whole(name: str, value: object) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise UsageError(f"{name}={value!r:.80}: give a whole number, such as 224; crops are squares")


@dataclass(frozen=True, kw_only=True)
class CropSettings:
    """What all crops of a transform have in common, with the names, probabilities and ranges of torchvision."""

    ratio: Range = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.0
    """the probability that colors change, by up to the following factors, in random order"""
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    grayscale: float = 0.0
    sigma: Range = (0.1, 2.0)
    """of the blur, whose kernel has 9 x 9 pixels"""

    def _recipe(self, **own: Any) -> CropRecipe:
        """Returns the recipe of a crop: the common settings and its own."""
        common = {each.name: getattr(self, each.name) for each in fields(CropSettings)}
        return CropRecipe(**common, **own)


@final
@dataclass(frozen=True, kw_only=True)
class CropRecipe(CropSettings):
    """The distributions of one crop."""

    scale: Range | None = (0.08, 1.0)
    """the share of the image's area; None for the center of the image, after its short side became `resize` pixels"""
    resize: int = 0
    blur: float = 0.0
    solarize: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "grayscale", "blur", "solarize"):
            check_probability(name, getattr(self, name))
        for name in ("scale", "ratio", "sigma"):
            low_high = getattr(self, name)
            if low_high is not None and not (_are_numbers(low_high, 2) and 0 < low_high[0] <= low_high[1]):
                raise UsageError(f"{name}={low_high!r}: give two numbers above 0, the smaller one first")
        if self.scale is not None and self.scale[1] > 1:
            raise UsageError(f"scale={self.scale}: a crop is at most the whole image, 1.0")
        for name in ("brightness", "contrast", "saturation"):
            _check_number(name, getattr(self, name), 1, "the largest change, from 0 to 1")
        _check_number("hue", self.hue, 0.5, "the largest change, from 0 to 0.5 of the circle")


@dataclass(frozen=True)
class CropGroup:
    """The crops of one size, which become one tensor of a batch."""

    name: str
    size: int
    recipes: tuple[CropRecipe, ...]

    def __post_init__(self) -> None:
        _check_whole(f"{self.name}: size", self.size)
        if self.size < 1:
            raise UsageError(f"{self.name}: size={self.size}: a crop has at least one pixel")


@dataclass(frozen=True, kw_only=True)
class ImageTransform(ABC):
    """Crops of an image, resized with antialiasing, with changes of color, normalized.

    Random numbers are derived from the seed of the loader, the dataset, the epoch, the sample and the number of the
    crop, so the crops are the same on the CPU and on a GPU, on any number of ranks, and after a resume.

        crops = hw.data.RandomResizedCrop(size=224)             # a subclass; CenterCrop and MultiCrop are the others
        loader = hw.data.ShardLoader("shards/train", batch_size=256, transform=crops)
    """

    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    output: Output = "bf16"
    """the type of the pixels; with `"uint8"` they are from 0 to 255 and not normalized, with `"fp8"` (E4M3) they are
    scaled, and lose two thirds of the levels"""
    channels_last: bool = False
    """whether the channels of a pixel are neighbors in memory; the shape of a batch is the same"""
    interpolation: Interpolation = "bicubic"
    exif: bool = False
    """whether images are turned by their EXIF orientation; most training datasets are used without it"""
    scaled_decode: bool = False
    """whether the CPU decodes a JPEG at a half, a quarter or an eighth of its size if crops are small enough: much
    faster for large photos, but crops differ a little from those of the whole image, so it is off by default"""
    augment: Augment | None = None
    """applied to the bytes of each crop before its colors change, on the CPU: `hw.data.RandAugment()`"""
    then: tuple[BatchTransform, ...] = ()
    """applied to whole batches: `hw.data.Mixup` and others, or your own functions"""

    def __post_init__(self) -> None:
        for name, choices in (("output", get_args(Output)), ("interpolation", get_args(Interpolation))):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name}={getattr(self, name)!r}: give one of {', '.join(choices)}")
        if not _are_numbers(self.mean, 3):
            raise UsageError(f"mean={self.mean!r}: give three numbers, one for each of red, green and blue")
        if not _are_numbers(self.std, 3) or min(self.std) <= 0:
            raise UsageError(f"std={self.std!r}: give three numbers above 0")
        self.groups()  # checks the rest

    def crop_bytes(self) -> int:
        """Returns the bytes that the crops of one image take."""
        return sum(3 * group.size**2 * len(group.recipes) for group in self.groups()) * _BYTES[self.output]

    def groups(self) -> tuple[CropGroup, ...]:
        """Returns the crops of an image, by size."""
        return self._groups

    @cached_property
    def _groups(self) -> tuple[CropGroup, ...]:
        return self._make_groups()

    @abstractmethod
    def _make_groups(self) -> tuple[CropGroup, ...]:
        """Returns the crops of an image, by size; refuses settings that are not valid."""


@final
@dataclass(frozen=True, kw_only=True)
class MultiCrop(CropSettings, ImageTransform):
    """The crops of DINO: a few large ones and many small ones of every image. The defaults are those of DINOv2.

        loader = hw.data.ShardLoader(shards, batch_size=64, transform=hw.data.MultiCrop())
        for batch in loader:
            batch.global_crops      # 2 x 64 x 3 x 224 x 224
            batch.local_crops       # 8 x 64 x 3 x 96 x 96

    `blur` has the probabilities for the first global crop, for the other global crops, and for the local crops;
    `solarize` applies to the second global crop.
    """

    n_global: int = 2
    n_local: int = 8
    global_size: int = 224
    local_size: int = 96
    global_scale: Range = (0.32, 1.0)
    local_scale: Range = (0.05, 0.32)
    jitter: float = 0.8
    saturation: float = 0.2
    grayscale: float = 0.2
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    solarize: float = 0.2

    def _make_groups(self) -> tuple[CropGroup, ...]:
        for name in ("n_global", "n_local", "global_size", "local_size"):
            _check_whole(name, getattr(self, name))
        if not _are_numbers(self.blur, 3):
            raise UsageError(f"blur={self.blur!r}: give three probabilities, as in (1.0, 0.1, 0.5)")
        if self.n_global < 1 or self.n_local < 0:
            raise UsageError(
                f"n_global={self.n_global}, n_local={self.n_local}: a batch has at least one global crop"
            )
        large = [
            self._recipe(
                scale=self.global_scale,
                blur=self.blur[min(number, 1)],
                solarize=self.solarize * (number == 1),
            )
            for number in range(self.n_global)
        ]
        groups = [CropGroup("global_crops", self.global_size, tuple(large))]
        if self.n_local:
            small = self._recipe(scale=self.local_scale, blur=self.blur[2])
            groups.append(CropGroup("local_crops", self.local_size, (small,) * self.n_local))
        return tuple(groups)


@final
@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop(CropSettings, ImageTransform):
    """One random crop of every image, for supervised training; the defaults are those of ImageNet.

    loader = hw.data.ShardLoader(shards, batch_size=256, transform=hw.data.RandomResizedCrop(size=224))
    for batch in loader:
        loss = F.cross_entropy(net(batch.images), batch.labels)
    """

    size: int = field(default=224, kw_only=False)
    scale: Range = (0.08, 1.0)
    blur: float = 0.0
    solarize: float = 0.0
    interpolation: Interpolation = "bilinear"

    def _make_groups(self) -> tuple[CropGroup, ...]:
        recipe = self._recipe(scale=self.scale, blur=self.blur, solarize=self.solarize)
        return (CropGroup("images", self.size, (recipe,)),)


@final
@dataclass(frozen=True, kw_only=True)
class CenterCrop(ImageTransform):
    """The center of every image, for validation: the short side becomes `resize` pixels, and `size` of them are kept.

    hw.data.ShardLoader(shards, batch_size=256, shuffle=False, transform=hw.data.CenterCrop(size=224, resize=256))
    """

    size: int = field(default=224, kw_only=False)
    resize: int = 256
    """whatever `size` is: give both for small crops, such as size=24, resize=28"""
    interpolation: Interpolation = "bilinear"

    def _make_groups(self) -> tuple[CropGroup, ...]:
        _check_whole("size", self.size)
        _check_whole("resize", self.resize)
        if self.resize < self.size:
            raise UsageError(
                f"resize={self.resize} is less than size={self.size}: the crop would be larger than the image"
            )
        return (CropGroup("images", self.size, (CropRecipe(scale=None, resize=self.resize, flip=0.0),)),)
