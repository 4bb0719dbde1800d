"""`TrainValStage`: training and validation in the managed loop, with a method to override for each of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, Unpack, final

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from headway.train import loop
from headway.train.batches import missing_dataset
from headway.train.model.mesh_groups import group_by_mesh
from headway.train.model.zero_grad import fast_zero_grad
from headway.train.settings import TrainOptions, TrainSettings, check_setting_names
from headway.train.stage import Stage
from headway.train.train_val_state import TrainValState

Loss: TypeAlias = "Tensor | tuple[Tensor, Tensor | float]"
"""the return value of a step: a mean loss, with or without its weight"""


class TrainValStage(Stage):
    """Trains and validates; you write `step`, or `train_step` and `val_step`.

        class Classify(hw.TrainValStage):
            def step(self, batch):
                x, y = batch
                logits = self.models["net"](x)
                self.log("accuracy", (logits.argmax(1) == y).float().mean(), weight=len(y))
                return F.cross_entropy(logits, y)

        pipe.append_stage(Classify(precision="bf16", gradient_clip=1.0), max_epochs=10)

    What you write, besides the hooks of `Stage`: `step`, `train_step`, `val_step`, `train_dataset`, `val_dataset`,
    `optimizers`, `zero_grad`, `clip_gradients`, `optimize`, `gradient_clip`, `loss_metric_name`, `train_metric_prefix`
    and `val_metric_prefix`. What you use, besides the names of `Stage`: `training`. All other names are yours.
    """

    _loop: TrainValState

    def __init__(self, **settings: Unpack[TrainOptions]) -> None:
        check_setting_names(type(self).__name__, settings, TrainSettings)
        vars(self)["_loop"] = TrainValState(self, TrainSettings(**settings), base=TrainValStage)

    # --- what you write

    def step(self, batch: Any) -> Loss | None:  # noqa: ARG002
        """Computes forward and loss, for training and validation alike.

        Returns the mean loss over the samples of the batch; or, for a mean over anything else, that mean and its
        weight: batches and ranks are then averaged by weight.

            return F.cross_entropy(logits, labels), (labels != -100).sum()      # a mean over tokens
        """
        raise self._loop.no_step()

    def train_step(self, batch: Any) -> Loss | None:
        """Computes forward and loss in training; by default `step`."""
        return self.step(batch)

    def val_step(self, batch: Any) -> Loss | None:
        """Computes forward and loss in validation; by default `step`. May return None."""
        return self.step(batch)

    def train_dataset(self) -> Iterable[Any]:
        """Returns the loader to train on, which is a registered one; by default the dataset "train"."""
        if "train" not in self.datasets:
            raise missing_dataset(self, "train")
        return self.datasets["train"]

    def val_dataset(self) -> Iterable[Any] | Mapping[str, Iterable[Any]] | None:
        """Returns the loader to validate on, or a dict of several; by default the dataset "val", if there is one.

        The metrics of `{"val": ..., "ood": ...}` are called `val/loss`, `ood/loss` and so on.
        """
        return self.datasets.get("val")

    def optimizers(self) -> Sequence[Optimizer]:
        """Returns the optimizers that this stage steps; by default the only one that is registered."""
        return self._loop.only_optimizer

    def zero_grad(self) -> None:
        """Clears the gradients, before the first batch of each optimizer step.

        It clears those of all registered optimizers: a backward pass may also fill gradients of parameters that another
        optimizer steps, in a later step.
        """
        for optimizer in self.pipe.optimizers.values():
            fast_zero_grad(optimizer)()

    def clip_gradients(self, norm: Tensor, limit: float) -> None:
        """Scales all gradients by one factor, so that their total norm is at most `limit`."""
        for parameters in group_by_mesh(self._loop.optimizer_step.parameters()):
            clip_grads_with_norm_(parameters, limit, norm)

    def optimize(self) -> None:
        """Steps the optimizers that `optimizers()` returns; the loop then steps schedulers and updates averages.

        If you override it, call `super().optimize()` or `self.step_optimizer(name)` instead of `optimizer.step()`:
        under fp16, gradients have a scale, which both remove.
        """
        for optimizer in self.optimizers():
            self._loop.precision.step(optimizer)

    def gradient_clip(self) -> float | None:
        """Returns the largest total norm of the gradients in this step; by default the setting."""
        return self._loop.settings.gradient_clip

    def loss_metric_name(self) -> str:
        """Returns the metric name of the loss."""
        return "loss"

    def train_metric_prefix(self) -> str:
        """Returns the prefix of metric names in training."""
        return "train/"

    def val_metric_prefix(self) -> str:
        """Returns the prefix of metric names in validation."""
        return "val/"

    # --- what you use

    @property
    @final
    def training(self) -> bool:
        """Whether the stage is training rather than validating."""
        return self._loop.training

    @final
    def run_epoch(self) -> None:
        """Runs the managed loop: see loop.py."""
        for _ in loop.train(self._loop):  # pauses where a validation is due
            loop.validate(self._loop)
