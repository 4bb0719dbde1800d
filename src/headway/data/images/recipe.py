"""What may happen to one crop of an image: the distributions from which `draws` draws its parameters."""

from __future__ import annotations

from dataclasses import dataclass

from headway.errors import UsageError

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class CropRecipe:
    """The distributions of one crop. Probabilities and ranges are as in torchvision's transforms of these names."""

    scale: Range | None = (0.08, 1.0)
    """the share of the image's area; None for the center of the image, after its short side became `resize` pixels"""
    ratio: Range = (3 / 4, 4 / 3)
    resize: int = 0
    flip: float = 0.5
    jitter: float = 0.0
    """how often color is changed, by up to these factors, in random order"""
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    grayscale: float = 0.0
    blur: float = 0.0
    sigma: Range = (0.1, 2.0)
    """of the blur, whose kernel has 9 x 9 pixels"""
    solarize: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "grayscale", "blur", "solarize"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name}={getattr(self, name)}: give a probability, from 0 to 1")
        for name in ("scale", "ratio", "sigma"):
            low_high = getattr(self, name)
            if low_high is not None and not 0 < low_high[0] <= low_high[1]:
                raise UsageError(f"{name}={low_high}: give two numbers above 0, the smaller one first")
        if self.scale is not None and self.scale[1] > 1:
            raise UsageError(f"scale={self.scale}: a crop has at most all of the image, 1.0")
        for name in ("brightness", "contrast", "saturation"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name}={getattr(self, name)}: give the largest change, from 0 to 1")
        if not 0 <= self.hue <= 0.5:
            raise UsageError(f"hue={self.hue}: give the largest change, from 0 to 0.5 of the circle")


@dataclass(frozen=True)
class CropGroup:
    """The crops of one size, which become one tensor of a batch."""

    name: str
    size: int
    recipes: tuple[CropRecipe, ...]

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError(f"{self.name}: size={self.size}: a crop has at least one pixel")
