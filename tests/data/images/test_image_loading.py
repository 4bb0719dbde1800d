"""`ShardLoader` with transforms of images: batches, bad files, orientation, and the same crops everywhere."""

from __future__ import annotations

import io
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from headway.data import Batch, CenterCrop, MultiCrop, RandomResizedCrop, ShardLoader, pack
from headway.data.images.device.availability import missing_for_gpu
from headway.data.images.exif import orientation, turn
from headway.data.samples import cropper
from headway.errors import UsageError

sys.path.insert(0, str(Path(__file__).parent))
import oracle
from one_image import crop_image

SMALL = MultiCrop(global_size=24, local_size=12, n_local=3, output="fp32")


def jpeg(number: int, **how: Any) -> bytes:
    pixels = oracle.photo(40 + number % 7, 50 + number % 5, number)
    return simplejpeg.encode_jpeg(pixels, quality=92, **how)


def saved(image: Image.Image, kind: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def shards(tmp_path: Path, samples: list[dict[str, Any]], size: int = 2**16) -> Path:
    pack(
        ({"__key__": f"{n:04d}", **sample} for n, sample in enumerate(samples)),
        tmp_path / "shards",
        shard_size=size,
    )
    return tmp_path / "shards"


def batches(source: Path, **how: Any) -> list[Batch]:
    loader = ShardLoader(source, **{"batch_size": 8, "seed": 3, "threads": 2, **how})
    return list(loader)


def by_sample(found: list[Batch], name: str) -> dict[tuple[int, ...], torch.Tensor]:
    crops: dict[tuple[int, ...], torch.Tensor] = {}
    for batch in found:
        for number, row in enumerate(batch.samples.tolist()):
            crops[tuple(row)] = batch[name][:, number]
    return crops


def test_batches_have_crops_labels_and_the_numbers_of_their_samples(tmp_path: Path) -> None:
    source = shards(tmp_path, [{"jpg": jpeg(n), "cls": n % 5, "txt": str(n)} for n in range(24)])
    found = batches(source, transform=SMALL)
    assert len(found) == 3 and all(type(batch) is Batch for batch in found)
    first = found[0]
    assert first.global_crops.shape == (2, 8, 3, 24, 24) and first.local_crops.shape == (3, 8, 3, 12, 12)
    assert first.labels.tolist() == [int(text) % 5 for text in first["txt"]]
    assert next(iter(first.values())).shape[0] == 8, "the first tensor has the samples, which a stage counts"
    plain = batches(source, transform=RandomResizedCrop(size=16))[0]
    assert plain.images.shape == (8, 3, 16, 16) and plain.images.dtype == torch.bfloat16
    eight = batches(source, transform=RandomResizedCrop(size=16, output="fp8"))[0]
    assert (eight.fp8.dequantize(eight.images) - plain.images).abs().max() < 0.12
    last = batches(source, transform=RandomResizedCrop(size=16, channels_last=True))[0]
    assert last.images.is_contiguous(memory_format=torch.channels_last) and torch.equal(
        last.images, plain.images
    )


def test_a_sample_has_the_same_crops_on_any_ranks_and_after_a_resume(tmp_path: Path) -> None:
    source = shards(tmp_path, [{"jpg": jpeg(n), "cls": n} for n in range(32)])
    whole = by_sample(batches(source, transform=SMALL, batch_size=8), "local_crops")
    assert len(whole) == 32
    parts: dict[tuple[int, ...], torch.Tensor] = {}
    for rank in range(4):
        parts |= by_sample(
            batches(source, transform=SMALL, batch_size=2, rank=rank, world_size=4), "local_crops"
        )
    assert parts.keys() == whole.keys() and all(torch.equal(parts[key], whole[key]) for key in whole)
    loader = ShardLoader(source, batch_size=8, seed=3, threads=2, transform=SMALL)
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    running.close()
    resumed = ShardLoader(source, batch_size=8, seed=3, threads=1, transform=SMALL)
    resumed.load_state_dict(state)
    rest = by_sample(list(resumed), "local_crops")
    assert len(rest) == 24 and all(torch.equal(rest[key], whole[key]) for key in rest)
    other = by_sample(batches(source, transform=SMALL, seed=4), "local_crops")
    assert not any(torch.equal(other[key], whole[key]) for key in whole), "another seed, other crops"


def test_images_of_all_kinds_become_crops(tmp_path: Path) -> None:
    image = Image.fromarray(oracle.photo(40, 50))
    kinds = [
        {"jpg": jpeg(1)},
        {"jpg": saved(image, "JPEG", progressive=True)},
        {"jpg": saved(image.convert("CMYK"), "JPEG")},
        {"jpg": saved(image.convert("L"), "JPEG")},
        {"png": saved(image.quantize(16), "PNG")},
        {"png": saved(image.convert("L"), "PNG")},
        {"png": saved(image.convert("RGBA"), "PNG")},
        {"webp": saved(image, "WEBP")},
    ]
    source = shards(tmp_path, kinds)
    transform = CenterCrop(size=24, resize=32, output="uint8")
    (batch,) = batches(source, transform=transform, shuffle=False)
    for found, kind in zip(batch.images, kinds, strict=True):
        (data,) = kind.values()
        pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
        assert torch.equal(found, crop_image(transform, pixels, 0)["images"][0]), "what Pillow decodes"
    for number in (3, 5):
        assert torch.equal(batch.images[number][0], batch.images[number][1]), "gray stays gray"


def test_a_file_that_cannot_be_decoded_never_ends_the_batch(tmp_path: Path) -> None:
    good = jpeg(3)
    samples = [{"jpg": jpeg(n), "cls": n} for n in range(16)]
    samples[5]["jpg"], samples[9]["jpg"] = good[: len(good) // 3], b"\xff\xd8nothing"
    source = shards(tmp_path, samples)
    loader = ShardLoader(source, batch_size=8, seed=1, transform=SMALL, max_bad=0.5)
    found = list(loader)
    assert [batch.local_crops.shape[1] for batch in found] == [8, 8]
    assert sorted(bad.key for bad in loader.bad) == ["0005", "0009"] and loader.counters()["bad"] == 2
    assert all(Path(bad.shard).parent == source and "cannot be decoded" in bad.reason for bad in loader.bad)
    again = ShardLoader(source, batch_size=4, seed=1, transform=SMALL, max_bad=0.5, threads=1)
    used = [Counter(key for batch in each for key in batch["__key__"]) for each in (found, again)]
    assert used[0] == used[1] and sum(used[0].values()) == 16, "always by the same samples"
    checking = ShardLoader(
        source, batch_size=8, shuffle=False, transform=CenterCrop(size=8, resize=8), max_bad=0.5
    )
    labels = [label for batch in checking for label in batch.labels.tolist()]
    assert labels == [n for n in range(16) if n not in (5, 9)]


@pytest.mark.parametrize("how", range(1, 9))
def test_photos_are_turned_as_their_exif_data_says_if_asked(how: int, tmp_path: Path) -> None:
    image = Image.fromarray(oracle.photo(32, 48))
    exif = Image.Exif()
    exif[0x0112] = how
    data = saved(image, "JPEG", exif=exif, quality=95)
    assert orientation(memoryview(data)) == how
    pixels = simplejpeg.decode_jpeg(data)
    from PIL import ImageOps

    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    turned = turn(pixels, how)
    assert turned.shape == expected.shape and np.abs(turned.astype(int) - expected).max() <= 3
    if how == 6:
        source = shards(tmp_path, [{"jpg": data}])
        for exif_asked, like in ((True, turned), (False, pixels)):
            transform = CenterCrop(size=16, resize=16, output="uint8", exif=exif_asked)
            (batch,) = batches(source, transform=transform, shuffle=False, batch_size=1)
            assert torch.equal(batch.images, crop_image(transform, like, 0)["images"])


def test_orientation_of_damaged_headers_is_upright() -> None:
    image = Image.fromarray(oracle.photo(8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(image, "JPEG", exif=exif)
    for cut in range(2, 60):
        assert orientation(memoryview(data[:cut])) in (1, 6)
    for number in range(20, 50):
        changed = bytearray(data)
        changed[number] ^= 0xFF
        assert 1 <= orientation(memoryview(bytes(changed))) <= 8


@pytest.mark.skipif(not missing_for_gpu(), reason="this machine has what the GPU's path needs")
def test_without_a_gpu_the_loader_says_so_and_uses_the_cpu(tmp_path: Path, messages: list[str]) -> None:
    source = shards(tmp_path, [{"jpg": jpeg(n), "cls": n} for n in range(8)])
    there = batches(source, transform=SMALL, device="cuda")
    here = batches(source, transform=SMALL)
    assert torch.equal(there[0].local_crops, here[0].local_crops)
    assert [text for text in messages if "on the CPU" in text] == [
        f"images are decoded and cropped on the CPU: {missing_for_gpu()} here for device='cuda'"
    ]
    with pytest.raises(UsageError, match="needs a transform of images"):
        batches(source, device="cuda")


@pytest.mark.parametrize(
    "how",
    [{"output": "fp32"}, {"output": "bf16", "channels_last": True}, {"output": "fp8"}, {"output": "uint8"}],
)
def test_crops_in_the_memory_of_a_batch_are_those_of_each_sample_alone(
    how: dict[str, Any], tmp_path: Path
) -> None:
    transform = MultiCrop(global_size=24, local_size=12, n_local=3, exif=True, **how)
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(oracle.photo(40, 56))
    samples: list[dict[str, Any]] = [{"jpg": jpeg(n)} for n in range(18)]
    samples[2] = {"jpg": saved(image, "JPEG", progressive=True)}
    samples[5] = {"jpg": saved(image, "JPEG", exif=exif)}
    samples[7] = {"png": saved(image, "PNG")}
    samples[11] = {"jpg": b"broken"}
    source = shards(tmp_path, samples, size=2**20)
    for shuffle, count in ((True, 18), (False, 17)):
        loader = ShardLoader(
            source, batch_size=6, shuffle=shuffle, seed=3, threads=2, transform=transform, max_bad=0.5
        )
        found = list(loader)
        assert sum(len(batch.samples) for batch in found) == count
        for batch in found:
            expected = [_alone(transform, loader, samples, row) for row in batch.samples]
            for name in ("global_crops", "local_crops"):
                stack = torch.stack([_plain(each[name]) for each in expected], 1)
                assert torch.equal(_plain(batch[name]), stack)
                last = batch[name].flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
                assert last if transform.channels_last else batch[name].is_contiguous()


def _alone(
    transform: MultiCrop, loader: ShardLoader, samples: list[dict[str, Any]], row: torch.Tensor
) -> dict[str, torch.Tensor]:
    (data,) = samples[int(row[3])].values()
    pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    key = loader._reader.keys.of_transforms(row.numpy()[None])[0]
    return crop_image(transform, turn(pixels, orientation(memoryview(data))), int(key))


def _plain(crops: torch.Tensor) -> torch.Tensor:
    return crops.view(torch.uint8) if crops.dtype is torch.float8_e4m3fn else crops


def test_crops_of_a_batch_are_drawn_at_once_and_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shards(tmp_path, [{"jpg": jpeg(n)} for n in range(16)])
    drawn, draw = list[int](), cropper.draw_groups

    def count(transform: Any, keys: Any, sizes: Any) -> Any:
        drawn.append(len(keys))
        return draw(transform, keys, sizes)

    def copy(*_: Any) -> None:
        raise AssertionError("these crops are in one memory already")

    monkeypatch.setattr(cropper, "draw_groups", count)
    monkeypatch.setattr(cropper, "draw_image", copy)
    monkeypatch.setattr("headway.data.images.batch.stack_crops", copy)
    assert len(batches(source, transform=SMALL)) == 2
    assert drawn == [2] * 8, "a chunk of each of two threads has two samples"


def test_an_image_too_long_to_count_its_pixels_is_a_bad_sample(tmp_path: Path) -> None:
    long = Image.fromarray(np.zeros((1, 3_000_000), np.uint8))
    good = saved(Image.new("L", (3, 5), 200), "PNG")
    source = shards(tmp_path, [{"png": good}, {"png": saved(long, "PNG")}, {"png": good}])
    transform = CenterCrop(8, resize=1024, output="uint8")
    loader = ShardLoader(source, batch_size=3, shuffle=False, transform=transform, max_bad=1.0)
    assert [batch["__key__"] for batch in loader] == [["0000", "0002"]]
    assert [(bad.key, "3072000000" in bad.reason) for bad in loader.bad] == [("0001", True)]


def test_orientation_is_found_wherever_a_file_may_have_it() -> None:
    from PIL import ImageOps

    image, exif = Image.fromarray(oracle.photo(12, 20)), Image.Exif()
    exif[0x0112] = 6
    plain, png = saved(image, "JPEG"), saved(image, "PNG", exif=exif)
    at = png.index(b"eXIf") - 4
    size = 12 + int.from_bytes(png[at : at + 4], "big")
    last = png.index(b"IEND") - 4

    def with_exif(tiff: bytes, before: bytes = b"") -> bytes:
        part = b"Exif\0\0" + tiff
        return plain[:2] + before + b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part + plain[2:]

    files = [
        png,
        png[:at] + png[at + size : last] + png[at : at + size] + png[last:],
        saved(image, "WEBP", exif=exif),
        saved(image, "WEBP", exif=b"Exif\0\0" + exif.tobytes()[6:], lossless=True),
        with_exif(b"MM\0*" + struct.pack(">IHHHIII", 8, 1, 0x112, 4, 1, 6, 0)),
        with_exif(b"II*\0" + struct.pack("<IHHHIII", 8, 1, 0x112, 4, 1, 6, 0)),
        with_exif(b"MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x112, 3, 1, 6, 0, 0), before=b"\xff" * 3),
        saved(image, "JPEG", progressive=True, exif=exif),
    ]
    for number, data in enumerate(files):
        assert ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size == (12, 20), number
        assert orientation(memoryview(data)) == 6, number
        for cut in range(len(data)):
            assert orientation(memoryview(data[:cut])) in (1, 6)
    for data in (plain, saved(image, "PNG"), saved(image, "WEBP"), b"", b"RIFF\0\0\0\0WEBP" + bytes(40)):
        assert orientation(memoryview(data)) == 1
