"""Hooks that change what is trained: at which of them a checkpoint was saved decides what runs again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway as hw
from headway.train import Callback
from variants.base import CLASSES, FEATURES, Net, Train, Variant, momentum, record


def head(stage: Any) -> nn.Linear:
    return stage.pipe.registered_models["net"].bare.last  # type: ignore[no-any-return]


def main(stage: Any) -> torch.optim.Optimizer:
    return stage.pipe.optimizers["main"]  # type: ignore[no-any-return]


class ResetHead(Train):
    def pre_stage(self) -> None:
        head(self).reset_parameters()


class ResetOptimizer(Train):
    def pre_stage(self) -> None:
        main(self).state.clear()


class ScaleEachEpoch(Train):
    def pre_epoch(self) -> None:
        with torch.no_grad():
            head(self).weight.mul_(0.5)


class NoiseEachEpoch(Train):
    def pre_epoch(self) -> None:
        with torch.no_grad():
            head(self).weight.add_(torch.randn_like(head(self).weight), alpha=0.1)


class NoiseAfterEpoch(Train):
    def post_epoch(self) -> None:
        with torch.no_grad():
            head(self).weight.add_(torch.randn_like(head(self).weight), alpha=0.1)


class RateEachEpoch(Train):
    def pre_epoch(self) -> None:
        for group in main(self).param_groups:
            group["lr"] *= 0.5


class RateByEpoch(Train):
    def pre_epoch(self) -> None:
        for group in main(self).param_groups:
            group["lr"] = 0.02 / (1 + self.epoch)


class RateAfterEpoch(Train):
    def post_epoch(self) -> None:
        for group in main(self).param_groups:
            group["lr"] *= 0.5


class RateBeforeStage(Train):
    def pre_stage(self) -> None:
        for group in main(self).param_groups:
            group["lr"] *= 0.1


class Unfreeze(Train):
    """The backbone is frozen in the first epoch; its group is there from the beginning."""

    def pre_epoch(self) -> None:
        self.pipe.registered_models["net"].bare.first.requires_grad_(self.epoch > 0)


class UnfreezeAfter(Train):
    def pre_stage(self) -> None:
        self.pipe.registered_models["net"].bare.first.requires_grad_(False)

    def post_epoch(self) -> None:
        self.pipe.registered_models["net"].bare.first.requires_grad_(True)


class AddGroup(Train):
    """Gradual unfreezing as tutorials have it: a group is added when its epoch comes."""

    def pre_epoch(self) -> None:
        if self.epoch == 1:
            backbone = self.pipe.registered_models["net"].bare.first
            main(self).add_param_group({"params": list(backbone.parameters()), "lr": 0.005})


class AddGroupAfter(Train):
    def post_epoch(self) -> None:
        if self.epoch == 1:
            backbone = self.pipe.registered_models["net"].bare.first
            main(self).add_param_group({"params": list(backbone.parameters()), "lr": 0.005})


class AddGroupInStep(Train):
    def loss(self, batch: Any) -> Tensor:
        if self.pipe.steps_done == 3 and len(main(self).param_groups) == 1:
            backbone = self.pipe.registered_models["net"].bare.first
            main(self).add_param_group({"params": list(backbone.parameters()), "lr": 0.005})
        return super().loss(batch)


class AddGroupBeforeStage(Train):
    def pre_stage(self) -> None:
        backbone = self.pipe.registered_models["net"].bare.first
        main(self).add_param_group({"params": list(backbone.parameters()), "lr": 0.005})


def of_head(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(parameters)[2:], lr=0.02)


class EndOfStage(Train):
    def post_stage(self) -> None:
        with torch.no_grad():
            head(self).weight.mul_(0.5)


class EndOfStageDraws(Train):
    def post_stage(self) -> None:
        with torch.no_grad():
            head(self).weight.add_(torch.randn_like(head(self).weight))


class FreezeSecond(Train):
    def pre_stage(self) -> None:
        if self.name == "second":
            self.pipe.registered_models["net"].bare.first.requires_grad_(False)
            head(self).reset_parameters()


class SmoothedLabels(Train):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.models["net"](x), y, label_smoothing=0.2)


def two_stages(first: type[Train], second: type[Train]) -> Any:
    def append(pipe: hw.Pipeline, _: object) -> None:
        pipe.append_stage(first(), max_epochs=2, name="first")
        pipe.append_stage(second(), max_epochs=1, name="second")

    return append


def by_steps(pipe: hw.Pipeline, _: object) -> None:
    pipe.append_stage(Train(), max_steps=7, name="first")
    pipe.append_stage(SmoothedLabels(), max_steps=9, name="second")


class ResetInRun(hw.Pipeline):
    def pre_run(self) -> None:
        with torch.no_grad():
            self.registered_models["net"].bare.last.weight.mul_(0.5)  # type: ignore[union-attr,operator]


class RegisterInRun(hw.Pipeline):
    def pre_run(self) -> None:
        self.register_model("second", nn.Linear(CLASSES, CLASSES))
        self.register_optimizer("second", momentum, model="second")


class WithSecond(Train):
    def optimizers(self) -> Any:
        return list(self.pipe.optimizers.values())

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.models["second"](self.models["net"](x)), y)


class Halve(Callback):
    """Halves the head at one hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.halve)

    def halve(self, stage: Any) -> None:
        with torch.no_grad():
            head(stage).weight.mul_(0.5)


def halved(hook: str) -> Variant:
    return Variant(prepare=lambda pipe: pipe.add_callback(Halve(hook)))


class AtLogPoint(Callback):
    """Lowers the rate at each log point, as a monitor of the loss may."""

    def log_point(self, stage: Any, kind: str, point: Any) -> None:  # noqa: ARG002
        for group in main(stage).param_groups:
            group["lr"] *= 0.9


class OwnLoop(hw.Stage):
    """Accumulates over two batches within an iteration, and clips."""

    def __init__(self) -> None:
        super().__init__(log_every=4)

    def run_epoch(self) -> None:
        for x, y in self.batches("train"):
            main(self).zero_grad()
            loss = record(self, F.cross_entropy(self.models["net"](x), y))
            loss.backward()
            nn.utils.clip_grad_norm_(self.models["net"].parameters(), 0.5)
            self.step_optimizer("main")
            self.log("loss", loss)


class OwnLoopHooks(OwnLoop):
    def pre_stage(self) -> None:
        head(self).reset_parameters()

    def pre_epoch(self) -> None:
        for group in main(self).param_groups:
            group["lr"] *= 0.7

    def post_epoch(self) -> None:
        with torch.no_grad():
            head(self).bias.zero_()


class GradientHook(Train):
    """A hook of torch on gradients, registered in `pre_stage`."""

    def pre_stage(self) -> None:
        head(self).weight.register_hook(lambda gradient: gradient * 0.5)


class ForwardHook(Train):
    def pre_stage(self) -> None:
        head(self).register_forward_hook(lambda _module, _given, output: output * 0.5)


class Reparametrized(Train):
    """Replaces a part of the model for the second stage, which is the same object for the optimizer."""

    def pre_stage(self) -> None:
        net = self.pipe.registered_models["net"].bare
        net.drop = nn.Dropout(0.5)


class Closing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra(x)


class ZeroExtra(Train):
    def pre_stage(self) -> None:
        nn.init.zeros_(self.pipe.registered_models["net"].bare.extra.weight)

    def post_epoch(self) -> None:
        nn.init.zeros_(self.pipe.registered_models["net"].bare.extra.bias)


VARIANTS = {
    "pre-stage-resets-head": Variant(stage=ResetHead),
    "pre-stage-resets-optimizer": Variant(stage=ResetOptimizer, kills=(5, 13)),
    "pre-stage-lowers-rate": Variant(stage=RateBeforeStage),
    "pre-stage-lowers-rate-scheduled": Variant(
        stage=RateBeforeStage, scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.95)
    ),
    "pre-stage-zeroes-a-part": Variant(stage=ZeroExtra, model=Closing),
    "pre-stage-sets-dropout": Variant(stage=Reparametrized),
    "pre-stage-gradient-hook": Variant(stage=GradientHook),
    "pre-stage-forward-hook": Variant(stage=ForwardHook),
    "pre-stage-adds-group": Variant(stage=AddGroupBeforeStage, optimizer=of_head),
    "pre-epoch-scales": Variant(stage=ScaleEachEpoch),
    "pre-epoch-scales-killed-elsewhere": Variant(stage=ScaleEachEpoch, kills=(8, 17)),
    "pre-epoch-draws": Variant(stage=NoiseEachEpoch),
    "pre-epoch-multiplies-rate": Variant(stage=RateEachEpoch),
    "pre-epoch-multiplies-rate-killed-elsewhere": Variant(stage=RateEachEpoch, kills=(9, 15)),
    "pre-epoch-sets-rate": Variant(stage=RateByEpoch),
    "pre-epoch-unfreezes": Variant(stage=Unfreeze, kills=(9, 13)),
    "pre-epoch-adds-group": Variant(stage=AddGroup, optimizer=of_head, kills=(5, 13)),
    "pre-epoch-adds-group-killed-after": Variant(stage=AddGroup, optimizer=of_head, kills=(9, 15)),
    "post-epoch-draws": Variant(stage=NoiseAfterEpoch),
    "post-epoch-multiplies-rate": Variant(stage=RateAfterEpoch),
    "post-epoch-unfreezes": Variant(stage=UnfreezeAfter),
    "post-epoch-adds-group": Variant(stage=AddGroupAfter, optimizer=of_head, kills=(9, 13)),
    "step-adds-group": Variant(stage=AddGroupInStep, optimizer=of_head, kills=(9, 13)),
    "post-stage-scales": Variant(stages=two_stages(EndOfStage, Train)),
    "post-stage-draws": Variant(stages=two_stages(EndOfStageDraws, Train)),
    "post-stage-ends-the-run": Variant(stages=two_stages(Train, EndOfStageDraws), kills=(13, 18)),
    "second-stage-resets-head": Variant(stages=two_stages(Train, ResetHead)),
    "second-stage-killed-within": Variant(stages=two_stages(Train, ResetHead), kills=(11, 16)),
    "second-stage-freezes": Variant(stages=two_stages(FreezeSecond, FreezeSecond), kills=(13, 16)),
    "second-stage-lowers-rate": Variant(stages=two_stages(Train, RateBeforeStage), kills=(13, 16)),
    "stages-of-steps": Variant(stages=by_steps, kills=(7, 9)),
    "pre-run-scales": Variant(pipeline=ResetInRun),
    "pre-run-registers": Variant(pipeline=RegisterInRun, stage=WithSecond),
    "callback-pre-stage": halved("pre_stage"),
    "callback-pre-epoch": halved("pre_epoch"),
    "callback-post-epoch": halved("post_epoch"),
    "callback-log-point": Variant(prepare=lambda pipe: pipe.add_callback(AtLogPoint())),
    "own-loop": Variant(stage=OwnLoop),
    "own-loop-hooks": Variant(stage=OwnLoopHooks),
}
