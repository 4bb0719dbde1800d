"""Train a GAN: two networks, two optimizers, and a loop of your own.

    headway run --nproc 2 examples/gan.py
    headway submit --nodes 1 --gpus-per-node 8 examples/gan.py

The generator learns to draw points on a circle, the critic to tell them from real ones. `self.batches` makes the loop
one of headway's: it is timed, logged, stopped, saved and resumed like any other, noise included.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import headway as hw

NOISE = 8


class Gan(hw.Stage):
    def run_epoch(self):
        generator, critic = self.models["generator"], self.models["critic"]
        for (real,) in self.batches("train"):
            fake = generator(torch.randn(len(real), NOISE, device=self.device))

            verdicts = critic(torch.cat([real, fake.detach()]))
            truth = torch.ones_like(verdicts)
            truth[len(real) :] = 0
            critic_loss = F.binary_cross_entropy_with_logits(verdicts, truth)
            self.update("critic", critic_loss)

            verdicts = critic(fake)
            generator_loss = F.binary_cross_entropy_with_logits(verdicts, torch.ones_like(verdicts))
            self.update("generator", generator_loss)

            self.log("critic_loss", critic_loss, weight=len(real))
            self.log("generator_loss", generator_loss, weight=len(real))
            self.log("distance", (fake.norm(dim=1) - 1).abs().mean(), weight=len(real))  # from the circle

    def update(self, name, loss):
        self.pipe.optimizers[name].zero_grad()
        loss.backward()
        self.step_optimizer(name)


def network(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    pipe = hw.Pipeline(config=options, name="gan")
    hw.seed(0)
    angle = torch.linspace(0, 2 * torch.pi, 4096)
    circle = TensorDataset(torch.stack([angle.cos(), angle.sin()], 1))
    pipe.register_dataset("train", hw.data.DataLoader(circle, global_batch_size=256, shuffle=True))
    for name, net in {"generator": network(NOISE, 2), "critic": network(2, 1)}.items():
        pipe.register_model(name, net)
        pipe.register_optimizer(
            name, lambda params: torch.optim.Adam(params, lr=3e-3, betas=(0.5, 0.999)), model=name
        )
    stage = Gan()
    for column in ("critic_loss", "generator_loss", "distance"):
        stage.add_column(column)
    pipe.append_stage(stage, max_epochs=options.epochs)
    pipe.enable_checkpointing(every="10 epochs")
    pipe.run()


if __name__ == "__main__":
    main()
