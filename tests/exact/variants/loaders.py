"""Data: loaders of headway and of torch, with workers and draws, uneven batches, accumulation, several of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import data as torch_data

import headway as hw
from variants.base import BATCH, FEATURES, SAMPLES, Train, Variant, record, samples


class Drawing(torch_data.Dataset[Any]):
    """Noise on each sample, drawn by a function."""

    def __init__(self, draw: Any) -> None:
        self.samples, self.draw = samples(), draw

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        x, y = self.samples[number]
        return x + 0.3 * self.draw(), y


def by_python() -> float:
    return random.gauss(0, 1)


def by_numpy() -> Tensor:
    return torch.from_numpy(np.random.randn(FEATURES).astype(np.float32))


def by_torch() -> Tensor:
    return torch.randn(FEATURES)


class OwnGenerator(Drawing):
    """Draws from a generator in an attribute."""

    def __init__(self) -> None:
        super().__init__(self.own)
        self.generator = np.random.default_rng(3)

    def own(self) -> float:
        return float(self.generator.normal())


class HiddenGenerator(Drawing):
    """Draws from a generator within a list of an attribute."""

    def __init__(self) -> None:
        super().__init__(self.own)
        self.parts = {"noise": [torch.Generator().manual_seed(3)]}

    def own(self) -> Tensor:
        return torch.randn(FEATURES, generator=self.parts["noise"][0])


class Curriculum(Drawing):
    """Counts the samples that were read, and makes them harder."""

    def __init__(self) -> None:
        super().__init__(self.harder)
        self.seen = 0

    def harder(self) -> Tensor:
        self.seen += 1
        return torch.full((FEATURES,), self.seen / 100)


class Stream(torch_data.IterableDataset[Any]):
    """A stream with a shuffle buffer."""

    def __iter__(self) -> Iterator[Any]:
        every, buffer = samples(), list[Any]()
        for number in range(SAMPLES):
            buffer.append(every[number])
            if len(buffer) == 10:
                yield buffer.pop(random.randrange(10))
        yield from buffer


class CountingStream(torch_data.IterableDataset[Any]):
    """A stream that begins elsewhere in each pass, as it counts them."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        every = samples()
        for number in range(SAMPLES):
            yield every[(number * 5 + self.passes) % SAMPLES]


class Endless:
    """An iterable that goes on where it was, without state_dict."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __iter__(self) -> Iterator[Any]:
        every = samples()
        for _ in range(len(self)):
            numbers = [(self.position + each * 7) % SAMPLES for each in range(BATCH)]
            self.position += 3
            x, y = zip(*[every[n] for n in numbers], strict=True)
            yield torch.stack(x), torch.stack(y)


class EndlessWithState(Endless):
    """The same, which can save its position; it is called between two batches."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[Any]:
        every = samples()
        while True:
            numbers = [(self.position + each * 7) % SAMPLES for each in range(BATCH)]
            self.position += 3
            x, y = zip(*[every[n] for n in numbers], strict=True)
            yield torch.stack(x), torch.stack(y)
            if self.position % (3 * len(self)) == 0:
                return


def ours(dataset: Any = None, **options: Any) -> Any:
    options = {"global_batch_size": BATCH, "shuffle": True, "seed": 3} | options
    return lambda: {"train": hw.data.DataLoader(dataset() if dataset else samples(), **options)}


def theirs(dataset: Any = None, **options: Any) -> Any:
    options = {"batch_size": BATCH} | options
    return lambda: {"train": torch_data.DataLoader(dataset() if dataset else samples(), **options)}


def weighted() -> dict[str, Any]:
    sampler = torch_data.WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES)
    return {"train": torch_data.DataLoader(samples(), batch_size=BATCH, sampler=sampler)}


def own_order() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    return {"train": torch_data.DataLoader(samples(), batch_size=BATCH, shuffle=True, generator=generator)}


def collate(parts: list[Any]) -> Any:
    """Mixes samples with a weight that numpy draws."""
    x, y = torch_data.default_collate(parts)
    return x + float(np.random.beta(2, 2)) * x.flip(0), y


def two() -> dict[str, Iterable[Any]]:
    return {
        "train": hw.data.DataLoader(samples(), global_batch_size=BATCH, shuffle=True, seed=3),
        "other": torch_data.DataLoader(Drawing(by_torch), batch_size=BATCH, shuffle=True),
    }


def with_validation() -> dict[str, Iterable[Any]]:
    return {
        "train": hw.data.DataLoader(samples(), global_batch_size=BATCH, shuffle=True, seed=3),
        "val": hw.data.DataLoader(Drawing(by_torch), global_batch_size=BATCH),
    }


class SideBySide(hw.Stage):
    """Two loaders in each step of a loop of its own."""

    def __init__(self) -> None:
        super().__init__(log_every=4)

    def run_epoch(self) -> None:
        net, optimizer = self.models["net"], self.pipe.optimizers["main"]
        for (x, y), (other, _) in zip(self.batches("train"), self.batches("other"), strict=False):
            optimizer.zero_grad()
            loss = record(self, F.cross_entropy(net(x), y) + net(other).square().mean())
            loss.backward()
            self.step_optimizer("main")


class OneAfterAnother(SideBySide):
    """Two passes in an epoch; the second ends with `break`."""

    def run_epoch(self) -> None:
        for name, most in (("train", 4), ("other", 2)):
            for number, (x, y) in enumerate(self.batches(name)):
                self.pipe.optimizers["main"].zero_grad()
                record(self, F.cross_entropy(self.models["net"](x), y)).backward()
                self.step_optimizer("main")
                if number + 1 == most:
                    break


class DrawsItself(SideBySide):
    """A loop that draws its noise and order itself, from Python, numpy and torch."""

    def run_epoch(self) -> None:
        for x, y in self.batches("train"):
            self.pipe.optimizers["main"].zero_grad()
            order = torch.randperm(len(x))[: random.randint(4, len(x))]
            loss = F.cross_entropy(self.models["net"](x[order] * np.random.uniform(0.5, 1.5)), y[order])
            record(self, loss).backward()
            self.step_optimizer("main")


class Accumulated(SideBySide):
    """Two batches for each step of the optimizer, by hand."""

    def run_epoch(self) -> None:
        for number, (x, y) in enumerate(self.batches("train")):
            record(self, F.cross_entropy(self.models["net"](x), y)).backward()
            if number % 3 == 2:
                self.step_optimizer("main")
                self.pipe.optimizers["main"].zero_grad()


class Weighted(Train):
    def train_step(self, batch: Any) -> Any:
        _, y = batch
        loss = super().train_step(batch)
        return loss, (y > 0).sum()

    def step(self, batch: Any) -> Any:
        return self.loss(batch), (batch[1] > 0).sum()


VARIANTS = {
    "ordered": Variant(loaders=ours(shuffle=False)),
    "workers": Variant(loaders=ours(lambda: Drawing(by_torch), num_workers=1)),
    "draws-python": Variant(loaders=ours(lambda: Drawing(by_python))),
    "draws-numpy": Variant(loaders=ours(lambda: Drawing(by_numpy))),
    "draws-torch": Variant(loaders=ours(lambda: Drawing(by_torch))),
    "collate-draws": Variant(loaders=ours(collate_fn=collate)),
    "own-generator": Variant(loaders=ours(OwnGenerator), named="generator"),
    "own-generator-hidden": Variant(loaders=ours(HiddenGenerator), named="parts"),
    "own-counter": Variant(loaders=ours(Curriculum), named="seen"),
    "stream": Variant(loaders=ours(Stream, shuffle=False), refused="IterableDataset without state_dict"),
    "uneven-last-batch": Variant(loaders=ours(lambda: samples(45))),
    "drop-last": Variant(loaders=ours(lambda: samples(53), drop_last=True)),
    "torch-shuffled": Variant(loaders=theirs(shuffle=True)),
    "torch-ordered": Variant(loaders=theirs()),
    "torch-own-order": Variant(loaders=own_order),
    "torch-weighted": Variant(loaders=weighted),
    "torch-workers": Variant(loaders=theirs(lambda: Drawing(by_numpy), shuffle=True, num_workers=1)),
    "torch-persistent-workers": Variant(
        loaders=theirs(lambda: Drawing(by_torch), shuffle=True, num_workers=1, persistent_workers=True),
        named_late="random state within its persistent workers was not saved",
    ),
    "torch-draws": Variant(loaders=theirs(lambda: Drawing(by_python), shuffle=True)),
    "torch-stream": Variant(loaders=theirs(Stream)),
    "torch-own-generator": Variant(loaders=theirs(OwnGenerator, shuffle=True)),
    "torch-counting-stream": Variant(loaders=theirs(CountingStream), named="passes"),
    "list-of-batches": Variant(loaders=lambda: {"train": list(theirs()()["train"])}),
    "iterable": Variant(loaders=lambda: {"train": Endless()}, named="position"),
    "iterable-with-state": Variant(loaders=lambda: {"train": EndlessWithState()}),
    "validation": Variant(loaders=with_validation),
    "validation-in-epoch": Variant(loaders=with_validation, stage=lambda: Train(val_every="2 steps")),
    "two-side-by-side": Variant(loaders=two, stage=SideBySide),
    "two-in-turn": Variant(loaders=two, stage=OneAfterAnother),
    "loop-draws": Variant(stage=DrawsItself),
    "accumulate": Variant(stage=lambda: Train(accumulate=2), kills=(2, 7)),
    "accumulate-by-hand": Variant(stage=Accumulated, named="accumulation"),
    "weighted-loss": Variant(stage=Weighted),
    "limited": Variant(stage=lambda: Train(limit_train_batches=4), kills=(5, 9)),
}
