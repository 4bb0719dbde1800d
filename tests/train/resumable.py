"""A script that can be killed and started again, on any number of ranks; it writes down what each step saw.

headway run --nproc 3 resumable.py FOLDER [fsdp] [slow] [each] [ordered] [workers] [tail]
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import headway as hw
from headway.train import Fsdp

SAMPLES, GLOBAL_BATCH, EPOCHS, EVERY = 60, 12, 3, 2


class Numbered(Dataset[Any]):
    """Samples that know their number."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, Tensor]:
        return number, self.x[number]


class Witness(hw.TrainValStage):
    """Writes a line per step: its number, the samples of this rank, and the loss."""

    def __init__(self, folder: Path, *, slow: bool) -> None:
        super().__init__(log_every=4)
        self.folder, self.slow = folder, slow

    def train_step(self, batch: Any) -> Tensor:
        numbers, x = batch
        loss = F.mse_loss(self.models["net"](x), x[:, :2].cumsum(1))
        line = {
            "step": self.pipe.steps_done + 1,
            "ranks": hw.world_size(),
            "samples": numbers.tolist(),
            "loss": loss.item(),
        }
        with (self.folder / f"steps-{hw.rank()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(0.2 if self.slow else 0)
        return loss


def main(folder: Path, *words: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    pipe = hw.Pipeline(name="toy", root=folder / "runs")
    pipe.register_model("net", net, parallel=Fsdp(blocks=(nn.Linear,)) if "fsdp" in words else "ddp", ema=0.9)
    pipe.register_optimizer("adamw", lambda ps: torch.optim.AdamW(ps, lr=0.01), model="net")
    batch, ordered = {"global_batch_size": GLOBAL_BATCH}, "ordered" in words
    if ordered or "each" in words:
        batch = {"batch_size": 2 if ordered else 4}
    workers = 1 if "workers" in words else 0
    train = hw.data.DataLoader(Numbered(), shuffle=not ordered, seed=2, num_workers=workers, **batch)
    pipe.register_dataset("train", train)
    pipe.append_stage(Witness(folder, slow="slow" in words), max_epochs=EPOCHS)
    pipe.enable_checkpointing(every=EVERY)
    pipe.run()
    if hw.is_root():
        print("done at step", pipe.steps_done, flush=True)
    if "tail" in words and not (folder / "tail").exists():  # the rest of the script, which takes long
        hw.barrier()
        (folder / "tail").touch()
        signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
