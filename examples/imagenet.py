"""Train ResNet-50 on ImageNet: tar shards, bf16, any number of GPUs on any number of nodes.

    headway data pack imagenet/train shards/train                       # once: classes into shards, in random order
    headway data pack imagenet/val shards/val
    headway run --nproc 8 examples/imagenet.py --data shards            # a process for each GPU of this machine
    headway submit --nodes 4 --gpus-per-node 8 --pre $PWD/shards examples/imagenet.py --data $PWD/shards

The last is for SLURM. It copies the shards to each node's own disk first, into $SLURM_TMPDIR; where a cluster does not
set that, say where with --pre-to '/scratch/$USER'. Without --pre the shards are read where they are.

Without --data the pictures are made up. Does it work, and what holds it up?

    headway run --smoke examples/imagenet.py                            # two steps, a validation, a save, a restart
    HEADWAY_FAKE_DATA=1 headway run examples/imagenet.py --data shards  # one batch over and over: all but the loader
    headway run examples/imagenet.py --data shards --dummy-model        # a model that costs nothing: the loader alone

ResNet-50 is torchvision's; where that is not installed, a small network takes its place.
"""

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway as hw
from headway.train.model.schedules import warmup_cosine

CLASSES = 1000
MEAN, STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)


class Classify(hw.TrainValStage):
    def step(self, batch: dict[str, Tensor]) -> Tensor:
        pixels, label = batch["images"], batch["cls"]
        mean, std = (pixels.new_tensor(each, dtype=torch.float32)[:, None, None] for each in (MEAN, STD))
        # bytes travel, floats are made here; in memory, the channels of a pixel are neighbors, as GPUs like it best
        logits = self.models["net"]((pixels - mean) / std)
        if self.training:
            return F.cross_entropy(logits, label, label_smoothing=0.1)
        right = logits.topk(5).indices == label[:, None]
        self.log("top1", right[:, 0].double().mean(), weight=len(label))
        self.log("top5", right.any(1).double().mean(), weight=len(label))
        self.log("images", len(label), reduce="sum")  # each counts once, on any number of ranks
        return F.cross_entropy(logits, label)


class MadeUp(torch.utils.data.Dataset[dict[str, Any]]):
    """Noise around a color that depends on the class."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Any]:
        random = np.random.default_rng(number)
        color = np.random.default_rng(number % 10).integers(50, 200, 3)
        noise = random.integers(-50, 50, (self.size, self.size, 3))
        return {
            "images": torch.from_numpy((noise + color).astype(np.uint8)).permute(2, 0, 1),
            "cls": number % 10,
        }


def make_net(*, dummy: bool) -> nn.Module:
    if dummy:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES))
    if importlib.util.find_spec("torchvision") is not None:
        from torchvision.models import resnet50

        net: nn.Module = resnet50(zero_init_residual=True)
        return net
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def make_loaders(options: argparse.Namespace) -> dict[str, Any]:
    batch, size = options.batch, options.size
    if options.data is None:
        return {
            "train": hw.data.DataLoader(MadeUp(4 * batch * hw.world_size(), size), batch, shuffle=True),
            "val": hw.data.DataLoader(MadeUp(2 * batch + 3, size), batch),
        }
    staged = os.environ.get("HEADWAY_STAGED")  # by `headway submit --pre`
    shards = Path(staged) / options.data.name if staged else options.data
    # of a sample, its epoch and the seed: a restart sees the same crops
    train = hw.data.RandomResizedCrop(size=size, output="uint8", channels_last=True)
    val = hw.data.CenterCrop(size=size, resize=size * 8 // 7, output="uint8", channels_last=True)
    return {
        "train": hw.data.ShardLoader(shards / "train", batch, transform=train, tail="drop"),
        "val": hw.data.ShardLoader(shards / "val", batch, transform=val, shuffle=False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a directory with train/ and val/, of tar shards")
    parser.add_argument("--batch", type=int, default=64, help="pictures per rank and step")
    parser.add_argument("--size", type=int, default=224, help="of a picture, in pixels")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--lr", type=float, default=0.1, help="for 256 pictures per step")
    parser.add_argument("--dummy-model", action="store_true", help="to see what the loader can give")
    options = parser.parse_args()
    hw.init()
    hw.seed(0)
    loaders = make_loaders(options)
    lr = hw.scale_lr(options.lr, batch_size=options.batch, base_batch_size=256)
    steps = max(1, len(loaders["train"]))

    pipe = hw.Pipeline(config=vars(options) | {"data": options.data and str(options.data)}, name="imagenet")
    net = make_net(dummy=options.dummy_model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    pipe.register_model("net", net)
    pipe.register_optimizer(
        "sgd",
        lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4, nesterov=True),
        scheduler=lambda sgd: warmup_cosine(
            sgd, warmup=min(5, options.epochs // 2) * steps, total=options.epochs * steps
        ),
        model="net",
    )
    for name, loader in loaders.items():
        pipe.register_dataset(name, loader)
    stage = Classify(precision="bf16")
    stage.add_column("val/top1")
    pipe.append_stage(stage, max_epochs=options.epochs)
    pipe.enable_checkpointing(every="10min", keep_last=2, keep_best="max:val/top1")
    pipe.run()


if __name__ == "__main__":
    main()
