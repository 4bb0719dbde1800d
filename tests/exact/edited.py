"""A training whose constants a test edits between its starts.

EXACT_TRACE=FILE EXACT_KILL=STEP python edited.py DIRECTORY      # on any number of ranks; killed in this step
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headway as hw

RATE = 0.02
MOMENTUM = 0.9
SCALE = 1.0
FROZEN = True
GROUPS = 1
STEPS_PER_DECAY = 4


class Train(hw.TrainValStage):
    def train_step(self, batch: Any) -> Tensor:
        step = self.pipe.steps_done + 1
        if step == int(os.environ["EXACT_KILL"]):
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch
        loss = F.cross_entropy(self.models["net"](x), y) * SCALE
        with Path(f"{os.environ['EXACT_TRACE']}-{hw.rank()}").open("a") as file:
            file.write(json.dumps([step, float(loss.detach()).hex()]) + "\n")
        return loss


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    groups = [every] if GROUPS == 1 else [every[:1], every[1:]]
    return torch.optim.SGD([{"params": group} for group in groups], lr=RATE, momentum=MOMENTUM)


def main(directory: Path) -> None:
    hw.seed(0)
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
    net[0].requires_grad_(not FROZEN)
    pipe = hw.Pipeline(name="edited", root=directory)
    pipe.register_model("net", net)
    pipe.register_optimizer(
        "sgd",
        optimizer,
        model="net",
        scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, STEPS_PER_DECAY, 0.7),
    )
    data = TensorDataset(x, x[:, :3].argmax(1))
    pipe.register_dataset("train", hw.data.DataLoader(data, global_batch_size=8, shuffle=True, seed=3))
    pipe.append_stage(Train(log_every=4), max_epochs=2)
    pipe.enable_checkpointing(every=2, background=False)
    pipe.run()
    if hw.is_root():
        words = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
        Path(f"{os.environ['EXACT_TRACE']}-end").write_text(hashlib.sha256(words).hexdigest())


if __name__ == "__main__":
    hw.init()
    main(Path(sys.argv[1]))
