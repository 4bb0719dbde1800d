"""What a training loop costs per step: headway and its peers, where they are installed, against a raw loop.

    scripts/make-loop-peers.sh && .peers-loop/bin/python benchmarks/loop.py [--blocks 40] [--device cpu|cuda]

A tiny model (4 x 256, batch 64, AdamW), so that the cost of the loop is visible beside the model's. The batches are in
host memory already, except in the rows with a DataLoader: there a loader without workers collates single samples, and
the difference between torch's loader and headway's is the cost of headway's. Lightning, dmlcloud and headway log the
loss in each step, in their own way.

Machines are noisy and their speed drifts. So a block of raw steps runs before and after each block of a loop's steps,
in the same process and thread, while the loop waits for its next batch. A block is compared with the mean of its two
neighbors, which removes a steady drift. The median of these ratios is printed with its 95 % interval, which comes from
their ranks and assumes nothing about the noise. "raw again" is a raw loop measured like the others: it should give 0.

With --ablate, raw loops that do a part of what headway does, and headway without a part of it, show where its time
goes: microseconds per step beyond the raw loop, in wall-clock time and in CPU time of this thread.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway import dist
from headway.data import DataLoader
from headway.train import Pipeline, Stage, TrainValStage
from headway.train.settings import LOG_EVERY

BLOCK_STEPS = 100
"""steps between two readings of the clock: two of headway's log points"""
WARM_UP_BLOCKS = 2
"""blocks that are not counted"""


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3)


def train(batches: Any, device: torch.device, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The raw loop, to which all others are compared."""
    for x, y in batches:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()


class Duration(NamedTuple):
    """Seconds of wall-clock time, and of CPU time of this thread."""

    wall: float
    cpu: float


class TimedBatches:
    """The batches of one run. Between two blocks of them, a block of raw steps runs and is timed."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        self.blocks, self.device = blocks + WARM_UP_BLOCKS, device
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(64, 256, generator=generator)
        self.batch = x, torch.randint(0, 10, (64,), generator=generator)
        self.net = make_net().to(device)
        self.optimizer = adamw(self.net.parameters())
        self.raw: list[Duration] = []
        self.measured: list[Duration] = []
        self._began: Duration | None = None

    def __len__(self) -> int:
        return self.blocks * BLOCK_STEPS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.blocks):
            self.next_block()
            for _ in range(BLOCK_STEPS):
                yield self.batch
        self.next_block()

    def next_block(self) -> None:
        """Ends the measured block, runs a raw one, and begins the next measured block."""
        if self._began is not None:
            self.measured.append(self._since(self._began))
        self.raw.append(self._raw_block())
        self._began = self._now()

    def _raw_block(self) -> Duration:
        began = self._now()
        with torch.enable_grad():
            train([self.batch] * BLOCK_STEPS, self.device, self.net, self.optimizer)
        return self._since(began)

    def _now(self) -> Duration:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return Duration(time.perf_counter(), time.thread_time())

    def _since(self, began: Duration) -> Duration:
        now = self._now()
        return Duration(now.wall - began.wall, now.cpu - began.cpu)

    def ratios(self) -> list[float]:
        """Time of each block relative to the mean of the raw ones before and after it."""
        beside = [(before.wall + after.wall) / 2 for before, after in pairwise(self.raw)]
        return [mine.wall / base for mine, base in zip(self.measured, beside, strict=False)][WARM_UP_BLOCKS:]

    def extra(self, clock: str) -> list[float]:
        """Microseconds per step beyond the neighboring raw blocks, by one of the clocks."""
        raw, mine = ([getattr(took, clock) for took in every] for every in (self.raw, self.measured))
        beside = [(before + after) / 2 for before, after in pairwise(raw)]
        return [(took - base) / BLOCK_STEPS * 1e6 for took, base in zip(mine, beside, strict=False)][
            WARM_UP_BLOCKS:
        ]


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The batches as single samples, for a loader without workers: the first sample of a block begins the block."""

    def __init__(self, batches: TimedBatches) -> None:
        self._batches = batches
        self._count = 0

    def __len__(self) -> int:
        return (len(self._batches) + 1) * len(self._batches.batch[0])  # the last batch ends the last block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self._batches.batch
        if self._count % (BLOCK_STEPS * len(x)) == 0:
            self._batches.next_block()
        self._count += 1
        return x[index % len(x)], y[index % len(x)]


def raw_again(batches: TimedBatches) -> None:
    net = make_net().to(batches.device)
    train(batches, batches.device, net, adamw(net.parameters()))


def raw_with_loader(batches: TimedBatches) -> None:
    """A raw loop over torch's DataLoader."""
    net = make_net().to(batches.device)
    batch_size = len(batches.batch[0])
    loader = torch.utils.data.DataLoader(Samples(batches), batch_size=batch_size, shuffle=True)
    train(loader, batches.device, net, adamw(net.parameters()))


def headway_with_loader(batches: TimedBatches) -> None:
    """headway over its own DataLoader."""
    headway(batches, loader=DataLoader(Samples(batches), batch_size=len(batches.batch[0]), shuffle=True))


class Classify(TrainValStage):
    def step(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.models["net"](x)
        return F.cross_entropy(logits, y)


def headway(
    batches: TimedBatches, stage: Stage | None = None, *, loader: Any = None, measured: bool = True
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        pipe = Pipeline(name="loop", root=Path(directory))
        if not measured:
            pipe._state.timer.every = NEVER_STEPS
        pipe.register_model("net", make_net())
        pipe.register_optimizer("adamw", adamw, model="net")
        pipe.register_dataset("train", batches if loader is None else loader)
        pipe.append_stage(stage or Classify(), max_epochs=1)
        pipe.run()


def fabric(batches: TimedBatches) -> None:
    from lightning_fabric import Fabric

    run = Fabric(accelerator=batches.device.type, devices=1)
    run.launch()
    net, optimizer = run.setup(made := make_net(), adamw(made.parameters()))
    for batch in batches:
        x, y = run.to_device(batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        run.backward(loss)
        optimizer.step()


def accelerate(batches: TimedBatches) -> None:
    from accelerate import Accelerator

    run = Accelerator(cpu=batches.device.type == "cpu")
    net, optimizer = run.prepare(made := make_net(), adamw(made.parameters()))
    for x, y in batches:
        x, y = x.to(run.device, non_blocking=True), y.to(run.device, non_blocking=True)
        with run.accumulate(net):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            run.backward(loss)
            optimizer.step()


def lightning(batches: TimedBatches) -> None:
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

        def configure_optimizers(self) -> Any:
            return adamw(self.parameters())

    trainer = L.Trainer(
        max_epochs=1,
        accelerator=batches.device.type,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), batches)


def dmlcloud(batches: TimedBatches) -> None:
    import dmlcloud as dml

    class Own(dml.Stage):
        def run_epoch(self) -> None:
            net = make_net().to(batches.device)
            optimizer = adamw(net.parameters())
            for x, y in batches:
                x, y = x.to(batches.device, non_blocking=True), y.to(batches.device, non_blocking=True)
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                self.log("loss", loss)
                self.finish_step()

    pipe = dml.Pipeline(name="loop")
    pipe.append(Own(epochs=1))
    pipe.run()


NEVER_STEPS = 10**9


def losses_kept(batches: TimedBatches) -> None:
    """A raw loop that keeps its losses, and copies their mean to the host every `LOG_EVERY` steps."""
    net, losses = make_net().to(batches.device), []
    optimizer = adamw(net.parameters())
    for x, y in batches:
        x, y = x.to(batches.device, non_blocking=True), y.to(batches.device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if len(losses) == LOG_EVERY:
            torch.stack(losses).mean(dtype=torch.float64).item()
            losses.clear()


class RawStage(Stage):
    """A raw loop inside a stage, with everything that surrounds it."""

    def run_epoch(self) -> None:
        train(self.datasets["train"], self.device, self.models["net"], self.pipe.optimizers["adamw"])


class RawStageWithBatches(Stage):
    """A raw loop inside a stage, whose batches come from headway."""

    def run_epoch(self) -> None:
        batches = self._loop.device_batches(self.datasets["train"])
        train(batches, self.device, self.models["net"], self.pipe.optimizers["adamw"])


PARTS: dict[str, Callable[[TimedBatches], None]] = {
    "raw again": raw_again,
    "raw, losses kept, their mean read every 50 steps": losses_kept,
    "raw, in a stage": lambda batches: headway(batches, RawStage()),
    "raw, in a stage, batches from headway": lambda batches: headway(batches, RawStageWithBatches()),
    "headway without log points, no step timed": lambda batches: headway(
        batches, Classify(log_every=NEVER_STEPS), measured=False
    ),
    "headway without log points, each step timed": lambda batches: headway(
        batches, Classify(log_every=NEVER_STEPS)
    ),
    "headway": headway,
    "raw, torch's DataLoader": raw_with_loader,
    "headway, hw.data.DataLoader": headway_with_loader,
}

LOOPS: dict[str, tuple[Callable[[TimedBatches], None], str]] = {
    "raw again": (raw_again, "torch"),
    "headway": (headway, "headway"),
    "raw, torch's DataLoader": (raw_with_loader, "torch"),
    "headway, hw.data.DataLoader": (headway_with_loader, "headway"),
    "Fabric": (fabric, "lightning_fabric"),
    "Accelerate": (accelerate, "accelerate"),
    "Lightning": (lightning, "pytorch_lightning"),
    "dmlcloud": (dmlcloud, "dmlcloud"),
}


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval, from the ranks of the values."""
    ordered, count = sorted(values), len(values)
    reach = math.ceil(0.98 * math.sqrt(count))
    low, high = max(0, count // 2 - reach), min(count - 1, count // 2 + reach)
    return ordered[low], statistics.median(ordered), ordered[high]


def run(
    loops: Mapping[str, Callable[[TimedBatches], None]], arguments: argparse.Namespace, device: torch.device
) -> dict[str, list[TimedBatches]]:
    """Runs the loops in turn, alternately forward and backward."""
    measured: dict[str, list[TimedBatches]] = {name: [] for name in loops}
    for number in range(arguments.rounds):
        for name, loop in list(loops.items())[:: 1 if number % 2 == 0 else -1]:
            batches = TimedBatches(arguments.blocks // arguments.rounds, device)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                loop(batches)
            measured[name].append(batches)
    return measured


def print_parts(measured: Mapping[str, list[TimedBatches]]) -> None:
    for name, mine in measured.items():
        columns = []
        for clock in Duration._fields:
            low, middle, high = interval([extra for batches in mine for extra in batches.extra(clock)])
            columns.append(f"{clock} {middle:+7.1f} us ({low:+.1f} to {high:+.1f})")
        print(f"{name:50} {'   '.join(columns)}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=40, help=f"of {BLOCK_STEPS} steps, for each loop")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each loop, in turn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=[*LOOPS], default=[*LOOPS])
    parser.add_argument("--ablate", action="store_true", help="show where headway's time goes")
    arguments = parser.parse_args()
    dist.init(device=arguments.device)
    device = dist.world().device
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if device.type == "cpu":
        torch.set_num_threads(1)
    there = {
        name: LOOPS[name][0]
        for name in arguments.only
        if importlib.util.find_spec(LOOPS[name][1]) is not None
    }
    measured = run(PARTS if arguments.ablate else there, arguments, device)
    every = [batches for each in measured.values() for batches in each]
    each = [took.wall / BLOCK_STEPS * 1e6 for batches in every for took in batches.raw[WARM_UP_BLOCKS:]]
    low, _, high = statistics.quantiles(each, n=4)
    print(
        f"{device.type}, torch {torch.__version__}, {arguments.blocks} blocks of {BLOCK_STEPS} steps for each loop"
    )
    print(f"{'raw loop':28} {statistics.median(each):7.1f} us/step   (quartiles {low:.1f} to {high:.1f})")
    if arguments.ablate:
        print_parts(measured)
        return
    for name, mine in measured.items():
        found = [ratio for batches in mine for ratio in batches.ratios()]
        low, middle, high = (value - 1 for value in interval(found))
        print(f"{name:28} {middle:+7.1%}           (95 %: {low:+.1%} to {high:+.1%})")
    if missing := [name for name in arguments.only if name not in there]:
        print(f"not installed here: {', '.join(missing)}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
