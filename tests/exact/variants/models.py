"""Models: buffers of every kind, tied and reparametrized weights, precisions, averages."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm

import headway as hw
from headway.train import Callback
from variants.base import BATCH, CLASSES, FEATURES, Net, Train, Variant, momentum


class Normed(Net):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def features(self, x: Tensor) -> Tensor:
        return self.norm(super().features(x))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))[:, :CLASSES]  # type: ignore[no-any-return]


class Counting(Net):
    """Counts its calls in a buffer, which scales the output."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x) / self.calls


class Replacing(Net):
    """Replaces a persistent buffer in each call, by one of another length."""

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("trail", torch.zeros(0), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.trail = torch.cat([self.trail, x.detach().mean().reshape(1)])
        return super().forward(x) * (1 + self.trail.mean())


class Lazy(Net):
    """Registers a buffer in its first call."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.persistent = persistent

    def features(self, x: Tensor) -> Tensor:
        if "mean" not in dict(self.named_buffers()):
            self.register_buffer("mean", x.detach().mean(0), persistent=self.persistent)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().features(x - self.mean)


class NoneBuffer(Net):
    """A buffer that is None until the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def features(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return super().features(x - self.mean)


class Attribute(Net):
    """A tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(FEATURES)

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().features(x - self.mean)


class Extra(Attribute):
    """The same tensor as extra state."""

    def get_extra_state(self) -> Any:
        return {"mean": self.mean}

    def set_extra_state(self, state: Any) -> None:
        self.mean = state["mean"]


class PlainExtra(Net):
    """Extra state of plain values."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) / (1 + self.calls / 10)


class Counter(Net):
    """A counter of Python."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) / (1 + self.calls / 10)


class OwnNoise(Net):
    """A generator that the module owns."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + 0.1 * torch.randn(len(x), 10, generator=self.generator)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=torch.complex64))
        self.register_buffer("phase", torch.ones((), dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.phase = self.phase * (0.8 + 0.6j)
        return (x.to(torch.complex64) @ self.weight * self.phase).real


def quantize(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch will remove these dtypes
        return torch.quantize_per_tensor(tensor, 0.05, 0, torch.qint8)


class Quantized(Net):
    """A quantized buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", quantize(torch.zeros(FEATURES)))

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            mean = 0.9 * self.code.dequantize() + 0.1 * x.detach().mean(0)
            self.code = quantize(mean)
        return super().features(x - self.code.dequantize())


class Bytes(Net):
    """Buffers of small integers and booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(FEATURES, dtype=torch.uint8))
        self.register_buffer("seen", torch.zeros(FEATURES, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0, 4, dtype=torch.float16))

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            self.counts += (x > 1).any(0)
            self.seen |= self.counts > 3
        return super().features(x * (1 + self.counts / 10) * (1 + self.seen.float()))


class SparseBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(FEATURES).to_sparse())

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept = (0.9 * self.kept.to_dense() + F.relu(x.detach().mean(0))).to_sparse()
        return super().features(x - self.kept.to_dense())


class Recurrent(nn.Module):
    """Carries its state from batch to batch, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(FEATURES, 8), nn.Linear(8, CLASSES)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.cell(x, None if self.state is None else self.state.detach())
        return self.last(self.state)  # type: ignore[no-any-return]


def wrapped(wrap: Any) -> Any:
    def make() -> nn.Module:
        net = Net()
        wrap(net.first)
        return net

    return make


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.mean()


class OfPrecision(Train):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        dtype = next(self.models["net"].parameters()).dtype
        return F.cross_entropy(self.models["net"](x.to(dtype)).float(), y)


class Distill(Train):
    """A teacher that follows the model, registered as a model."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        student, teacher = (
            self.pipe.registered_models["net"].bare,
            self.pipe.registered_models["teacher"].bare,
        )
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            target = teacher.eval()(x)
        made = self.models["net"](x)
        return F.cross_entropy(made, y) + F.mse_loss(made, target)


class DistillUnregistered(Distill):
    """The same teacher, in an attribute."""

    def pre_stage(self) -> None:
        self.teacher = copy.deepcopy(self.pipe.registered_models["net"].bare).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        student = self.pipe.registered_models["net"].bare
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            target = self.teacher.eval()(x)
        made = self.models["net"](x)
        return F.cross_entropy(made, y) + F.mse_loss(made, target)


def add_teacher(pipe: hw.Pipeline) -> None:
    pipe.register_model("teacher", Net().requires_grad_(False))


class SwaCallback(Callback):
    """torch's averaged model, registered as state."""

    def __init__(self, net: nn.Module) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(net)

    def log_point(self, stage: Any, kind: str, point: Any) -> None:  # noqa: ARG002
        self.average.update_parameters(stage.pipe.registered_models["net"].bare)
        with torch.no_grad():
            for slow, fast in zip(
                self.average.module.parameters(),
                stage.pipe.registered_models["net"].bare.parameters(),
                strict=True,
            ):
                fast.lerp_(slow, 0.1)


def swa(*, register: bool) -> Any:
    def prepare(pipe: hw.Pipeline) -> None:
        callback = SwaCallback(pipe.registered_models["net"].bare)
        pipe.add_callback(callback)
        if register:
            pipe.register_state("swa", callback.average)

    return prepare


class PruneOnce(Train):
    """torch's pruning, from the first epoch on: it replaces a parameter and registers a mask."""

    def pre_stage(self) -> None:
        net = self.pipe.registered_models["net"].bare
        with torch.no_grad():
            net.first.weight.masked_fill_(net.first.weight.abs() < 0.1, 0)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(FEATURES, CLASSES)})
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1))])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["a"](x) * self.scale[0] + self.scale[1]  # type: ignore[no-any-return]


VARIANTS = {
    "plain": Variant(),
    "batch-norm": Variant(model=lambda: Normed(nn.BatchNorm1d(10))),
    "batch-norm-cumulative": Variant(model=lambda: Normed(nn.BatchNorm1d(10, momentum=None))),
    "layer-norm": Variant(model=lambda: Normed(nn.LayerNorm(10))),
    "instance-norm": Variant(model=lambda: Normed(nn.GroupNorm(2, 10))),
    "dropouts": Variant(model=lambda: Normed(nn.AlphaDropout(0.3))),
    "rrelu": Variant(model=lambda: Normed(nn.RReLU())),
    "tied-weights": Variant(model=Tied),
    "nested-containers": Variant(model=Deep),
    "buffer-persistent": Variant(model=lambda: Counting(persistent=True)),
    "buffer-not-persistent": Variant(model=lambda: Counting(persistent=False), named="net.calls"),
    "buffer-grows": Variant(model=Replacing),
    "buffer-grows-not-persistent": Variant(model=lambda: Replacing(persistent=False), named="net.trail"),
    "buffer-lazy": Variant(model=lambda: Lazy(persistent=True)),
    "buffer-lazy-not-persistent": Variant(model=lambda: Lazy(persistent=False), named="net.mean"),
    "buffer-none": Variant(model=NoneBuffer),
    "buffers-of-integers": Variant(model=Bytes),
    "buffer-quantized": Variant(model=Quantized, refused="qint8"),
    "buffer-sparse": Variant(model=SparseBuffer, refused="sparse_coo"),
    "attribute-tensor": Variant(model=Attribute, named="mean"),
    "attribute-counter": Variant(model=Counter, named="calls"),
    "attribute-generator": Variant(model=OwnNoise, named="generator"),
    "attribute-recurrent": Variant(model=Recurrent, named="state"),
    "extra-state": Variant(model=Extra),
    "extra-state-plain": Variant(model=PlainExtra),
    "complex": Variant(model=Complex, optimizer=momentum),
    "spectral-norm": Variant(model=wrapped(parametrizations.spectral_norm)),
    "spectral-norm-old": Variant(model=wrapped(spectral_norm)),
    "weight-norm": Variant(model=wrapped(parametrizations.weight_norm)),
    "orthogonal": Variant(model=wrapped(parametrizations.orthogonal)),
    "parametrized": Variant(
        model=wrapped(lambda part: parametrize.register_parametrization(part, "weight", Symmetric()))
    ),
    "float64": Variant(model=lambda: Net().double(), stage=OfPrecision),
    "bfloat16": Variant(model=lambda: Net().bfloat16(), stage=OfPrecision),
    "autocast-bf16": Variant(stage=lambda: Train(precision="bf16")),
    "autocast-fp16": Variant(stage=lambda: Train(precision="fp16")),
    "ema": Variant(model_options={"ema": 0.9}),
    "ema-batch-norm": Variant(model=lambda: Normed(nn.BatchNorm1d(10)), model_options={"ema": 0.9}),
    "clipped": Variant(stage=lambda: Train(gradient_clip=0.1)),
    "teacher": Variant(stage=Distill, prepare=add_teacher),
    "teacher-unregistered": Variant(stage=DistillUnregistered, named="teacher"),
    "swa-registered": Variant(prepare=swa(register=True)),
    "swa-unregistered": Variant(prepare=swa(register=False), named="average"),
    "masked": Variant(stage=PruneOnce),
    "checkpointed": Variant(model_options={"activation_checkpointing": (nn.Linear,)}),
    "lazy-linear": Variant(model=lambda: initialized(nn.LazyLinear(CLASSES))),
    "not-wrapped": Variant(model_options={"parallel": "none"}),
}


def initialized(module: nn.Module) -> nn.Module:
    module(torch.zeros(BATCH, FEATURES))
    return module
