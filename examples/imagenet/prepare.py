"""Pack ImageNet into shards: a directory per class goes in, shards/train, shards/val and shards/test come out.

    python examples/imagenet/prepare.py imagenet shards              # imagenet/train/n01440764/*.JPEG, imagenet/val/...

ImageNet's own validation images are the test set. A tenth of the training images, the same share of every class, is
the validation set; its seed is its own, so that it stays the same whatever else is drawn.
"""

import argparse
import random
from pathlib import Path

import headway as hw


def samples(photos, classes):
    for photo in photos:
        yield {"__key__": photo.stem, "jpg": photo.read_bytes(), "cls": classes.index(photo.parent.name)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a directory with train/ and val/, each with one per class")
    parser.add_argument("out", type=Path)
    parser.add_argument("--val-share", type=float, default=0.1)
    parser.add_argument("--val-seed", type=int, default=0)
    options = parser.parse_args()
    photos = sorted((options.source / "train").glob("*/*"))
    random.Random(0).shuffle(photos)  # a loader mixes samples with those that are stored near them
    labels = [photo.parent.name for photo in photos]
    classes = sorted(set(labels))
    train, val = hw.data.split(photos, options.val_share, by=labels, seed=options.val_seed)
    hw.data.pack(samples(train, classes), options.out / "train")
    hw.data.pack(samples(val, classes), options.out / "val")
    hw.data.pack(options.source / "val", options.out / "test")


if __name__ == "__main__":
    main()
