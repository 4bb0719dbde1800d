"""Crops on a GPU: equal to the CPU's and to torchvision's, whatever the files are."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from headway.data import Batch, CenterCrop, MultiCrop, RandomResizedCrop, ShardLoader, pack
from headway.data.images.cpu import DrawnImage, cut_crops, draw_groups, largest_value, normalization
from headway.data.images.device.availability import missing_for_gpu
from headway.data.images.draws import CropTable
from headway.data.images.fp8 import Fp8Scaling

sys.path.insert(0, str(Path(__file__).parents[1] / "data" / "images"))
import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(missing_for_gpu()), reason=f"needs the GPU's path: {missing_for_gpu()}"),
]

KEYS = np.arange(1, 9, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def levels(transform: Any) -> torch.Tensor:
    """How much one level of 255 is, per channel, after normalizing."""
    return torch.tensor(normalization(transform)[0])[:, None, None]


def crops_of(
    transform: Any, pixels: list[np.ndarray], turns: list[int] | None = None
) -> dict[str, torch.Tensor]:
    from headway.data.images.device.gpu import GpuCropper
    from headway.data.images.device.image_table import ImageTable

    cropper = GpuCropper(transform)
    images = [torch.from_numpy(each).cuda().permute(2, 0, 1) for each in pixels]
    images[0] = images[0].contiguous()  # planes, as nvJPEG decodes; the others as the CPU does
    table = ImageTable.of(images).turned(np.array(turns or [1] * len(pixels)))
    tables = cropper.draw(KEYS[: len(pixels)], table.sizes)
    return {name: part.cpu() for name, part in cropper.crop(table, tables).items()}


def test_crops_are_those_of_the_cpu() -> None:
    shapes = [(375, 500), (1, 1), (3, 700), (97, 96), (1300, 900), (60, 31), (2000, 3000), (224, 224)]
    pixels = [oracle.photo(*shape, seed=at) for at, shape in enumerate(shapes)]
    transform = MultiCrop(output="fp32")
    found = crops_of(transform, pixels)
    tables = draw_groups(transform, KEYS, np.array(shapes))
    differences = []
    for at, each in enumerate(pixels):
        expected = cut_crops(
            transform, DrawnImage(each, [CropTable(t.ints[at], t.floats[at]) for t in tables], 0)
        )
        for name, crops in expected.items():
            differences.append(((found[name][:, at] - crops) / levels(transform)).abs().flatten())
    every = torch.cat(differences)
    assert not every.isnan().any() and every.mean() < 0.35
    # the CPU clips what overshoots at an edge after the first of two passes, the GPU and torchvision at the end
    assert every.kthvalue(int(0.995 * len(every))).values < 2 and every.max() < 40


def test_crops_are_those_of_torchvision() -> None:
    from torchvision.transforms.v2 import InterpolationMode, functional as tv

    shapes = [(375, 500), (240, 200), (700, 900), (96, 130)]
    pixels = [oracle.photo(*shape, seed=at) for at, shape in enumerate(shapes)]
    transform = MultiCrop(output="fp32", n_local=4)
    found = crops_of(transform, pixels)
    differences = []
    for group, table in zip(
        transform.groups(), draw_groups(transform, KEYS[:4], np.array(shapes)), strict=True
    ):
        for at, each in enumerate(pixels):
            image = torch.from_numpy(each).permute(2, 0, 1).float() / 255
            for number in range(len(group.recipes)):
                ints, floats = table.ints[at, number].tolist(), table.floats[at, number].tolist()
                size = [group.size, group.size]
                crop = tv.resized_crop(
                    image, *ints[:4], size=size, interpolation=InterpolationMode.BICUBIC, antialias=True
                ).clamp(0, 1)
                crop = tv.horizontal_flip(crop) if ints[8] & 1 else crop
                steps = (None, tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
                for slot in range(4):
                    step = (ints[9] >> 3 * slot) & 7
                    crop = steps[step](crop, floats[step - 1]) if step else crop
                crop = tv.rgb_to_grayscale(crop, 3) if ints[8] & 2 else crop
                crop = tv.gaussian_blur(crop, [9, 9], [floats[4]] * 2) if floats[4] else crop
                crop = tv.solarize(crop, 128 / 255) if ints[8] & 4 else crop
                crop = tv.normalize(crop, list(transform.mean), list(transform.std))
                differences.append(
                    ((found[group.name][number, at] - crop) / levels(transform)).abs().flatten()
                )
    every = torch.cat(differences)
    assert every.mean() < 0.2 and every.kthvalue(int(0.999 * len(every))).values < 1.5 and every.max() < 4


def test_types_layouts_and_orientations() -> None:
    pixels = [oracle.photo(90, 120, seed=at) for at in range(8)]
    exact = crops_of(RandomResizedCrop(size=56, output="fp32"), pixels)["images"]
    for output, worst in (("bf16", 0.02), ("fp16", 0.003)):
        assert (
            crops_of(RandomResizedCrop(size=56, output=output), pixels)["images"].float() - exact
        ).abs().max() < worst
    last = crops_of(RandomResizedCrop(size=56, output="fp32", channels_last=True), pixels)["images"]
    assert last.is_contiguous(memory_format=torch.channels_last) and torch.equal(last, exact)
    plain = crops_of(RandomResizedCrop(size=56, output="uint8"), pixels)["images"]
    transform = RandomResizedCrop(size=56)
    again = exact / levels(transform) - torch.tensor(normalization(transform)[1])[:, None, None] / levels(
        transform
    )
    assert (plain.float() - again).abs().max() < 0.51
    eight = crops_of(RandomResizedCrop(size=56, output="fp8"), pixels)["images"]
    assert eight.dtype == torch.float8_e4m3fn
    assert (
        Fp8Scaling.of(largest_value(transform)).dequantize(eight, torch.float32) - exact
    ).abs().max() < 0.12
    from headway.data.images.exif import turn

    turns = list(range(1, 9))
    turned = [turn(each, how) for each, how in zip(pixels, turns, strict=True)]
    assert torch.equal(crops_of(transform, pixels, turns)["images"], crops_of(transform, turned)["images"])
    center = CenterCrop(size=64, resize=80, output="fp32")
    tables = draw_groups(center, KEYS, np.full((8, 2), (90, 120)))
    expected = [
        cut_crops(center, DrawnImage(p, [CropTable(t.ints[0], t.floats[0]) for t in tables], 0))["images"][0]
        for p in pixels
    ]
    assert ((crops_of(center, pixels)["images"] - torch.stack(expected)) / levels(center)).abs().max() < 1.3


def saved(image: Image.Image, kind: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def shards(tmp_path: Path, samples: list[dict[str, Any]]) -> Path:
    pack(
        ({"__key__": f"{n:04d}", **each} for n, each in enumerate(samples)), tmp_path / "s", shard_size=2**18
    )
    return tmp_path / "s"


def photos(count: int) -> list[dict[str, Any]]:
    shapes = [(60 + n % 9, 80 + n % 7) for n in range(count)]
    return [
        {"jpg": simplejpeg.encode_jpeg(oracle.photo(*shape, seed=n), quality=92), "cls": n}
        for n, shape in enumerate(shapes)
    ]


def loaded(source: Path, **how: Any) -> tuple[list[Batch], ShardLoader]:
    loader = ShardLoader(source, **{"batch_size": 8, "seed": 3, "threads": 2, "max_bad": 0.5, **how})
    return list(loader), loader


def test_a_loader_gives_the_same_batches_as_on_the_cpu(tmp_path: Path) -> None:
    samples = photos(32)
    image = Image.fromarray(oracle.photo(70, 80))
    samples[3] = {"jpg": saved(image, "JPEG", progressive=True), "cls": 3}
    samples[4] = {"jpg": saved(image.convert("CMYK"), "JPEG"), "cls": 4}
    samples[5] = {"jpg": saved(image.convert("L"), "JPEG"), "cls": 5}
    samples[6]["jpg"] = samples[6]["jpg"][: len(samples[6]["jpg"]) // 3]
    samples[7]["jpg"] = samples[7]["jpg"][:200] + bytes(len(samples[7]["jpg"]) - 202) + b"\xff\xd9"
    source = shards(tmp_path, samples)
    transform = MultiCrop(global_size=48, local_size=24, output="fp32")
    here, cpu = loaded(source, transform=transform)
    there, gpu = loaded(source, transform=transform, device="cuda")
    assert len(here) == len(there) == 4
    for ours, theirs in zip(here, there, strict=True):
        assert theirs.global_crops.is_cuda and theirs.labels.is_cuda
        assert (
            ours.samples.tolist() == theirs.samples.tolist()
            and ours.labels.tolist() == theirs.labels.tolist()
        )
        for name in ("global_crops", "local_crops"):
            difference = ((ours[name] - theirs[name].cpu()) / levels(transform)).abs()
            assert difference.mean() < 0.8, "nvJPEG and libjpeg round differently, too"
    assert sorted(bad.key for bad in cpu.bad) == sorted(bad.key for bad in gpu.bad)
    checked, _ = loaded(source, transform=CenterCrop(size=16, resize=16), device="cuda", shuffle=False)
    expected, _ = loaded(source, transform=CenterCrop(size=16, resize=16), shuffle=False)
    assert [b.labels.tolist() for b in checked] == [b.labels.tolist() for b in expected]


def test_processes_that_read_change_nothing(tmp_path: Path) -> None:
    photos = [simplejpeg.encode_jpeg(oracle.photo(90 + n, 120, seed=n)) for n in range(40)]
    photos[7], photos[21] = photos[7][:-60], photos[21][:200]
    pack(({"__key__": f"{n:02d}", "jpg": data, "cls": n} for n, data in enumerate(photos)), tmp_path)
    how: dict[str, Any] = {"batch_size": 8, "transform": MultiCrop(), "device": "cuda", "max_bad": 1}
    fast, plain = ShardLoader(tmp_path, **how), ShardLoader(tmp_path, **how)
    pool = fast._reader._pool
    assert pool is not None
    answer = pool.read([(0, 0, 0, n) for n in range(4)])
    assert answer is not None and None not in answer.answer.rows and pool._slots is not None
    assert torch.from_numpy(pool._slots._memory[: len(answer.memory)]).is_pinned()
    plain._reader._pool = None
    for _ in range(2):
        for found, expected in zip(fast, plain, strict=True):
            assert [*found] == [*expected]
            for name in found:
                same = torch.equal if isinstance(found[name], torch.Tensor) else list.__eq__
                assert same(found[name], expected[name]), name
    assert {bad.key for bad in fast.bad} == {bad.key for bad in plain.bad} == {"07", "21"}
    assert pool._idle, "they are still in use"
