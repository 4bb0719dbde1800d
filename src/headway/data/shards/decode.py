"""Bytes to values, by extension: images, numbers, text, JSON, arrays. Nothing here can run code from a file.

What decides is the last part of the extension: `seg.png` is a PNG. Unknown ones stay bytes. Formats that run code when
they are read (pickle and its kin) are refused by name; a decoder of your own may take them.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from importlib import import_module
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.data.shards.shard import Limits
from headway.errors import BadSample, HeadwayError, MissingExtra

Decoder = Callable[[memoryview], Any]
Pixels = npt.NDArray[np.uint8]

_SCAN = b"\xff\xda"
# frames that are not progressive, tables and comments: segments that have a length
_SEGMENTS = {0xC0, 0xC1, 0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)}
_SEGMENT, _FRAME = struct.Struct(">BBH"), struct.Struct(">HHB")
_SMALL = 2**24


def decode(
    sample: Mapping[str, memoryview],
    decoders: Mapping[str, Decoder] | None = None,
    limits: Limits | None = None,
) -> dict[str, Any]:
    """Decodes the parts of a sample; `decoders` are asked first, by full extension.

    >>> decode({"cls": memoryview(b"7"), "json": memoryview(b"[1, 2]")})
    {'cls': 7, 'json': [1, 2]}
    """
    limits, decoders, values = limits or Limits(), decoders or {}, dict[str, Any]()
    for extension, data in sample.items():
        values[extension], late = begin(extension, data, decoders, limits)
        if late is not None:
            finish([(extension, data, late)], values, decoders)
    return values


def begin(
    extension: str, data: memoryview, decoders: Mapping[str, Decoder], limits: Limits
) -> tuple[Any, Decoder | None]:
    """The value of a part; or, if that may take long, what `finish` is to call for it.

    Of a picture, all is checked that its header says.
    """
    if extension in decoders:
        return None, decoders[extension]
    kind = extension.rpartition(".")[2]
    if kind in _REFUSED:
        raise BadSample(
            f"{extension!r} files can run code when they are read, so headway does not; convert them, "
            f"or pass decoders={{{extension!r}: your_function}}"
        )
    try:
        if kind in _IMAGES:
            return None, _image(kind, data, limits)
        if kind in _TEXT and len(data) > limits.text_bytes:
            raise ValueError(f"more than {limits.text_bytes} bytes of text")
        return (_PLAIN[kind](data) if kind in _PLAIN else np.frombuffer(data, np.uint8)), None
    except _BROKEN as error:
        raise _bad(extension, data, error) from error


def finish(
    late: Iterable[tuple[str, memoryview, Decoder]], values: dict[str, Any], decoders: Mapping[str, Decoder]
) -> None:
    """What `begin` has left to do. Written to be short: whatever runs between two pictures runs slowly."""
    try:
        for extension, data, decoder in late:
            values[extension] = decoder(data)
    except HeadwayError:
        raise
    except _BROKEN as error:
        if extension in decoders:
            raise  # the user's own
        raise _bad(extension, data, error) from error


def _bad(extension: str, data: memoryview, error: Exception) -> BadSample:
    kind = extension.rpartition(".")[2]
    return BadSample(f"a {kind} of {len(data)} bytes cannot be decoded: {str(error)[:_LONGEST]}")


# what the parsers of the libraries raise when bytes are not what they should be
_BROKEN: tuple[type[Exception], ...] = (
    ValueError,
    OSError,
    SyntaxError,
    ArithmeticError,
    LookupError,
    TypeError,
)
_BROKEN += (EOFError, RecursionError, TokenError, struct.error, zlib.error)
_LONGEST = 200  # letters of what a library says: some quote the whole file
_REFUSED = {"pkl", "pickle", "pyd", "pth", "pt", "ckpt"}
_IMAGES = {"jpg", "jpeg", "png", "webp"}


def _array(data: memoryview) -> npt.NDArray[Any]:
    """A NumPy file without objects; its data stays where it is."""
    file = io.BytesIO(data[:65536])
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(
        version
    )
    if read is None:
        raise ValueError(f"version {version} of the npy format")
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    flat = np.frombuffer(data[file.tell() :], dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


_PLAIN: dict[str, Decoder] = {
    "cls": lambda data: int(bytes(data)),
    "index": lambda data: int(bytes(data)),
    "txt": lambda data: bytes(data).decode(),
    "text": lambda data: bytes(data).decode(),
    "json": lambda data: json.loads(bytes(data)),
    "npy": _array,
}
_TEXT = _PLAIN.keys() - {"npy"}


def _image(kind: str, data: memoryview, limits: Limits) -> Decoder:
    """What gives height x width x 3, RGB."""
    by_pillow = partial(_pillow, limits=limits)
    if kind not in ("jpg", "jpeg"):
        return by_pillow
    simplejpeg, size = _simplejpeg(), _plain_size(data)
    if size is None and bytes(data).count(_SCAN) > limits.scans:
        raise ValueError(f"more than {limits.scans} scans")
    if simplejpeg is None:
        return by_pillow
    if size is None:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours in ("CMYK", "YCCK"):
            return by_pillow
        size = height, width
    _check(size[1], size[0], data, limits)
    decode_jpeg: Decoder = simplejpeg.decode_jpeg  # to RGB, if nothing else is asked for
    return decode_jpeg


@cache
def _simplejpeg() -> Any:
    """libjpeg-turbo without Pillow's copies: a third faster; None where it is not installed."""
    try:
        return import_module("simplejpeg")
    except ModuleNotFoundError:
        return None


def _plain_size(data: memoryview) -> tuple[int, int] | None:
    """Height and width of a JPEG in one scan, grey or in colour; None of any other, and where that is not sure.

    Nearly all are such, and to count the scans of all would take a twentieth of the time of decoding. It must not be
    mistaken: a decoder that took another header for the first than we do would go around the limits.
    """
    at, last, size, components = 2, len(data) - 10, None, 0
    while at <= last:
        start, marker, length = _SEGMENT.unpack_from(data, at)
        if start == 0xFF and marker == _SCAN[1]:
            return size if data[at + 4] == components else None
        if start != 0xFF or marker not in _SEGMENTS:
            return None
        if marker in (0xC0, 0xC1):  # a frame that is not progressive
            height, width, count = _FRAME.unpack_from(data, at + 5)
            if count not in (1, 3):
                return None
            size, components = (height, width), count
        at += 2 + length
    return None


def _pillow(data: memoryview, limits: Limits) -> Pixels:
    """The first frame of an image in one of the formats named here: Pillow's other parsers see nothing of it."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingExtra("pillow", extra="images", purpose="to decode images") from error
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG", "PNG", "WEBP"]) as image:
            _check(*image.size, data, limits)
            if getattr(image, "n_frames", 1) > limits.frames:  # formats without frames do not have it
                raise ValueError(f"more than {limits.frames} frames")
            return np.asarray(image.convert("RGB"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(str(error)) from error


def _check(width: int, height: int, data: memoryview, limits: Limits) -> None:
    """By what the header says, before anything is decoded."""
    if width * height > limits.pixels:
        raise ValueError(f"{width} x {height} is more than {limits.pixels} pixels")
    if 3 * width * height > max(_SMALL, limits.ratio * len(data)):
        raise ValueError(f"{width} x {height} is more than {limits.ratio} times its size")
