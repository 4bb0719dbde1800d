"""State of Python: counters, queues, tensors and generators, where scripts keep them; registered, and not."""

from __future__ import annotations

import collections
import itertools
import random
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import data as torch_data

import headway as hw
from headway.train import Callback
from variants.base import BATCH, CLASSES, Train, Variant, samples

COUNTS = {"calls": 0}
GENERATOR = torch.Generator().manual_seed(11)
NUMPY = np.random.default_rng(12)
PYTHON = random.Random(13)
HISTORY: list[float] = []
TOTAL = 0
MEANS: dict[str, Tensor] = {}
SEEN: dict[str, Tensor] = {}
TURNS = itertools.count(1)


class ModuleGlobals(Train):
    def loss(self, batch: Any) -> Tensor:
        COUNTS["calls"] += 1
        return super().loss(batch) / COUNTS["calls"]


class ModuleInteger(Train):
    def loss(self, batch: Any) -> Tensor:
        global TOTAL
        TOTAL += 1
        return super().loss(batch) / TOTAL


class ModuleList(Train):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        HISTORY.append(float(loss.detach()))
        return loss * sum(HISTORY[-3:])


class ModuleGenerator(Train):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.rand((), generator=GENERATOR)


class ModuleNumpy(Train):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * float(NUMPY.uniform(0.5, 1.5))


class ModuleRandom(Train):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * PYTHON.uniform(0.5, 1.5)


class OnStage(Train):
    """A counter on the stage."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def loss(self, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(batch) / self.calls


class MadeInStep(Train):
    """An attribute that the first step makes."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.mean = loss.detach() if not hasattr(self, "mean") else 0.9 * self.mean + 0.1 * loss.detach()
        return loss * self.mean


class OnStageGenerator(Train):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(5)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.rand((), generator=self.noise)


class OnStageNumpy(Train):
    def pre_stage(self) -> None:
        self.noise = np.random.default_rng(5)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * float(self.noise.uniform(0.5, 1.5))


class OnStageQueue(Train):
    def __init__(self) -> None:
        super().__init__()
        self.queue: collections.deque[float] = collections.deque(maxlen=4)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.queue.append(float(loss.detach()))
        return loss * max(self.queue)


class OnStageTensor(Train):
    def pre_stage(self) -> None:
        self.center = torch.zeros(CLASSES)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.models["net"](x)
        self.center.mul_(0.9).add_(logits.detach().mean(0), alpha=0.1)
        return F.cross_entropy(logits - self.center, y)


class OnStageArray(Train):
    def pre_stage(self) -> None:
        self.weights = np.ones(CLASSES)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.weights[int(y[0])] += 0.1
        return F.cross_entropy(self.models["net"](x), y, weight=torch.tensor(self.weights).float())


class OnStageDict(Train):
    def pre_stage(self) -> None:
        self.memory = {"seen": {"count": 0, "labels": set[int]()}}

    def loss(self, batch: Any) -> Tensor:
        self.memory["seen"]["count"] += 1
        return super().loss(batch) / self.memory["seen"]["count"]


class OnClass(Train):
    calls: ClassVar[int] = 0

    def loss(self, batch: Any) -> Tensor:
        OnClass.calls += 1
        return super().loss(batch) / OnClass.calls


class OnClassGenerator(Train):
    noise: ClassVar[torch.Generator] = torch.Generator().manual_seed(3)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.rand((), generator=self.noise)


@dataclass
class Controller:
    """A controller of the weight of a loss, as an object of the user's."""

    weight: float = 1.0
    steps: int = 0

    def adapt(self, loss: float) -> float:
        self.steps += 1
        self.weight *= 1.1 if loss > 1 else 0.9
        return self.weight


class Controlled(Train):
    def __init__(self, controller: Controller | None = None) -> None:
        super().__init__()
        self.controller = controller or Controller()

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * self.controller.adapt(float(loss.detach()))


class Saved(Controller):
    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.steps = state["weight"], state["steps"]


class Queue:
    """A queue of tensors that can be saved, as contrastive learning has it."""

    def __init__(self) -> None:
        self.rows, self.next = torch.zeros(16, CLASSES), 0

    def push(self, rows: Tensor) -> None:
        for row in rows.detach():
            self.rows[self.next % 16] = row
            self.next += 1

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows.copy_(state["rows"])
        self.next = state["next"]


class Queued(Train):
    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.models["net"](x)
        self.queue.push(logits)
        return F.cross_entropy(logits, y) + (logits.mean(0) - self.queue.rows.mean(0)).square().sum()


class Anything:
    """Keeps state of one shape, and can be saved."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


class Scaled(Train):
    """Scales the loss by what `advance` makes of a state."""

    def __init__(self, start: Any, advance: Any, factor: Any) -> None:
        super().__init__()
        self.kept, self.advance, self.factor = Anything(start), advance, factor

    def loss(self, batch: Any) -> Tensor:
        self.kept.state = self.advance(self.kept.state)
        return super().loss(batch) * self.factor(self.kept.state)


def scaled(start: Any, advance: Any, factor: Any, **fields: Any) -> Variant:
    return Variant(
        stage=lambda: Scaled(start, advance, factor),
        prepare=lambda pipe: pipe.register_state("kept", pipe.stages[0].kept),  # type: ignore[attr-defined]
        **fields,
    )


class InCallback(Callback):
    """Counts log points, and lowers the rate by them."""

    def __init__(self) -> None:
        self.count = 0

    def log_point(self, stage: Any, kind: str, point: Any) -> None:  # noqa: ARG002
        self.count += 1
        for group in stage.pipe.optimizers["main"].param_groups:
            group["lr"] = 0.02 / (1 + self.count)


class GeneratorInCallback(Callback):
    def __init__(self) -> None:
        self.noise = np.random.default_rng(1)

    def log_point(self, stage: Any, kind: str, point: Any) -> None:  # noqa: ARG002
        for group in stage.pipe.optimizers["main"].param_groups:
            group["lr"] = 0.02 * float(self.noise.uniform())


class OnPipeline(hw.Pipeline):
    """A subclass of the pipeline with a counter."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls = 0


class CountsOnPipeline(Train):
    def loss(self, batch: Any) -> Tensor:
        self.pipe.calls += 1  # type: ignore[attr-defined]
        return super().loss(batch) / self.pipe.calls  # type: ignore[attr-defined]


def closure() -> Train:
    """A stage that calls a closure with a counter."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    class Closes(Train):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) / count()

    return Closes()


class Derived(Train):
    """Attributes that change, but that no step reads before it has set them: not state."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.last = loss.detach()
        self.progress = self.pipe.steps_done / 18
        return loss * (1 + self.progress)


class Filled(Train):
    """A dict that is empty at the start, in a hook of a module."""

    def pre_stage(self) -> None:
        def smooth(module: nn.Module, _: Any, output: Tensor) -> Tensor:  # noqa: ARG001
            mean = output.detach().mean()
            MEANS["first"] = MEANS["first"] * 0.9 + mean * 0.1 if "first" in MEANS else mean
            return output - MEANS["first"]

        self.models["net"].first.register_forward_hook(smooth)


class HookCounter(Train):
    """A counter that only a hook of a gradient closes over."""

    def pre_stage(self) -> None:
        calls = 0

        def scale(gradient: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return gradient / calls

        self.models["net"].last.weight.register_hook(scale)


class Counted(Train):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) / next(TURNS)


class Cycled(Train):
    def __init__(self) -> None:
        super().__init__()
        self.factors = itertools.cycle([0.5, 1.0, 1.5, 2.0, 2.5])

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * next(self.factors)


def remember(value: float, memory: list[float] = [0.0]) -> float:  # noqa: B006  the state is here
    memory[0] = 0.9 * memory[0] + 0.1 * value
    return memory[0]


def warm_up(loss: Tensor) -> Tensor:
    warm_up.calls += 1  # type: ignore[attr-defined]
    return loss * min(1.0, warm_up.calls / 20)  # type: ignore[attr-defined]


warm_up.calls = 0  # type: ignore[attr-defined]


class Remembers(Train):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss / (1 + remember(float(loss.detach())))


class WarmsUp(Train):
    def loss(self, batch: Any) -> Tensor:
        return warm_up(super().loss(batch))


class LowersDropout(Train):
    """A setting of a module of torch."""

    def loss(self, batch: Any) -> Tensor:
        self.models["net"].drop.p *= 0.9
        return super().loss(batch)


class ChangesConfig(Train):
    def loss(self, batch: Any) -> Tensor:
        self.config["scale"] *= 0.9
        return super().loss(batch) * self.config["scale"]


def with_config(**settings: Any) -> hw.Pipeline:
    return hw.Pipeline(config={"scale": 1.0}, **settings)


class CountingCollate:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, parts: list[Any]) -> Any:
        self.calls += 1
        x, y = torch_data.default_collate(parts)
        return x * self.calls, y


class Pool(torch_data.Sampler[int]):
    """Draws without putting back, across epochs."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Any:
        for _ in range(40):
            if not self.left:
                self.left = torch.randperm(48).tolist()
            yield self.left.pop()


class StepsKept(torch.optim.SGD):
    """An optimizer that counts its steps; torch and a decorator wrap the function that does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 / self.steps * parameter.grad


class Around(torch.optim.Optimizer):
    """An optimizer around another one, which keeps its own state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        self.inner.step()


class Overwritten(Train):
    """Dicts whose items each step assigns before it reads them: not state."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, Any] = {}

    def pre_stage(self) -> None:
        def keep(module: nn.Module, _: Any, output: Tensor) -> None:  # noqa: ARG001
            SEEN["first"] = output.detach()

        self.models["net"].first.register_forward_hook(keep)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch) + SEEN["first"].square().mean()
        self.last["loss"] = float(loss.detach())
        self.last["samples"] = BATCH
        return loss * (1 + self.last["loss"] / self.last["samples"])


class FirstUse(Train):
    """A constant that the first step makes, and one that the first validation would: not state."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, Tensor] = {}
        self.mask: Tensor | None = None

    def loss(self, batch: Any) -> Tensor:
        count = len(batch[0])
        if count not in self.places:
            self.places[count] = torch.arange(1.0, count + 1)
        if self.pipe.steps_done >= 3 and self.mask is None:
            self.mask = torch.ones(count)
        return super().loss(batch) * self.places[count].mean()


class Silent(Train):
    """State that no check can find: in an interpreter's own variable."""

    def loss(self, batch: Any) -> Tensor:
        sys.setswitchinterval(sys.getswitchinterval() * 0.9)
        return super().loss(batch) * sys.getswitchinterval()


def registered_generator(pipe: hw.Pipeline) -> None:
    noise = pipe.stages[0].noise  # type: ignore[attr-defined]
    pipe.register_state("noise", Kept(noise))


class Kept:
    """Saves a generator of torch."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"])


VARIANTS = {
    "module-dict": Variant(stage=ModuleGlobals, named="COUNTS"),
    "module-integer": Variant(stage=ModuleInteger, named="TOTAL"),
    "module-list": Variant(stage=ModuleList, named="HISTORY"),
    "module-generator": Variant(stage=ModuleGenerator, named="GENERATOR"),
    "module-numpy-generator": Variant(stage=ModuleNumpy, named="NUMPY"),
    "module-python-generator": Variant(stage=ModuleRandom, named="PYTHON"),
    "stage-counter": Variant(stage=OnStage, named="calls"),
    "stage-made-in-step": Variant(stage=MadeInStep, named="mean"),
    "stage-generator": Variant(stage=OnStageGenerator, named="noise"),
    "stage-generator-registered": Variant(stage=OnStageGenerator, prepare=registered_generator),
    "stage-numpy-generator": Variant(stage=OnStageNumpy, named="noise"),
    "stage-queue": Variant(stage=OnStageQueue, named="queue"),
    "stage-tensor": Variant(stage=OnStageTensor, named="center"),
    "stage-array": Variant(stage=OnStageArray, named="weights"),
    "stage-dict": Variant(stage=OnStageDict, named="memory"),
    "stage-object": Variant(stage=Controlled, named="controller"),
    "stage-object-registered": Variant(
        stage=lambda: Controlled(Saved()),
        prepare=lambda pipe: pipe.register_state("controller", pipe.stages[0].controller),  # type: ignore[attr-defined]
    ),
    "stage-object-savable": Variant(stage=lambda: Controlled(Saved()), named="controller"),
    "stage-queue-registered": Variant(
        stage=Queued,
        prepare=lambda pipe: pipe.register_state("queue", pipe.stages[0].queue),  # type: ignore[attr-defined]
    ),
    "stage-queue-savable": Variant(stage=Queued, named="queue"),
    "class-counter": Variant(stage=OnClass, named="calls"),
    "class-generator": Variant(stage=OnClassGenerator, named="noise"),
    "callback-counter": Variant(prepare=lambda pipe: pipe.add_callback(InCallback()), named="count"),
    "callback-generator": Variant(
        prepare=lambda pipe: pipe.add_callback(GeneratorInCallback()), named="noise"
    ),
    "pipeline-counter": Variant(pipeline=OnPipeline, stage=CountsOnPipeline, named="calls"),
    "closure": Variant(stage=closure, named="calls"),
    "registered-int": scaled(0, lambda n: n + 1, lambda n: 1 / n),
    "registered-big-int": scaled(2**80, lambda n: n + 1, lambda n: 1 / (n - 2**80)),
    "registered-float": scaled(1.0, lambda v: v * 0.9, lambda v: v),
    "registered-infinity": scaled(float("inf"), lambda v: v, lambda v: 0.5 if v == float("inf") else 1.0),
    "registered-tuple": scaled((0, 1), lambda v: (v[1], v[0] + 1), lambda v: 1 + v[0] * isinstance(v, tuple)),
    "registered-list": scaled([], lambda v: [*v, len(v)][-5:], lambda v: 1 + v[-1] / 10),
    "registered-set": scaled({0}, lambda v: v | {len(v)}, lambda v: 1 / len(v), refused="set"),
    "registered-integer-keys": scaled({0: 1.0}, lambda v: {0: v[0] * 0.9}, lambda v: v[0]),
    "registered-bytes": scaled(b"1", lambda v: v + b"1", lambda v: 1 / len(v), refused="bytes"),
    "registered-none": scaled(None, lambda v: None if v == 1 else 1, lambda v: 0.5 if v else 1.0),
    "registered-array": scaled(np.ones(2), lambda v: v * 0.9, lambda v: float(v[0]), refused="ndarray|array"),
    "registered-numpy-scalar": scaled(np.float64(1), lambda v: v * 0.9, float, refused="float64"),
    "registered-tensors": scaled(
        {"a": torch.ones(2), "b": [torch.zeros((), dtype=torch.int8)]},
        lambda v: {"a": v["a"] * 0.9, "b": [v["b"][0] + 1]},
        lambda v: v["a"][0] / (1 + v["b"][0]),
    ),
    "registered-nested": scaled(
        {"deep": {"er": [1, {"x": 2.5}]}},
        lambda v: {"deep": {"er": [v["deep"]["er"][0] + 1, v["deep"]["er"][1]]}},
        lambda v: 1 / v["deep"]["er"][0],
    ),
    "dict-filled-by-hook": Variant(stage=Filled, named="MEANS"),
    "hook-counter": Variant(stage=HookCounter, named="calls"),
    "iterator-count": Variant(stage=Counted, named="TURNS"),
    "iterator-cycle": Variant(stage=Cycled, named="factors"),
    "default-argument": Variant(stage=Remembers, named="memory"),
    "function-attribute": Variant(stage=WarmsUp, named="warm_up.calls"),
    "module-setting": Variant(stage=LowersDropout, named="net.drop.p"),
    "config": Variant(stage=ChangesConfig, pipeline=with_config, named="config"),
    "collate-counter": Variant(
        loaders=lambda: {
            "train": hw.data.DataLoader(
                samples(), batch_size=BATCH, shuffle=True, collate_fn=CountingCollate()
            )
        },
        named="collate_fn.calls",
    ),
    "sampler-pool": Variant(
        loaders=lambda: {"train": torch_data.DataLoader(samples(), BATCH, sampler=Pool())}, named="left"
    ),
    "optimizer-counter": Variant(optimizer=StepsKept, named="main.steps"),
    "optimizer-around": Variant(optimizer=Around, named="main.inner"),
    "not-state": Variant(stage=Derived),
    "not-state-items": Variant(stage=Overwritten),
    "not-state-first-use": Variant(stage=FirstUse),
}

SILENT = Variant(stage=Silent)
"""a variant that differs in silence: the table must say so"""
