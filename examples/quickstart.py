"""Train a small classifier: a model, a step and a main().

    python examples/quickstart.py
    headway run --nproc 2 examples/quickstart.py

Stop it with Ctrl-C, or kill it, and start it again: it resumes where it was.

The data is made up (two interleaved spirals), so that nothing has to be downloaded.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headway as hw


class Classify(hw.TrainValStage):
    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        logits = self.models["net"](x)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), weight=len(y))
        return F.cross_entropy(logits, y)


def spirals(count: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    arm = torch.arange(count) % 2
    turn = torch.rand(count, generator=random) * 3 * math.pi
    points = torch.stack([turn.cos(), turn.sin()], dim=1) * turn[:, None] * (1 - 2 * arm)[:, None]
    return TensorDataset(points / 10 + 0.02 * torch.randn(points.shape, generator=random), arm)


def main() -> None:
    config = {"lr": 3e-3, "batch": 64, "epochs": 5}
    hw.init()
    hw.seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    pipe = hw.Pipeline(config=config, name="spirals")
    pipe.register_model("net", net)
    pipe.register_optimizer(
        "adamw", lambda parameters: torch.optim.AdamW(parameters, lr=config["lr"]), model="net"
    )
    pipe.register_dataset("train", hw.data.DataLoader(spirals(8000, seed=1), config["batch"], shuffle=True))
    pipe.register_dataset("val", hw.data.DataLoader(spirals(1003, seed=2), config["batch"]))
    stage = Classify(gradient_clip=1.0)
    stage.add_column("val/accuracy")
    pipe.append_stage(stage, max_epochs=config["epochs"])
    pipe.enable_checkpointing(every="1ep", keep_best="val/loss")
    pipe.run()


if __name__ == "__main__":
    main()
