"""Crops on the CPU against Pillow and plain arithmetic, and the draws that decide on them."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from headway.data import CenterCrop, MultiCrop, RandomResizedCrop
from headway.data.images import CropRecipe
from headway.data.images.cpu import draw_groups, largest_value, normalization, resize
from headway.data.images.device.availability import usable_gpu
from headway.data.images.draws import draw_crops
from headway.data.images.fp8 import Fp8Scaling
from headway.data.images.window import enlarged_window
from headway.errors import UsageError

sys.path.insert(0, str(Path(__file__).parent))
import oracle
from one_image import crop_image

KEYS = np.arange(1, 400, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def sizes(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    odd = [(1, 1), (1, 900), (700, 1), (2, 3), (6000, 8000), (40, 4000)]
    return np.array([*odd, *rng.integers(1, 900, (len(KEYS) - len(odd), 2)).tolist()])


def to_bytes(crop: torch.Tensor, transform: MultiCrop) -> np.ndarray:
    """A normalized crop, from 0 to 255 again: height x width x 3."""
    factors, summands = (np.array(each) for each in normalization(transform))
    return (crop.float().permute(1, 2, 0).numpy() - summands) / factors


def test_boxes_are_those_of_torchvisions_rule_drawn_one_by_one() -> None:
    recipes, shapes = [CropRecipe(scale=(0.32, 1.0)), CropRecipe(scale=(0.05, 0.32))], sizes()
    table = draw_crops(recipes, [224, 96], KEYS, shapes)
    for sample, (height, width) in enumerate(shapes.tolist()):
        for crop, recipe in enumerate(recipes):
            expected = oracle.box(recipe, int(KEYS[sample]), crop, height, width)
            assert tuple(table.ints[sample, crop, :4].tolist()) == expected, (height, width)


def test_what_is_drawn_for_a_sample_depends_on_nothing_but_its_key() -> None:
    transform, shapes = MultiCrop(), sizes()
    whole = draw_groups(transform, KEYS, shapes)
    some = np.array([300, 4, 17])
    part = draw_groups(transform, KEYS[some], shapes[some])
    for all_of, few in zip(whole, part, strict=True):
        assert np.array_equal(all_of.ints[some], few.ints) and np.array_equal(all_of.floats[some], few.floats)
    fewer = draw_groups(MultiCrop(n_local=2), KEYS, shapes)
    assert np.array_equal(fewer[1].ints, whole[1].ints[:, :2]), "further crops do not change the first ones"
    assert len(np.unique(whole[1].ints[:, :, :4].reshape(-1, 4), axis=0)) > 2800, "crops are all different"


def test_everything_is_drawn_as_often_and_as_widely_as_the_settings_say() -> None:
    keys = np.arange(20_000, dtype=np.uint64)
    large, small = draw_groups(MultiCrop(), keys, np.full((20_000, 2), 400))
    flags, order, sigma = small.ints[..., 8], small.ints[..., 9], small.floats[..., 4]
    shares = {
        "flip": (flags & 1 > 0).mean(),
        "gray": (flags & 2 > 0).mean(),
        "jitter": (order > 0).mean(),
        "blur": (sigma > 0).mean(),
        "solarize": (large.ints[:, 1, 8] & 4 > 0).mean(),
        "second blur": (large.floats[:, 1, 4] > 0).mean(),
    }
    expected = {"flip": 0.5, "gray": 0.2, "jitter": 0.8, "blur": 0.5, "solarize": 0.2, "second blur": 0.1}
    assert shares == pytest.approx(expected, abs=0.012)
    assert (large.floats[:, 0, 4] > 0).all() and not (large.ints[:, 0, 8] & 4).any()
    assert sigma[sigma > 0].min() >= 0.1 and sigma.max() <= 2.0
    low, high = small.floats[..., :4].min((0, 1)), small.floats[..., :4].max((0, 1))
    assert low == pytest.approx([0.6, 0.6, 0.8, -0.1], abs=0.01)
    assert high == pytest.approx([1.4, 1.4, 1.2, 0.1], abs=0.01)
    counts = np.unique(order[order > 0], return_counts=True)[1]
    assert len(counts) == 24 and counts.min() / counts.max() > 0.85, "all orders of four, about equally often"
    area = small.ints[..., 2] * small.ints[..., 3] / 400**2
    assert area.min() >= 0.045 and area.max() <= 0.33 and abs(area.mean() - 0.185) < 0.005


@pytest.mark.parametrize("shape", [(375, 500), (1, 1), (3, 700), (700, 2), (97, 96), (1300, 900)])
def test_crops_are_those_of_pillow_within_two_levels(shape: tuple[int, int]) -> None:
    pixels = oracle.photo(*shape)
    transform = MultiCrop(global_size=48, local_size=24, output="fp32")
    for key in (7, 8):
        crops = crop_image(transform, pixels, key)
        tables = draw_groups(transform, np.array([key], np.uint64), np.array([shape]))
        errors, of_color = [], []
        for group, table in zip(transform.groups(), tables, strict=True):
            assert crops[group.name].shape == (len(group.recipes), 3, group.size, group.size)
            for number, crop in enumerate(crops[group.name]):
                ints, floats = table.ints[0, number], table.floats[0, number]
                expected = oracle.colored(oracle.resized(pixels, ints, group.size), ints, floats)
                errors.append(np.abs(to_bytes(crop, transform) - expected).ravel())
                if key == 7:
                    plain = resize(pixels, ints, group.size, "bicubic").permute(1, 2, 0).numpy()
                    plain = plain[:, ::-1] if ints[8] & 1 else plain
                    again = oracle.colored(plain, ints, floats)
                    of_color.append(np.abs(to_bytes(crop, transform) - again).max())
        found = np.concatenate(errors)
        # what lies on the threshold of a solarization may fall on either side of it, by one level
        assert max(of_color, default=0) < 1.01 and np.median(of_color or 0) < 0.01, "of the same bytes"
        # Pillow rounds between its two passes, in an order that depends on the sizes; color amplifies the difference
        assert found.mean() < 0.2 and np.quantile(found, 0.98) <= 2.0 and found.max() < 6


def test_images_of_any_size_are_resized_as_pillow_does() -> None:
    rng = np.random.default_rng(0)
    shapes = [
        (1, 1),
        (1, 700),
        (900, 1),
        (2, 3),
        (6000, 8000),
        *np.exp(rng.uniform(0, 6, (40, 2))).astype(int),
    ]
    transform = RandomResizedCrop(33, interpolation="bicubic", output="uint8")
    for key, (height, width) in enumerate(shapes):
        tile = oracle.photo(min(height, 600), min(width, 800), key)
        pixels = np.tile(tile, (-(-height // len(tile)), -(-width // tile.shape[1]), 1))[:height, :width]
        (table,) = draw_groups(transform, np.array([key], np.uint64), np.array([(height, width)]))
        found = crop_image(transform, pixels, key)["images"][0].permute(1, 2, 0).numpy()
        difference = np.abs(found.astype(int) - oracle.resized(pixels, table.ints[0, 0], 33))
        assert difference.max() <= 2 and difference.mean() <= 0.5, (height, width)


def test_each_color_operation_alone_is_exact() -> None:
    pixels, size = oracle.photo(60, 60), 32
    plain = {"jitter": 1.0, "grayscale": 0.0, "blur": (0.0, 0.0, 0.0), "solarize": 0.0, "output": "fp32"}
    nothing = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0.0)
    cases = [
        {"brightness": 0.9},
        {"contrast": 0.9},
        {"saturation": 1.0},
        {"hue": 0.5},
        {"grayscale": 1.0},
        {"blur": (1.0, 1.0, 1.0)},
        {"blur": (1.0, 1.0, 1.0), "sigma": (5.0, 9.0)},
        {"solarize": 1.0},
    ]
    for case in cases:
        transform = MultiCrop(global_size=size, n_local=0, **{**plain, **nothing, **case})
        (table,) = draw_groups(transform, KEYS[:3], np.full((3, 2), 60))
        for sample in range(3):
            crops = crop_image(transform, pixels, int(KEYS[sample]))["global_crops"]
            for number, crop in enumerate(crops):
                ints, floats = table.ints[sample, number], table.floats[sample, number]
                expected = oracle.colored(oracle.resized(pixels, ints, size), ints, floats)
                difference = np.abs(to_bytes(crop, transform) - expected)
                assert difference.mean() < 0.02 and difference.max() < 3, case


def test_validation_sees_the_center_as_torchvision_cuts_it() -> None:
    for shape in ((375, 500), (640, 480), (20, 90)):
        pixels = oracle.photo(*shape)
        transform = CenterCrop(size=56, resize=64, output="uint8")
        image = crop_image(transform, pixels, 1)["images"][0]
        (table,) = draw_groups(transform, np.array([1], np.uint64), np.array([shape]))
        assert min(table.ints[0, 0, 4:6]) == 64
        expected = oracle.resized(pixels, table.ints[0, 0], 56, "bilinear")
        assert np.abs(image.permute(1, 2, 0).numpy().astype(int) - expected).max() <= 1


def test_images_of_extreme_ratios_are_not_resized_whole() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (1, 5_000_000, 3), np.uint8)
    middle = pixels[:, 2_499_968:2_500_032]
    for kind in ("bilinear", "bicubic"):  # the whole would have 60 gigabytes
        transform = CenterCrop(size=56, resize=64, output="uint8", interpolation=kind)
        for turned in ((0, 1, 2), (1, 0, 2)):
            found, expected = (
                crop_image(transform, each.transpose(turned), 1)["images"] for each in (pixels, middle)
            )
            assert torch.equal(found, expected)


def test_a_window_of_an_enlarged_image_is_equal_to_the_whole_to_the_last_bit() -> None:
    rng = np.random.default_rng(0)
    shapes = ((1, 3000), (2000, 1), (3, 1000), (1000, 7), (1, 1), (2, 3), (5, 900), (31, 77))
    for (height, width), kind in itertools.product(shapes, ("bilinear", "bicubic")):
        pixels, scale = rng.integers(0, 256, (height, width, 3), np.uint8), 32 / min(height, width)
        rows, columns = int(height * scale), int(width * scale)
        (whole,) = F.interpolate(
            torch.from_numpy(pixels).permute(2, 0, 1)[None], (rows, columns), mode=kind, antialias=True
        )
        for row, column in ((0, 0), (rows - 24, columns - 24), ((rows - 24) // 2, (columns - 24) // 2)):
            found = enlarged_window(pixels, (rows, columns), (row, column), 24, kind)
            assert np.array_equal(
                found, whole[:, row : row + 24, column : column + 24].permute(1, 2, 0).numpy()
            )


def test_outputs_are_one_crop_in_several_types_and_layouts() -> None:
    pixels = oracle.photo(90, 120)
    exact = crop_image(RandomResizedCrop(size=32, output="fp32"), pixels, 5)["images"]
    for output, worst in (("bf16", 0.02), ("fp16", 0.002)):
        found = crop_image(RandomResizedCrop(size=32, output=output), pixels, 5)["images"]
        assert found.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[output]
        assert (found.float() - exact).abs().max() < worst
    plain = crop_image(RandomResizedCrop(size=32, output="uint8"), pixels, 5)["images"]
    factors, summands = normalization(RandomResizedCrop())
    again = plain.float() * torch.tensor(factors)[:, None, None] + torch.tensor(summands)[:, None, None]
    assert torch.allclose(again, exact, atol=1e-5)
    last = crop_image(RandomResizedCrop(size=32, output="fp32", channels_last=True), pixels, 5)["images"]
    assert last.is_contiguous(memory_format=torch.channels_last) and torch.equal(last, exact)


def test_fp8_keeps_what_it_can_and_says_what_its_values_mean() -> None:
    pixels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    exact = crop_image(CenterCrop(size=16, resize=16, output="fp32"), pixels, 0)["images"]
    transform = CenterCrop(size=16, resize=16, output="fp8")
    found = crop_image(transform, pixels, 0)["images"]
    assert found.dtype == torch.float8_e4m3fn
    scaling = Fp8Scaling.of(largest_value(transform))
    assert scaling.scale.shape == (1,) and scaling.amax_history.shape == (1024, 1)
    assert exact.abs().max() <= largest_value(transform) == pytest.approx(2.64, abs=0.001)
    factors = torch.tensor(normalization(CenterCrop())[0])[:, None, None]
    levels = (scaling.dequantize(found, torch.float32) - exact) / factors
    assert levels.abs().max() < 6 and levels.square().mean().sqrt() < 2.3, "of 255, as documented"
    assert 70 < len(found.float().unique()) < 160


def test_settings_that_mean_nothing_are_refused_with_the_value() -> None:
    for settings, words in [
        ({"jitter": 1.5}, "jitter=1.5"),
        ({"global_scale": (0.5, 0.1)}, r"scale=\(0.5, 0.1\)"),
        ({"n_global": 0}, "n_global=0"),
        ({"output": "int4"}, "output='int4'"),
        ({"hue": 0.7}, "hue=0.7"),
        ({"global_size": 0}, "size=0"),
        ({"global_size": "24"}, "global_size='24': give a whole number"),
        ({"local_size": (24, 24)}, r"local_size=\(24, 24\): give a whole number"),
        ({"global_scale": 0.5}, "scale=0.5: give two numbers"),
        ({"flip": "yes"}, "flip='yes': give a probability"),
        ({"blur": 0.5}, "blur=0.5: give three probabilities"),
        ({"mean": 0.5}, "mean=0.5: give three numbers"),
        ({"mean": (0.5,)}, r"mean=\(0.5,\): give three numbers"),
        ({"std": 0.5}, "std=0.5: give three numbers above 0"),
    ]:
        with pytest.raises(UsageError, match=words):
            MultiCrop(**settings)
    with pytest.raises(UsageError, match="resize=200 is less than size=224"):
        CenterCrop(resize=200)
    with pytest.raises(UsageError, match="size='24': give a whole number"):
        CenterCrop(size="24")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"transform=MultiCrop is a class: pass an instance"):
        usable_gpu(None, MultiCrop)
    assert CenterCrop(24) == CenterCrop(size=24) and RandomResizedCrop(24).groups()[0].size == 24
