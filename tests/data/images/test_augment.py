"""RandAugment and TrivialAugment against Pillow, operation by operation; and masks of blocks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from headway.data import BlockMasks, MultiCrop, RandAugment, RandomResizedCrop, TrivialAugment
from headway.data.images.batch import Batch
from headway.data.images.rand_augment import _table
from headway.errors import UsageError

sys.path.insert(0, str(Path(__file__).parent))
import oracle
from one_image import crop_image

NEAREST, AFFINE = Image.Resampling.NEAREST, Image.Transform.AFFINE
# Pillow's own operations, in the order of torchvision's table, with its ranges at the largest magnitude
PILLOW = [
    ("identity", lambda image, _: image, 0),
    ("shear x", lambda image, by: image.transform(image.size, AFFINE, (1, by, 0, 0, 1, 0), NEAREST), 0.3),
    ("shear y", lambda image, by: image.transform(image.size, AFFINE, (1, 0, 0, by, 1, 0), NEAREST), 0.3),
    (
        "move x",
        lambda image, by: image.transform(image.size, AFFINE, (1, 0, int(by), 0, 1, 0), NEAREST),
        150 / 331,
    ),
    (
        "move y",
        lambda image, by: image.transform(image.size, AFFINE, (1, 0, 0, 0, 1, int(by)), NEAREST),
        150 / 331,
    ),
    ("rotate", lambda image, by: image.rotate(by, NEAREST), 30),
    ("brightness", lambda image, by: ImageEnhance.Brightness(image).enhance(1 + by), 0.9),
    ("color", lambda image, by: ImageEnhance.Color(image).enhance(1 + by), 0.9),
    ("contrast", lambda image, by: ImageEnhance.Contrast(image).enhance(1 + by), 0.9),
    ("sharpness", lambda image, by: ImageEnhance.Sharpness(image).enhance(1 + by), 0.9),
    ("posterize", lambda image, bits: ImageOps.posterize(image, round(bits)), 4),
    ("solarize", lambda image, at: ImageOps.solarize(image, at), 0),
    ("autocontrast", lambda image, _: ImageOps.autocontrast(image), 0),
    ("equalize", lambda image, _: ImageOps.equalize(image), 0),
]
TABLE = _table(shear=0.3, translate=150 / 331, rotate=30, color=0.9, bits=4)


def moved(operation: int) -> bool:
    return 1 <= operation <= 5


@pytest.mark.parametrize("number", range(len(PILLOW)), ids=[name for name, _, _ in PILLOW])
def test_each_operation_is_pillows(number: int) -> None:
    name, pillow, strongest = PILLOW[number]
    operation = TABLE[number]
    for seed, (height, width) in enumerate([(64, 64), (33, 47), (224, 224), (1, 1), (2, 5)]):
        crop = oracle.photo(height, width, seed) if height > 4 else np.full((height, width, 3), 77, np.uint8)
        for magnitude in (0, 0.3, 1):
            for negative in (False, True):
                value = operation.argument(magnitude, width, negative=negative)
                expected = np.asarray(pillow(Image.fromarray(crop), value))
                found = operation.apply(crop, value)
                assert found.dtype == np.uint8 and found.shape == crop.shape
                wrong = np.abs(found.astype(int) - expected).max(2) > (0 if number not in (6, 7, 8, 9) else 1)
                # Pillow's places are whole 65536ths, so a pixel on an edge may come from its neighbor
                assert wrong.mean() <= (0.002 if moved(number) else 0), (name, height, width, value)
    stated = operation.argument(1, 100, negative=False)
    assert stated == pytest.approx(strongest * (100 if name.startswith("move") else 1))


def test_what_is_drawn_is_as_frequent_as_it_should_be_and_belongs_to_the_crop() -> None:
    crop = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    same = np.mean([np.array_equal(RandAugment(operations=1)(crop, key), crop) for key in range(2000)])
    assert 0.05 < same < 0.16, "one of 14 operations changes nothing, and autocontrast hardly this crop"
    assert np.array_equal(RandAugment()(crop, 5), RandAugment()(crop, 5))
    found = {TrivialAugment()(crop, key).tobytes() for key in range(300)}
    assert len(found) > 140, "operations, strengths and signs all differ"
    with pytest.raises(UsageError, match="a magnitude from 0 to 30"):
        RandAugment(magnitude=31)


def test_two_operations_follow_each_other_as_pillow_applies_them() -> None:
    crop = oracle.photo(48, 48)
    for key in range(60):
        words = [oracle_word(key, at) for at in range(4)]
        image = Image.fromarray(crop)
        for which, sign in (words[:2], words[2:]):
            at = int(which * 14)
            value = TABLE[at].argument(9 / 30, 48, negative=sign < 0.5)
            image = PILLOW[at][1](image, value)
        wrong = np.abs(RandAugment()(crop, key).astype(int) - np.asarray(image)).max(2) > 2
        if not any(int(which * 14) in (12, 13) for which in (words[0], words[2])):  # these amplify a level
            assert wrong.mean() < 0.01


def oracle_word(key: int, number: int) -> float:
    mask = 2**64 - 1
    state = (key + (number // 2 + 1) * 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    state ^= state >> 31
    return (state >> 32 * (number % 2) & 0xFFFFFFFF) * 2.0**-32


def test_crops_are_augmented_before_they_are_normalized_and_only_then_differ() -> None:
    pixels = oracle.photo(80, 100)
    plain = RandomResizedCrop(32, output="uint8", flip=0)
    augmented = RandomResizedCrop(32, output="uint8", flip=0, augment=lambda crop, _: 255 - crop)
    assert torch.equal(
        crop_image(augmented, pixels, 3)["images"], 255 - crop_image(plain, pixels, 3)["images"]
    )
    keys = list[int]()
    several = MultiCrop(global_size=16, local_size=8, augment=lambda crop, key: (keys.append(key), crop)[1])
    crop_image(several, pixels, 3)
    assert len({*keys}) == 10, "each crop has numbers of its own"


def test_masks_are_blocks_and_a_pure_function_of_sample_and_crop() -> None:
    masks = BlockMasks(patch=14, probability=0.5)
    keys = np.arange(1, 400, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    drawn = np.array([[masks.draw(int(key), crop, 16) for key in keys] for crop in (0, 1)])
    shares = drawn.mean((2, 3))
    assert 0.44 < (shares > 0).mean() < 0.56
    assert shares.max() <= 0.5 and 0.22 < shares[shares > 0].mean() < 0.33, "from 0.1 to 0.5, evenly"
    assert not np.array_equal(drawn[0], drawn[1])
    assert drawn.mean((0, 1)).min() > 0, "every patch is hidden now and then"
    beside = (drawn[:, :, :, 1:] & drawn[:, :, :, :-1]).sum() / drawn[:, :, :, 1:].sum()
    assert beside > 0.6, "patches alone would have a neighbor in a quarter of the cases"
    few = Batch({"global_crops": torch.zeros(2, 3, 3, 224, 224)})
    found = masks(few, keys[[7, 300, 2]]).masks
    assert found.shape == (2, 3, 256) and found.dtype == torch.bool
    assert torch.equal(found, torch.from_numpy(drawn[:, [7, 300, 2]].reshape(2, 3, 256)))
    with pytest.raises(UsageError, match="do not divide into patches of 15"):
        BlockMasks(patch=15)(Batch({"global_crops": torch.zeros(2, 3, 3, 224, 224)}), keys[:3])
