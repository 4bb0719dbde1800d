"""What a training loop costs per step: a raw loop, headway, and its peers where they are installed.

    python benchmarks/loop.py [--steps 300] [--rounds 25] [--device cpu|cuda]

A tiny model (4 x 256, batch 64, AdamW), so that the loop shows beside the mathematics; batches are in host memory
already. Lightning, dmlcloud and headway log the loss in each step, in their own way. The machine is noisy and its speed
drifts, so short runs of all loops alternate in one process, in changing order; each is compared with the raw loop of
its own round, and the median of these ratios is printed with the two quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway import dist
from headway.train import Pipeline, TrainValStage

Batches = list[tuple[Tensor, Tensor]]
WARM_UP = 100


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3)


def make_batches(count: int) -> Batches:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator)
    y = torch.randint(0, 10, (64,), generator=generator)
    return [(x, y)] * count


class Stopwatch:
    """Iterates over batches and reads the clock when the warm-up is over; the device is waited for."""

    def __init__(self, batches: Batches, device: torch.device) -> None:
        self.batches, self.device, self.began, self.ended = batches, device, 0.0, 0.0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for number, batch in enumerate(self.batches):
            if number == WARM_UP:
                self.began = self.now()
            yield batch
        self.ended = self.now()  # what comes after the last step is not the loop's

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def microseconds(self) -> float:
        return (self.ended - self.began) / (len(self.batches) - WARM_UP) * 1e6


def raw(watch: Stopwatch) -> None:
    net = make_net().to(watch.device)
    optimizer = adamw(net.parameters())
    for x, y in watch:
        x, y = x.to(watch.device, non_blocking=True), y.to(watch.device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()


class Classify(TrainValStage):
    def step(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.models["net"](x)
        return F.cross_entropy(logits, y)


def headway(watch: Stopwatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipe = Pipeline(name="loop", root=Path(folder))
        pipe.register_model("net", make_net())
        pipe.register_optimizer("adamw", adamw, model="net")
        pipe.register_dataset("train", watch)
        pipe.append_stage(Classify(), max_epochs=1)
        pipe.run()


def fabric(watch: Stopwatch) -> None:
    from lightning_fabric import Fabric

    run = Fabric(accelerator=watch.device.type, devices=1)
    run.launch()
    net, optimizer = run.setup(made := make_net(), adamw(made.parameters()))
    for batch in watch:
        x, y = run.to_device(batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        run.backward(loss)
        optimizer.step()


def accelerate(watch: Stopwatch) -> None:
    from accelerate import Accelerator

    run = Accelerator(cpu=watch.device.type == "cpu")
    net, optimizer = run.prepare(made := make_net(), adamw(made.parameters()))
    for x, y in watch:
        x, y = x.to(run.device, non_blocking=True), y.to(run.device, non_blocking=True)
        with run.accumulate(net):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            run.backward(loss)
            optimizer.step()


def lightning(watch: Stopwatch) -> None:
    import pytorch_lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, _: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss, batch_size=len(x))
            return loss

        def on_train_epoch_end(self) -> None:
            watch.ended = watch.now()  # Lightning does not ask for a batch after the last

        def configure_optimizers(self) -> Any:
            return adamw(self.parameters())

    trainer = L.Trainer(
        max_epochs=1,
        accelerator=watch.device.type,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), watch)


def dmlcloud(watch: Stopwatch) -> None:
    import dmlcloud as dml

    class Own(dml.Stage):
        def run_epoch(self) -> None:
            net = make_net().to(watch.device)
            optimizer = adamw(net.parameters())
            for x, y in watch:
                x, y = x.to(watch.device, non_blocking=True), y.to(watch.device, non_blocking=True)
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                self.log("loss", loss)
                self.finish_step()

    pipe = dml.Pipeline(name="loop")
    pipe.append(Own(epochs=1))
    pipe.run()


LOOPS: dict[str, tuple[Callable[[Stopwatch], None], str]] = {
    "raw loop": (raw, "torch"),
    "headway": (headway, "headway"),
    "Fabric": (fabric, "lightning_fabric"),
    "Accelerate": (accelerate, "accelerate"),
    "Lightning": (lightning, "pytorch_lightning"),
    "dmlcloud": (dmlcloud, "dmlcloud"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    dist.init(device=arguments.device)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    there = {name: loop for name, (loop, package) in LOOPS.items() if importlib.util.find_spec(package)}
    missing = [name for name in LOOPS if name not in there]
    times: dict[str, list[float]] = {name: [] for name in there}
    for number in range(arguments.rounds):
        order = list(there.items())
        shift = number % len(order)
        for name, loop in order[shift:] + order[:shift]:
            watch = Stopwatch(make_batches(arguments.steps + WARM_UP), torch.device(arguments.device))
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                loop(watch)
            times[name].append(watch.microseconds())
    print(
        f"{arguments.device}, torch {torch.__version__}, {arguments.rounds} rounds of {arguments.steps} steps"
    )
    for name, each in times.items():
        ratios = [mine / base - 1 for mine, base in zip(each, times["raw loop"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        over = "" if name == "raw loop" else f"{middle:+7.1%}  ({low:+.1%} to {high:+.1%})"
        print(f"{name:12} {statistics.median(each):8.1f} us/step {over}")
    if missing:
        print(f"not installed here: {', '.join(missing)}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
