"""`ImageCropper`: draws and cuts the crops of images on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from headway.data.images.batch import PLACE, SAMPLES, CropPlace, EncodedImage
from headway.data.images.cpu import DrawnImage, cut_crops, draw_groups, draw_image, largest_reduction
from headway.data.images.draws import CropTable
from headway.data.images.exif import orientation, turn
from headway.data.images.transforms import ImageTransform
from headway.data.quarantine import QuarantinedSample
from headway.data.samples.sample_keys import SampleKeys
from headway.data.shards.decode import (
    IMAGES,
    Decoder,
    LatePart,
    decode_reduced,
    image_name,
    jpeg_name,
    plain_jpeg_size,
)
from headway.data.shards.tar import ShardLimits
from headway.data.sources.chunk import SampleLocation
from headway.errors import BadSample

_MAX_SIDE_PIXELS = 2**31 - 1  # the tables of crops have 32 bits


@dataclass(slots=True)
class ReadSample:
    """A sample that was read and decoded, except for its images."""

    location: SampleLocation
    value: Any
    """its parts by extension, until it is transformed"""
    late: list[LatePart]
    bad: list[QuarantinedSample]
    place: CropPlace | None = None
    """where its crops are written; None if they get their own memory"""
    drawn: tuple[tuple[int, int], list[CropTable]] | None = None
    """its crops for an image of this height and width, if they are drawn already"""


@final
class ImageCropper:
    """Makes the crops of a transform."""

    def __init__(
        self, transform: ImageTransform, keys: SampleKeys, decoders: dict[str, Decoder], limits: ShardLimits
    ) -> None:
        self._transform, self._keys, self._decoders, self._limits = transform, keys, decoders, limits
        self.reduces = transform.scaled_decode
        """whether images are decoded at the smallest size that their crops allow"""

    def draw(self, samples: list[ReadSample]) -> None:
        """Draws the crops of all images whose headers state their size; one by one, they take twenty times as long."""
        sized = [(sample, size) for sample in samples if (size := self._jpeg_size(sample)) is not None]
        if not sized:
            return
        keys = self._keys.of_transforms(np.array([sample.location for sample, _ in sized]))
        tables = draw_groups(self._transform, keys, np.array([size for _, size in sized]))
        for number, (sample, size) in enumerate(sized):
            sample.drawn = size, [CropTable(ints[number], floats[number]) for ints, floats in tables]

    def _jpeg_size(self, sample: ReadSample) -> tuple[int, int] | None:
        """Returns height and width of a sample's image, if it is a JPEG that any decoder can decode."""
        name = jpeg_name(sample.value, self._decoders)
        if name is None:
            return None
        return next(plain_jpeg_size(data, self._limits) for part, data, _ in sample.late if part == name)

    def decode_reduced(self, sample: ReadSample) -> None:
        """Decodes the image of a sample at the smallest size that its crops allow, if it is a plain JPEG."""
        name = jpeg_name(sample.value, self._decoders)
        late = next((each for each in sample.late if each[0] == name), None)
        if late is None:
            return
        size = plain_jpeg_size(late[1], self._limits)
        if size is None:
            return
        tag = orientation(late[1]) if self._transform.exif else 1
        key = self._keys.of_transform(sample.location)
        tables = draw_image(self._transform, key, *(size[::-1] if tag >= 5 else size))
        factor = largest_reduction(tables)
        while tag > 1 and (size[0] % factor or size[1] % factor):
            factor //= 2  # else turning would move an incomplete last pixel to the front
        sample.late.remove(late)
        pixels = turn(decode_reduced(late[1], size, factor), tag)
        sample.value[late[0]] = DrawnImage(pixels, tables, key, factor)

    def crop(self, sample: ReadSample) -> dict[str, Any]:
        """Returns a sample with the crops of its image in place of the image."""
        image, place = take_image(self._transform, sample), sample.place
        if not isinstance(image, DrawnImage):
            tables = self._drawn(sample, *image.shape[:2])
            image = DrawnImage(image, tables, self._keys.of_transform(sample.location))
        into = place.memory.of_sample(place.number) if place is not None else None
        own = {SAMPLES: sample.location} | ({PLACE: place} if place is not None else {})
        return {**own, **cut_crops(self._transform, image, into), **sample.value}

    def _drawn(self, sample: ReadSample, height: int, width: int) -> list[CropTable]:
        """Returns the crops of a sample, drawn now unless they were drawn for an image of this size."""
        if sample.drawn is not None and sample.drawn[0] == (height, width):
            return sample.drawn[1]
        return draw_image(self._transform, self._keys.of_transform(sample.location), height, width)


def take_image(transform: ImageTransform, sample: ReadSample) -> Any:
    """Removes the image from a sample and returns it: as pixels, turned if `exif` is set, or an `EncodedImage`."""
    value = sample.value
    name = image_name(value)
    if name is None:
        raise BadSample(f"it has no image (a part called {', '.join(sorted(IMAGES))}) but {', '.join(value)}")
    image = value.pop(name)
    if isinstance(image, EncodedImage | DrawnImage):
        return image  # JPEGs have sides of less than 2**16 pixels
    if transform.exif:
        image = turn(image, next(orientation(data) for part, data, _ in sample.late if part == name))
    short, long = sorted(image.shape[:2])
    longest = max([recipe.resize for group in transform.groups() for recipe in group.recipes]) * long // short
    if longest > _MAX_SIDE_PIXELS:
        raise BadSample(
            f"{long} x {short} pixels would be resized to {longest} on the long side: crop the image"
        )
    return image
