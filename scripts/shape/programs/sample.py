import io

import numpy as np
from PIL import Image
from sitecustomize import mark

import headway as hw


def samples():
    random = np.random.default_rng(0)
    for number in range(400):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(file, "JPEG")
        yield {"__key__": f"{number:06d}", "jpg": file.getvalue(), "cls": number % 10}


hw.data.pack(samples(), "shards")
loader = hw.data.ShardLoader(
    "shards", batch_size=8, transform=hw.data.RandomResizedCrop(32), seed=0, threads=2
)
for number, _ in enumerate(loader):
    if number == 10:
        mark("begin")
    if number == 14:  # four batches of eight
        mark("end")
        break
