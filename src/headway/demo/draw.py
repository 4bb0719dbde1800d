"""Draws the pictures of `headway demo`: shapes of any color, size and place, on noise.

    python draw.py pictures                    pictures/train/circle/0000.png and so on: a directory for each class
    python draw.py pictures --arrays           as NumPy files, for machines without Pillow

Nothing is downloaded, and the same pictures are drawn each time. Needs NumPy only.
"""

from __future__ import annotations

import argparse
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SIZE = 32
"""pixels of a side"""
_NOISE = 40  # of 255

Pixels = npt.NDArray[np.uint8]
# whether a point is inside a shape, by its distance from the center in units of the radius
SHAPES: dict[str, Callable[[Any, Any], Any]] = {
    "circle": lambda x, y: np.hypot(x, y) < 1,
    "cross": lambda x, y: (np.minimum(abs(x), abs(y)) < 0.3) & (np.maximum(abs(x), abs(y)) < 1),
    "diamond": lambda x, y: abs(x) + abs(y) < 1.1,
    "ring": lambda x, y: abs(np.hypot(x, y) - 0.75) < 0.25,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.85,
    "triangle": lambda x, y: (y < 0.7) & (2 * abs(x) < y + 0.9),
}


def draw(shape: str, random: np.random.Generator) -> Pixels:
    """Returns one picture, height x width x 3."""
    radius = random.uniform(6, 12)
    center = random.uniform(radius, SIZE - radius, 2)
    y, x = (np.mgrid[:SIZE, :SIZE] + 0.5 - center[:, None, None]) / radius
    background, color = _contrasting(random)
    picture = np.where(SHAPES[shape](x, y)[..., None], color, background)
    noise = random.integers(-_NOISE, _NOISE + 1, picture.shape)
    return np.asarray(np.clip(picture + noise, 0, 255), np.uint8)


def _contrasting(random: np.random.Generator) -> tuple[Any, Any]:
    """Returns two colors that differ."""
    one = random.integers(0, 256, 3)
    return one, (one + random.integers(90, 167, 3)) % 256


def encode_png(pixels: Pixels) -> bytes:
    """Returns a PNG file, without Pillow."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: the row is not filtered
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits of RGB
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def write_split(directory: Path, each: int, *, seed: int, arrays: bool) -> None:
    """Draws `each` pictures of each shape into a directory."""
    random = np.random.default_rng(seed)
    for label, shape in enumerate(SHAPES):
        place = directory if arrays else directory / shape
        place.mkdir(parents=True, exist_ok=True)
        for number in range(each):
            pixels = draw(shape, random)
            if arrays:
                np.save(place / f"{shape}-{number:04}.npy", pixels)
                (place / f"{shape}-{number:04}.cls").write_text(str(label))
            else:
                (place / f"{number:04}.png").write_bytes(encode_png(pixels))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--each", type=int, default=300, help="pictures of each shape (default: 300)")
    parser.add_argument("--arrays", action="store_true", help="NumPy files instead of PNGs")
    options = parser.parse_args()
    for seed, (split, each) in enumerate({"train": options.each, "val": max(1, options.each // 5)}.items()):
        write_split(options.directory / split, each, seed=seed, arrays=options.arrays)
        print(f"{options.directory / split}: {each * len(SHAPES):,} pictures of {len(SHAPES)} shapes")


if __name__ == "__main__":
    main()
