"""A training in which each rank has a walker of its own, which decides on its losses.

headway run --nproc 2 keeps_ranks.py DIRECTORY [merges]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headway as hw


class Walker:
    """An environment: a position that depends on all steps so far, and a generator."""

    def __init__(self, rank: int) -> None:
        self.place, self.generator = torch.full((2,), float(rank)), np.random.default_rng(rank)

    def walk(self) -> Tensor:
        self.place = self.place * 0.9 + float(self.generator.normal())
        return self.place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "generator": self.generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.generator.bit_generator.state = state["place"], state["generator"]


class Merging(Walker):
    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        self.place = sum(state["place"] for state in states) / len(states)


class Walks(hw.TrainValStage):
    def __init__(self, walker: Walker) -> None:
        super().__init__(log_every=2)
        self.walker = walker

    def step(self, batch: Any) -> Tensor:
        (x,) = batch
        loss = F.mse_loss(self.models["net"](x), x.roll(1, 1)) * self.walker.walk().square().sum()
        with (self.pipe.directory.path.parent / f"losses-{hw.rank()}").open("a") as file:
            file.write(f"rank {hw.rank()} step {self.pipe.steps_done + 1} {float(loss.detach()).hex()}\n")
        return loss


def main(directory: Path, *words: str) -> None:
    hw.seed(0)
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    walker = (Merging if "merges" in words else Walker)(hw.rank())
    pipe = hw.Pipeline(name="walk", root=directory)
    pipe.register_model("net", nn.Linear(4, 4))
    pipe.register_optimizer("sgd", lambda ps: torch.optim.SGD(ps, lr=0.01), model="net")
    pipe.register_dataset("train", hw.data.DataLoader(TensorDataset(x), global_batch_size=4, shuffle=True))
    pipe.append_stage(Walks(walker), max_epochs=1)
    pipe.register_rank_state("walker", walker)
    pipe.enable_checkpointing(every=2, background=False)
    pipe.run()


if __name__ == "__main__":
    hw.init()
    main(Path(sys.argv[1]), *sys.argv[2:])
