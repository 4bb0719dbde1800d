"""What users write: `mypy --strict` has nothing to say about it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway as hw


class Classify(hw.TrainValStage):
    def __init__(self, smoothing: float) -> None:
        super().__init__(precision="bf16", gradient_clip=1.0, accumulate=2, val_every="500 steps")
        self.smoothing = smoothing
        self.weight = 0.1
        self.samples: list[int] = []

    def step(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.models["net"](x)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), weight=len(y))
        return F.cross_entropy(logits, y, label_smoothing=self.smoothing) * self.weight

    def post_epoch(self) -> None:
        self.samples.append(self.steps_done)


class Gan(hw.Stage):
    def run_epoch(self) -> None:
        for batch in self.batches("train"):
            self.step_optimizer("judge")
            self.log("loss_d", batch.mean(), weight=len(batch))


def main() -> None:
    pipe = hw.Pipeline(config={"lr": 3e-4}, name="digits")
    pipe.register_model("net", nn.Linear(784, 10), parallel="ddp", ema=0.999)
    pipe.register_optimizer("adamw", lambda params: torch.optim.AdamW(params, lr=3e-4), model="net")
    pipe.append_stage(Classify(0.1), max_epochs=10)
    pipe.append_stage(Gan(log_every=10), max_steps=100)
    pipe.enable_checkpointing("runs", resume="auto", every="10min", keep_last=3, keep_best="val/loss")
    pipe.run()
