"""Trains for SOAK seconds with all that may look like a hang and is none, under a watchdog of a few seconds."""

import gc
import os
import random
import sys
import time

import torch

import headway as hw

PERIOD = float(os.environ["HEADWAY_WATCHDOG"])
BEGAN = time.monotonic()


class Uneven(hw.TrainValStage):
    def step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        if self.training and self.pipe.steps_done == 0:
            time.sleep(2 * PERIOD)  # compiling
        if random.random() < 0.1:
            time.sleep(random.random() * PERIOD / 4)
        if random.random() < 0.02:
            gc.collect()
        return self.models["net"](batch[0]).square().mean()

    def post_epoch(self) -> None:
        if self.epoch == 1:
            time.sleep(1.5 * PERIOD)  # a hook that takes its time
            publish()
        if self.epoch >= 3 and time.monotonic() - BEGAN > float(os.environ["SOAK"]):
            self.stop_stage()


@hw.root_only
def publish() -> None:
    time.sleep(1.5 * PERIOD)


world = hw.init(device="cpu")
random.seed(world.rank)
data = torch.utils.data.TensorDataset(torch.randn(120, 4, generator=torch.Generator().manual_seed(0)))
pipe = hw.Pipeline(name="soak")
pipe.register_model("net", torch.nn.Linear(4, 1))
pipe.register_optimizer("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.01))
pipe.register_dataset("train", hw.data.DataLoader(data, batch_size=4, shuffle=True))
pipe.register_dataset("val", hw.data.DataLoader(data, batch_size=8))
pipe.append_stage(Uneven(log_every=5), max_epochs=10_000)
pipe.enable_checkpointing(sys.argv[1], every=7)
pipe.run()
hw.print_root(f"soaked for {time.monotonic() - BEGAN:.0f} s and {pipe.steps_done} steps")
