"""The orientation of a photo: how its pixels must be turned so that up is up."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

_ORIENTATION = 0x0112
_MAX_ENTRIES = 512  # of the first directory; a damaged header may state anything
_EXIF, _SCAN, _APP1 = b"Exif\0\0", 0xDA, 0xE1


def orientation(data: memoryview) -> int:
    """Returns the EXIF orientation of a JPEG, from 1 (as it is) to 8; 1 if it has none, or one that cannot be read."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _SCAN:
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] == _APP1 and data[at + 4 : at + 10] == _EXIF:
            return _from_tiff(bytes(data[at + 10 : at + 2 + length]))
        at += 2 + length
    return 1


def _from_tiff(tiff: bytes) -> int:
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    try:
        if order is None:
            return 1
        (at,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, at)
        for number in range(min(count, _MAX_ENTRIES)):
            tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, at + 2 + 12 * number)
            if tag == _ORIENTATION:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass  # a cut directory says nothing
    return 1


def turn(pixels: npt.NDArray[np.uint8], how: int) -> npt.NDArray[np.uint8]:
    """Returns an image, height x width x 3, as its orientation says.

    >>> turn(np.arange(6, dtype=np.uint8).reshape(1, 2, 3), 6).shape
    (2, 1, 3)
    """
    if how >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if how in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if how in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
