"""Checks whether images can be decoded and cropped on a GPU here; a message names what is missing."""

from __future__ import annotations

import torch

from headway.data.images.device import nvjpeg
from headway.data.images.transforms import ImageTransform
from headway.dist.device import QUEUES, use_many_queues
from headway.errors import UsageError
from headway.system.log import logger


def usable_gpu(device: str | torch.device | None, transform: object) -> torch.device | None:
    """Returns the GPU on which a loader decodes and crops images; None, with a message if `device` cannot be used."""
    if isinstance(transform, type) and issubclass(transform, ImageTransform):
        name = transform.__name__
        raise UsageError(f"transform={name} is a class: pass an instance, transform={name}()")
    if device is None or torch.device(device).type == "cpu":
        return None
    if not isinstance(transform, ImageTransform):
        raise UsageError(
            f"device={str(device)!r} is where images are decoded and cropped, which needs a transform of images, such "
            "as hw.data.MultiCrop(); without one, batches are moved by the pipeline"
        )
    missing = "augment= is not computed" if transform.augment is not None else missing_for_gpu()
    if missing:
        logger.info(f"images are decoded and cropped on the CPU: {missing} here for device={str(device)!r}")
        return None
    if not use_many_queues():
        logger.info(
            "images are decoded more slowly during other work on the GPU, as CUDA started with few hardware queues: "
            f"set {QUEUES} in the environment"
        )
    return torch.empty(0, device=device).device  # with its number


def missing_for_gpu() -> str:
    """Returns what this machine lacks to decode and crop on a GPU, as text; an empty string if nothing."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "no triton"
    return "" if nvjpeg.find_library() is not None else "no nvJPEG library"
