"""What cannot be resumed is an error when its state first exists: before the first step, or after it."""

from __future__ import annotations

import random
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
from headway.errors import UsageError
from headway.testing import ranks
from headway.train import Pipeline, TrainValStage

alone = pytest.mark.usefixtures("alone")


class Fit(TrainValStage):
    def __init__(self) -> None:
        super().__init__(val_every=None)
        self.steps = 0

    def step(self, batch: Any) -> Tensor:
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
) -> tuple[Pipeline, Fit]:
    hw.seed(3)
    pipe, stage = Pipeline(name="tried", root=folder), Fit()
    pipe.register_model("net", nn.Linear(4, 2))
    pipe.register_optimizer("it", optimizer or momentum, scheduler=scheduler)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    pipe.register_dataset("train", hw.data.DataLoader(torch.utils.data.TensorDataset(x), global_batch_size=8))
    if thing is not None:
        pipe.register_state("thing", thing)
    pipe.append_stage(stage, max_epochs=1)
    pipe.enable_checkpointing(every=4, background=False)
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
    "sparse": (Holds({"n": torch.eye(3).to_sparse()}), "thing.n' is a torch.sparse_coo tensor"),
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


@alone
def test_odd_tensors_and_values_are_kept(tmp_path: Path) -> None:
    odd = {
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "stride 0": torch.ones(1).expand(5),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "empty": torch.zeros(0, 3),
        "nan": [float("nan"), -0.0, torch.tensor([float("nan"), -0.0])],
        "keys": {3: (1, True, None), "a": {"b": [1.5]}},
    }
    pipe, stage = make(tmp_path, thing=Holds(odd))
    pipe.run()
    assert stage.steps == 6


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


@ranks(2)
def test_what_one_rank_cannot_resume_is_refused_on_all(tmp_path: Path) -> None:
    load = add if hw.rank() == 1 else None
    pipe, stage = make(tmp_path, thing=Holds({"items": [1]}, load))
    with pytest.raises(UsageError, match="state 'thing' could not be resumed, since 'items' differs"):
        pipe.run()
    assert stage.steps == 0
