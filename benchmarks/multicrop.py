"""Images per second of DINO's multi-crop on one GPU, from JPEGs in memory and from shards, against the decoder alone.

    python benchmarks/multicrop.py [--images 256] [--batches 60] [--rounds 3] [--no-training] [--json results.json]

A photo has about 500 x 375 pixels and 72 kB; 2 crops of 224 pixels and 8 of 96 are made of it, with all of DINOv2's
changes of color, to bf16. Two decoders alone are measured, each called for a whole batch at a time by one thread:
torchvision's, and headway's own use of the same library, which is the limit. Rounds are interleaved and medians
printed, because machines are shared. Where DALI is installed, its pipeline runs in the same rounds. The floor of the
kernels is the time that the bytes which they must read and write take, at the rate of a large copy on the same device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from multicrop_dali import DaliMultiCrop
from torchvision.io import decode_jpeg

from headway.data import MultiCrop, ShardLoader, pack
from headway.data.images.batch import IMAGE, SAMPLES, EncodedImage
from headway.data.images.device.device_batch import GpuBatcher
from headway.data.images.device.gpu import GpuCropper
from headway.data.images.device.image_table import ImageTable
from headway.data.images.device.nvjpeg import JpegDecoder
from headway.data.order.permutation import derive_keys
from headway.data.samples.collate import collate
from headway.data.samples.loader_threads import quick_switches
from headway.dist.device import use_many_queues

BATCH, QUALITY, WANTED_KB = 256, 80, 72
DEVICE = torch.device("cuda", 0)
AHEAD, WARM_UP = 4, 8  # batches: that are prefetched, and that come before the clock starts
WARM_UP_S = 1.0  # at least: processes start, memory is pinned


def photo(height: int, width: int, seed: int) -> np.ndarray:
    """An image whose JPEG has about the size of a photo's: smooth areas, edges and some grain."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack(
        [128 + 90 * np.sin(x / (19 + 5 * c) + seed) * np.cos(y / (23 - 3 * c)) for c in range(3)], 2
    )
    grain = rng.normal(0, 1, (height // 2 + 1, width // 2 + 1, 1)).repeat(2, 0).repeat(2, 1)[:height, :width]
    pixels += 6 * grain + rng.normal(0, 5, (height, width, 1))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (230, 25, 60)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def make_photos(number: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    sizes = [(int(375 + rng.integers(-30, 31)), int(500 + rng.integers(-40, 41))) for _ in range(number)]
    with ThreadPoolExecutor(16) as pool:
        pixels = list(pool.map(photo, *zip(*sizes, strict=True), range(number)))
        quality = QUALITY
        while True:
            found = list(
                pool.map(partial(simplejpeg.encode_jpeg, quality=quality, colorsubsampling="420"), pixels)
            )
            mean = statistics.mean(map(len, found)) / 1000
            if mean > WANTED_KB or quality >= 96:
                return found
            quality += 2


def timed(work: Callable[[], int]) -> float:
    """Images per second of some work, which returns how many it did."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    images = work()
    torch.cuda.synchronize()
    return images / (time.perf_counter() - began)


class TorchvisionDecoder:
    """Decodes a batch as torchvision's users do."""

    def __init__(self, photos: list[bytes]) -> None:
        self.count = len(photos)
        self._photos = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in photos]

    def decode(self) -> list[torch.Tensor]:
        return decode_jpeg(self._photos, mode="RGB", device=DEVICE)


class OwnDecoder:
    """Decodes a batch as headway does; nothing of it is used."""

    def __init__(self, photos: list[bytes]) -> None:
        self.count, self._images = len(photos), [sample[IMAGE] for sample in samples(pinned(photos))]
        self._decoder = JpegDecoder(DEVICE)

    def decode(self) -> torch.Tensor:
        return self._decoder.decode(self._images).block


def sizes_of(photos: Sequence[bytes | memoryview]) -> list[tuple[int, int]]:
    return [simplejpeg.decode_jpeg_header(data)[:2] for data in photos]


def repeat_decode(decoder: TorchvisionDecoder | OwnDecoder, batches: int) -> int:
    for _ in range(batches):
        decoder.decode()
    return batches * decoder.count


def pinned(photos: list[bytes]) -> list[memoryview]:
    """Copies photos to pinned memory, as the loader reads them from shards."""
    ends = np.cumsum([len(data) for data in photos]).tolist()
    block = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True).numpy()
    np.concatenate([np.frombuffer(data, np.uint8) for data in photos], out=block)
    return [block.data[start:end] for start, end in pairwise([0, *ends])]


def samples(
    photos: Sequence[bytes | memoryview], sizes: list[tuple[int, int]] | None = None
) -> list[dict[str, Any]]:
    return [
        {
            SAMPLES: np.array([0, 0, 0, number]),
            IMAGE: EncodedImage(memoryview(data), *size, 1),
            "cls": number,
        }
        for number, (data, size) in enumerate(zip(photos, sizes or sizes_of(photos), strict=True))
    ]


def from_memory(photos: list[bytes]) -> Generator[Any]:
    """Batches of crops of photos in memory, as the loader makes them, a few batches ahead: one thread copies the photos
    to pinned memory, one has them decoded, one makes the crops."""

    def keys_of(rows: np.ndarray) -> np.ndarray:
        return derive_keys(0, *(rows[:, column].astype(np.uint64) for column in range(4)))

    batcher, sizes = GpuBatcher(MultiCrop(), DEVICE, collate, keys_of), sizes_of(photos)

    def read() -> list[dict[str, Any]]:
        return samples(pinned(photos), sizes)

    def decode(read: Future[Any]) -> list[dict[str, Any]]:
        assert not batcher.decode(read.result())
        return read.result()

    with ExitStack() as stack:
        stack.enter_context(quick_switches(active=True))
        reading, decoding, collating = (stack.enter_context(ThreadPoolExecutor(1)) for _ in range(3))

        def start() -> Future[Any]:
            decoded = decoding.submit(decode, reading.submit(read))
            return collating.submit(lambda: batcher.collate(decoded.result()))

        waiting = [start() for _ in range(AHEAD)]
        while True:
            yield waiting.pop(0).result().hand_over()
            waiting.append(start())


def take(batches: Iterator[Any], number: int) -> int:
    return sum(batch.global_crops.shape[1] for batch in islice(batches, number))


def warm_up(batches: Iterator[Any]) -> None:
    began = time.perf_counter()
    take(batches, WARM_UP)
    while time.perf_counter() - began < WARM_UP_S:
        take(batches, 1)


def kernel_times(photos: list[bytes]) -> dict[str, float]:
    """Milliseconds of the kernels of a batch, and of a copy of the bytes that they cannot avoid."""
    images = TorchvisionDecoder(photos).decode()
    table = ImageTable.of(images)
    cropper = GpuCropper(MultiCrop())
    keys = np.arange(len(images), dtype=np.uint64)
    began = time.perf_counter()
    tables = cropper.draw(keys, table.sizes)
    draw_ms = (time.perf_counter() - began) * 1e3
    crops = cropper.crop(table, tables)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    host = time.perf_counter()
    events[0].record()
    for _ in range(20):
        cropper.crop(table, tables)
    events[1].record()
    host_ms = (time.perf_counter() - host) / 20 * 1e3
    torch.cuda.synchronize()
    total = sum(each.nbytes for each in images) + sum(each.nbytes for each in crops.values())
    source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    clock = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    target.copy_(source)
    clock[0].record()
    for _ in range(5):
        target.copy_(source)
    clock[1].record()
    torch.cuda.synchronize()
    rate = 5 * 2 * source.nbytes / clock[0].elapsed_time(clock[1])  # bytes per millisecond
    return {
        "kernels_ms": events[0].elapsed_time(events[1]) / 20,
        "launch_host_ms": host_ms,
        "draw_host_ms": draw_ms,
        "floor_ms": total / rate,
        "copy_TB_s": rate / 1e9,
    }


def vit() -> torch.nn.Module:
    """A ViT-S/16 without its head: 12 layers of 384, 6 heads."""
    layer = torch.nn.TransformerEncoderLayer(
        384, 6, 1536, activation="gelu", batch_first=True, norm_first=True, dropout=0
    )
    parts = torch.nn.ModuleDict(
        {
            "patches": torch.nn.Conv2d(3, 384, 16, 16),
            "layers": torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
        }
    )
    return parts.to(DEVICE)


def train(batches: Iterator[Any], steps: int) -> tuple[float, float]:
    """Seconds of a step, and the share of it in which the training waits for a batch."""
    net = vit()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    waits, began = 0.0, time.perf_counter()
    for step in range(steps + 3):
        if step == 3:
            torch.cuda.synchronize()
            waits, began = 0.0, time.perf_counter()
        asked = time.perf_counter()
        batch = next(batches)
        waits += time.perf_counter() - asked
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.zeros((), device=DEVICE)
            for crops in (batch["global_crops"], batch["local_crops"]):
                tokens = net["patches"](crops.flatten(0, 1)).flatten(2).transpose(1, 2)
                loss = loss + net["layers"](tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps, waits / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=BATCH)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--readers", type=int, help="threads that read shards")
    parser.add_argument("--shard-samples", type=int, default=8192)
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    use_many_queues()  # as init() does, before anything is done on the device
    photos = make_photos(options.images)
    print(f"{len(photos)} photos, mean {statistics.mean(map(len, photos)) / 1000:.0f} kB", flush=True)
    results: dict[str, Any] = kernel_times(photos)
    print({name: round(value, 3) for name, value in results.items()}, flush=True)
    decoders = {"torchvision": TorchvisionDecoder(photos), "decoder": OwnDecoder(photos)}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        repeated = (
            {"__key__": f"{n:06d}", "jpg": photos[n % len(photos)], "cls": n}
            for n in range(options.shard_samples)
        )
        pack(repeated, directory, shard_size=2**26)

        loader = ShardLoader(  # one for all rounds, as in training: its processes start once
            directory,
            batch_size=options.images,
            transform=MultiCrop(),
            device=DEVICE,
            prefetch=6,
            memory=2**31,
            threads=options.readers,
            steps_per_epoch=10**6,  # an epoch's end would empty the queues
        )

        def shards() -> Generator[Any]:
            yield from loader

        contenders: dict[str, Callable[[], Generator[Any]]] = {
            "from memory": partial(from_memory, photos),
            "from shards": shards,
        }
        peers = {}
        if find_spec("nvidia") and find_spec("nvidia.dali"):
            peers = {"DALI, split": DaliMultiCrop(photos), "DALI": DaliMultiCrop(photos, split=False)}
        rates: dict[str, list[float]] = {name: [] for name in (*decoders, *contenders, *peers)}
        for _ in range(options.rounds):
            for name, decoder in decoders.items():
                repeat_decode(decoder, WARM_UP)
                rates[name].append(timed(partial(repeat_decode, decoder, options.batches)))
            for name, contender in contenders.items():
                batches = contender()
                warm_up(batches)
                rates[name].append(timed(partial(take, batches, options.batches)))
                batches.close()  # or what it prefetches would slow down the next one
            for name, peer in peers.items():
                peer.run(WARM_UP)
                rates[name].append(timed(partial(peer.run, options.batches)))
        results["images/s"] = {name: statistics.median(each) for name, each in rates.items()}
        limit, torchvision = (results["images/s"][name] for name in ("decoder", "torchvision"))
        for name, each in rates.items():
            rate = statistics.median(each)
            print(
                f"{name:14} {rate:8,.0f} images/s  {rate / limit:6.1%} of the decoder, {rate / torchvision:6.1%} of "
                f"torchvision's  {[round(value) for value in each]}",
                flush=True,
            )
        for name in peers:
            for own in contenders:
                print(
                    f"{own} / {name}: {results['images/s'][own] / results['images/s'][name]:.2f} x",
                    flush=True,
                )
        if not options.no_training:
            loaded = shards()
            fixed = next(loaded)
            for name, source in (("fixed batch", repeat(fixed)), ("from shards", loaded)):
                seconds, share = train(source, 20)
                results[f"training, {name}"] = {"step_s": seconds, "wait_share": share}
                print(
                    f"ViT-S/16, {name}: {seconds * 1e3:.0f} ms a step, {share:.1%} of it waiting", flush=True
                )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
