import os

import torch
import torch.nn.functional as F
from sitecustomize import mark
from torch.utils.data import TensorDataset

import headway as hw

WALK = os.environ["SHAPE_WALK"]
LAYERS = 161 if WALK == "save" else 2  # weight and bias each
FROM = {"step": 22, "log-point": 40, "save": 60}[
    WALK
]  # the walk is what lies between this step's forward and the next


class Classify(hw.TrainValStage):
    n = 0

    def train_step(self, batch):
        self.n += 1
        if self.n == FROM + 1:
            mark("end")
        x, y = batch
        logits = self.models["net"](x)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), weight=len(y))
        loss = F.cross_entropy(logits, y)
        if self.n == FROM:
            mark("begin")
        return loss


points = torch.randn(4000, 2)
net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(LAYERS)))
pipe = hw.Pipeline(name="rings")
pipe.register_model("net", net)
pipe.register_optimizer("adamw", lambda params: torch.optim.AdamW(params), model="net")
data = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
pipe.register_dataset("train", hw.data.DataLoader(data, batch_size=64, shuffle=True, seed=0))
pipe.append_stage(Classify(gradient_clip=1.0, val_every=None, log_every=20), max_epochs=1)
pipe.enable_checkpointing(
    "runs", every="30 steps" if WALK == "save" else "10000 steps", background=WALK != "save"
)
pipe.run()
