"""Encodes images and histograms as bytes, in the thread of `MediaWriter`, alongside training."""

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
_PNG_COLORS = {1: 0, 2: 4, 3: 2, 4: 6}  # PNG's numbers for gray, gray with alpha, RGB and RGBA


def to_pixels(
    values: npt.NDArray[Any], *, channels_first: bool, span: tuple[float, float] | None = None
) -> Pixels:
    """Returns an image as bytes, with black and white at the ends of `span`, by default that of the image itself."""
    if values.ndim == 2:
        values = values[:, :, None]
    elif channels_first:
        values = values.transpose(1, 2, 0)
    low, high = span or value_span([values])
    if values.dtype == np.uint8 and (low, high) == (0, 255):
        return values
    finite = np.isfinite(values)
    exact = values.dtype.itemsize > 2 and values.dtype != np.float32
    known: npt.NDArray[Any] = np.where(finite, values, low).astype(np.float64 if exact else np.float32)
    scaled = np.where(finite, (known - low) / max(high - low, 1e-12), 0)
    return np.round(scaled * 255).astype(np.uint8)


def value_span(images: Sequence[npt.NDArray[Any]]) -> tuple[float, float]:
    """Returns the values of black and white: 0 and 1 (integers: 0 and 255), or the extremes if some lie outside.

    >>> value_span([np.array([0.5]), np.array([0.2])]), value_span([np.array([0.5]), np.array([3.0])])
    ((0.0, 1.0), (0.5, 3.0))
    """
    most = 255.0 if images and images[0].dtype.kind in "iu" else 1.0
    known = [values for image in images if (values := image[np.isfinite(image)]).size]
    low = min((float(values.min()) for values in known), default=0.0)
    high = max((float(values.max()) for values in known), default=most)
    return (low, high) if low < 0 or high > most else (0.0, most)


def grid_size(sizes: Sequence[tuple[int, int]], *, columns: int | None) -> tuple[int, int, int]:
    """Returns height, width and number of columns of a grid of images with these heights and widths."""
    columns = min(len(sizes), columns or math.ceil(math.sqrt(len(sizes))))
    rows, gap = math.ceil(len(sizes) / columns), _GRID_GAP_PIXELS
    height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
    return rows * (height + gap) - gap, columns * (width + gap) - gap, columns


def to_grid(images: Sequence[Pixels], *, columns: int | None) -> Pixels:
    """Returns a grid of images of any sizes, with a gap between them."""
    *size, columns = grid_size([image.shape[:2] for image in images], columns=columns)
    height, width = (max(image.shape[axis] for image in images) + _GRID_GAP_PIXELS for axis in (0, 1))
    grid = np.zeros((*size, max(image.shape[2] for image in images)), np.uint8)
    for place, image in enumerate(images):
        y, x = place // columns * height, place % columns * width
        grid[y : y + image.shape[0], x : x + image.shape[1]] = _with_channels(image, grid.shape[2])
    return grid


def _with_channels(image: Pixels, channels: int) -> Pixels:
    if image.shape[2] == 1 and channels >= 3:
        image = np.repeat(image, 3, axis=2)
    if image.shape[2] == 3 and channels == 4:
        opaque = np.full((*image.shape[:2], 1), 255, np.uint8)
        image = np.concatenate([image, opaque], axis=2)
    return image


def encode_png(pixels: Pixels) -> bytes:
    """Returns a PNG file, encoded without another package; each byte is stored as its difference from the pixel before.

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
    """Raises `MissingExtra` if the package that writes JPEG is not installed."""
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
    """Returns a histogram as JSON, for `read_histogram`."""
    return json.dumps({"edges": list(edges), "counts": list(counts), "non_finite": non_finite}).encode()
