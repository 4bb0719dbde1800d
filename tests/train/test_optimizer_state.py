"""Any optimizer resumes exactly: its state is what `state_dict()` returned, to the last bit, type and key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import headway as hw
from headway.errors import UsageError
from headway.testing import ranks
from headway.train import Pipeline, TrainValStage

alone = pytest.mark.usefixtures("alone")
Parameters = Iterable[nn.Parameter]
STEPS = 6

_NUMBERS = count()


class Cut(Exception):
    """The run ends here, as if it had been killed."""


class Fit(TrainValStage):
    def __init__(self, cut: int | None) -> None:
        super().__init__(val_every=None)
        self.cut = cut

    def step(self, batch: Any) -> Tensor:
        if self.pipe.steps_done == self.cut:
            raise Cut
        (x,) = batch
        out = self.models["net"](x.to(next(self.models["net"].parameters()).dtype))
        return F.mse_loss(out.float(), x[:, :2].float())


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def bias_free() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 2, bias=False))


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x.long()[:, 0].abs() % 5)


def make(
    folder: Path,
    optimizer: Callable[[Parameters], Optimizer],
    *,
    net: Callable[[], nn.Module] = dense,
    cut: int | None = None,
    dtype: torch.dtype = torch.float32,
    parallel: Any = "ddp",
    scheduler: Any = None,
) -> Pipeline:
    hw.seed(3)
    pipe = Pipeline(name="any", root=folder)
    pipe.register_model("net", net().to(dtype), parallel=parallel)
    pipe.register_optimizer("it", optimizer, model="net", scheduler=scheduler)
    x = torch.randn(8 * STEPS, 4, generator=torch.Generator().manual_seed(1))
    pipe.register_dataset("train", hw.data.DataLoader(torch.utils.data.TensorDataset(x), global_batch_size=8))
    pipe.append_stage(Fit(cut), max_epochs=1)
    pipe.enable_checkpointing(every=2, background=False)
    return pipe


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {k: v for key, value in state.items() for k, v in leaves(value, f"{path}.{key}").items()}
    if isinstance(state, list | tuple):
        return {k: v for key, value in enumerate(state) for k, v in leaves(value, f"{path}.{key}").items()}
    return {path: state.full_tensor() if hasattr(state, "full_tensor") else state}


def check_exact(folder: Path, optimizer: Callable[[Parameters], Optimizer], **options: Any) -> None:
    """Trains, and trains again with a cut after the fourth step; weights and states of the optimizer are equal."""
    folder = folder / str(next(_NUMBERS))
    folder.mkdir(exist_ok=True)
    whole = make(folder / "whole", optimizer, **options)
    whole.run()
    with pytest.raises(Cut):
        make(folder / "cut", optimizer, cut=5, **options).run()
    resumed = make(folder / "cut", optimizer, **options)
    resumed.run()
    assert len(resumed.directory.info()["attempts"]) == 2
    pairs = [
        (each.models["net"].state_dict(), each.optimizers["it"].state_dict()) for each in (whole, resumed)
    ]
    truth, ours = (leaves(list(pair)) for pair in pairs)
    assert truth.keys() == ours.keys()
    for path, value in truth.items():
        if isinstance(value, Tensor):
            assert (value.dtype, value.device, type(value)) == (
                ours[path].dtype, ours[path].device, type(ours[path])
            ), path  # fmt: skip
            assert torch.equal(value, ours[path]), path
        else:
            assert (type(value), value) == (type(ours[path]), ours[path]), path


# --- optimizers of others


class Master(Optimizer):
    """Momentum and weights in fp32 for parameters in bf16."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            s = self.state[p]
            if not s:
                s["master"], s["momentum"] = p.float(), torch.zeros_like(p, dtype=torch.float32)
            s["momentum"].mul_(0.9).add_(p.grad.float())
            s["master"].sub_(s["momentum"], alpha=0.1)
            p.copy_(s["master"])


class Quantized(Optimizer):
    """Momentum in eight bits, with a scale, in dicts, lists and tuples of its own, a name and a flag."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            s = self.state[p]
            if not s:
                s.update(
                    kind="int8",
                    ready=True,
                    nothing=None,
                    nested={
                        "codes": [torch.zeros_like(p, dtype=torch.int8)],
                        "scale": (p.new_ones((), dtype=torch.float64),),
                    },
                )
            assert s["kind"] == "int8"
            codes, (scale,) = s["nested"]["codes"][0], s["nested"]["scale"]
            momentum = codes.double() * scale * 0.9 + p.grad
            scale.copy_(momentum.abs().max() / 127)
            codes.copy_((momentum / scale).round())
            p.sub_(momentum, alpha=0.1)


class ByKey(Optimizer):
    """State of its own under string keys."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, {"lr": 0.1})
        self.state["count"] = 0
        self.state["all"] = {"norms": []}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.state["count"] += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 / self.state["count"])
        self.state["all"]["norms"].append(float(p.norm()))


class Lookahead(Optimizer):
    """Slow weights at the top level, around an optimizer with which it shares groups and state."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.count = base, 0
        self.defaults, self.param_groups, self.state = base.defaults, base.param_groups, base.state
        self.slow = [p.detach().clone() for g in base.param_groups for p in g["params"]]
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}  # type: ignore[assignment]

    def step(self) -> None:  # type: ignore[override]
        self.base.step()
        self.count += 1
        if self.count % 3 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, self.base.param_groups[0]["params"], strict=True):
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict() | {"slow": dict(enumerate(self.slow)), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        self.count = state["count"]
        for number, slow in enumerate(self.slow):
            slow.copy_(state["slow"][number])


class ById(Optimizer):
    """Its state is saved under the addresses of its parameters, which no other process has."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["last"] = p.grad.clone()
            p.sub_(p.grad, alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "fast": {id(p): s for p, s in self.state.items()},
            "param_groups": super().state_dict()["param_groups"],
        }


def tensor_rate(params: Parameters) -> Optimizer:
    rate = torch.tensor(0.05)
    optimizer = optim.Adam(params, lr=rate, foreach=False)

    def cool(*_: Any) -> None:  # a script may hold the rate itself
        rate.mul_(0.9)

    optimizer.register_step_pre_hook(cool)
    return optimizer


def held_group(params: Parameters) -> Optimizer:
    optimizer = optim.SGD(params, lr=0.1, momentum=0.9)
    group, groups = optimizer.param_groups[0], optimizer.param_groups

    def cool(*_: Any) -> None:
        group["lr"] *= 0.9
        groups[0]["momentum"] *= 0.9

    optimizer.register_step_pre_hook(cool)
    return optimizer


KINDS: dict[str, tuple[Callable[[Parameters], Optimizer], dict[str, Any]]] = {
    "muon": (lambda ps: optim.Muon(ps, lr=0.02), {"net": bias_free}),
    "adafactor": (lambda ps: optim.Adafactor(ps, lr=0.02), {}),
    "sparse": (lambda ps: optim.SparseAdam(list(ps), lr=0.02), {"net": Lookup}),
    "adam": (lambda ps: optim.Adam(ps, amsgrad=True), {}),
    "tensor rate": (tensor_rate, {}),
    "held group": (held_group, {}),
    "nadam of double": (lambda ps: optim.NAdam(ps), {"dtype": torch.float64}),
    "nadam of bf16": (lambda ps: optim.NAdam(ps), {"dtype": torch.bfloat16}),
    "master weights": (Master, {"dtype": torch.bfloat16}),
    "eight bits": (Quantized, {}),
    "eight bits of bf16": (Quantized, {"dtype": torch.bfloat16}),
    "string keys": (ByKey, {}),
    "lookahead": (lambda ps: Lookahead(optim.SGD(ps, lr=0.1, momentum=0.9)), {}),
    "lookahead, scheduled": (
        lambda ps: Lookahead(optim.SGD(ps, lr=0.1, momentum=0.9)),
        {"scheduler": lambda o: optim.lr_scheduler.StepLR(o, 2, 0.5)},
    ),
    "no momentum": (lambda ps: optim.SGD(ps, lr=0.1), {}),
    "rprop": (lambda ps: optim.Rprop(ps), {}),
    "flags": (lambda ps: optim.AdamW(ps, foreach=False, maximize=True), {}),
}  # fmt: skip


@alone
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_resumed_optimizer_is_the_one_that_was_saved(kind: str, tmp_path: Path) -> None:
    optimizer, options = KINDS[kind]
    check_exact(tmp_path, optimizer, **options)


@alone
def test_state_under_the_id_of_a_parameter_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"optimizer 'it' saves state under the id\(\) of a parameter"):
        make(tmp_path, ById).run()


@alone
def test_adamw_is_not_adam(tmp_path: Path) -> None:
    """torch loads the state of one into the other."""
    with pytest.raises(Cut):
        make(tmp_path, optim.AdamW, cut=3).run()
    with pytest.raises(
        UsageError, match="optimizer 'it' was saved as AdamW and is now Adam: create it as in"
    ):
        make(tmp_path, optim.Adam).run()


SHARDED = {
    name: KINDS[name] for name in ("muon", "adafactor", "adam", "master weights", "lookahead", "eight bits")
}


@ranks(2)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_on_two_ranks(parallel: str, tmp_path: Path) -> None:
    for name, (optimizer, options) in SHARDED.items():
        if (name, parallel) == ("adafactor", "fsdp"):
            continue  # torch's does not take sharded parameters
        try:
            check_exact(tmp_path, optimizer, **options | {"parallel": parallel})
        except Exception as error:
            error.add_note(f"{name}, {parallel}")
            raise
