"""Images per second of one CPU core: DINO's multi-crop, and thumbnails, against Pillow and DALI.

    scripts/make-peers.sh            # once: DALI, in an environment of its own
    python benchmarks/images.py [--images 1024] [--batches 4] [--thumbnails 300000] [--rounds 5] [--json results.json]

A photo has about 500 x 375 pixels and 70 kB; 2 crops of 224 pixels and 8 of 96 are made of it, with all of DINOv2's
changes of color, to normalized floats in batches of 64. All make the same crops, with the same changes:

    headway     `ShardLoader` with `MultiCrop`, one thread: reading, drawing and collating are counted
    Pillow      what torchvision does with a Pillow image, step by step, one after the other; reading is not counted
    DALI        its operators for the CPU, one thread; its own formula for color, in one step; reading is not counted

Rates are images per second of CPU time of the whole process, because machines are shared. All contenders live as long
as the benchmark, as in training: the first two batches of each, for which threads start and memory is mapped, are not
counted. Then each makes a few batches in turn, always the same number, and nothing ahead of them. Medians of the
rounds are printed. Thumbnails are read as in benchmarks/data.py, on two cores, in seconds of the clock.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_peers import photos
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

import data
from headway.data import MultiCrop, ShardLoader
from headway.data.images.cpu import draw_groups
from headway.data.images.draws import ColorOp, Column, CropTable, Factor, Flag

Contender = Callable[[], Iterator[list[Tensor]]]
"""yields the batches of a pass, with a tensor for each size of crops"""

BATCH = 64
WARM_UP = 2  # batches of each contender that are not counted
TRANSFORM = MultiCrop(output="fp32")
MEAN, STD = (torch.tensor(values)[:, None, None] for values in (TRANSFORM.mean, TRANSFORM.std))


class Photos:
    """The JPEGs in the shards of a directory, and the parameters of their crops in the first epoch."""

    def __init__(self, directory: Path) -> None:
        self.shards = directory / "shards"
        self.encoded = list(photos(directory))
        # nothing is prefetched: the CPU time of a batch is spent while it is waited for, here and in all others
        self.loader = ShardLoader(
            self.shards, batch_size=BATCH, shuffle=False, threads=1, prefetch=1, transform=TRANSFORM
        )
        batches = self.loader._rank_batches(self.loader._mix_timeline(), 0)
        rows = np.array([location for batch in batches for location in batch.locations])
        sizes = np.array([Image.open(io.BytesIO(each)).size[::-1] for each in self.encoded])
        self.tables = draw_groups(TRANSFORM, self.loader._reader.keys.of_transforms(rows), sizes)


# --- contenders


def by_headway(given: Photos) -> Iterator[list[Tensor]]:
    given.loader.set_epoch(0)
    for batch in given.loader:
        yield [batch.global_crops, batch.local_crops]


def by_pillow(given: Photos) -> Iterator[list[Tensor]]:
    for start in range(0, len(given.encoded), BATCH):
        images = [
            _pillow_crops(given, number) for number in range(start, min(start + BATCH, len(given.encoded)))
        ]
        yield [torch.stack(crops, 1) for crops in zip(*images, strict=True)]


def _pillow_crops(given: Photos, number: int) -> list[Tensor]:
    image = Image.open(io.BytesIO(given.encoded[number])).convert("RGB")
    return [
        torch.stack(
            [
                _pillow_crop(image, ints, floats, group.size)
                for ints, floats in zip(
                    table.ints[number].tolist(), table.floats[number].tolist(), strict=True
                )
            ]
        )
        for group, table in zip(TRANSFORM.groups(), given.tables, strict=True)
    ]


def _pillow_crop(image: Image.Image, ints: Sequence[int], floats: Sequence[float], size: int) -> Tensor:
    top, left, height, width = ints[:4]
    crop = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BICUBIC)
    if ints[Column.FLAGS] & Flag.FLIP:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    order = ints[Column.ORDER]
    while order:
        crop, order = _PILLOW[ColorOp(order & 7)](crop, floats[(order & 7) - 1]), order >> 3
    if ints[Column.FLAGS] & Flag.GRAYSCALE:
        crop = crop.convert("L").convert("RGB")
    if floats[Factor.SIGMA] > 0:
        crop = crop.filter(ImageFilter.GaussianBlur(floats[Factor.SIGMA]))
    if ints[Column.FLAGS] & Flag.SOLARIZE:
        crop = ImageOps.solarize(crop, 128)
    pixels = torch.from_numpy(np.array(crop)).permute(2, 0, 1).contiguous()
    return pixels.float().div_(255).sub_(MEAN).div_(STD)


def _pillow_hue(crop: Image.Image, shift: float) -> Image.Image:
    hue, saturation, value = crop.convert("HSV").split()
    turned = Image.fromarray(np.asarray(hue) + np.uint8(int(shift * 255) % 256))
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


_PILLOW: dict[ColorOp, Callable[[Image.Image, float], Image.Image]] = {
    ColorOp.BRIGHTNESS: lambda crop, factor: ImageEnhance.Brightness(crop).enhance(factor),
    ColorOp.CONTRAST: lambda crop, factor: ImageEnhance.Contrast(crop).enhance(factor),
    ColorOp.SATURATION: lambda crop, factor: ImageEnhance.Color(crop).enhance(factor),
    ColorOp.HUE: _pillow_hue,
}


class Dali:
    """A pipeline that lives over all rounds: building it takes longer than a batch."""

    def __init__(self, given: Photos) -> None:
        self._batches = -(-len(given.encoded) // BATCH)
        parameters = [_dali_parameters(table) for table in given.tables]
        raw = [np.frombuffer(each, np.uint8) for each in given.encoded]

        def feed(batch: int) -> list[list[Any]]:
            some = [
                n % len(raw)
                for n in range(batch % self._batches * BATCH, (batch % self._batches + 1) * BATCH)
            ]
            crops = [[table[n, crop] for n in some] for table in parameters for crop in range(table.shape[1])]
            return [[raw[n] for n in some], *crops]

        sizes = [group.size for group in TRANSFORM.groups() for _ in group.recipes]
        self._pipe = _dali_pipeline(feed, sizes)
        self._pipe.build()

    def __call__(self) -> Iterator[list[Tensor]]:
        for _ in range(self._batches):
            crops = [torch.from_numpy(np.asarray(out.as_tensor())) for out in self._pipe.run()]
            large = len(TRANSFORM.groups()[0].recipes)
            yield [torch.stack(crops[:large]), torch.stack(crops[large:])]


def _dali_parameters(table: CropTable) -> Any:
    """Returns top, left, bottom, right, flip, changed, brightness, contrast, saturation, hue, sigma and solarize."""
    ints, floats = table.ints.astype(np.float32), table.floats
    flags = table.ints[..., Column.FLAGS]
    changed = (table.ints[..., Column.ORDER] > 0)[..., None]
    color = np.where(changed, floats[..., :4] * (1, 1, 1, 360), (1, 1, 1, 0))
    color[..., 2] *= (flags & Flag.GRAYSCALE) == 0
    columns = [ints[..., :2], ints[..., :2] + ints[..., 2:4], (flags & Flag.FLIP > 0)[..., None]]
    columns += [changed | (flags & Flag.GRAYSCALE > 0)[..., None], color, floats[..., Factor.SIGMA, None]]
    return np.concatenate([*columns, (flags & Flag.SOLARIZE > 0)[..., None]], -1).astype(np.float32)


def _dali_pipeline(feed: Callable[[int], list[list[Any]]], sizes: Sequence[int]) -> Any:
    from nvidia.dali import fn, pipeline_def, types

    colors = {"brightness": 6, "contrast": 7, "saturation": 8, "hue": 9}
    norm = {name: [255 * value for value in getattr(TRANSFORM, name)] for name in ("mean", "std")}

    # nothing is prefetched: that would be counted as the CPU time of others
    alone = {"exec_async": False, "exec_pipelined": False, "prefetch_queue_depth": 1}

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, enable_conditionals=True, **alone)
    def multicrop() -> Any:
        jpeg, *rows = fn.external_source(source=feed, num_outputs=1 + len(sizes), batch=True)
        image = fn.decoders.image(jpeg, device="cpu", output_type=types.RGB)
        found = []
        for at in range(len(sizes)):  # DALI translates this function, and knows few of Python's words
            row, side = rows[at], sizes[at]
            box = {"roi_start": row[0:2], "roi_end": row[2:4]}
            crop = fn.resize(image, size=(side, side), interp_type=types.INTERP_CUBIC, **box)
            if row[5] > 0:
                crop = fn.color_twist(crop, **{name: row[column] for name, column in colors.items()})
            if row[10] > 0:
                crop = fn.gaussian_blur(crop, sigma=row[10], window_size=9)
            if row[11] > 0:
                bright = fn.cast(crop >= 128, dtype=types.UINT8)
                crop = fn.cast(bright * (255 - crop) + (1 - bright) * crop, dtype=types.UINT8)
            flip = fn.cast(row[4], dtype=types.INT32)
            planes = {"dtype": types.FLOAT, "output_layout": "CHW", "mirror": flip}
            found.append(fn.crop_mirror_normalize(crop, **planes, **norm))
        return tuple(found)

    return multicrop()


# --- comparing


def measure(contenders: dict[str, Contender], batches: int, rounds: int) -> dict[str, float]:
    """Returns images per CPU second of each contender, which makes some batches in each round."""
    endless = {name: _repeat(passes) for name, passes in contenders.items()}
    for each in endless.values():
        _consume(each, WARM_UP)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, each in endless.items():
            began = time.process_time()
            _consume(each, batches)
            rates[name].append(batches * BATCH / (time.process_time() - began))
    for each in endless.values():
        each.close()
    return {name: statistics.median(each) for name, each in rates.items()}


def _repeat(passes: Contender) -> Generator[list[Tensor]]:
    while True:
        yield from passes()


def _consume(batches: Iterator[list[Tensor]], count: int) -> None:
    """Takes batches and keeps none, as a loop of training does: the memory of a batch may be used for a later one."""
    for batch in islice(batches, count):
        assert batch[0].shape[1] == BATCH


def difference(one: Iterator[list[Tensor]], other: Iterator[list[Tensor]]) -> float:
    """Returns by how many of 255 levels the crops of two contenders differ on average."""
    levels = [
        ((here - there) * STD * 255).abs().mean().item()
        for batch, again in zip(one, other, strict=True)
        for here, there in zip(batch, again, strict=True)
    ]
    return statistics.mean(levels)


def thumbnails(count: int, rounds: int) -> dict[str, float]:
    """Returns thumbnails per second of headway, DALI and threads that only decode."""
    with tempfile.TemporaryDirectory() as directory:
        data.make_thumbnails(Path(directory), count)
        arena = data.Comparison(Path(directory), threads=2)
        wanted = ("bare", "headway", "dali")
        arena.contenders = {name: kind for name, kind in arena.contenders.items() if name in wanted}
        return data.reading(arena, rounds)


def show(seen: dict[str, Any]) -> None:
    for part, what in (
        ("multicrop", "images/s of CPU time, multi-crop"),
        ("thumbnails", "thumbnails/s, two cores"),
    ):
        rates = seen[part]
        for name, rate in rates.items():
            ratio = f"headway / {name}: {rates['headway'] / rate:.2f} x" if name != "headway" else ""
            print(f"{name:10} {rate:10.1f} {what:34} {ratio}")
    for name, levels in seen["difference"].items():
        print(f"crops differ from those of {name} by {levels:.2f} of 255 levels on average")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images", type=int, default=1024, help="that shards have; should be many batches of 64"
    )
    parser.add_argument("--batches", type=int, default=4, help="of 64 images, that each makes in a round")
    parser.add_argument("--thumbnails", type=int, default=300_000, help="0 leaves them out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write everything that was seen to this file")
    args = parser.parse_args()
    peers = data.PEERS / "bin" / "python"
    if peers.exists() and Path(sys.prefix).resolve() != data.PEERS.resolve():
        os.execv(peers, [str(peers), *sys.argv])
    torch.set_num_threads(1)
    seen: dict[str, Any] = {"thumbnails": {}, "difference": {}}
    with tempfile.TemporaryDirectory() as directory:
        data.make(Path(directory), args.images // BATCH * BATCH or BATCH)
        given = Photos(Path(directory))
        contenders: dict[str, Contender] = {
            "headway": partial(by_headway, given),
            "Pillow": partial(by_pillow, given),
        }
        if find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None:
            contenders["DALI"] = Dali(given)
        else:
            print("not here: DALI (scripts/make-peers.sh)")
        for name in contenders.keys() - {"headway"}:
            ours, theirs = (islice(contenders[each](), 4) for each in ("headway", name))
            seen["difference"][name] = difference(ours, theirs)
        seen["multicrop"] = measure(contenders, args.batches, args.rounds)
    if args.thumbnails:
        seen["thumbnails"] = thumbnails(args.thumbnails, args.rounds)
    show(seen)
    if args.json:
        args.json.write_text(json.dumps(seen, indent=1))


if __name__ == "__main__":
    main()
