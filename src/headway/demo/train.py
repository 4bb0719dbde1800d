"""The training script of `headway demo`: an ordinary script that classifies six shapes.

    headway run --nproc 2 train.py

Kill it and start it again: it resumes where it was, and every loss is the same as without the kill.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway as hw

SHAPES, SIZE = 6, 32


class Classify(hw.TrainValStage):
    """Forward and loss; the loop is headway's."""

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        pixels = batch["png"] if "png" in batch else batch["npy"]
        logits = self.models["net"](pixels.permute(0, 3, 1, 2) / 255 - 0.5)
        self.log("accuracy", (logits.argmax(1) == batch["cls"]).float().mean(), weight=len(logits))
        return F.cross_entropy(logits, batch["cls"])


def make_net() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    # dropout draws random numbers, which must also be the same after a resume
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, SHAPES)
    )


def batch(size: int = 32) -> tuple[Tensor, Tensor]:
    """Returns the batch with which `headway plan module train.py:make_net` traces the network."""
    return torch.randn(size, 3, SIZE, SIZE), torch.randint(SHAPES, (size,))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--batch", type=int, default=64, help="global batch size: pictures per step, of all ranks"
    )
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()
    hw.init(device="cpu")  # two ranks can share a CPU, but not a GPU; without device=, each rank uses a GPU
    hw.seed(0)

    pipe = hw.Pipeline(config=vars(options), name="shapes")
    pipe.register_model("net", make_net())
    pipe.register_optimizer(
        "adamw", lambda parameters: torch.optim.AdamW(parameters, lr=options.lr), model="net"
    )
    for split in ("train", "val"):
        loader = hw.data.ShardLoader(
            f"shards/{split}", global_batch_size=options.batch, shuffle=split == "train", threads=1
        )
        pipe.register_dataset(split, loader)
    stage = Classify(log_every=5)
    stage.add_column("val/accuracy")
    pipe.append_stage(stage, max_epochs=options.epochs)
    pipe.enable_checkpointing(every="1 epoch", keep_last=2)
    pipe.enable_ledger()  # each step's loss, samples and random numbers: for headway compare --exact
    pipe.run()


if __name__ == "__main__":
    main()
