"""A small DDP run whose every loss counts: rank 0 writes each step's loss, bit for bit, and the weights at the end.

fit.py [PAUSES]    seconds that a step takes in each start of a job, with commas; later starts make haste
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headway as hw

STARTS = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + int(os.environ.get("HEADWAY_EARLIER_STARTS", "0"))
STARTS += int(os.environ.get("FIT_STARTS", "0"))  # by hand
PAUSE = [*(float(pause) for pause in ",".join(sys.argv[1:]).split(",") if pause), *[0.01] * 100][STARTS]


class Fit(hw.TrainValStage):
    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.models["net"](x), y)
        if self.models["net"].training:
            time.sleep(PAUSE)
            if hw.is_root():
                with (self.pipe.directory.path / "losses.txt").open("a") as file:
                    file.write(f"{self.pipe.steps_done} {loss.item().hex()}\n")
        return loss


def numbers(count: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=random)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def main() -> None:
    torch.use_deterministic_algorithms(True)
    hw.init(device="cpu")
    hw.seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))
    pipe = hw.Pipeline(name="fit")
    pipe.register_model("net", net)
    pipe.register_optimizer("adamw", lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), model="net")
    pipe.register_dataset("train", hw.data.DataLoader(numbers(128, seed=1), 4, shuffle=True, seed=3))
    pipe.register_dataset("val", hw.data.DataLoader(numbers(16, seed=2), 4))
    pipe.append_stage(Fit(), max_epochs=3)
    pipe.enable_checkpointing(every=5, keep_last=2)
    pipe.enable_ledger()
    run = pipe.run()
    if hw.is_root():
        bits = b"".join(value.detach().numpy().tobytes() for value in net.state_dict().values())
        Path(run.path, "weights.txt").write_text(hashlib.sha256(bits).hexdigest())


if __name__ == "__main__":
    main()
