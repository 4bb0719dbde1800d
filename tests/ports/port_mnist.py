"""The classic MNIST script (pytorch/examples), by hand and ported: a stage, and no loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import headway as hw

EPOCHS, BATCH, LR, GAMMA = 2, 8, 1.0, 0.7


def digits(count: int, seed: int) -> TensorDataset:
    """Ten shapes of 28 x 28 with noise, in place of a download."""
    shapes = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(shapes[labels] + 0.1 * torch.randn(count, 1, 28, 28, generator=generator), labels)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(2304, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def loaders() -> tuple[Any, Any]:
    train = hw.data.DataLoader(digits(48, 1), global_batch_size=2 * BATCH, shuffle=True, seed=3)
    return train, hw.data.DataLoader(digits(21, 2), batch_size=BATCH)


class Mnist(hw.TrainValStage):
    def step(self, batch: Any) -> Tensor:
        data, target = batch
        output = self.models["net"](data)
        self.log("accuracy", (output.argmax(1) == target).float().mean(), weight=len(target))
        return F.nll_loss(output, target)


def ported(directory: Path) -> hw.Pipeline:
    torch.manual_seed(1)
    train, test = loaders()
    pipe = hw.Pipeline(name="mnist", root=directory)
    pipe.register_model("net", Net())
    pipe.register_optimizer(
        "adadelta",
        lambda params: optim.Adadelta(params, lr=LR),
        scheduler=lambda optimizer: StepLR(optimizer, step_size=1, gamma=GAMMA),
        every="epoch",
    )
    pipe.register_dataset("train", train)
    pipe.register_dataset("val", test)
    pipe.append_stage(Mnist(), max_epochs=EPOCHS)
    torch.manual_seed(10 + hw.rank())
    pipe.run()
    return pipe


def by_hand() -> tuple[nn.Module, list[float], list[float]]:
    """Returns the model, and loss and accuracy of the tests; the test set is counted as a whole."""
    torch.manual_seed(1)
    train, test = loaders()
    net = Net()
    model: Any = nn.parallel.DistributedDataParallel(net) if hw.world_size() > 1 else net
    optimizer = optim.Adadelta(net.parameters(), lr=LR)
    scheduler = StepLR(optimizer, step_size=1, gamma=GAMMA)
    torch.manual_seed(10 + hw.rank())
    losses, accuracies = [], []
    for epoch in range(EPOCHS):
        train.set_epoch(epoch)
        net.train()
        for data, target in train:
            optimizer.zero_grad()
            F.nll_loss(model(data), target).backward()
            optimizer.step()
        net.eval()
        sums = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad():
            for data, target in test:
                output = net(data)
                right = (output.argmax(1) == target).sum()
                sums += torch.tensor([F.nll_loss(output, target, reduction="sum"), right, len(target)])
        if hw.world_size() > 1:
            torch.distributed.all_reduce(sums)
        losses.append((sums[0] / sums[2]).item())
        accuracies.append((sums[1] / sums[2]).item())
        scheduler.step()
    return net, losses, accuracies
