"""`OptimizerStep`: the part of a managed step from its losses to the update of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from headway.dist.collective.exchange import gather_rows
from headway.dist.device import exact_dtype
from headway.errors import HeadwayError, UsageError
from headway.train.model.losses import SMALLEST_WEIGHT, weighs_some
from headway.train.model.mesh_groups import total_norm
from headway.train.model.precision import HostReadback
from headway.train.model.zero_grad import fast_zero_grad

if TYPE_CHECKING:
    from headway.train.loop_state import LoopState
    from headway.train.model.schedules import Schedule
    from headway.train.run_state import RunState
    from headway.train.train_val_state import TrainValState


def check_norm(name: str, norm: object) -> None:
    """Raises `UsageError` unless the value of a setting is a norm to clip gradients to, or None."""
    if norm is not None and not (isinstance(norm, int | float | np.number) and norm is not True and norm > 0):
        raise UsageError(f"{name}={norm!r}: give a norm above 0, or None for no clipping")


@final
class OptimizerStep:
    """The part of a step after its forward passes: averages over batches and ranks, clips, and steps optimizers."""

    def __init__(self, state: TrainValState) -> None:
        self._state = state
        self.skipped_in_a_row = 0
        self.weighs: bool | None = None
        """whether the batches of this epoch so far have weights, if that is known"""
        self._updates: list[Callable[[], object]] | None = None
        self._ordered: dict[tuple[tuple[int, int], ...], list[nn.Parameter]] = {}  # by groups of parameters
        self._shares: Sequence[Tensor | float] = ()  # of each batch in this step, if batches have no weights
        self._weight: Tensor | None = (
            None  # of this rank's batches so far, if gradients are divided at the end
        )
        self._unit: Tensor | None = None  # of weights, see `_choose_unit`
        self._equal_gradients = True  # whether all ranks have the same gradients, or parts of the same
        self._undecided: tuple[Sequence[Optimizer], HostReadback] | None = (
            None  # whether the last step overflowed
        )

    def begin_epoch(self) -> None:
        """Prepares, once per epoch and after its hooks, what does not depend on the step."""
        self.weighs, self._updates = None, self._fixed_updates()
        self._ordered.clear()
        models = self._state.pipe.registered_models.values()
        trained = [model for model in models if any(p.requires_grad for p in model.bare.parameters())]
        self._equal_gradients = all(model.synced for model in trained)

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps skipped in a row, and the unit of weights in fp16, on which overflows depend."""
        fp16 = self._state.precision.scaler is not None
        return {
            "skipped": self.skipped_in_a_row,
            "unit": self._unit.item() if fp16 and self._unit is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped_in_a_row, unit = state["skipped"], state.get("unit")  # older checkpoints have no unit
        if unit is not None and self._state.precision.scaler is not None:
            device = self._state.device
            self._unit = torch.tensor(unit, dtype=exact_dtype(device), device=device)

    # --- the mean over batches and ranks

    def scale(self, loss: Tensor, weight: Tensor | None, window: Sequence[Any], number: int) -> Tensor:
        """Returns the loss to call backward on, so that the gradient is that of a mean over all batches and ranks.

        It is the mean over samples, or by the weights that the step returned. With accumulation, the total weight is
        not known before the last forward pass; gradients are then those of a sum, and `apply_update` divides them.
        """
        if self.weighs is (weight is None):
            raise weighs_some(self._state.stage)
        if weight is None:
            if number == 0:
                self._shares = self._sample_shares(window)
            return loss * self._shares[number]
        self._state.run.timer.mark_step("backward")  # waiting for other ranks counts as backward, as in DDP
        if self._state.settings.accumulate == 1:
            return loss.float() * (weight * self._ranks_per_weight(weight)).float()
        if self._unit is None:
            self._unit = self._choose_unit(weight)
        self._weight = weight if self._weight is None else self._weight + weight
        return loss.float() * (weight / self._unit).float()

    def agree_on_weights(self, weighs: bool) -> None:
        """Sets whether the batches of this epoch have weights; raises on all ranks if only some ranks return them.

        From here on, such ranks would run different collectives from the rest, and all would hang.
        """
        if self._state.pipe.world.world_size > 1:
            table = gather_rows(torch.tensor([float(weighs)], device=self._state.device))
            ranks = table[:, 0].nonzero()[:, 0].tolist()
            if 0 < len(ranks) < len(table):
                raise weighs_some(self._state.stage, ranks)
        self.weighs = weighs

    def _ranks_per_weight(self, weight: Tensor) -> Tensor:
        """Returns the number of ranks, by which the gradient sync divides, over the total weight of all ranks."""
        total, size = weight.clone(), self._state.pipe.world.world_size
        if size > 1:
            c10d.all_reduce(total)
        return size / total.clamp(min=SMALLEST_WEIGHT)

    def _choose_unit(self, weight: Tensor) -> Tensor:
        """Returns a power of two near the weights, the same on all ranks, as the unit in which they are counted.

        Only fp16 needs it: a loss times thousands of tokens would overflow until the loss scale has shrunk as much.
        It is chosen once in a run, and saved: overflows and rounding in fp16 depend on it.
        """
        if self._state.precision.scaler is None:
            return torch.ones_like(weight)
        largest = weight.clamp(min=1.0)
        if self._state.pipe.world.world_size > 1:
            c10d.all_reduce(largest, op=c10d.ReduceOp.MAX)
        return largest / torch.frexp(largest).mantissa

    def _divide_gradients(self, weight: Tensor) -> None:
        """Divides the gradients of a sum of losses by the total weight, which makes them those of the mean."""
        assert self._unit is not None
        factor = self._unit * self._ranks_per_weight(weight)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
        for each in local:
            each.mul_(factor.to(each.device))

    def _sample_shares(self, window: Sequence[Any]) -> Sequence[Tensor | float]:
        """Returns the weight of each batch's mean loss in the mean over all samples of the window, on all ranks."""
        self._state.run.timer.mark_step("backward")  # waiting for other ranks counts as backward, as in DDP
        counts = [self._state.checked_count(batch) for batch in window]
        mine, size = sum(counts), self._state.pipe.world.world_size
        total = torch.tensor(mine, dtype=exact_dtype(self._state.device), device=self._state.device)
        if size > 1:
            c10d.all_reduce(total)  # ranks may have last batches of different sizes, or no sample
        if not mine and not float(total):  # the number is read only where this rank has no sample
            raise UsageError(
                f"stage {self._state.name!r} counts no sample in the {len(window)} batches of a step: return how many "
                "samples a batch has from count_samples()"
            )
        if size == 1:
            return [count / mine for count in counts]
        return [(count * size / total).float() for count in counts]

    # --- the update

    def set_gradient_sync(self, enabled: bool) -> None:
        """Sets whether the next backward averages gradients over ranks, or only adds them up on this rank."""
        for model in self._state.pipe.registered_models.values():
            model.set_gradient_sync(enabled)

    def parameters(self) -> list[nn.Parameter]:
        """Returns all parameters that this stage's optimizers step and that have a gradient."""
        groups = [group for optimizer in self._state.stage.optimizers() for group in optimizer.param_groups]
        # hooks may add groups and parameters
        key = tuple((id(group), len(group["params"])) for group in groups)
        if key not in self._ordered:
            self._ordered[key] = self._in_order_of_models([p for group in groups for p in group["params"]])
        return [p for p in self._ordered[key] if p.grad is not None]

    def _in_order_of_models(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Sorts parameters as `model.parameters()` has them: the last bit of their norm depends on the order."""
        models = [model.bare for model in self._state.pipe.registered_models.values()]
        places = {id(p): place for place, p in enumerate(p for model in models for p in model.parameters())}
        return sorted(parameters, key=lambda p: places.get(id(p), len(places)))

    def apply_update(self) -> bool:
        """Clips gradients and steps optimizers, schedulers and averages; returns False if it skips the step."""
        if self._weight is not None:
            self._divide_gradients(self._weight)
            self._weight = None
        if self._updates is not None:
            for update in self._updates:
                update()
            return True
        self.settle()
        stage, settings = self._state.stage, self._state.settings
        optimizers, limit = stage.optimizers(), stage.gradient_clip()
        check_norm("gradient_clip()", limit)
        norm = None
        if limit is not None or settings.on_nan == "skip":
            for optimizer in optimizers:
                self._state.precision.unscale(optimizer)
            norm = total_norm([p.grad for p in self.parameters() if p.grad is not None])
        made = norm is None or settings.on_nan == "stop" or self._is_finite(norm)
        if made:
            if norm is not None and limit is not None:
                stage.clip_gradients(norm, limit)
            self._state.optimize()
            self._follow(optimizers)
            if norm is not None:
                self._log_norm(norm)
        if self._state.precision.scaler is not None:
            self._state.precision.scaler.update()
        stage.zero_grad()
        return made

    def _follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Steps the schedulers and averages of the optimizers that stepped: an overflow in fp16 skips all of them.

        The result of the overflow check is on the device. A fused optimizer does not make the host wait for it; then
        the host reads it only before the next update, when the device has the work of a whole step queued.
        """
        precision, followers = self._state.precision, followers_of(self._state.run, optimizers)
        if precision.scaler is None:
            for follow in followers:
                follow()
            return
        overflows = torch.stack([precision.overflow(optimizer) for optimizer in optimizers])
        skipped = overflows.amax()
        if not self._equal_gradients and self._state.pipe.world.world_size > 1:
            c10d.all_reduce(skipped, op=c10d.ReduceOp.MAX)
        self._log_skipped(skipped)
        if followers:
            self._undecided = optimizers, HostReadback(overflows)
            if not any(map(precision.runs_ahead, optimizers)):
                self.settle()

    def settle(self) -> None:
        """Steps the schedulers and averages of the last update, if they were deferred until its overflow check.

        Call it before anything reads schedulers, learning rates or averages.
        """
        if self._undecided is None:
            return
        (optimizers, overflows), self._undecided = self._undecided, None
        stepped = [
            each for each, overflowed in zip(optimizers, overflows.read(), strict=True) if not overflowed
        ]
        for follow in followers_of(self._state.run, stepped):
            follow()

    def _log_norm(self, norm: Tensor) -> None:
        """Logs the norm of the gradients; one that has overflowed in fp16 belongs to a skipped step."""
        if self._state.precision.scaler is None:
            self._state.log_own("grad_norm", norm)
        else:
            self._state.log_own("grad_norm", norm, weight=norm.isfinite())

    def _log_skipped(self, skipped: Tensor | int) -> None:
        """Counts a skipped step once, not once per rank."""
        counts = float(self._state.pipe.world.is_root)
        self._state.log_own("skipped_steps", skipped, weight=counts, reduce="sum")

    def _fixed_updates(self) -> list[Callable[[], object]] | None:
        """Returns the calls that a step makes to apply its gradients; None if some of them depend on the step.

        Together with `fast_zero_grad` this saves 21 us of a step of 2,055 us (benchmarks/loop.py, H200).
        """
        settings = self._state.settings
        if settings.gradient_clip is not None or settings.on_nan == "skip" or self._state.precision.scaler:
            return None
        if not all(map(self._state.is_default, ("optimizers", "zero_grad", "optimize", "gradient_clip"))):
            return None
        optimizers = self._state.stage.optimizers()
        steps, clears = [each.step for each in optimizers], [fast_zero_grad(each) for each in optimizers]
        return [*steps, *followers_of(self._state.run, optimizers), *clears]

    def _is_finite(self, norm: Tensor) -> bool:
        """Whether losses and norm are finite on all ranks (for `on_nan="skip"`); raises after too many skips in a row.

        A loss may be non-finite although its gradients are finite, and on one rank only: a mean over no token is NaN
        with gradients of 0.
        """
        step, device = self._state.run.steps_done + 1, self._state.device
        losses = [
            loss
            for _, loss, samples, weight in takewhile(
                lambda each: each[0] == step, reversed(self._state.recent_losses)
            )
            if samples or weight is not None  # not those of repeated batches
        ]
        bad = torch.stack([~each.to(device).isfinite() for each in (norm, *losses)]).any().float()
        if self._state.pipe.world.world_size > 1:
            c10d.all_reduce(bad, op=c10d.ReduceOp.MAX)
        if not bad.item():
            self.skipped_in_a_row = 0
            return True
        self.skipped_in_a_row += 1
        self._log_skipped(1)
        if self.skipped_in_a_row > self._state.settings.max_skips:
            raise HeadwayError(
                f"stage {self._state.name!r}: the losses or gradients of {self.skipped_in_a_row} steps in a row, up to "
                f"step {step}, are non-finite: lower the learning rate, set gradient_clip, or check the data"
            )
        return False


def followers_of(run: RunState, optimizers: Sequence[Optimizer]) -> list[Callable[[], object]]:
    """Returns the calls that follow steps of optimizers: to their schedulers, and to the averages of their models."""
    schedulers = [
        schedule.step
        for optimizer in optimizers
        for schedule in run.schedules.values()
        if schedule.every == "step" and schedule.optimizer is optimizer
    ]
    averages = [
        model.ema.update
        for model in run.pipe.registered_models.values()
        if model.ema is not None and any(model.ema.follows(optimizer) for optimizer in optimizers)
    ]
    return [*schedulers, *averages]


def epoch_schedules(state: LoopState) -> list[Schedule]:
    """Returns the schedulers that step after an epoch of a stage, unless only other stages step their optimizers."""
    mine = state.stepped_optimizers().values()
    managed = [each for each in state.run.stage_states if not each.loop_is_users]
    others = [optimizer for each in managed for optimizer in each.stepped_optimizers().values()]
    return [
        schedule
        for schedule in state.run.schedules.values()
        if any(schedule.optimizer is each for each in mine)
        or not any(schedule.optimizer is each for each in others)
    ]
