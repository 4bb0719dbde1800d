"""A GAN (after pytorch/examples/dcgan), by hand and ported: two models, two optimizers, and a loop of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

import headway as hw

NOISE, EPOCHS = 4, 2


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, 6), nn.Tanh())


def judge() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def adam(parameters: Any) -> optim.Optimizer:
    return optim.Adam(parameters, lr=0.01, betas=(0.5, 0.999))


def loader() -> Any:
    data = TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(5)).tanh())
    return hw.data.DataLoader(data, global_batch_size=8, shuffle=True, seed=1)


def judge_loss(judge: Any, real: Tensor, fake: Tensor) -> Tensor:
    on_real, on_fake = judge(torch.cat([real, fake.detach()])).chunk(2)
    right, wrong = torch.ones_like(on_real), torch.zeros_like(on_fake)
    return F.binary_cross_entropy_with_logits(on_real, right) + F.binary_cross_entropy_with_logits(
        on_fake, wrong
    )


def generator_loss(judge: Any, fake: Tensor) -> Tensor:
    verdict = judge(fake)
    return F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))


class Gan(hw.Stage):
    def run_epoch(self) -> None:
        generator, judge = self.models["generator"], self.models["judge"]
        optimizers = self.pipe.optimizers
        for (real,) in self.batches("train"):
            fake = generator(torch.randn(len(real), NOISE))
            optimizers["judge"].zero_grad()
            loss_d = judge_loss(judge, real, fake)
            loss_d.backward()
            self.step_optimizer("judge")
            optimizers["generator"].zero_grad()
            loss_g = generator_loss(judge, fake)
            loss_g.backward()
            self.step_optimizer("generator")
            self.log("loss_d", loss_d, weight=len(real))
            self.log("loss_g", loss_g, weight=len(real))


def ported(directory: Path) -> hw.Pipeline:
    torch.manual_seed(2)
    pipe = hw.Pipeline(name="gan", root=directory)
    for name, module in (("generator", generator()), ("judge", judge())):
        pipe.register_model(name, module)
        pipe.register_optimizer(name, adam, model=name)
    pipe.register_dataset("train", loader())
    pipe.append_stage(Gan(log_every=1), max_epochs=EPOCHS)
    torch.manual_seed(20 + hw.rank())
    pipe.run()
    return pipe


def by_hand() -> tuple[dict[str, nn.Module], list[float]]:
    """Returns the models, and the judge's loss in each step, over all ranks."""
    torch.manual_seed(2)
    bare = {"generator": generator(), "judge": judge()}
    many = hw.world_size() > 1
    models: dict[str, Any] = {
        name: nn.parallel.DistributedDataParallel(module) if many else module for name, module in bare.items()
    }
    optimizers = {name: adam(module.parameters()) for name, module in bare.items()}
    train, losses = loader(), []
    torch.manual_seed(20 + hw.rank())
    for epoch in range(EPOCHS):
        train.set_epoch(epoch)
        for (real,) in train:
            fake = models["generator"](torch.randn(len(real), NOISE))
            optimizers["judge"].zero_grad()
            loss_d = judge_loss(models["judge"], real, fake)
            loss_d.backward()
            optimizers["judge"].step()
            optimizers["generator"].zero_grad()
            generator_loss(models["judge"], fake).backward()
            optimizers["generator"].step()
            losses.append(sum(hw.all_gather_object(loss_d.item())) / hw.world_size())
    return bare, losses
