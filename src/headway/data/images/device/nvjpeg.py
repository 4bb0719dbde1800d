"""JPEG decoding on a GPU, by torchvision's nvJPEG: whole batches, and what it refuses one by one on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headway.data.images.transforms import ImageTransform
from headway.errors import UsageError
from headway.system.log import logger


def usable_gpu(device: str | torch.device | None, transform: object) -> bool:
    """Whether images are decoded and cropped on a GPU, as a loader was asked to; logs why not, if they cannot be."""
    if isinstance(transform, type) and issubclass(transform, ImageTransform):
        name = transform.__name__
        raise UsageError(f"transform={name} is a class: pass an instance, transform={name}()")
    if device is None or torch.device(device).type == "cpu":
        return False
    if not isinstance(transform, ImageTransform):
        raise UsageError(
            f"device={str(device)!r} is where images are decoded and cropped, which needs a transform of images, such "
            "as hw.data.MultiCrop(); without one, batches are moved by the pipeline"
        )
    missing = "augment= is not computed" if transform.augment is not None else missing_for_gpu()
    if missing:
        logger.info(f"images are decoded and cropped on the CPU: {missing} here for device={str(device)!r}")
    return not missing


def missing_for_gpu() -> str:
    """Returns what the GPU's path lacks on this machine, in words; nothing if it can be used."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "no triton"
    return "" if _decode_jpeg() is not None else "no torchvision with nvJPEG"


@cache
def _decode_jpeg() -> Callable[..., Any] | None:
    try:
        from torchvision.io import decode_jpeg
    except ImportError:
        return None
    found: Callable[..., Any] = decode_jpeg
    return found


@cache
def _allow_read_only() -> None:
    """torch warns once of a buffer that must not be written to; nothing here writes to one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.frombuffer(b"\0", dtype=torch.uint8)


def as_tensor(data: memoryview) -> Tensor:
    """Returns bytes as a tensor, without a copy."""
    _allow_read_only()
    return torch.frombuffer(data, dtype=torch.uint8)


def decode_batch(encoded: Sequence[Tensor], device: torch.device) -> list[Tensor | None]:
    """Decodes JPEGs to 3 x height x width bytes on the current stream of a device; None for those that nvJPEG refuses.

    One that cannot be decoded fails the whole call, so a call that failed is repeated in halves.
    """
    decode = _decode_jpeg()
    assert decode is not None
    if not encoded:
        return []
    try:
        return list(decode(list(encoded), mode="RGB", device=device))
    except RuntimeError:
        if len(encoded) == 1:
            return [None]
    middle = len(encoded) // 2
    return [*decode_batch(encoded[:middle], device), *decode_batch(encoded[middle:], device)]
