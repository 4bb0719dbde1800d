"""Train a classifier on ImageNet, on any number of GPUs and nodes. README.md explains it.

headway run --nproc 8 examples/imagenet/train.py --data shards
headway submit --nodes 4 --gpus-per-node 8 --pre $PWD/shards examples/imagenet/train.py --data $PWD/shards
headway run --smoke examples/imagenet/train.py --model small --batch 8 --size 64     # made-up images
"""

import argparse
import importlib.util
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import headway as hw

CLASSES = 1000
TORCHVISION = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
TORCHVISION += ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32")


class Classify(hw.TrainValStage):
    def step(self, batch):
        images, labels = batch["images"], batch["cls"]
        logits = self.models["net"](images)
        if self.training:
            return F.cross_entropy(logits, labels, label_smoothing=0.1)
        right = logits.topk(5).indices == labels[:, None]
        self.log("top1", right[:, 0].float().mean(), weight=len(labels))
        self.log("top5", right.any(1).float().mean(), weight=len(labels))
        self.log("images", len(labels), reduce="sum")  # each counts once, on any number of ranks
        return F.cross_entropy(logits, labels)


class FakeImages(torch.utils.data.Dataset):
    """As many images as ImageNet has, of noise around a value that depends on the class."""

    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        label = number % CLASSES
        return {"images": torch.randn(3, self.size, self.size) + label / CLASSES, "cls": label}


def make_net(name):
    if name == "dummy":  # costs nothing: what is left is the loader
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES))
    if name == "small":
        layers = []
        for before, after in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(before, after, 3, stride=2, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))
    from torchvision.models import get_model

    return get_model(name, num_classes=CLASSES)


def make_loaders(options):
    batch, size = options.batch, options.size
    if options.data is None:
        workers = {"num_workers": options.workers, "pin_memory": torch.cuda.is_available()}
        return {
            "train": hw.data.DataLoader(
                FakeImages(1_281_167, size), batch, shuffle=True, drop_last=True, **workers
            ),
            "val": hw.data.DataLoader(FakeImages(50_000, size), batch, **workers),
        }
    staged = os.environ.get("HEADWAY_STAGED")  # where `headway submit --pre` has copied the shards to
    shards = Path(staged) / options.data.name if staged else options.data
    output = "bf16" if options.precision in ("bf16", "fp16") else "fp32"
    device = "cuda" if torch.cuda.is_available() else None  # decodes and crops there
    crop = hw.data.RandomResizedCrop(size, output=output, channels_last=True)
    center = hw.data.CenterCrop(size, resize=size * 8 // 7, output=output, channels_last=True)
    loaders = {
        "train": hw.data.ShardLoader(
            shards / "train", batch, transform=crop, tail="drop", device=device, seed=options.seed
        )
    }
    for name in ("val", "test"):
        loaders[name] = hw.data.ShardLoader(
            shards / name, batch, transform=center, shuffle=False, device=device
        )
    return loaders


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "resnet50" if importlib.util.find_spec("torchvision") else "small"
    parser.add_argument("--model", default=default, choices=("dummy", "small", *TORCHVISION))
    parser.add_argument("--weights", type=Path, help="to begin with: a safetensors or torch file, or a run")
    parser.add_argument("--data", type=Path, help="what prepare.py has written; else images are made up")
    parser.add_argument("--batch", type=int, default=256, help="images per rank and step")
    parser.add_argument("--size", type=int, default=224, help="of an image, in pixels")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--lr", type=float, default=1e-3, help="for 1024 images in a step of all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "tf32", "bf16", "fp16"))
    parser.add_argument(
        "--compile", default=False, metavar="MODE", help='of torch.compile, such as "default"'
    )
    parser.add_argument("--workers", type=int, default=2, help="processes per rank that make images up")
    parser.add_argument("--limit-train-samples", type=int, help="per epoch")
    parser.add_argument("--limit-val-samples", type=int, help="per validation")
    parser.add_argument("--profile", metavar="STEPS", help='steps to trace on rank 0, such as "20-25"')
    parser.add_argument("--wandb", metavar="PROJECT", help="log to this project of Weights & Biases")
    return parser.parse_args()


def main():
    options = parse()
    pipe = hw.Pipeline(config=options, name="imagenet")
    hw.seed(options.seed)
    net = make_net(options.model).to(memory_format=torch.channels_last)
    on_gpu = torch.cuda.is_available()
    pipe.register_model("net", net, sync_batchnorm=on_gpu, compile=options.compile, init_from=options.weights)
    loaders = make_loaders(options)
    for name in ("train", "val"):
        pipe.register_dataset(name, loaders[name])

    def limit(samples):
        return samples and max(1, samples // (options.batch * hw.world_size()))

    batches = min(len(loaders["train"]), limit(options.limit_train_samples) or len(loaders["train"]))
    lr = hw.scale_lr(options.lr, batch_size=options.batch, base_batch_size=1024)
    pipe.register_optimizer(
        "adamw",
        lambda params: torch.optim.AdamW(params, lr=lr, weight_decay=0.05),
        scheduler=lambda adamw: hw.train.warmup_cosine(
            adamw, warmup=options.epochs // 10 * batches, total=options.epochs * batches
        ),
        model="net",
    )
    stage = Classify(
        precision=options.precision,
        limit_train_batches=limit(options.limit_train_samples),
        limit_val_batches=limit(options.limit_val_samples),
    )
    stage.add_column("val/top1")
    if options.profile:
        stage.enable_profiler(options.profile, memory=True)
    pipe.append_stage(stage, max_epochs=options.epochs)
    pipe.enable_checkpointing(every="10min", keep_last=2, keep_best="max:val/top1")
    if options.wandb:
        pipe.enable_wandb(project=options.wandb)
    pipe.run()
    if "test" in loaders:
        pipe.test(stage, loaders["test"], weights="best")


if __name__ == "__main__":
    main()
