"""What images become: values that a file holds are kept or refused, whatever JPEG library is installed."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headway.data import ShardLimits, decode_rgb
from headway.data.shards import decode as decoding
from headway.data.shards.decode import decode
from headway.errors import BadSample


def saved(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def decoded(extension: str, data: bytes, limits: ShardLimits | None = None) -> np.ndarray:
    found = decode({extension: memoryview(data)}, limits=limits)[extension]
    assert isinstance(found, np.ndarray)
    return found


def colors_16() -> bytes:
    """A PNG of 16 bits per color, which Pillow can neither write nor read without cutting it to 8."""
    rows = b"".join(b"\0" + struct.pack(">6H", *range(300 * row, 300 * row + 6)) for row in range(2))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


MASK = np.repeat(np.arange(12, dtype=np.uint8), 12).reshape(12, 12)


def mask() -> Image.Image:
    image = Image.fromarray(MASK).convert("P")
    image.putpalette([value for color in range(256) for value in (255 - color, color // 2, 7)])
    return image


def test_gray_pngs_of_16_bits_keep_their_values() -> None:
    depth = np.arange(1200, dtype=np.uint16).reshape(30, 40) * 54
    found = decoded("depth.png", saved(Image.fromarray(depth)))
    assert found.dtype == np.uint16 and np.array_equal(found, depth)


def test_pngs_with_a_palette_become_their_indices_and_colors_if_asked_for() -> None:
    for bits in (4, 8):
        found = decoded("seg.png", saved(mask(), bits=bits))
        assert found.dtype == np.uint8 and np.array_equal(found, MASK)
    colors = decode_rgb(memoryview(saved(mask())))
    assert colors.shape == (12, 12, 3) and colors[11, 0].tolist() == [244, 5, 7]
    assert np.array_equal(decoded("jpg", saved(mask())), colors), "a picture under another name"
    with pytest.raises(BadSample, match="cannot be decoded"):
        decode_rgb(memoryview(b"\x89PNG\r\n\x1a\n"))


def test_other_pngs_are_rgb_as_before() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3), np.uint8)
    for mode in ("RGB", "RGBA", "L", "LA", "1"):
        image = Image.fromarray(pixels).convert(mode)
        assert np.array_equal(decoded("png", saved(image)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("extension", ["png", "jpg"])
def test_sixteen_bits_that_would_be_cut_are_refused_with_the_way_out(extension: str) -> None:
    with pytest.raises(BadSample, match=r"16 bits per color do not fit uint8; pass decoders="):
        decoded(extension, colors_16())


def test_large_masks_are_no_bombs_and_a_refusal_names_the_limit() -> None:
    size = 4000, 3000
    for mode in ("P", "L"):
        assert decoded("png", saved(Image.new(mode, size))).shape[:2] == (3000, 4000)
    data = saved(Image.new("RGB", size))
    with pytest.raises(
        BadSample, match=r"more than 500 times the size of the file.*ShardLimits\(ratio=\.\.\.\)"
    ):
        decoded("png", data)
    assert decoded("png", data, ShardLimits(ratio=1500)).shape == (3000, 4000, 3)
    with pytest.raises(BadSample, match=r"more than 100 pixels.*ShardLimits\(pixels=\.\.\.\)"):
        decoded("png", data, ShardLimits(pixels=100))


# --- two installations


def photo() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 255, (20, 28, 3), np.uint8)
    return Image.fromarray(noise).resize((84, 60))


def outcome(data: bytes) -> object:
    try:
        found = decoded("jpg", data)
    except BadSample:
        return "bad"
    return found.shape, found.tobytes()


def with_and_without_simplejpeg(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[object, object]:
    first = outcome(data)
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "_simplejpeg", lambda: None)
        return first, outcome(data)


def test_a_png_named_jpg_and_extra_bytes_are_fine_with_any_library(monkeypatch: pytest.MonkeyPatch) -> None:
    jpeg, noise = saved(photo(), "JPEG"), np.random.default_rng(0).integers(0, 255, (1700, 1700, 3), np.uint8)
    png = saved(Image.fromarray(noise), compress_level=0)
    assert png.count(b"\xff\xda") > 100, "by chance, and not because of its scans"
    for data in (saved(photo()), jpeg[:-2] + bytes(7) + jpeg[-2:], png):
        with_it, without = with_and_without_simplejpeg(data, monkeypatch)
        assert with_it == without != "bad"


def test_a_jpeg_named_png_has_the_limits_of_a_jpeg() -> None:
    data = saved(photo(), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    assert decoded("png", data).shape == (60, 84, 3)
    for extension in ("jpg", "png"):
        with pytest.raises(BadSample, match=r"more than 100 scans.*ShardLimits\(scans=\.\.\.\)"):
            decoded(extension, data[:last] + data[last:-2] * 120 + data[-2:])


def test_the_limit_of_pixels_is_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # as if these were of 200 megapixels
    jpeg = saved(photo(), "JPEG")
    with_it, without = with_and_without_simplejpeg(jpeg, monkeypatch)
    assert with_it == without != "bad"
    with pytest.raises(BadSample, match=r"set PIL\.Image\.MAX_IMAGE_PIXELS"):
        decoded("webp", saved(photo(), "WEBP"))
    for kind in ("PNG", "JPEG"):
        assert decoded(kind.lower().replace("jpeg", "jpg"), saved(photo(), kind)).shape == (60, 84, 3)
        with pytest.raises(
            BadSample, match=r"84 x 60 is more than 5000 pixels.*ShardLimits\(pixels=\.\.\.\)"
        ):
            decoded("png", saved(photo(), kind), ShardLimits(pixels=5000))
    monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)
    assert decoding.decode_reduced(memoryview(jpeg), (60, 84), 2).shape == (30, 42, 3)
    with pytest.raises(BadSample, match="not a JPEG, PNG or WebP"):
        decoded("png", saved(photo(), "GIF"))


def damage(data: bytes, rng: random.Random) -> bytes:
    raw, at = bytearray(data), rng.randrange(len(data))
    match rng.randrange(5):
        case 0:
            raw[at] ^= 1 << rng.randrange(8)
        case 1:
            del raw[at:]
        case 2:
            raw[at:at] = rng.randbytes(rng.choice([1, 4, 50]))
        case 3:
            raw[at:at] = raw[at : at + rng.randrange(200)]
        case 4:
            raw[-2:-2] = rng.randbytes(9)
    return bytes(raw)


def test_damaged_images_are_good_or_bad_with_any_library(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, seen = random.Random(0), list[object]()
    kinds: list[dict[str, Any]] = [{}, {"progressive": True}, {"restart_marker_blocks": 4}]
    images = [saved(photo(), "JPEG", **how) for how in kinds] + [saved(photo().convert("L"), "JPEG")]
    for number in range(300):
        data = damage(images[number % len(images)], rng)
        with_it, without = with_and_without_simplejpeg(data, monkeypatch)
        assert with_it == without, f"damage {number}"
        seen.append(with_it)
    assert 30 < seen.count("bad") < 270
