"""The EXIF orientation of a photo: how its pixels must be turned to be upright."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

_ORIENTATION = 0x0112
_WHOLE_NUMBERS = {3: "H", 4: "I", 8: "h", 9: "i"}  # types of an entry, and how they are read
_MAX_ENTRIES = 512  # of the first directory; a damaged header may state anything
_EXIF, _FILL, _SCAN, _APP1 = b"Exif\0\0", 0xFF, 0xDA, 0xE1
_PNG, _RIFF, _WEBP = b"\x89PNG\r\n\x1a\n", b"RIFF", b"WEBP"


def orientation(data: memoryview) -> int:
    """Returns the EXIF orientation of a JPEG, PNG or WebP image, from 1 (as it is) to 8; 1 if it has none, or one that
    cannot be read."""
    if data[:8] == _PNG:
        found = _find_chunk(data, 8, b"eXIf", ">I4s", 4)
    elif data[:4] == _RIFF and data[8:12] == _WEBP:
        found = _find_chunk(data, 12, b"EXIF", "<4sI", 0)
    else:
        found = _find_segment(data)
    return _from_tiff(found.removeprefix(_EXIF))


def _find_segment(data: memoryview) -> bytes:
    """Returns the EXIF data of a JPEG; nothing if it has none."""
    at = 2
    while at + 4 <= len(data) and data[at] == _FILL and data[at + 1] != _SCAN:
        if data[at + 1] == _FILL:  # any number of them may precede a marker
            at += 1
            continue
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] == _APP1 and data[at + 4 : at + 10] == _EXIF:
            return bytes(data[at + 4 : at + 2 + length])
        at += 2 + length
    return b""


def _find_chunk(data: memoryview, at: int, kind: bytes, header: str, checksum_bytes: int) -> bytes:
    """Returns the contents of the first chunk of a kind; nothing if there is none."""
    while at + 8 <= len(data):
        fields = struct.unpack_from(header, data, at)
        length = next(each for each in fields if isinstance(each, int))
        if kind in fields:
            return bytes(data[at + 8 : at + 8 + length])
        at += 8 + length + (checksum_bytes or length % 2)  # chunks of WebP begin at even places
    return b""


def _from_tiff(tiff: bytes) -> int:
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    try:
        if order is None:
            return 1
        (at,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, at)
        for number in range(min(count, _MAX_ENTRIES)):
            entry = at + 2 + 12 * number
            tag, kind = struct.unpack_from(order + "HH", tiff, entry)
            if tag == _ORIENTATION:
                (value,) = struct.unpack_from(order + _WHOLE_NUMBERS.get(kind, "H"), tiff, entry + 8)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass  # the directory is truncated
    return 1


def turn(pixels: npt.NDArray[np.uint8], tag: int) -> npt.NDArray[np.uint8]:
    """Returns an image, height x width x 3, turned by its EXIF orientation `tag`.

    >>> turn(np.arange(6, dtype=np.uint8).reshape(1, 2, 3), 6).shape
    (2, 1, 3)
    """
    if tag >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if tag in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if tag in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if tag == 1:
        return pixels
    # numpy counts a reversed axis of one pixel as contiguous, torch does not
    return np.array(pixels, order="C")
