"""DINO's multi-crop as a DALI pipeline: the peer of `benchmarks/multicrop.py`, which runs it where DALI is installed.

JPEGs lie in memory, as they do for headway; DALI decodes them (hardware decoder included), draws its own parameters and
makes 2 crops of 224 and 8 of 96 pixels with DINOv2's changes of color, to 16-bit floats on the GPU. Changes that only
some samples get are made for those alone (`split`), or for all with parameters that change nothing in the others, as
most DALI pipelines do; which is faster is measured. Its color change is one step, torchvision's are four: less work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
GROUPS = {224: ((0.32, 1.0), (1.0, 0.1)), 96: ((0.05, 0.32), (0.5,) * 8)}  # size: scale, blur of each crop


class DaliMultiCrop:
    """A built pipeline over the same photos again and again; `run` returns the number of images of some batches."""

    def __init__(
        self, photos: Sequence[bytes], *, device: str = "gpu", split: bool = True, threads: int = 8
    ) -> None:
        raw = [np.frombuffer(each, np.uint8) for each in photos]
        self.count = len(raw)
        self._pipe = _pipeline(raw, device, threads, split=split)
        self._pipe.build()

    def run(self, batches: int) -> int:
        for _ in range(batches):
            self._pipe.run()
        return batches * self.count


def _pipeline(raw: list[Any], device: str, threads: int, *, split: bool) -> Any:
    from nvidia.dali import fn, pipeline_def, types

    where = {"device_id": 0 if device == "gpu" else None, "num_threads": threads}

    @pipeline_def(batch_size=len(raw), prefetch_queue_depth=3, enable_conditionals=split, **where)
    def multicrop() -> Any:
        jpeg = fn.external_source(source=lambda: raw, batch=True, no_copy=True)
        decoder = {"hw_decoder_load": 0.9, "preallocate_width_hint": 600, "preallocate_height_hint": 450}
        if device == "gpu":
            image = fn.decoders.image(jpeg, device="mixed", output_type=types.RGB, **decoder)
        else:
            image = fn.decoders.image(jpeg, device="cpu", output_type=types.RGB)
        size = fn.peek_image_shape(jpeg)
        found = []
        for side, (scale, blurs) in GROUPS.items():
            for number, blur in enumerate(blurs):
                found.append(
                    _crop(image, size, side, scale, blur, 0.2 if side == 224 and number == 1 else 0.0)
                )
        return tuple(found)

    def change_some(crop: Any, blur: float, solarize: float) -> Any:
        if fn.random.coin_flip(probability=0.8, dtype=types.BOOL):
            crop = fn.color_twist(
                crop,
                brightness=fn.random.uniform(range=(0.6, 1.4)),
                contrast=fn.random.uniform(range=(0.6, 1.4)),
                saturation=fn.random.uniform(range=(0.8, 1.2)),
                hue=fn.random.uniform(range=(-36.0, 36.0)),
            )
        if fn.random.coin_flip(probability=0.2, dtype=types.BOOL):
            crop = fn.hsv(crop, saturation=0.0)
        if fn.random.coin_flip(probability=blur, dtype=types.BOOL):
            crop = fn.gaussian_blur(crop, sigma=fn.random.uniform(range=(0.1, 2.0)), window_size=9)
        if fn.random.coin_flip(probability=solarize, dtype=types.BOOL):
            bright = fn.cast(crop >= 128, dtype=types.UINT8)
            crop = fn.cast(bright * (255 - crop) + (1 - bright) * crop, dtype=types.UINT8)
        return crop

    def change_all(crop: Any, blur: float, solarize: float) -> Any:
        jitter, gray = coin(0.8), coin(0.2)
        crop = fn.color_twist(
            crop,
            brightness=1 + jitter * fn.random.uniform(range=(-0.4, 0.4)),
            contrast=1 + jitter * fn.random.uniform(range=(-0.4, 0.4)),
            saturation=(1 - gray) * (1 + jitter * fn.random.uniform(range=(-0.2, 0.2))),
            hue=jitter * fn.random.uniform(range=(-36.0, 36.0)),
        )
        crop = fn.gaussian_blur(
            crop, sigma=0.01 + coin(blur) * fn.random.uniform(range=(0.1, 2.0)), window_size=9
        )
        if solarize:
            some = coin(solarize)
            bright = fn.cast((crop >= 128) * some, dtype=types.UINT8)
            crop = fn.cast(bright * (255 - crop) + (1 - bright) * crop, dtype=types.UINT8)
        return crop

    def coin(probability: float) -> Any:
        return fn.cast(fn.random.coin_flip(probability=probability), dtype=types.FLOAT)

    def _crop(image: Any, shape: Any, side: int, scale: Any, blur: float, solarize: float) -> Any:
        start, extent = fn.random_crop_generator(
            shape, random_area=list(scale), random_aspect_ratio=[3 / 4, 4 / 3]
        )
        first = fn.cast(start, dtype=types.FLOAT)
        box = {"roi_start": first, "roi_end": first + extent}
        crop = fn.resize(image, size=(side, side), interp_type=types.INTERP_CUBIC, antialias=True, **box)
        crop = (change_some if split else change_all)(crop, blur, solarize)
        mirror = fn.random.coin_flip(probability=0.5)
        return fn.crop_mirror_normalize(
            crop, dtype=types.FLOAT16, output_layout="CHW", mirror=mirror, mean=MEAN, std=STD
        )

    return multicrop()
