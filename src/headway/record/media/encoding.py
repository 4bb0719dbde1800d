"""Pixels, histograms and texts as bytes. Everything here runs beside training, in the thread of `MediaWriter`."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.errors import MissingExtra

Pixels = npt.NDArray[np.uint8]
"""height, width and 1, 3 or 4 channels"""

_ZLIB_LEVEL = 6
_JPEG_QUALITY = 90
_GRID_GAP_PIXELS = 2
_PNG_COLORS = {1: 0, 2: 4, 3: 2, 4: 6}  # its number for gray, gray with alpha, RGB and RGBA


def to_pixels(values: npt.NDArray[Any], *, channels_first: bool) -> Pixels:
    """Returns an image as bytes: floats are 0 to 1, or else scaled from their own minimum and maximum."""
    if values.ndim == 2:
        values = values[:, :, None]
    elif channels_first:
        values = values.transpose(1, 2, 0)
    if values.dtype == np.bool_:
        return np.asarray(values, np.uint8) * np.uint8(255)
    if values.dtype.kind in "iu":
        clipped: Pixels = np.clip(values, 0, 255).astype(np.uint8)
        return clipped
    finite = np.isfinite(values)
    values = np.where(finite, values, 0).astype(np.float32)
    low, high = float(values.min(initial=0)), float(values.max(initial=1))
    if low < 0 or high > 1:
        known = values[finite]
        low, high = float(known.min()), float(known.max())
        values = np.where(finite, (values - low) / max(high - low, 1e-12), 0)
    return np.round(values * 255).astype(np.uint8)


def to_grid(images: Sequence[Pixels], *, columns: int | None) -> Pixels:
    """Returns images of any sizes side by side, in rows, with a gap between them."""
    columns = min(len(images), columns or math.ceil(math.sqrt(len(images))))
    rows, gap = math.ceil(len(images) / columns), _GRID_GAP_PIXELS
    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    channels = max(3 if image.shape[2] == 3 else image.shape[2] for image in images)
    grid = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap, channels), np.uint8)
    for place, image in enumerate(images):
        y, x = place // columns * (height + gap), place % columns * (width + gap)
        grid[y : y + image.shape[0], x : x + image.shape[1]] = _with_channels(image, channels)
    return grid


def _with_channels(image: Pixels, channels: int) -> Pixels:
    if image.shape[2] == 1 and channels >= 3:
        image = np.repeat(image, 3, axis=2)
    if image.shape[2] == 3 and channels == 4:
        opaque = np.full((*image.shape[:2], 1), 255, np.uint8)
        image = np.concatenate([image, opaque], axis=2)
    return image


def encode_png(pixels: Pixels) -> bytes:
    """Returns a PNG file, written without another package; each byte is stored as its difference to the pixel before.

    >>> encode_png(np.zeros((2, 2, 3), np.uint8))[:4]
    b'\\x89PNG'
    """
    height, width, channels = pixels.shape
    lines = np.empty((height, 1 + width * channels), np.uint8)
    lines[:, 0] = 1  # the filter "Sub"
    lines[:, 1 : 1 + channels] = pixels[:, 0]
    lines[:, 1 + channels :] = (pixels[:, 1:] - pixels[:, :-1]).reshape(height, -1)  # modulo 256
    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLORS[channels], 0, 0, 0)
    data = zlib.compress(lines.tobytes(), _ZLIB_LEVEL)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def check_jpeg() -> None:
    """Raises `MissingExtra` if there is no package to write JPEG with."""
    if importlib.util.find_spec("PIL") is None:
        raise MissingExtra("pillow", extra="images", purpose="to keep images as JPEG")


def encode_jpeg(pixels: Pixels) -> bytes:
    """Returns a JPEG file; transparency is lost."""
    from PIL import Image

    gray, target = pixels.shape[2] < 3, io.BytesIO()
    picture = Image.fromarray(pixels[:, :, 0] if gray else pixels[:, :, :3])
    picture.save(target, "JPEG", quality=_JPEG_QUALITY)
    return target.getvalue()


def encode_histogram(edges: Sequence[float], counts: Sequence[int], non_finite: int) -> bytes:
    """Returns a histogram as JSON, as `read_histogram` reads it."""
    return json.dumps({"edges": list(edges), "counts": list(counts), "non_finite": non_finite}).encode()
