"""Optimizers: all of torch, with their implementations, and others with every shape of state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from variants.base import CLASSES, FEATURES, Net, Train, Variant


def of(kind: type[Optimizer], **settings: Any) -> Variant:
    return Variant(optimizer=lambda parameters: kind(parameters, **settings))


def rate(value: float) -> Tensor:
    return torch.tensor(value)


class Rows(nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, CLASSES, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x.abs() * 5).long().clamp(max=19)).sum(1)  # type: ignore[no-any-return]


class Matrices(nn.Module):
    """What Muon takes: two-dimensional parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 10, bias=False)
        self.last = nn.Linear(10, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class WithClosure(Train):
    """A step whose optimizer calls the model itself."""

    def train_step(self, batch: Any) -> Tensor:
        self.batch = batch
        return super().train_step(batch)

    def optimize(self) -> None:
        optimizer = self.pipe.optimizers["main"]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(self.batch)
            loss.backward()
            return loss

        optimizer.step(closure)


def groups(parameters: Any) -> Optimizer:
    every = list(parameters)
    return optim.AdamW(
        [
            {"params": [p for p in every if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in every if p.ndim < 2], "lr": 0.001, "name": "biases"},
        ],
        lr=0.02,
    )


TORCH = {
    "sgd": of(optim.SGD, lr=0.1),
    "sgd-momentum": of(optim.SGD, lr=0.05, momentum=0.9),
    "sgd-nesterov": of(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-foreach": of(optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    "sgd-fused": of(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "sgd-maximize": of(optim.SGD, lr=0.001, maximize=True),
    "sgd-tensor-lr": of(optim.SGD, lr=rate(0.05), momentum=0.9),
    "adam": of(optim.Adam, lr=0.02),
    "adam-foreach": of(optim.Adam, lr=0.02, foreach=True),
    "adam-fused": of(optim.Adam, lr=0.02, fused=True),
    "adam-amsgrad": of(optim.Adam, lr=0.02, amsgrad=True),
    "adam-maximize": of(optim.Adam, lr=0.0005, maximize=True),
    "adam-tensor-lr": of(optim.Adam, lr=rate(0.02), foreach=False),
    "adam-tensor-betas": of(optim.Adam, lr=rate(0.02), betas=(rate(0.9), rate(0.99)), foreach=False),
    "adam-decoupled": of(optim.Adam, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
    "adamw": of(optim.AdamW, lr=0.02),
    "adamw-fused-amsgrad": of(optim.AdamW, lr=0.02, amsgrad=True, fused=True),
    "adamw-groups": Variant(optimizer=groups),
    "nadam": of(optim.NAdam, lr=0.02),
    "nadam-decoupled-foreach": of(optim.NAdam, lr=0.02, decoupled_weight_decay=True, foreach=True),
    "radam": of(optim.RAdam, lr=0.02),
    "radam-foreach": of(optim.RAdam, lr=0.02, foreach=True),
    "adamax": of(optim.Adamax, lr=0.02),
    "adagrad": of(optim.Adagrad, lr=0.1),
    "adagrad-fused": of(optim.Adagrad, lr=0.1, fused=True, initial_accumulator_value=0.1),
    "adadelta": of(optim.Adadelta, lr=0.5),
    "adadelta-foreach": of(optim.Adadelta, lr=0.5, foreach=True),
    "asgd": of(optim.ASGD, lr=0.05, t0=3),
    "asgd-foreach": of(optim.ASGD, lr=0.05, t0=3, foreach=True),
    "rmsprop": of(optim.RMSprop, lr=0.005, momentum=0.5),
    "rmsprop-centered": of(optim.RMSprop, lr=0.005, centered=True),
    "rprop": of(optim.Rprop, lr=0.01),
    "rprop-foreach": of(optim.Rprop, lr=0.01, foreach=True),
    "adafactor": of(optim.Adafactor, lr=0.02),
    "adafactor-foreach": of(optim.Adafactor, lr=0.02, foreach=True),
    "muon": Variant(optimizer=lambda ps: optim.Muon(ps, lr=0.02), model=Matrices),
    "sparse-adam": Variant(optimizer=lambda ps: optim.SparseAdam(list(ps), lr=0.05), model=Rows),
    "lbfgs": Variant(
        optimizer=lambda ps: optim.LBFGS(ps, lr=0.1, max_iter=3, history_size=4), stage=WithClosure
    ),
    "lbfgs-wolfe": Variant(
        optimizer=lambda ps: optim.LBFGS(ps, max_iter=3, line_search_fn="strong_wolfe"), stage=WithClosure
    ),
    "nadam-of-float64": Variant(
        optimizer=lambda ps: optim.NAdam(ps, lr=0.02), model=lambda: Net().double(), stage=lambda: Doubles()
    ),
}


class Doubles(Train):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.models["net"](x.double()), y)


class Halves(Train):
    """A model of bfloat16."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.models["net"](x.bfloat16()).float(), y)


class Custom(Optimizer):
    """Descends along what `direction` makes of a gradient and the state of its parameter."""

    def __init__(self, parameters: Any, *, lr: float = 0.05, **settings: Any) -> None:
        super().__init__(parameters, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    direction = self.direction(parameter, self.state[parameter])
                    parameter.add_(direction.to(parameter.dtype), alpha=-group["lr"])

    def direction(self, parameter: Tensor, state: dict[Any, Any]) -> Tensor:
        raise NotImplementedError


def custom(direction: Callable[[Tensor, dict[Any, Any]], Tensor], **fields: Any) -> Variant:
    """Returns a variant with an optimizer that is this function."""
    kind = type("Direction", (Custom,), {"direction": lambda _, *given: direction(*given)})
    return Variant(optimizer=kind, **fields)


def nested(p: Tensor, state: dict[Any, Any]) -> Tensor:
    inner = state.setdefault("moments", {"first": torch.zeros_like(p), "deep": {"count": 0}})
    inner["first"].mul_(0.9).add_(p.grad)
    inner["deep"]["count"] += 1
    return inner["first"] / inner["deep"]["count"]


def listed(p: Tensor, state: dict[Any, Any]) -> Tensor:
    recent = state.setdefault("recent", [])
    recent.append(p.grad.clone())
    del recent[:-3]
    return sum(recent) / len(recent)


def paired(p: Tensor, state: dict[Any, Any]) -> Tensor:
    first, second = state.get("pair", (torch.zeros_like(p), torch.ones_like(p)))
    state["pair"] = (0.9 * first + p.grad, 0.9 * second + p.grad**2)
    assert isinstance(state["pair"], tuple)
    return state["pair"][0] / state["pair"][1].sqrt()


def tuple_kept(p: Tensor, state: dict[Any, Any]) -> Tensor:
    kept = state.setdefault("kept", (1.0, 2))
    scale = 1.0 if isinstance(kept, tuple) else 0.5
    return p.grad * scale


def scalars(p: Tensor, state: dict[Any, Any]) -> Tensor:
    state["count"] = state.get("count", 0) + 1
    state["decay"] = state.get("decay", 1.0) * 0.97
    state["even"] = not state.get("even", False)
    state["nothing"] = None
    state["mode"] = "slow" if state["count"] > 7 else "fast"
    return p.grad * state["decay"] * (2 if state["even"] else 1) * (0.5 if state["mode"] == "slow" else 1)


def huge(p: Tensor, state: dict[Any, Any]) -> Tensor:
    state["count"] = state.get("count", 2**70) + 1
    state["best"] = min(state.get("best", float("inf")), float(p.grad.abs().max()))
    state["worst"] = max(state.get("worst", -float("inf")), float(p.grad.abs().max()))
    return p.grad * (1 + state["count"] - 2**70) * 0.1 * state["best"] / state["worst"]


def quantized(p: Tensor, state: dict[Any, Any]) -> Tensor:
    """Momentum in eight bits, with its scale."""
    momentum = state["bytes"].to(p.dtype) * state["scale"] if state else torch.zeros_like(p)
    momentum = 0.9 * momentum + p.grad
    state["scale"] = momentum.abs().max().clamp(min=1e-8) / 127
    state["bytes"] = (momentum / state["scale"]).round().to(torch.int8)
    return momentum


def of_dtype(dtype: torch.dtype) -> Callable[[Tensor, dict[Any, Any]], Tensor]:
    """Momentum in another precision than that of the parameters."""

    def direction(p: Tensor, state: dict[Any, Any]) -> Tensor:
        momentum = state.setdefault("momentum", torch.zeros_like(p, dtype=dtype))
        momentum.mul_(0.9).add_(p.grad.to(dtype))
        return momentum.to(dtype=torch.float64).to(p.dtype)

    return direction


def complex_momentum(p: Tensor, state: dict[Any, Any]) -> Tensor:
    turned = state.setdefault("turned", torch.zeros_like(p, dtype=torch.complex64))
    turned.mul_(0.9j).add_(p.grad)
    return turned.real


def conjugate(p: Tensor, state: dict[Any, Any]) -> Tensor:
    turned = state.get("turned", torch.zeros_like(p, dtype=torch.complex64))
    state["turned"] = (0.5j * turned + p.grad).conj()
    return state["turned"].real


def sparse(p: Tensor, state: dict[Any, Any]) -> Tensor:
    kept = state.get("kept")
    dense = p.grad + (0.9 * kept.to_dense() if kept is not None else 0)
    state["kept"] = torch.where(dense.abs() > dense.abs().mean(), dense, 0).to_sparse()
    return dense


def booleans(p: Tensor, state: dict[Any, Any]) -> Tensor:
    mask = state.setdefault("mask", torch.ones_like(p, dtype=torch.bool))
    mask ^= p.grad > 0
    return p.grad * mask


def zero_dim(p: Tensor, state: dict[Any, Any]) -> Tensor:
    norm = state.setdefault("norm", torch.zeros((), dtype=torch.float64))
    norm += p.grad.double().square().sum()
    return p.grad / (norm.sqrt() + 1)


def empty(p: Tensor, state: dict[Any, Any]) -> Tensor:
    seen = state.setdefault("seen", torch.zeros(0, 3))
    state["seen"] = torch.cat([seen, torch.full((1, 3), float(len(seen)))]) if len(seen) < 6 else seen[:0]
    return p.grad * (1 + len(state["seen"]))


def expanded(p: Tensor, state: dict[Any, Any]) -> Tensor:
    state["mean"] = (state["mean"] * 0.5 if state else torch.zeros_like(p)) + p.grad.mean()
    state["mean"] = state["mean"].flatten()[:1].expand(p.numel()).view_as(p)
    return p.grad + state["mean"]


def transposed(p: Tensor, state: dict[Any, Any]) -> Tensor:
    momentum = state.setdefault("momentum", torch.zeros_like(p).t())
    momentum.mul_(0.9).add_(p.grad.t())
    return momentum.t()


def late(p: Tensor, state: dict[Any, Any]) -> Tensor:
    state["count"] = state.get("count", 0) + 1
    if state["count"] == 4:
        state["momentum"] = torch.zeros_like(p)
    if "momentum" in state:
        state["momentum"].mul_(0.9).add_(p.grad)
    return state.get("momentum", p.grad)


def integer_keys(p: Tensor, state: dict[Any, Any]) -> Tensor:
    counts = state.setdefault("counts", {0: 0, 1: 0})
    counts[counts[0] % 2] += 1
    return p.grad * (1 + counts[1] / 10)


def tensor_keys(p: Tensor, state: dict[Any, Any]) -> Tensor:
    state[0] = state.get(0, 0) + 1
    return p.grad / state[0]


class StringKeys(Custom):
    """State that belongs to no parameter."""

    def direction(self, parameter: Tensor, state: dict[Any, Any]) -> Tensor:  # noqa: ARG002
        total = self.state["total"]  # type: ignore[index]
        total["norm"] = total.get("norm", torch.zeros(())) + parameter.grad.square().sum()
        return parameter.grad / (total["norm"].sqrt() + 1)


class SecondParameters(Custom):
    """Another step every fifth, counted in a group."""

    def direction(self, parameter: Tensor, state: dict[Any, Any]) -> Tensor:  # noqa: ARG002
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        group["trail"] = [*group.get("trail", []), float(parameter.grad.norm())][-4:]
        return parameter.grad * (1 if group["count"] % 5 else 3) / (1 + sum(group["trail"]))


class GroupTensors(Custom):
    """A tensor in a group, as torch's capturable optimizers and schedule-free ones have."""

    def direction(self, parameter: Tensor, state: dict[Any, Any]) -> Tensor:  # noqa: ARG002
        group = self.param_groups[0]
        group["sum"] = group.get("sum", torch.zeros((), dtype=torch.float64)) + parameter.grad.abs().sum()
        return parameter.grad / (1 + group["sum"])


class Lookahead(Optimizer):
    """Slow weights, which follow the fast ones every third step, under a top-level key of their own."""

    def __init__(self, parameters: Any) -> None:
        self.fast = optim.Adam(parameters, lr=0.02)
        super().__init__(self.fast.param_groups, {})
        self.param_groups, self.defaults = self.fast.param_groups, self.fast.defaults
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        self.fast.step()
        self.count += 1
        if self.count % 3 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return self.fast.state_dict() | {"slow": self.slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fast.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        for slow, saved in zip(self.slow, state["slow"], strict=True):
            slow.copy_(saved)
        self.count = state["count"]


class MasterWeights(Optimizer):
    """Weights of float32 beside a model of bfloat16, made in the constructor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        for p in self.param_groups[0]["params"]:
            self.state[p]["master"] = p.detach().float().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for p in self.param_groups[0]["params"]:
            master = self.state[p]["master"]
            master.add_(p.grad.float(), alpha=-self.param_groups[0]["lr"])
            p.copy_(master)


class Attribute(Custom):
    """A count that `state_dict` does not have."""

    count = 0

    def direction(self, parameter: Tensor, state: dict[Any, Any]) -> Tensor:  # noqa: ARG002
        self.count += 1
        return parameter.grad / (1 + self.count)


class Complete(Attribute):
    """The same count, which `state_dict` has."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state.pop("count")
        super().load_state_dict(state)


class Noise(Custom):
    """Draws from a generator of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.generator = torch.Generator().manual_seed(5)

    def direction(self, parameter: Tensor, state: dict[Any, Any]) -> Tensor:  # noqa: ARG002
        return parameter.grad + 0.1 * torch.randn(parameter.shape, generator=self.generator)


class TwoPhases(Train):
    """An optimizer for each model part, one of them only every second step."""

    def optimizers(self) -> list[Optimizer]:
        every = list(self.pipe.optimizers.values())
        return every if self.pipe.steps_done % 2 else every[:1]


def second_optimizer(pipe: Any) -> None:
    pipe.register_model("head", nn.Linear(CLASSES, CLASSES))
    pipe.register_optimizer("second", lambda ps: optim.Adagrad(ps, lr=0.1), model="head")


class WithHead(TwoPhases):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.models["head"](self.models["net"](x)), y)


OWN = {
    "state-nested": custom(nested),
    "state-list": custom(listed),
    "state-tuple-of-tensors": custom(paired),
    "state-tuple": custom(tuple_kept),
    "state-scalars": custom(scalars),
    "state-huge-and-infinite": custom(huge),
    "state-int8": custom(quantized),
    "state-float64": custom(of_dtype(torch.float64)),
    "state-bfloat16": custom(of_dtype(torch.bfloat16)),
    "state-float32-of-bfloat16": custom(
        of_dtype(torch.float32), model=lambda: Net().bfloat16(), stage=Halves
    ),
    "state-complex": custom(complex_momentum),
    "state-conjugate": custom(conjugate),
    "state-sparse": custom(sparse, refused="sparse_coo"),
    "state-bool": custom(booleans),
    "state-zero-dim": custom(zero_dim),
    "state-empty": custom(empty),
    "state-expanded": custom(expanded),
    "state-transposed": custom(transposed, model=Matrices),
    "state-late": custom(late),
    "state-integer-keys-inside": custom(integer_keys),
    "state-integer-key": custom(tensor_keys),
    "state-string-key": Variant(optimizer=StringKeys),
    "group-values": Variant(optimizer=SecondParameters),
    "group-tensor": Variant(optimizer=GroupTensors),
    "lookahead": Variant(optimizer=Lookahead),
    "master-weights": Variant(optimizer=MasterWeights, model=lambda: Net().bfloat16(), stage=Halves),
    "top-level-key": Variant(optimizer=Complete),
    "attribute": Variant(optimizer=Attribute, named="main.count"),
    "generator": Variant(optimizer=Noise, named="generator"),
    "two-in-turn": Variant(stage=WithHead, prepare=second_optimizer),
}

VARIANTS = TORCH | OWN
