"""Decodes bytes by extension: images, numbers, text, JSON, arrays. Nothing here can run code from a file.

The last part of the extension decides: `seg.png` is a PNG. Bytes with an unknown extension become a uint8 array.
Formats that can run code when they are read (pickle and others) are refused by name, unless the user gives a decoder
for them.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Set
from functools import cache, partial
from importlib import import_module
from tokenize import TokenError
from typing import Any, final

import numpy as np
import numpy.typing as npt

from headway.data.shards.tar import ShardLimits
from headway.errors import BadSample, HeadwayError, MissingExtra

Decoder = Callable[[memoryview], Any]
Pixels = npt.NDArray[np.uint8]
LatePart = tuple[str, memoryview, Decoder]
"""the extension of an image, its bytes, and the function that decodes them"""

KEY = "__key__"
"""the part of a sample that has its name"""
RGB_BYTES = 3
"""of a pixel"""
_START, _SCAN, _END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"
# markers of segments with a length: frames that are not progressive, tables and comments
_SEGMENTS = {0xC0, 0xC1, 0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)}
_SEGMENT, _FRAME = struct.Struct(">BBH"), struct.Struct(">HHB")
_MAX_EXTENSIONS = 1000  # cached: those in a file may all differ
_AFTER_HEADER_BYTES = 5  # in a JPEG, at least
_MAX_HEADERS = 256  # cached
_SMALL_IMAGE_BYTES = 2**24  # decoded; the ratio is not checked below it


def decode(
    sample: Mapping[str, memoryview],
    decoders: Mapping[str, Decoder] | None = None,
    limits: ShardLimits | None = None,
) -> dict[str, Any]:
    """Decodes the parts of a sample; `decoders`, by full extension, take precedence.

    >>> decode({"cls": memoryview(b"7"), "json": memoryview(b"[1, 2]")})
    {'cls': 7, 'json': [1, 2]}
    """
    decoder = SampleDecoder(decoders or {}, limits or ShardLimits())
    values, late = decoder.begin(sample)
    decoder.finish(late, values)
    return values


@final
class SampleDecoder:
    """Decodes the parts of samples. The decoder of an extension is looked up once, not for each sample."""

    def __init__(
        self, decoders: Mapping[str, Decoder], limits: ShardLimits, reserved: Set[str] = frozenset()
    ) -> None:
        """A sample with a part that is named `KEY`, or has one of the `reserved` names, is bad."""
        self._decoders, self._limits, self._reserved = decoders, limits, {KEY, *reserved}
        self._parsers: dict[str, Decoder] = {}
        self._choices: dict[str, Callable[[memoryview], Decoder]] = {}

    def begin(self, parts: Mapping[str, memoryview]) -> tuple[dict[str, Any], list[LatePart]]:
        """Returns the values of a sample by extension, and the parts that `finish` decodes: images, and parts for which
        the user gave a decoder. The headers of images are checked here."""
        values: dict[str, Any] = {}  # dict[str, Any]() would take as long as all the rest
        late: list[LatePart] = []
        parsers = self._parsers
        try:
            for extension, data in parts.items():
                parse = parsers.get(extension)
                if parse is not None:
                    values[extension] = parse(data)
                elif (choose := self._choices.get(extension)) is not None:
                    values[extension] = None  # its place among the parts
                    late.append((extension, data, choose(data)))
                else:
                    self._learn(extension)
                    return self.begin(parts)
        except _BROKEN as error:
            raise _bad(extension, data, error) from error
        return values, late

    def finish(self, late: Iterable[LatePart], values: dict[str, Any]) -> None:
        """Decodes the parts that `begin` left. Kept short: code between two images runs with a cold cache."""
        try:
            for extension, data, decoder in late:
                values[extension] = decoder(data)
        except HeadwayError:
            raise
        except _BROKEN as error:
            if extension in self._decoders:
                raise  # an error of the user's own decoder
            raise _bad(extension, data, error) from error

    def _learn(self, extension: str) -> None:
        """Looks up how parts with an extension are decoded."""
        if len(self._parsers) + len(self._choices) >= _MAX_EXTENSIONS:
            self._parsers.clear()
            self._choices.clear()
        kind = extension.rpartition(".")[2]
        if extension in self._reserved:
            raise BadSample(f"its part {extension!r} has a name that batches use themselves: rename it")
        if extension in self._decoders:
            own = self._decoders[extension]
            self._choices[extension] = lambda _: own
        elif kind in _REFUSED:
            raise BadSample(
                f"{extension!r} files can run code when they are read, so headway does not; convert them, "
                f"or pass decoders={{{extension!r}: your_function}}"
            )
        elif kind in IMAGES:
            self._choices[extension] = _image(kind, self._limits)
        elif kind == "cls":
            self._parsers[extension] = _labels(self._limits.text_bytes)
        elif kind in _TEXT:
            self._parsers[extension] = _limited(_PLAIN[kind], self._limits.text_bytes)
        else:
            self._parsers[extension] = _PLAIN.get(kind, raw_bytes)


def _limited(parse: Decoder, most: int) -> Decoder:
    def parse_text(data: memoryview) -> Any:
        if len(data) > most:
            raise _above("text_bytes", most, "it has", "bytes of text")
        return parse(data)

    return parse_text


def _labels(most: int) -> Decoder:
    """Returns a parser of labels; a single function, because it runs for each sample."""

    def parse_label(data: memoryview) -> int:
        if len(data) > most:
            raise _above("text_bytes", most, "it has", "bytes of text")
        label = int(data)
        if not -(2**63) <= label < 2**63:
            raise ValueError(f"{label} is not a valid label: it has more than 64 bits")
        return label

    return parse_label


def raw_bytes(data: memoryview) -> npt.NDArray[np.uint8]:
    """Returns bytes as an array, undecoded."""
    return np.frombuffer(data, np.uint8)


def _bad(extension: str, data: memoryview, error: Exception) -> BadSample:
    kind = extension.rpartition(".")[2]
    return BadSample(f"a {kind} of {len(data)} bytes cannot be decoded: {str(error)[:_MAX_REASON_CHARS]}")


# raised by the parsers of libraries for invalid bytes
_BROKEN: tuple[type[Exception], ...] = (
    ValueError,
    OSError,
    SyntaxError,
    ArithmeticError,
    LookupError,
    TypeError,
)
_BROKEN += (EOFError, RecursionError, TokenError, struct.error, zlib.error)
_MAX_REASON_CHARS = 200  # some libraries quote the whole file
_REFUSED = {"pkl", "pickle", "pyd", "pth", "pt", "ckpt"}
IMAGES = {"jpg", "jpeg", "png", "webp"}
_JPEGS = ("jpg", "jpeg")


def _array(data: memoryview) -> npt.NDArray[Any]:
    """Reads a NumPy file without Python objects; its data is not copied."""
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
    "index": int,
    "txt": lambda data: bytes(data).decode(),
    "text": lambda data: bytes(data).decode(),
    "json": lambda data: json.loads(bytes(data)),
    "npy": _array,
}
_TEXT = _PLAIN.keys() - {"npy"}


def _image(kind: str, limits: ShardLimits) -> Callable[[memoryview], Decoder]:
    """Returns a function that chooses the decoder of an image: to RGB, height x width x 3; a PNG with a palette or 16
    bits of gray keeps its values."""
    by_pillow: Decoder = partial(_pillow, limits=limits, keep=kind == "png")
    simplejpeg = _simplejpeg()
    if kind not in _JPEGS or simplejpeg is None:
        return lambda _: by_pillow
    by_simplejpeg: Decoder = partial(_jpeg, simplejpeg.decode_jpeg, by_pillow)
    sizes, unchecked = HeaderCache(), min(limits.pixels, _SMALL_IMAGE_BYTES // RGB_BYTES)

    def choose(data: memoryview) -> Decoder:
        size = sizes.size(data)
        if size is None:
            _check_scans(data, limits)
            try:
                height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
            except ValueError:
                return by_pillow
            if colors in ("CMYK", "YCCK"):
                return by_pillow
            size = height, width
        if size[0] * size[1] > unchecked:
            _check(size[1], size[0], RGB_BYTES, data, limits)
        return by_simplejpeg

    return choose


def _jpeg(decode_jpeg: Decoder, by_pillow: Decoder, data: memoryview) -> Any:
    """Decodes a JPEG to RGB. If libjpeg-turbo refuses it, for extra bytes before the end for example, Pillow decides:
    which samples are good must not depend on what is installed."""
    try:
        return decode_jpeg(data)
    except ValueError:
        return by_pillow(data)


def decode_jpeg_into(memory: memoryview, data: memoryview, height: int, width: int) -> bool:
    """Decodes a JPEG of this size to RGB, into memory; False if libjpeg-turbo refuses it or is not installed."""
    simplejpeg = _simplejpeg()
    if simplejpeg is None:
        return False
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, buffer=memory)
    except ValueError:
        return False
    return pixels.shape == (height, width, RGB_BYTES)


def decode_rgb(data: memoryview, limits: ShardLimits | None = None) -> Pixels:
    """Decodes a JPEG, PNG or WebP image to RGB, height x width x 3, even one with a palette.

    hw.data.ShardLoader(shards, batch_size=64, decoders={"png": hw.data.decode_rgb})
    """
    try:
        pixels: Pixels = _pillow(data, limits or ShardLimits())
    except _BROKEN as error:
        raise _bad("image", data, error) from error
    return pixels


def decode_reduced(data: memoryview, size: tuple[int, int], factor: int) -> Pixels:
    """Decodes a JPEG of this height and width to RGB, at its full size divided by `factor` (1, 2, 4 or 8), rounded up.

    The decoder skips frequencies instead of computing all pixels. Only for JPEGs that `plain_jpeg_size` accepts.
    """
    height, width = (-(-side // factor) for side in size)
    simplejpeg, by_pillow = _simplejpeg(), partial(_pillow_draft, size[0] // factor, size[1] // factor)
    try:
        if simplejpeg is None:
            return by_pillow(data)
        by_simplejpeg = partial(simplejpeg.decode_jpeg, min_height=height, min_width=width)
        pixels: Pixels = _jpeg(by_simplejpeg, by_pillow, data)
        return pixels
    except _BROKEN as error:
        raise _bad("jpg", data, error) from error


def _pillow_draft(height: int, width: int, data: memoryview) -> Pixels:
    """Decodes a JPEG with Pillow at the smallest scale that gives at least these sides."""
    with _open_image(data) as image:
        image.draft("RGB", (max(1, width), max(1, height)))
        return np.asarray(image.convert("RGB"))


@cache
def _simplejpeg() -> Any:
    """Imports simplejpeg, which is a third faster than Pillow because it does not copy; None if it is not installed."""
    try:
        return import_module("simplejpeg")
    except ModuleNotFoundError:
        return None


def image_name(names: Iterable[str]) -> str | None:
    """Returns the name of the first image among the parts of a sample.

    >>> image_name(["cls", "png", "jpg"])
    'png'
    """
    return next((name for name in names if name in IMAGES), None)


def is_jpeg(extension: str) -> bool:
    """Whether an extension is that of a JPEG.

    >>> is_jpeg("crop.jpg"), is_jpeg("jpg.png")
    (True, False)
    """
    return extension.rpartition(".")[2] in _JPEGS


def jpeg_name(names: Iterable[str], own: Container[str]) -> str | None:
    """Returns the name of the image of a sample, if that is a JPEG and the user gave no decoder for it (`own`).

    >>> jpeg_name(["cls", "jpg"], own=()), jpeg_name(["png", "jpg"], own=()), jpeg_name(["jpg"], own=("jpg",))
    ('jpg', None, None)
    """
    name = image_name(names)
    return name if name in _JPEGS and name not in own else None


def plain_jpeg_size(data: memoryview, limits: ShardLimits) -> tuple[int, int] | None:
    """Returns height and width of a JPEG that any decoder can decode: in one scan, gray or in color, not truncated.

    None for all others; the decoders of this module decide which of those are good. Raises `BadSample` for a JPEG that
    exceeds the limits.
    """
    size = _plain_size(data) if data[-2:] == _END else None
    if size is None or not all(size):
        return None
    try:
        _check(size[1], size[0], RGB_BYTES, data, limits)
    except ValueError as error:
        raise _bad("jpg", data, error) from error
    return size


def _plain_size(data: memoryview) -> tuple[int, int] | None:
    """Returns height and width of a JPEG in one scan, gray or in color; None for any other, and if in doubt."""
    header = _plain_header(data)
    return None if header is None else header[:2]


def _plain_header(data: memoryview) -> tuple[int, int, int] | None:
    """Returns height and width of a JPEG in one scan, gray or in color, and where its header ends; else None.

    Nearly all JPEGs are like this, and counting the scans of all would take a twentieth of the decoding time. The
    result must be right: a decoder that read another header than this function would bypass the limits.
    """
    at, last, size, components = 2, len(data) - 5 - _AFTER_HEADER_BYTES, None, 0
    while at <= last:
        start, marker, length = _SEGMENT.unpack_from(data, at)
        if start == 0xFF and marker == _SCAN[1]:
            return (*size, at + 5) if size is not None and data[at + 4] == components else None
        if start != 0xFF or marker not in _SEGMENTS:
            return None
        if marker in (0xC0, 0xC1):  # a frame that is not progressive
            height, width, count = _FRAME.unpack_from(data, at + 5)
            if count not in (1, 3) or size is not None:
                return None
            size, components = (height, width), count
        at += 2 + length
    return None


@final
class HeaderCache:
    """Caches the sizes in headers of JPEGs: thumbnails of one encoder and size begin with the same bytes."""

    def __init__(self) -> None:
        self._sizes: dict[bytes, tuple[int, int]] = {}
        self._end = 0  # of the header that was walked last

    def size(self, data: memoryview) -> tuple[int, int] | None:
        """Returns the same as `_plain_size`, which reads only the header, so equal headers mean equal sizes."""
        end = self._end
        known = self._sizes.get(bytes(data[:end])) if len(data) >= end + _AFTER_HEADER_BYTES else None
        if known is not None:
            return known
        header = _plain_header(data)
        if header is None:
            return None
        height, width, end = header
        if len(self._sizes) >= _MAX_HEADERS:
            self._sizes.clear()
        self._sizes[bytes(data[:end])], self._end = (height, width), end
        return height, width


def _pillow(data: memoryview, limits: ShardLimits, *, keep: bool = False) -> npt.NDArray[Any]:
    """Decodes the first frame of a JPEG, PNG or WebP image to RGB; Pillow's other parsers are not used.

    With `keep`, a PNG with a palette becomes its indices, as in masks, and a gray one of 16 bits its values: height x
    width, uint8 or uint16.
    """
    with _open_image(data) as image:
        stored = image.tile[0][3] if image.format == "PNG" and image.tile else ""
        width, height = image.size
        _check(width, height, _STORED_BYTES.get(image.mode, RGB_BYTES) if stored else RGB_BYTES, data, limits)
        if _plain_size(data) is None:
            _check_scans(data, limits)
        if getattr(image, "n_frames", 1) > limits.frames:  # formats without frames do not have it
            raise _above("frames", limits.frames, "it has")
        gray = keep and image.mode.startswith("I")
        if str(stored).endswith("16B") and not gray:
            raise ValueError("16 bits per color do not fit uint8; pass decoders={...} with your own function")
        if gray:
            return np.asarray(image).astype(np.uint16)
        return np.asarray(image if keep and image.mode == "P" else image.convert("RGB"))


def _open_image(data: memoryview) -> Any:
    """Reads the header of an image with Pillow. `Image.open` would add a limit of its own to ours."""
    try:
        from PIL import Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
    except ModuleNotFoundError as error:
        raise MissingExtra("pillow", extra="images", purpose="to decode images") from error
    file, head = io.BytesIO(data), bytes(data[:12])
    if head.startswith(_START + b"\xff"):
        return JpegImagePlugin.jpeg_factory(file)
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImagePlugin.PngImageFile(file)
    if head.startswith(b"RIFF") and head.endswith(b"WEBP"):
        try:
            return WebPImagePlugin.WebPImageFile(file)
        except Image.DecompressionBombError as error:  # its parser has a limit of its own
            raise ValueError(f"{error} If that is intended, set PIL.Image.MAX_IMAGE_PIXELS") from error
    raise ValueError("it is not a JPEG, PNG or WebP image")


_STORED_BYTES = {"1": 1, "L": 1, "P": 1, "LA": 2, "I": 2, "I;16": 2}  # per pixel of a PNG, by Pillow's mode


def _check(width: int, height: int, pixel_bytes: int, data: memoryview, limits: ShardLimits) -> None:
    """Checks what the header states, before anything is decoded."""
    if width * height > limits.pixels:
        raise _above("pixels", limits.pixels, f"{width} x {height} is")
    if pixel_bytes * width * height > max(_SMALL_IMAGE_BYTES, limits.ratio * len(data)):
        raise _above("ratio", limits.ratio, f"{width} x {height} decodes to", "times the size of the file")


def _check_scans(data: memoryview, limits: ShardLimits) -> None:
    if data[:2] == _START and bytes(data).count(_SCAN) > limits.scans:
        raise _above("scans", limits.scans, "it has")


def _above(limit: str, value: int, found: str, unit: str = "") -> ValueError:
    """Returns the error for an image or a string that exceeds a limit, with the setting that raises the limit."""
    return ValueError(
        f"{found} more than {value} {unit or limit}; if that is intended, set ShardLimits({limit}=...)"
    )
