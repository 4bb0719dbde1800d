"""What cannot be resumed is an error when its state first exists: before the first step, or after it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_optimizer_state import Lookahead
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import headway as hw
from headway import checkpoint
from headway.checkpoint.write import comparison
from headway.errors import UsageError
from headway.testing import ranks
from headway.train import Pipeline, TrainValStage

alone = pytest.mark.usefixtures("alone")


class Fit(TrainValStage):
    def __init__(self) -> None:
        super().__init__(val_every=None)
        self.steps = 0
        self.cut: int | None = None

    def step(self, batch: Any) -> Tensor:
        if self.pipe.steps_done == self.cut:
            raise KeyboardInterrupt
        self.steps += 1
        return F.mse_loss(F.dropout(self.models["net"](batch[0])), batch[0][:, :2])


class Holds:
    """An object whose state is what a test wants, and that restores it as the test wants."""

    def __init__(self, state: Any, load: Callable[[Holds, Any], None] | None = None) -> None:
        self.state, self._load = state, load

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        if self._load:
            self._load(self, state)
        else:
            self.state = state


class Forgetful(SGD):
    """Does not restore a value of its own."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})
        self.calls = 0


class Picky(SGD):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["state"]:
            raise KeyError("exp_avg")
        super().load_state_dict(state)


class Stale(SGD):
    """A parameter was replaced, but its state is still there."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.state[nn.Parameter(torch.ones(2))]["x"] = 1
        return found


class Late(Picky):
    """Has no state in the first steps."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure) if self.calls > 2 else None


def make(
    folder: Path,
    optimizer: Callable[[Any], Optimizer] | None = None,
    *,
    thing: Any = None,
    scheduler: Any = None,
    parallel: Any = "ddp",
    net: nn.Module | None = None,
    background: bool = False,
) -> tuple[Pipeline, Fit]:
    hw.seed(3)
    pipe, stage = Pipeline(name="tried", root=folder), Fit()
    pipe.register_model("net", net or nn.Linear(4, 2), parallel=parallel)
    pipe.register_optimizer("it", optimizer or momentum, scheduler=scheduler)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    pipe.register_dataset("train", hw.data.DataLoader(torch.utils.data.TensorDataset(x), global_batch_size=8))
    if thing is not None:
        pipe.register_state("thing", thing)
    pipe.append_stage(stage, max_epochs=1)
    pipe.enable_checkpointing(every=4, background=background)
    return pipe, stage


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


def add(holds: Holds, state: Any) -> None:
    holds.state = {"items": holds.state["items"] + state["items"]}


def refuse(*_: Any) -> None:
    raise ValueError("no such field")


OBJECTS: dict[str, tuple[Any, str]] = {
    "adds up": (
        Holds({"items": [1]}, add),
        r"state 'thing' could not be resumed, since 'items' differs after",
    ),
    "refuses": (Holds({"items": 1}, refuse), r"state 'thing' does not accept .*ValueError: no such field"),
    "forgets": (Holds({"n": 1}, lambda h, _: h.state.update(n=0)), "'n' differs after"),
    "a set": (Holds({"n": {1}}), "thing.n' is a builtins.set, which a checkpoint cannot hold"),
}


@alone
@pytest.mark.parametrize("kind", list(OBJECTS))
def test_an_object_is_tried_before_the_first_step(kind: str, tmp_path: Path) -> None:
    thing, message = OBJECTS[kind]
    pipe, stage = make(tmp_path, thing=thing)
    with pytest.raises(UsageError, match=message):
        pipe.run()
    assert pipe.directory.info()["attempts"][-1]["exit_code"] == 2
    assert stage.steps == 0
    assert checkpoint.find_valid(pipe.directory) is None


@alone
def test_a_scheduler_is_tried_before_the_first_step(tmp_path: Path) -> None:
    class Restarts(LambdaLR):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict | {"last_epoch": -1})

    pipe, stage = make(tmp_path, scheduler=lambda o: Restarts(o, lambda _: 1.0))
    with pytest.raises(UsageError, match="scheduler 'it' could not be resumed, since 'last_epoch' differs"):
        pipe.run()
    assert stage.steps == 0


@alone
@pytest.mark.parametrize(
    ("optimizer", "steps", "message"),
    [
        (
            Forgetful,
            1,
            "optimizer 'it' could not be resumed, since 'other.calls' differs after load_state_dict",
        ),
        (Picky, 1, r"optimizer 'it' does not accept .*KeyError: 'exp_avg'"),
        (Stale, 1, "optimizer 'it' has state of a parameter that is in none of its groups"),
        (Late, 4, r"optimizer 'it' does not accept .*KeyError: 'exp_avg'"),
    ],
)
def test_an_optimizer_is_tried_when_it_first_has_state(
    optimizer: Any, steps: int, message: str, tmp_path: Path
) -> None:
    pipe, stage = make(tmp_path, lambda ps: optimizer(ps, lr=0.1, momentum=0.9))
    with pytest.raises(UsageError, match=message):
        pipe.run()
    assert stage.steps == steps, "and no checkpoint has that state"
    assert checkpoint.find_valid(pipe.directory) == pipe.directory.checkpoint_dir(0)


KEPT: dict[str, Tensor] = {
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "stride 0": torch.ones(1).expand(5),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(-0.0, dtype=torch.float64),
    "nan": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16),
    "eight bits": torch.tensor([0.3, -2.0]).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True])[::2],
}
REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo tensor"),
    "compressed": (lambda: torch.eye(3).to_sparse_csr(), "torch.sparse_csr tensor"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "tensor of torch.quint8",
    ),
    "complex": (lambda: torch.ones(2, dtype=torch.complex128), "tensor of torch.complex128"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
}


class Odd(SGD):
    """Keeps odd tensors from its first step on."""

    def __init__(self, params: Any, tensors: dict[str, Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.tensors = tensors

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        state = self.state[self.param_groups[0]["params"][0]]
        if "odd" not in state:
            state["odd"] = dict(self.tensors)
        return found


class WithBuffers(nn.Linear):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(4, 2)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def owned_by(owner: str, folder: Path, tensors: dict[str, Tensor]) -> tuple[Pipeline, Fit]:
    """A run in which an object, an optimizer or a model has these tensors."""
    return make(
        folder,
        (lambda params: Odd(params, tensors)) if owner == "optimizer" else None,
        thing=Holds({"odd": tensors, "keys": {3: (1, True, None)}}) if owner == "thing" else None,
        net=WithBuffers(tensors if owner == "model" else {}),
    )


@alone
@pytest.mark.parametrize("owner", ["thing", "optimizer", "model"])
def test_odd_tensors_return_to_the_bit(owner: str, tmp_path: Path) -> None:
    pipe, stage = owned_by(owner, tmp_path, KEPT)
    stage.cut = 5
    with pytest.raises(KeyboardInterrupt):
        pipe.run()
    empty = {name: torch.zeros_like(tensor.resolve_conj().contiguous()) for name, tensor in KEPT.items()}
    resumed, stage = owned_by(owner, tmp_path, empty)
    resumed.run()
    assert stage.steps == 2, "it resumes after step 4"
    weight = resumed.models["net"].weight
    found = {
        "thing": lambda: resumed._state.registered_state["thing"].state["odd"],  # type: ignore[attr-defined]
        "optimizer": lambda: resumed.optimizers["it"].state[weight]["odd"],
        "model": lambda: dict(resumed.models["net"].named_buffers()),
    }[owner]()
    for name, tensor in KEPT.items():
        assert comparison.describe(found[name]) == comparison.describe(tensor), name


@alone
@pytest.mark.filterwarnings("ignore")  # torch announces the end of quantized and nested tensors
@pytest.mark.parametrize("owner", ["thing", "optimizer", "model"])
@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_no_checkpoint_holds_are_refused_at_once(kind: str, owner: str, tmp_path: Path) -> None:
    build, what = REFUSED[kind]
    pipe, stage = owned_by(owner, tmp_path, {"x": build()})
    with pytest.raises(UsageError, match=rf"x' is a {re.escape(what)}, which a checkpoint cannot hold"):
        pipe.run()
    assert pipe.directory.info()["attempts"][-1]["exit_code"] == 2
    assert stage.steps == (1 if owner == "optimizer" else 0)


@alone
def test_a_trial_changes_nothing(tmp_path: Path) -> None:
    """Not the random numbers, nor objects that the script holds."""

    class Draws(Holds):
        def state_dict(self) -> Any:
            torch.rand(1), random.random(), np.random.rand()
            return super().state_dict()

    found = []
    for thing in (None, Draws({"n": torch.ones(2)})):
        made: list[Optimizer] = []

        def keep(params: Any, made: list[Optimizer] = made) -> Optimizer:
            made.append(Lookahead(momentum(params)))
            return made[0]

        pipe, _ = make(tmp_path, keep, thing=thing)
        group, groups, state = made[0].param_groups[0], made[0].param_groups, made[0].state
        pipe.run()
        assert group is made[0].param_groups[0] and groups is made[0].param_groups and state is made[0].state
        assert made[0].base.param_groups is groups  # type: ignore[attr-defined]
        found.append(
            (pipe.models["net"].weight.tolist(), random.getstate(), np.random.get_state()[1].tolist())
        )  # type: ignore[index]
    assert found[0][0] == found[1][0], "nor may a save"


class Rounds(Tensor):
    """A type of tensor that copies other values than it has."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.copy_, Tensor.cpu):
            args = tuple(each.round() if isinstance(each, Rounds) else each for each in args)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@alone
@pytest.mark.parametrize("background", [False, True])
def test_what_is_not_read_back_as_it_was_ends_the_run(background: bool, tmp_path: Path) -> None:
    odd = torch.Tensor._make_subclass(Rounds, torch.full((3,), 0.3))
    pipe, stage = make(tmp_path, lambda params: Odd(params, {"x": odd}), background=background)
    named = r"'optimizers\.it\.state\.net\.weight\.odd\.x' differs when it is read back"
    with pytest.raises(UsageError, match=named):
        pipe.run()
    assert pipe.directory.info()["attempts"][-1]["exit_code"] == 2
    assert checkpoint.find_valid(pipe.directory) == pipe.directory.checkpoint_dir(0), (
        "the one before that state"
    )
    assert stage.steps <= 6


class Differs(SGD):
    """Keeps a value, a small tensor or a setting that each rank has in its own way."""

    where = ""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        weight = self.param_groups[0]["params"][0]
        if self.where == "state":
            self.state[weight]["norm"] = torch.tensor(float(hw.rank()))
        elif self.where == "value":
            self.state[weight]["seen"] = hw.rank()
        elif self.where == "groups":
            self.param_groups[0]["momentum"] = 0.8 + hw.rank() / 10
        return found


DIFFERENCES = {
    "state": "state.net.weight.norm",
    "value": "state.net.weight.seen",
    "groups": "groups.0.momentum",
}


@ranks(2)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("where", DIFFERENCES)
def test_an_optimizer_that_differs_between_ranks_is_refused(
    where: str, parallel: str, tmp_path: Path
) -> None:
    def build(params: Any) -> Optimizer:
        made = Differs(params, lr=0.1, momentum=0.9)
        made.where = where
        return made

    pipe, stage = make(tmp_path, build, parallel=parallel)
    message = f"optimizer 'it' has another '{DIFFERENCES[where]}' on rank 1 than on rank 0"
    with pytest.raises(UsageError, match=re.escape(message)):
        pipe.run()
    assert stage.steps == 1


@ranks(2)
def test_models_that_each_rank_trains_on_its_own_may_differ(tmp_path: Path) -> None:
    pipe, stage = make(tmp_path, parallel="none")
    pipe.run()
    assert stage.steps == 6


@ranks(2)
def test_what_one_rank_cannot_resume_is_refused_on_all(tmp_path: Path) -> None:
    load = add if hw.rank() == 1 else None
    pipe, stage = make(tmp_path, thing=Holds({"items": [1]}, load))
    with pytest.raises(UsageError, match="state 'thing' could not be resumed, since 'items' differs"):
        pipe.run()
    assert stage.steps == 0
