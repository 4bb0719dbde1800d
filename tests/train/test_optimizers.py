"""Optimizers that a stage chooses and steps itself, and parameters that hooks freeze and unfreeze."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from toys import FEATURES, Batches, Classify, make_net, make_pipe, sgd, warm_up

from headway.testing import ranks
from headway.train import Ddp, Pipeline, TrainValStage

alone = pytest.mark.usefixtures("alone")
STEPS = 6


def two_models(folder: Path) -> Pipeline:
    torch.manual_seed(5)
    pipe = Pipeline(name="two", root=folder)
    for name, out in (("maker", FEATURES), ("judge", 1)):
        pipe.register_model(name, nn.Linear(FEATURES, out))
        pipe.register_optimizer(name, sgd, model=name, scheduler=warm_up)
    pipe.register_dataset("train", Batches(STEPS))
    return pipe


class Alternating(TrainValStage):
    """Steps the two in turn; the loss of the maker is computed by the judge, and fills its gradients, too."""

    def player(self) -> str:
        return "judge" if self.steps_done % 2 else "maker"

    def optimizers(self) -> Sequence[Optimizer]:
        return [self.pipe.optimizers[self.player()]]

    def step(self, batch: Any) -> Tensor:
        return loss_of(self.models, self.player(), batch[0])


def loss_of(models: Any, player: str, x: Tensor) -> Tensor:
    made = models["maker"](x)
    verdict: Tensor = models["judge"](made.detach() if player == "judge" else made)
    return verdict.square().mean()


@alone
def test_optimizers_in_turn_use_the_gradients_of_their_own_steps_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    models = {"maker": nn.Linear(FEATURES, FEATURES), "judge": nn.Linear(FEATURES, 1)}
    optimizers = {name: sgd(model.parameters()) for name, model in models.items()}
    schedulers = {name: warm_up(optimizer) for name, optimizer in optimizers.items()}
    for number, (x, _) in enumerate(Batches(STEPS)):
        player = "judge" if number % 2 else "maker"
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        loss_of(models, player, x).backward()
        optimizers[player].step()
        schedulers[player].step()
    pipe = two_models(tmp_path)
    pipe.append_stage(Alternating(), max_epochs=1)
    pipe.run()
    for name, model in models.items():
        for ours, theirs in zip(pipe.models[name].parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs), name


@alone
def test_schedulers_step_once_whoever_steps_the_optimizer(tmp_path: Path) -> None:
    class Both(Alternating):
        def player(self) -> str:
            return "maker"

        def optimize(self) -> None:
            super().optimize()
            self.step_optimizer("judge")  # which optimizers() does not return

    class Itself(Both):
        def optimize(self) -> None:
            self.step_optimizer("maker")

    for kind, judged in ((Both, STEPS), (Itself, 0)):
        pipe = two_models(tmp_path)
        pipe.append_stage(kind(), max_epochs=1)
        pipe.run()
        assert [scheduler.last_epoch for scheduler in pipe.schedulers.values()] == [STEPS, judged]


@alone
def test_a_step_of_a_hook_is_a_whole_step(tmp_path: Path) -> None:
    """Outside `optimize`, nothing follows in the loop."""

    class Distills(Alternating):
        def player(self) -> str:
            return "maker"

        def post_epoch(self) -> None:
            loss_of(self.models, "maker", torch.ones(2, FEATURES)).backward()
            self.step_optimizer("maker")
            self.pipe.optimizers["maker"].zero_grad()

    pipe = two_models(tmp_path)
    pipe.append_stage(Distills(), max_epochs=2)
    pipe.run()
    assert pipe.schedulers["maker"].last_epoch == 2 * (STEPS + 1)


@alone
def test_a_method_that_pre_epoch_assigns_is_used_in_that_epoch(tmp_path: Path) -> None:
    class Clips(Classify):
        def pre_epoch(self) -> None:
            if self.epoch == 1:
                self.gradient_clip = lambda: 1e-3  # type: ignore[method-assign]

    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(2))
    pipe.append_stage(Clips(log_every=1), max_epochs=3)
    pipe.run()
    assert [step for step, _ in pipe.history.points("train/grad_norm")] == [3, 4, 5, 6]


class Thaws(Classify):
    def pre_epoch(self) -> None:
        if self.epoch == 1:
            self.pipe.registered_models["net"].bare.requires_grad_(True)


def run_thawed(folder: Path, *, before: bool) -> tuple[Tensor, Tensor]:
    """Freezes the first layer before or after its optimizer is registered; returns it before and after training."""
    pipe = Pipeline(name="toy", root=folder)
    net = make_net()
    pipe.register_model("net", net, parallel=Ddp(find_unused_parameters=True))
    if before:
        net.first.requires_grad_(False)
    pipe.register_optimizer("sgd", sgd, model="net")
    net.first.requires_grad_(False)
    begun = net.first.weight.detach().clone()
    pipe.register_dataset("train", Batches(2, rank=pipe.world.rank))
    pipe.append_stage(Thaws(), max_epochs=3)
    pipe.run()
    return begun, net.first.weight.detach()


@ranks(2)
def test_layers_that_are_frozen_after_their_optimizer_is_registered_can_be_trained_later(
    tmp_path: Path,
) -> None:
    begun, ended = run_thawed(tmp_path, before=False)
    assert not torch.equal(begun, ended)


@alone
@pytest.mark.parametrize("before", [True, False])
def test_unfrozen_parameters_that_no_optimizer_steps_are_named_once(
    before: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun, ended = run_thawed(tmp_path, before=before)
    assert torch.equal(begun, ended) is before
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("unfrozen parameters that no optimizer steps (first.weight, first.bias)") == before
