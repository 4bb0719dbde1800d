"""JPEGs that are decoded at a part of their size: against Pillow's draft mode, and never smaller than crops need."""

from __future__ import annotations

import io
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from headway.data import CenterCrop, MultiCrop, RandomResizedCrop, ShardLimits, ShardLoader, pack
from headway.data.images.cpu import draw_image, largest_reduction
from headway.data.shards import decode as decoding
from headway.data.shards.decode import decode_reduced, decode_rgb

sys.path.insert(0, str(Path(__file__).parent))
import oracle


def encoded(pixels: np.ndarray, mode: str = "RGB", **how: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "JPEG", **{"quality": 90, **how})
    return file.getvalue()


@pytest.mark.parametrize("installed", [True, False])
def test_reduced_pixels_are_those_of_pillows_draft_mode(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not installed:
        monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)
    for height, width in ((301, 403), (64, 64), (17, 250)):
        for how in ({"subsampling": 0}, {"subsampling": 2}, {"mode": "L"}):
            data = encoded(oracle.photo(height, width), **how)
            assert np.array_equal(
                decode_reduced(memoryview(data), (height, width), 1), decode_rgb(memoryview(data))
            )
            for factor in (2, 4, 8):
                with Image.open(io.BytesIO(data)) as image:
                    image.draft("RGB", (width // factor, height // factor))
                    expected = np.asarray(image.convert("RGB"))
                found = decode_reduced(memoryview(data), (height, width), factor)
                assert found.shape == (-(-height // factor), -(-width // factor), 3)
                assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "transform",
    [MultiCrop(), RandomResizedCrop(224), RandomResizedCrop(24), CenterCrop(224), CenterCrop(24, resize=28)],
)
def test_no_crop_is_made_of_fewer_pixels_than_it_has(transform: Any) -> None:
    factors, rng = set[int](), np.random.default_rng(0)
    for key in range(300):
        height, width = (int(side) for side in np.exp(rng.uniform(0, np.log(8000), 2)))
        tables = draw_image(transform, key, height, width)
        factor = largest_reduction(tables)
        factors.add(factor)
        for table in tables:
            tall, wide, rows, columns = table.ints[:, 2:6].T
            if factor > 1:
                assert (tall >= 2 * factor * rows).all() and (wide >= 2 * factor * columns).all()
            larger = all(
                (each.ints[:, 2] >= 4 * factor * each.ints[:, 4]).all()
                and (each.ints[:, 3] >= 4 * factor * each.ints[:, 5]).all()
                for each in tables
            )
            assert factor == 8 or not larger, "no more pixels than needed"
    assert {1, 8} <= factors or transform == MultiCrop(), "small images are whole, large ones are not"


def load(source: Path, transform: Any, **how: Any) -> list[Any]:
    settings = {"batch_size": 4, "seed": 3, "threads": 1, "shuffle": False, **how}
    return list(ShardLoader(source, transform=transform, **settings))


def test_a_loader_gives_nearly_the_same_crops_and_finds_the_same_samples_bad(tmp_path: Path) -> None:
    photos = [encoded(oracle.photo(480 + n, 640, n)) for n in range(4)]
    turned = Image.Exif()
    turned[0x0112] = 6
    photos += [
        encoded(oracle.photo(482, 646, 7), exif=turned),
        encoded(oracle.photo(480, 640, 8), progressive=True),  # these are decoded whole
        photos[0][: len(photos[0]) // 2],
        encoded(oracle.photo(20, 20)),
    ]
    samples = ({"__key__": f"{n}", "jpg": data, "cls": n} for n, data in enumerate(photos))
    pack(samples, tmp_path)
    for transform in (CenterCrop, RandomResizedCrop):
        size = {"size": 48, "resize": 56} if transform is CenterCrop else {"size": 48, "scale": (0.5, 1.0)}
        how: dict[str, Any] = {**size, "output": "uint8", "exif": True}
        whole, scaled = (
            load(tmp_path, transform(**how, scaled_decode=on), max_bad=1.0) for on in (False, True)
        )
        labels = [batch.labels.tolist() for batch in whole]
        assert [batch.labels.tolist() for batch in scaled] == labels == [[0, 1, 2, 3], [4, 5, 7]]
        one, two = (torch.cat([batch.images for batch in each]).float() for each in (whole, scaled))
        assert torch.equal(one[5:], two[5:]), "progressive and small images are decoded whole"
        differences = (one - two).abs().mean((1, 2, 3))[:5]
        assert (differences > 0).all() and (differences < 1.2).all()


def test_a_photo_of_48_million_pixels_takes_little_memory_or_is_refused_with_the_limit(
    tmp_path: Path,
) -> None:
    pixels = np.kron(oracle.photo(60, 80), np.ones((100, 100, 1), np.uint8))
    pack(iter([{"__key__": "a", "jpg": simplejpeg.encode_jpeg(pixels, quality=50), "cls": 1}]), tmp_path)
    del pixels
    transform = CenterCrop(224, scaled_decode=True, output="uint8")
    tracemalloc.start()
    try:
        (batch,) = load(tmp_path, transform, batch_size=1)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert batch.images.shape == (1, 3, 224, 224)
    assert most < 20e6, "whole, it takes 144 MB"
    refused = ShardLoader(tmp_path, batch_size=1, shuffle=False, max_bad=1.0, transform=transform,
                          limits=ShardLimits(pixels=40_000_000))  # fmt: skip
    assert list(refused) == []
    assert (
        "8000 x 6000 is more than 40000000 pixels; if that is intended, set ShardLimits(pixels=...)"
        in str(refused.bad[0].reason)
    )
