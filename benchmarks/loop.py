"""What a training loop costs per step: headway and its peers, where they are installed, against a raw loop.

    scripts/make-loop-peers.sh && .peers-loop/bin/python benchmarks/loop.py [--blocks 40] [--device cpu|cuda]

A tiny model (4 x 256, batch 64, AdamW), so that the loop shows beside the mathematics; batches are in host memory
already. Lightning, dmlcloud and headway log the loss in each step, in their own way.

Machines are noisy and their speed drifts. So a block of raw steps runs before and after each block of a loop's steps,
in the same process and thread, out of the loader that the loop asks for its next batch. A block is compared with the
mean of its two neighbours, which takes a steady drift out; the median of these ratios is printed with its 95 %
interval, which comes from their ranks and assumes nothing about the noise. "raw again" is a raw loop measured like the
others: it should give 0.

With --ablate, raw loops that do some of what headway does, and headway without some of it, tell where its time goes:
microseconds per step beyond the raw loop, by the clock on the wall and by that of this thread on its CPU.
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
from headway.train import Pipeline, Stage, TrainValStage
from headway.train.settings import LOG_EVERY

BLOCK = 100
"""steps between two looks at the clock: two of headway's log points"""
WARM_UP = 2
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
    """The raw loop: what everything is measured by."""
    for x, y in batches:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()


class Took(NamedTuple):
    """Seconds, by the clock on the wall and by that of this thread on its CPU."""

    wall: float
    cpu: float


class Course:
    """The batches of one run. Between two blocks of them, a block of raw steps is run and timed."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        self.blocks, self.device = blocks + WARM_UP, device
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(64, 256, generator=generator)
        self.batch = x, torch.randint(0, 10, (64,), generator=generator)
        self.net = make_net().to(device)
        self.optimizer = adamw(self.net.parameters())
        self.raw: list[Took] = []
        self.measured: list[Took] = []

    def __len__(self) -> int:
        return self.blocks * BLOCK

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.blocks):
            self.raw.append(self._raw_block())
            began = self._now()
            for _ in range(BLOCK):
                yield self.batch
            self.measured.append(self._since(began))
        self.raw.append(self._raw_block())

    def _raw_block(self) -> Took:
        began = self._now()
        with torch.enable_grad():
            train([self.batch] * BLOCK, self.device, self.net, self.optimizer)
        return self._since(began)

    def _now(self) -> Took:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return Took(time.perf_counter(), time.thread_time())

    def _since(self, began: Took) -> Took:
        now = self._now()
        return Took(now.wall - began.wall, now.cpu - began.cpu)

    def ratios(self) -> list[float]:
        """Of each block to the mean of the raw ones before and after it."""
        beside = [(before.wall + after.wall) / 2 for before, after in pairwise(self.raw)]
        return [mine.wall / base for mine, base in zip(self.measured, beside, strict=False)][WARM_UP:]

    def extra(self, clock: str) -> list[float]:
        """Microseconds per step beyond the raw blocks beside, by one of the clocks."""
        raw, mine = ([getattr(took, clock) for took in every] for every in (self.raw, self.measured))
        beside = [(before + after) / 2 for before, after in pairwise(raw)]
        return [(took - base) / BLOCK * 1e6 for took, base in zip(mine, beside, strict=False)][WARM_UP:]


def raw_again(course: Course) -> None:
    net = make_net().to(course.device)
    train(course, course.device, net, adamw(net.parameters()))


class Classify(TrainValStage):
    def step(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.models["net"](x)
        return F.cross_entropy(logits, y)


def headway(course: Course, stage: Stage | None = None, *, measured: bool = True) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipe = Pipeline(name="loop", root=Path(folder))
        if not measured:
            pipe._timer.every = NEVER
        pipe.register_model("net", make_net())
        pipe.register_optimizer("adamw", adamw, model="net")
        pipe.register_dataset("train", course)
        pipe.append_stage(stage or Classify(), max_epochs=1)
        pipe.run()


def fabric(course: Course) -> None:
    from lightning_fabric import Fabric

    run = Fabric(accelerator=course.device.type, devices=1)
    run.launch()
    net, optimizer = run.setup(made := make_net(), adamw(made.parameters()))
    for batch in course:
        x, y = run.to_device(batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        run.backward(loss)
        optimizer.step()


def accelerate(course: Course) -> None:
    from accelerate import Accelerator

    run = Accelerator(cpu=course.device.type == "cpu")
    net, optimizer = run.prepare(made := make_net(), adamw(made.parameters()))
    for x, y in course:
        x, y = x.to(run.device, non_blocking=True), y.to(run.device, non_blocking=True)
        with run.accumulate(net):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            run.backward(loss)
            optimizer.step()


def lightning(course: Course) -> None:
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
        accelerator=course.device.type,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), course)


def dmlcloud(course: Course) -> None:
    import dmlcloud as dml

    class Own(dml.Stage):
        def run_epoch(self) -> None:
            net = make_net().to(course.device)
            optimizer = adamw(net.parameters())
            for x, y in course:
                x, y = x.to(course.device, non_blocking=True), y.to(course.device, non_blocking=True)
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                self.log("loss", loss)
                self.finish_step()

    pipe = dml.Pipeline(name="loop")
    pipe.append(Own(epochs=1))
    pipe.run()


NEVER = 10**9
"""steps"""


def losses_kept(course: Course) -> None:
    """A raw loop that keeps its losses, and has their mean come to the host now and then."""
    net, losses = make_net().to(course.device), []
    optimizer = adamw(net.parameters())
    for x, y in course:
        x, y = x.to(course.device, non_blocking=True), y.to(course.device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if len(losses) == LOG_EVERY:
            torch.stack(losses).mean(dtype=torch.float64).item()
            losses.clear()


class Raw(Stage):
    """A raw loop within a run: all that surrounds it is there."""

    def run_epoch(self) -> None:
        train(self.datasets["train"], self.device, self.models["net"], self.pipe.optimizers["adamw"])


class Fed(Stage):
    """A raw loop whose batches come through headway."""

    def run_epoch(self) -> None:
        batches = self._loop.feed(self.datasets["train"])
        train(batches, self.device, self.models["net"], self.pipe.optimizers["adamw"])


PARTS: dict[str, Callable[[Course], None]] = {
    "raw again": raw_again,
    "raw, losses kept, their mean read every 50 steps": losses_kept,
    "raw, in a stage": lambda course: headway(course, Raw()),
    "raw, in a stage, batches by headway": lambda course: headway(course, Fed()),
    "headway without log points, no step timed": lambda course: headway(
        course, Classify(log_every=NEVER), measured=False
    ),
    "headway without log points, each step timed": lambda course: headway(course, Classify(log_every=NEVER)),
    "headway": headway,
}

LOOPS: dict[str, tuple[Callable[[Course], None], str]] = {
    "raw again": (raw_again, "torch"),
    "headway": (headway, "headway"),
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
    loops: Mapping[str, Callable[[Course], None]], arguments: argparse.Namespace, device: torch.device
) -> dict[str, list[Course]]:
    """Runs the loops in turn, back and forth."""
    courses: dict[str, list[Course]] = {name: [] for name in loops}
    for number in range(arguments.rounds):
        for name, loop in list(loops.items())[:: 1 if number % 2 == 0 else -1]:
            course = Course(arguments.blocks // arguments.rounds, device)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                loop(course)
            courses[name].append(course)
    return courses


def tell_parts(courses: Mapping[str, list[Course]]) -> None:
    for name, mine in courses.items():
        told = []
        for clock in Took._fields:
            low, middle, high = interval([extra for course in mine for extra in course.extra(clock)])
            told.append(f"{clock} {middle:+7.1f} us ({low:+.1f} to {high:+.1f})")
        print(f"{name:50} {'   '.join(told)}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=40, help=f"of {BLOCK} steps, for each loop")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each loop, in turn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=[*LOOPS], default=[*LOOPS])
    parser.add_argument("--ablate", action="store_true", help="tell where headway's time goes")
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
    courses = run(PARTS if arguments.ablate else there, arguments, device)
    every = [course for each in courses.values() for course in each]
    each = [took.wall / BLOCK * 1e6 for course in every for took in course.raw[WARM_UP:]]
    low, _, high = statistics.quantiles(each, n=4)
    print(
        f"{device.type}, torch {torch.__version__}, {arguments.blocks} blocks of {BLOCK} steps for each loop"
    )
    print(f"{'raw loop':12} {statistics.median(each):7.1f} us/step   (quartiles {low:.1f} to {high:.1f})")
    if arguments.ablate:
        tell_parts(courses)
        return
    for name, mine in courses.items():
        found = [ratio for course in mine for ratio in course.ratios()]
        low, middle, high = (value - 1 for value in interval(found))
        print(f"{name:12} {middle:+7.1%}           (95 %: {low:+.1%} to {high:+.1%})")
    if missing := [name for name in arguments.only if name not in there]:
        print(f"not installed here: {', '.join(missing)}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
