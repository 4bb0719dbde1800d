"""Files of any size, kind and orientation, whole and cut, against Pillow alone with the same parameters."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from headway.data import CenterCrop, ImageTransform, RandomResizedCrop, ShardLoader, pack
from headway.data.images.cpu import draw_groups

sys.path.insert(0, str(Path(__file__).parent))
import oracle

KINDS: list[tuple[str, str, str, dict[str, Any]]] = [  # extension, mode, format, and how it is saved
    ("jpg", "RGB", "JPEG", {"quality": 90}),
    ("jpg", "RGB", "JPEG", {"quality": 60, "subsampling": 0}),
    ("jpg", "RGB", "JPEG", {"progressive": True}),
    ("jpg", "L", "JPEG", {}),
    ("jpeg", "CMYK", "JPEG", {}),
    ("png", "RGB", "PNG", {"compress_level": 1}),
    ("png", "L", "PNG", {}),
    ("webp", "RGB", "WEBP", {"quality": 80, "method": 0}),
]
ODD = [(1, 1), (1, 640), (700, 1), (2, 3), (17, 16)]
COUNT = 72  # files
SIZE = 24


@dataclass
class File:
    """A file, and what Pillow makes of it: None if it cannot be decoded."""

    extension: str
    data: bytes
    pixels: np.ndarray | None


@pytest.fixture(scope="module")
def files() -> list[File]:
    rng = np.random.default_rng(5)
    shapes = [*ODD, *(tuple(each) for each in np.exp(rng.uniform(0, 5.7, (COUNT, 2))).astype(int).tolist())]
    return [_file(number, *shapes[number], rng) for number in range(COUNT)]


def _file(number: int, height: int, width: int, rng: np.random.Generator) -> File:
    extension, mode, kind, how = KINDS[number % len(KINDS)]
    image = Image.fromarray(oracle.photo(height, width, number)).convert(mode)
    data = _save(image, kind, how, int(rng.integers(0, 9)))
    if number % 4 == 3:
        data = data[: int(rng.integers(1, len(data)))]
    return File(extension, data, _by_pillow(data))


def _save(image: Image.Image, kind: str, how: dict[str, Any], turned: int) -> bytes:
    """Encodes an image; `turned` is its EXIF orientation, 0 for none."""
    exif, file = Image.Exif(), io.BytesIO()
    if turned:
        exif[0x0112] = turned
    image.save(file, kind, exif=exif, **how)
    return file.getvalue()


def _by_pillow(data: bytes) -> np.ndarray | None:
    try:
        image = Image.open(io.BytesIO(data))
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, SyntaxError, UnidentifiedImageError, ValueError):
        return None


@pytest.fixture(scope="module")
def source(files: list[File], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(files, tmp_path_factory.mktemp("files"))


def packed(files: list[File], directory: Path) -> Path:
    samples = ({"__key__": f"{number:03d}", file.extension: file.data} for number, file in enumerate(files))
    pack(samples, directory, shard_size=2**22)
    return directory


def good(files: list[File]) -> list[str]:
    return [f"{number:03d}" for number, file in enumerate(files) if file.pixels is not None]


def test_the_files_are_of_all_kinds_and_sizes(files: list[File]) -> None:
    whole = [file.pixels.shape[:2] for file in files if file.pixels is not None]
    assert len(files) - 18 <= len(whole) <= len(files) - 10, "most of those that are cut"
    assert {(1, 1), (1, 640), (1, 700)} <= {tuple(sorted(shape)) for shape in whole}


@pytest.mark.parametrize(
    "transform",
    [
        CenterCrop(SIZE, resize=28, output="uint8", exif=True),
        RandomResizedCrop(SIZE, interpolation="bicubic", output="uint8", exif=True),
    ],
    ids=["center", "random"],
)
def test_crops_of_files_are_those_of_pillow(
    transform: ImageTransform, files: list[File], source: Path
) -> None:
    loader = ShardLoader(
        source, batch_size=10, shuffle=False, seed=3, threads=2, transform=transform, max_bad=1.0
    )
    assert compare(loader, transform, files) == good(files), "in order; the others are left out"
    bad = {f"{number:03d}" for number in range(len(files))} - {*good(files)}
    assert {sample.key for sample in loader.bad} == bad and loader.counters()["bad"] == len(bad)
    assert all("cannot be decoded" in sample.reason for sample in loader.bad)


def test_the_largest_photo_is_turned_and_resized_as_by_pillow(tmp_path: Path) -> None:
    tile = np.tile(oracle.photo(500, 500)[..., 0], (12, 16))
    data = _save(Image.fromarray(tile), "JPEG", {"quality": 50}, 6)
    files, transform = [File("jpg", data, _by_pillow(data))], CenterCrop(SIZE, output="uint8", exif=True)
    assert files[0].pixels is not None and files[0].pixels.shape == (8000, 6000, 3)
    loader = ShardLoader(packed(files, tmp_path), batch_size=1, shuffle=False, transform=transform)
    assert compare(loader, transform, files) == ["000"]


def compare(loader: ShardLoader, transform: ImageTransform, files: list[File]) -> list[str]:
    """Compares all crops with those that Pillow makes with the same parameters; returns their keys."""
    keys, means = list[str](), list[float]()
    for batch in loader:
        hashes = loader._reader.keys.of_transforms(batch.samples.numpy())
        for number, key in enumerate(batch["__key__"]):
            pixels = files[int(key)].pixels
            assert pixels is not None, f"Pillow cannot decode {key}"
            (table,) = draw_groups(transform, hashes[number : number + 1], np.array([pixels.shape[:2]]))
            expected = oracle.resized(pixels, table.ints[0, 0], SIZE, transform.interpolation)
            difference = np.abs(batch.images[number].permute(1, 2, 0).numpy().astype(int) - expected)
            assert difference.mean() <= 0.5 and difference.max() <= 2, (key, pixels.shape)
            means.append(float(difference.mean()))
        keys += batch["__key__"]
    assert np.mean(means) < 0.1
    return keys


def test_in_training_each_file_that_is_cut_is_replaced(files: list[File], source: Path) -> None:
    transform = RandomResizedCrop(SIZE, output="uint8", exif=True)
    loader = ShardLoader(
        source, batch_size=10, seed=3, threads=2, transform=transform, max_bad=1.0, tail="drop"
    )
    found = list(loader)
    assert [len(batch.images) for batch in found] == [10] * (len(files) // 10), "no batch is short"
    keys = [key for batch in found for key in batch["__key__"]]
    assert {*keys} <= {*good(files)} and len(loader.bad) > 10
    for sample in loader.bad:
        assert sample.key not in good(files) and Path(sample.shard).parent == source
    again = ShardLoader(
        source, batch_size=5, seed=3, threads=1, transform=transform, max_bad=1.0, tail="drop"
    )
    crops = {
        _name(row): image for batch in found for row, image in zip(batch.samples, batch.images, strict=True)
    }
    for batch in list(again)[: len(found)]:
        for row, image in zip(batch.samples, batch.images, strict=True):
            assert torch.equal(crops[_name(row)], image), "by the same one, with the same crop"


def _name(row: torch.Tensor) -> tuple[int, ...]:
    return tuple(row.tolist())
