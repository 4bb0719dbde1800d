"""Make up photos, for a trial: shards/curated and shards/web, 48 of each.

python examples/dino/make_photos.py shards
"""

import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image

import headway as hw


def photos(seed, count=48):
    rng = np.random.default_rng(seed)
    for number in range(count):
        coarse = rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)  # a few colors that flow into each other
        file = io.BytesIO()
        Image.fromarray(coarse).resize((60, 50), Image.Resampling.BICUBIC).save(file, "JPEG")
        yield {"__key__": f"{number:06d}", "jpg": file.getvalue()}


if __name__ == "__main__":
    for seed, name in enumerate(("curated", "web")):
        hw.data.pack(photos(seed), Path(sys.argv[1]) / name)
