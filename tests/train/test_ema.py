"""The average of the weights: what it begins with, and which weights it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from toys import Batches, Classify, make_net, make_pipe

from headway.errors import UsageError
from headway.testing import ranks
from headway.train import Pipeline
from headway.train.model.ema import Ema

alone = pytest.mark.usefixtures("alone")
HOOKS = ("pre_run", "pre_stage", "pre_epoch")


@torch.no_grad()
def triple(pipe: Pipeline) -> None:
    for weight in pipe.registered_models["net"].bare.parameters():
        weight.mul_(3.0)


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


class Fails(Classify):
    fails = False

    def step(self, batch: Any) -> Tensor:
        if self.fails and self.training:
            raise KeyboardInterrupt
        return super().step(batch)


def begin(
    folder: Path, when: str, set_weights: Callable[[Pipeline], None] = triple, **model: Any
) -> Pipeline:
    """Weights that no step changes, and that are set at some time before the first one."""
    pipe, stage = make_pipe(folder, optimizer=still, ema=0.999, **model), Fails(log_every=1)
    pipe.register_dataset("train", Batches(3, rank=pipe.world.rank))
    pipe.append_stage(stage, max_epochs=1)
    if when == "registered":
        set_weights(pipe)
    else:
        owner: Any = pipe if when == "pre_run" else stage
        setattr(owner, when, lambda: None if pipe.steps_done else set_weights(pipe))
    return pipe


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_average(pipe: Pipeline) -> None:
    model = pipe.registered_models["net"]
    assert model.ema is not None
    for name, weight in model.bare.named_parameters():
        assert torch.equal(local(model.ema.state_dict()[name]), local(weight.detach())), name


@alone
@pytest.mark.parametrize("when", ["registered", *HOOKS])
def test_the_average_begins_with_the_weights_of_the_first_step(when: str, tmp_path: Path) -> None:
    pipe = begin(tmp_path, when)
    pipe.run()
    check_average(pipe)


@ranks(2)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_it_does_on_several_ranks(parallel: str, tmp_path: Path) -> None:
    pipe = begin(tmp_path, "pre_stage", parallel=parallel)
    pipe.run()
    check_average(pipe)


@alone
@pytest.mark.parametrize("when", HOOKS)
def test_it_does_in_a_run_that_resumes_before_its_first_step(when: str, tmp_path: Path) -> None:
    """The first checkpoint is saved before the hooks of the stage."""
    for fails in (True, False):
        pipe = begin(tmp_path, when)
        pipe.enable_checkpointing(every=1, background=False)
        (stage,) = pipe.stages
        stage.fails = fails  # type: ignore[attr-defined]
        if fails:
            with pytest.raises(KeyboardInterrupt):
                pipe.run()
    run = pipe.run()
    assert len(run.info()["attempts"]) == 2
    check_average(pipe)


@alone
def test_it_does_in_the_first_stage_of_its_model(tmp_path: Path) -> None:
    """The weights of a later stage may come from an earlier one."""

    class Head(Classify):
        def optimizers(self) -> list[torch.optim.Optimizer]:
            return [self.pipe.optimizers["head"]]

        def pre_stage(self) -> None:
            self.pipe.registered_models["head"].bare.load_state_dict(
                self.pipe.registered_models["net"].bare.state_dict()
            )

        def step(self, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(self.models["head"](batch[0]), batch[1])

    class Body(Classify):
        def optimizers(self) -> list[torch.optim.Optimizer]:
            return [self.pipe.optimizers["sgd"]]

    pipe = make_pipe(tmp_path)
    pipe.register_model("head", make_net(), ema=0.999)
    pipe.register_optimizer("head", still, model="head")
    pipe.register_dataset("train", Batches(3))
    for stage in (Body(), Head()):
        pipe.append_stage(stage, max_epochs=1)
    pipe.run()
    head = pipe.registered_models["head"]
    assert head.ema is not None
    for name, weight in head.bare.named_parameters():
        assert torch.equal(head.ema.state_dict()[name], weight), name


@alone
@pytest.mark.parametrize("when", ["registered", *HOOKS])
def test_an_average_that_was_loaded_is_kept(when: str, tmp_path: Path) -> None:
    def load(pipe: Pipeline) -> None:
        average = pipe.registered_models["net"].ema
        assert average is not None
        average.load_state_dict(
            {name: torch.zeros_like(value) for name, value in average.state_dict().items()}
        )

    pipe = begin(tmp_path, when, load)
    pipe.run()
    found = pipe.state_dict()["averages"]["net"]["last.weight"]
    torch.testing.assert_close(found, pipe.registered_models["net"].bare.last.weight * (1 - 0.999**3))  # type: ignore[operator, union-attr]


@alone
def test_an_evaluation_before_training_uses_the_weights_that_the_script_has_loaded(tmp_path: Path) -> None:
    pipe, batch = begin(tmp_path, "registered"), next(iter(Batches(1)))
    (stage,) = pipe.stages
    found = pipe.test(stage, [batch], weights="current")
    net = pipe.registered_models["net"].bare.eval()
    with torch.no_grad():
        expected = nn.functional.cross_entropy(net(batch[0]), batch[1])
    assert found["test/loss"] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trained_weights_that_round_updates_away_are_refused(dtype: torch.dtype) -> None:
    net = make_net().to(dtype)
    with pytest.raises(UsageError, match=r"ema=0.999 cannot average 'first.weight', since torch\.\w+ rounds"):
        Ema(net, 0.999)
    Ema(nn.Sequential(net.requires_grad_(False), nn.Linear(2, 2)), 0.999)  # a frozen one does not change
