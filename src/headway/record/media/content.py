"""Copies of what a stage logs, made without waiting for a device; another thread encodes them later.

A tensor on a GPU is copied to pinned memory by the device: the host only queues the copy. A tensor or array in host
memory is copied at once, since the next step may overwrite it.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headway.dist.device import exact_dtype
from headway.errors import UsageError
from headway.record.media.encoding import (
    Pixels,
    encode_histogram,
    encode_jpeg,
    encode_png,
    grid_size,
    to_grid,
    to_pixels,
    value_span,
)
from headway.record.media.index import MediaKind
from headway.system.redact import redact

ImageFormat = Literal["png", "jpeg"]
MAX_BINS = 1024
_CHANNELS = (1, 3, 4)
_MAX_PIXELS = 1 << 26
_MAX_TEXT_CHARACTERS = 1 << 20


class Figure(Protocol):
    """A matplotlib figure."""

    dpi: float
    bbox: Any

    def savefig(self, *arguments: Any, **options: Any) -> Any: ...


ImageLike: TypeAlias = "Tensor | np.ndarray[Any, Any] | Sequence[Any] | Any"
"""an image, a batch of images, or a list of images: tensors, numpy arrays, Pillow images"""


@final
@dataclass(frozen=True, kw_only=True)
class EncodedMedia:
    """The file of one item, and the facts for its row."""

    data: bytes
    ending: str
    width: int = 0
    height: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class MediaContent:
    """An item to keep: `encode` waits for the copy from the device, if there is one."""

    kind: MediaKind
    bytes: int
    """how much memory it takes until it is encoded"""
    encode: Callable[[ImageFormat], EncodedMedia]
    caption: str = ""


# --- images


def take_image(image: ImageLike, *, caption: str, columns: int | None) -> MediaContent:
    """Copies an image, or a batch or list of images, which becomes a grid."""
    given = list(image) if isinstance(image, list | tuple) else [image]
    if not given:
        raise UsageError("log_image got an empty list: give an image, or several")
    taken = [part for each in given for part in _take_images(each)]
    sizes = [size for part in taken for size in part.sizes]
    height, width, _ = grid_size(sizes, columns=columns) if sizes else (0, 0, 0)
    if height * width > _MAX_PIXELS:
        raise UsageError(
            f"log_image got {len(sizes):,} images with {height * width:,} pixels together, which is more than "
            f"{_MAX_PIXELS:,}: give fewer or smaller images, such as x[:16]"
        )

    def encode(format: ImageFormat) -> EncodedMedia:
        images = _read_images(taken)
        if not images:
            raise ValueError("the batch has no images")
        return _encode_pixels(images[0] if len(images) == 1 else to_grid(images, columns=columns), format)

    size = sum(part.bytes for part in taken)
    return MediaContent(kind="image", bytes=size, encode=encode, caption=redact(caption))


def take_figure(figure: Figure, *, caption: str) -> MediaContent:
    """Draws a figure, which must happen in this thread; another thread compresses it."""
    if not (hasattr(figure, "savefig") and hasattr(figure, "bbox")):
        raise UsageError(
            f"log_figure got a {type(figure).__name__}: give a matplotlib figure, such as that of plt.subplots()"
        )
    drawn = io.BytesIO()
    figure.savefig(drawn, format="raw", dpi=figure.dpi)  # four bytes per pixel
    width, height = int(figure.bbox.width), int(figure.bbox.height)
    if len(drawn.getvalue()) != height * width * 4:  # cropped, as with rcParams["savefig.bbox"] = "tight"
        return _take_cropped(figure, caption)
    pixels = np.frombuffer(drawn.getvalue(), np.uint8).reshape(height, width, 4)
    return MediaContent(
        kind="figure",
        bytes=pixels.nbytes,
        encode=lambda format: _encode_pixels(pixels, format),
        caption=redact(caption),
    )


def _take_cropped(figure: Figure, caption: str) -> MediaContent:
    """Draws a figure whose size is known only from the file that matplotlib writes."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=figure.dpi)
    data = drawn.getvalue()

    def encode(format: ImageFormat) -> EncodedMedia:
        if format == "png":
            width, height = struct.unpack(">II", data[16:24])  # from the header
            return EncodedMedia(data=data, ending="png", width=width, height=height)
        from PIL import Image

        return _encode_pixels(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), format)

    return MediaContent(kind="figure", bytes=len(data), encode=encode, caption=redact(caption))


def _encode_pixels(pixels: Pixels, format: ImageFormat) -> EncodedMedia:
    height, width, _ = pixels.shape
    data = encode_png(pixels) if format == "png" else encode_jpeg(pixels)
    return EncodedMedia(data=data, ending="png" if format == "png" else "jpg", width=width, height=height)


@final
@dataclass(frozen=True, kw_only=True)
class _TakenImages:
    """One image or a batch of images in host memory, or on the way there."""

    array: Callable[[], np.ndarray[Any, Any]]
    shape: tuple[int, ...]
    channels_first: bool
    bytes: int

    def read(self) -> np.ndarray[Any, Any]:
        array = self.array()
        return array.astype(np.uint8) * np.uint8(255) if array.dtype == np.bool_ else array

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The height and width of each image."""
        height, width = self.shape[-2:] if self.channels_first or len(self.shape) == 2 else self.shape[-3:-1]
        return [(height, width)] * (self.shape[0] if len(self.shape) == 4 else 1)


def _read_images(taken: Sequence[_TakenImages]) -> list[Pixels]:
    """Returns the pixels of all images: float images share one scale, integer images another."""
    arrays = [part.read() for part in taken]
    spans = {
        kind: value_span([each for each in arrays if (each.dtype.kind == "f") == kind])
        for kind in {each.dtype.kind == "f" for each in arrays}
    }
    return [
        to_pixels(image, channels_first=part.channels_first, span=spans[array.dtype.kind == "f"])
        for part, array in zip(taken, arrays, strict=True)
        for image in (array if array.ndim == 4 else [array])
    ]


def _take_images(image: ImageLike) -> list[_TakenImages]:
    if hasattr(image, "convert") and hasattr(image, "mode"):  # a Pillow image
        mode = str(image.mode)
        # `convert` would cut off the values of modes that begin with I or F
        kept = mode in ("L", "RGB", "RGBA") or mode.startswith(("I", "F"))
        image = np.asarray(image if kept else image.convert("RGBA" if mode in ("LA", "PA") else "RGB"))
    if not isinstance(image, Tensor | np.ndarray):
        raise UsageError(
            f"log_image got a {type(image).__name__}: give a tensor, a numpy array or a Pillow image, or a list of them"
        )
    shape = tuple(image.shape)
    first = _channels_first(shape, isinstance(image, Tensor))
    array, size = take_array(image, "log_image")
    return [_TakenImages(array=array, shape=shape, channels_first=first, bytes=size)] if size else []


def _channels_first(shape: tuple[int, ...], is_tensor: bool) -> bool:
    """Returns whether channels come before height and width; in tensors they do if both are possible."""
    if len(shape) == 2:
        return False
    if len(shape) in (3, 4):
        first, last = shape[-3] in _CHANNELS, shape[-1] in _CHANNELS
        if first or last:
            return is_tensor if first and last else first
    raise UsageError(
        f"log_image got the shape {shape}: give height x width, 1, 3 or 4 channels before or after them, or a batch of "
        "such, as in x[:, None] for images without channels"
    )


# --- histograms and texts


def take_histogram(values: Any, *, bins: int) -> MediaContent:
    """Copies the values of a histogram; those on a device are counted there, and only the counts are copied."""
    if not isinstance(bins, int) or isinstance(bins, bool) or not 1 <= bins <= MAX_BINS:
        raise UsageError(f"bins={bins!r}: give a whole number from 1 to {MAX_BINS}")
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values, dtype=np.float64))
    if tensor.is_complex():
        raise UsageError("log_histogram got complex values: give their absolute values or their angles")
    if tensor.device.type == "cpu":
        array, size = take_array(tensor, "log_histogram")
        counted: Callable[[], np.ndarray[Any, Any]] = lambda: count_values(  # noqa: E731
            torch.from_numpy(array()), bins
        ).numpy()
    else:
        _refuse_sharded(tensor, "log_histogram")
        counted, size = take_array(count_values(tensor.detach(), bins), "log_histogram")

    def encode(_: ImageFormat) -> EncodedMedia:
        low, high, non_finite, *counts = counted().tolist()
        width = (high - low) / bins
        edges = [low + width * place for place in range(bins)] + [high]
        data = encode_histogram(edges, [int(count) for count in counts], int(non_finite))
        return EncodedMedia(data=data, ending="json")

    return MediaContent(kind="histogram", bytes=size, encode=encode)


def count_values(values: Tensor, bins: int) -> Tensor:
    """Returns the smallest and the largest finite value, how many are not finite, and the counts of all bins.

    It never waits for the device: nothing here needs a value on the host.
    """
    exact = exact_dtype(values.device)
    flat = values.reshape(-1).to(exact)
    finite = flat.isfinite()
    none = ~finite.any() if flat.numel() else torch.ones((), dtype=torch.bool, device=flat.device)
    padded = torch.cat([flat, flat.new_zeros(1)])  # used if no value is finite
    known = torch.cat([finite, none.reshape(1)])
    low = torch.where(known, padded, math.inf).amin()
    high = torch.where(known, padded, -math.inf).amax()
    same = low == high
    low, high = torch.where(same, low - 0.5, low), torch.where(same, high + 0.5, high)
    edges = low + (high - low) / bins * torch.arange(bins, dtype=exact, device=flat.device)
    place = torch.searchsorted(edges, torch.where(finite, flat, low), right=True) - 1
    place = torch.where(finite, place.clamp(0, bins - 1), bins)
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, place, torch.ones_like(place))
    return torch.cat([torch.stack([low, high]), counts[bins:].to(exact), counts[:bins].to(exact)])


def take_text(text: str) -> MediaContent:
    """Keeps a text, without secrets; of a very long one, only the beginning."""
    if not isinstance(text, str):
        raise UsageError(f"log_text got a {type(text).__name__}: give text, such as tokenizer.decode(tokens)")
    rest = len(text) - _MAX_TEXT_CHARACTERS
    note = f"\n... and {rest:,} more characters" if rest > 0 else ""

    def encode(_: ImageFormat) -> EncodedMedia:
        kept = redact(text[:_MAX_TEXT_CHARACTERS]) + note
        return EncodedMedia(data=kept.encode(errors="replace"), ending="txt")

    return MediaContent(kind="text", bytes=min(len(text), _MAX_TEXT_CHARACTERS), encode=encode)


# --- copies


def take_array(
    values: Tensor | np.ndarray[Any, Any], caller: str
) -> tuple[Callable[[], np.ndarray[Any, Any]], int]:
    """Copies values to host memory; returns a function that waits for the copy, and its size in bytes."""
    if isinstance(values, np.ndarray):
        array = np.array(values)
        if array.dtype.kind not in "buif":
            raise UsageError(f"{caller} got an array of {array.dtype}: give numbers")
        return (lambda: array), array.nbytes
    _refuse_sharded(values, caller)
    source = values.detach()
    size = source.numel() * source.element_size()
    if source.device.type != "cuda":
        host = source.clone() if source.device.type == "cpu" else source.cpu()
        return (lambda: _to_numpy(host)), size
    pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    pinned.copy_(source, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(source.device))

    def read() -> np.ndarray[Any, Any]:
        copied.synchronize()
        return _to_numpy(pinned)

    return read, size


def _to_numpy(host: Tensor) -> np.ndarray[Any, Any]:
    return (host.float() if host.dtype in (torch.bfloat16, torch.float16) else host).numpy()


def _refuse_sharded(values: Tensor, caller: str) -> None:
    if isinstance(values, DTensor):
        raise UsageError(
            f"{caller} got a tensor that is sharded over ranks: give values.full_tensor(), called on all ranks, or "
            "values.to_local() for the part of this rank"
        )
