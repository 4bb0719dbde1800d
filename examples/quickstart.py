"""Train a small classifier on made-up data. Kill it and start it again: it resumes where it was.

headway run --nproc 2 examples/quickstart.py
headway submit --nodes 2 --gpus-per-node 8 examples/quickstart.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import headway as hw


class Classify(hw.TrainValStage):
    def step(self, batch):  # forward and loss, for training and validation
        x, y = batch
        logits = self.models["net"](x)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), weight=len(y))
        return F.cross_entropy(logits, y)


def spirals(count, seed):
    turn = 9 * torch.rand(count, generator=torch.Generator().manual_seed(seed))
    arm = torch.arange(count) % 2
    points = torch.stack([turn.cos(), turn.sin()], 1) * (turn * (1 - 2 * arm))[:, None] / 10
    return TensorDataset(points, arm)


if __name__ == "__main__":
    pipe = hw.Pipeline(name="spirals")
    hw.seed(0)  # the same weights on all ranks
    pipe.register_model("net", nn.Sequential(nn.Linear(2, 99), nn.ReLU(), nn.Linear(99, 2)))
    pipe.register_optimizer("adamw", lambda params: torch.optim.AdamW(params, lr=0.05), model="net")
    train, val = spirals(4000, seed=1), spirals(1003, seed=2)
    pipe.register_dataset("train", hw.data.DataLoader(train, global_batch_size=64, shuffle=True))
    pipe.register_dataset("val", hw.data.DataLoader(val, global_batch_size=64))
    pipe.append_stage(Classify(gradient_clip=1.0), max_epochs=5)
    pipe.enable_checkpointing(every="1 epoch", keep_best="val/loss")
    pipe.run()
