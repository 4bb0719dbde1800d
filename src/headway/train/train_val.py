"""`TrainValStage`: training and validation in the managed loop, with a method to override for each of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import cached_property
from types import MethodType
from typing import Any, final

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from headway.dist import set_phase
from headway.dist.collective.exchange import gather_rows
from headway.errors import HeadwayError, UsageError
from headway.train import batches as feed, loop
from headway.train.diagnose import evidence
from headway.train.metrics.meter import Meter, Point, Reduction, Scope
from headway.train.model.mesh_groups import apart, total_norm
from headway.train.model.precision import Precision
from headway.train.settings import TrainSettings
from headway.train.stage import Stage, missing_dataset, no_batch


class TrainValStage(Stage):
    """Trains and validates; you write `step`, or `train_step` and `val_step`.

    class Classify(hw.TrainValStage):
        def step(self, batch):
            x, y = batch
            logits = self.models["net"](x)
            self.log("accuracy", (logits.argmax(1) == y).float().mean(), weight=len(y))
            return F.cross_entropy(logits, y)

    pipe.append_stage(Classify(precision="bf16", gradient_clip=1.0), max_epochs=10)
    """

    def __init__(self, **settings: Any) -> None:
        known = [field.name for field in fields(TrainSettings)]
        for name in settings:
            if name not in known:
                raise UsageError(
                    f"{type(self).__name__} has no setting {name!r}: there are {', '.join(known)}"
                )
        self.settings = TrainSettings(**settings)
        super().__init__(log_every=self.settings.log_every)
        self.columns = [f"{prefix}{self.loss_metric_name()}" for prefix in self._prefixes()]
        self.training = True
        self.muted = False
        self.skipped = 0  # steps left out in a row
        self.validated_at = 0  # the steps that were finished at the last validation
        self._validated: dict[str, Any] = {}
        self._updates: list[Callable[[], object]] | None = None

    # --- what you may override

    def step(self, batch: Any) -> Tensor | None:
        """Forward and loss, for training and validation alike."""
        raise NotImplementedError

    def train_step(self, batch: Any) -> Tensor | None:
        """Forward and loss in training; by default `step`."""
        return self.step(batch)

    def val_step(self, batch: Any) -> Tensor | None:
        """Forward and loss in validation; by default `step`. May return None."""
        return self.step(batch)

    def train_dataset(self) -> Iterable[Any]:
        """What to train on; by default the dataset "train"."""
        if "train" not in self.datasets:
            raise UsageError(missing_dataset(self, "train"))
        return self.datasets["train"]

    def val_dataset(self) -> Iterable[Any] | None:
        """What to validate on; by default the dataset "val", if there is one."""
        return self.datasets.get("val")

    def optimizers(self) -> Sequence[Optimizer]:
        """The optimisers that this stage steps; by default the only one there is."""
        return self._only_optimizer

    @cached_property
    def _only_optimizer(self) -> Sequence[Optimizer]:
        every = self.pipe.optimizers
        if len(every) != 1:
            names = ", ".join(repr(name) for name in every) or "none"
            raise UsageError(
                f"stage {self.name!r} cannot tell which optimiser to step, there is {names}: register one, or override "
                "optimizers() to return those of this stage"
            )
        return list(every.values())

    def zero_grad(self) -> None:
        """Forgets the gradients, before each optimiser step's first batch."""
        for optimizer in self.optimizers():
            forgetting(optimizer)()

    def clip_gradients(self, norm: Tensor, limit: float) -> None:
        """Scales all gradients so that their common norm is at most `limit`; by default all alike."""
        for kind in apart(self.parameters()):
            clip_grads_with_norm_(kind, limit, norm)

    def optimize(self) -> None:
        """Steps the optimisers."""
        scaler = self.precision.scaler
        for optimizer in self.optimizers():
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)

    def gradient_clip(self) -> float | None:
        """The largest norm of all gradients together, for this step; by default the setting."""
        return self.settings.gradient_clip

    def loss_metric_name(self) -> str:
        return "loss"

    def train_metric_prefix(self) -> str:
        return "train/"

    def val_metric_prefix(self) -> str:
        return "val/"

    # --- the loop

    @final
    def run_epoch(self) -> None:
        """The managed loop: see loop.py."""
        for _ in loop.train(self):  # pauses where a validation is due
            loop.validate(self)

    @property
    def models(self) -> Mapping[str, nn.Module]:
        return self.pipe.models if self.training else self.pipe.evaluated_models

    @cached_property
    def precision(self) -> Precision:
        return Precision(self.settings.precision, self.device)

    @cached_property
    def val_meter(self) -> Meter:
        return Meter(self.device)

    def log(
        self,
        name: str,
        value: Tensor | float,
        *,
        weight: Tensor | float = 1.0,
        reduce: Reduction = "mean",
        scope: Scope = "global",
    ) -> None:
        """As `Stage.log`; the metric is `train/name` in training and `val/name` in validation."""
        if self.muted:
            return
        if self.training:
            self.meter.log(
                self.train_metric_prefix() + name, value, weight=weight, reduce=reduce, scope=scope
            )
        else:
            self.val_meter.log(
                self.val_metric_prefix() + name, value, weight=weight, reduce=reduce, scope=scope
            )

    def parameters(self) -> list[nn.Parameter]:
        """All parameters that this stage's optimisers step and that have a gradient."""
        groups = [group for optimizer in self.optimizers() for group in optimizer.param_groups]
        return [p for group in groups for p in group["params"] if p.grad is not None]

    def shares(self, window: Sequence[Any]) -> Sequence[Tensor | float]:
        """What each batch's mean loss counts in the mean over all samples of the window, on all ranks."""
        if self.weight:
            self.pipe.split.mark("backward", self.weight)  # where other ranks are waited for, too
        counts = [self.count_samples(batch) for batch in window]
        mine, size = sum(counts), self.pipe.world.world_size
        if size == 1:
            return [count / mine for count in counts]
        every = torch.tensor(float(mine), device=self.device)
        c10d.all_reduce(every)  # ranks may have different last batches
        return [count / mine * (mine * size / every) for count in counts]

    def let_gradients_travel(self, now: bool) -> None:
        """Between ranks, with the next backward; else they only add up on this rank."""
        for model in self.pipe.registered.values():
            model.travel(now)

    def before_log_point(self) -> None:
        if self.recent_losses:
            losses = torch.stack([loss for _, loss, _ in self.recent_losses])
            counts = [count for _, _, count in self.recent_losses]
            self.samples = sum(counts)
            total = max(self.samples, 1)
            if min(counts) == max(counts):
                mean = losses.mean(dtype=torch.float64)  # one kernel
            else:
                mean = (
                    losses.double() @ torch.tensor(counts, dtype=torch.float64, device=losses.device) / total
                )
            self.log(self.loss_metric_name(), mean, weight=total)

    def examine(self, point: Point) -> None:
        """Stops all ranks if the loss of any is not finite, and says where it began."""
        name = self.train_metric_prefix() + self.loss_metric_name()
        if ranks := point.unfinished.get(name):
            bad = [step for step, loss, _ in self.recent_losses if not loss.isfinite()]
            first = (
                gather_rows(torch.tensor([float(bad[0]) if bad else math.inf], device=self.device))
                .min()
                .item()
            )
            who = ", ".join(str(rank) for rank in ranks)
            known = evidence.of_a_loss(
                self, first, point.values.get(self.train_metric_prefix() + "grad_norm")
            )
            raise HeadwayError(
                f"the loss of stage {self.name!r} is not finite since step {first:g}, on rank {who}{known}: "
                'lower the learning rate, set gradient_clip, look at the data of that step, or pass on_nan="skip"'
            )
        self.recent_losses.clear()

    def step_optimizers(self) -> bool:
        """Clips, steps, schedules and averages; or leaves the step out, if that is the policy for a bad gradient."""
        if self._updates is not None:
            for update in self._updates:
                update()
            return True
        optimizers, limit = self.optimizers(), self.gradient_clip()
        norm = None
        if limit is not None or self.settings.on_nan == "skip":
            for optimizer in optimizers:
                self.precision.unscale(optimizer)
            norm = total_norm([p.grad for p in self.parameters() if p.grad is not None])
        made = norm is None or self.settings.on_nan == "stop" or self._is_sound(norm)
        if made:
            if norm is not None and limit is not None:
                self.clip_gradients(norm, limit)
                self.log("grad_norm", norm)
            self.optimize()
            for follow in self.pipe.followers(optimizers):
                follow()
        if self.precision.scaler is not None:
            self.precision.scaler.update()
        self.zero_grad()
        return made

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._updates = self._fixed_updates()

    def _fixed_updates(self) -> list[Callable[[], object]] | None:
        """All that a step does with its gradients, as calls; None if some of it is decided in the step."""
        settings = self.settings
        if settings.gradient_clip is not None or settings.on_nan == "skip" or self.precision.scaler:
            return None
        for name in ("optimizers", "zero_grad", "optimize", "gradient_clip"):
            if getattr(self, name) != MethodType(getattr(TrainValStage, name), self):  # it is the stage's own
                return None
        optimizers = self.optimizers()
        stepped, cleared = [each.step for each in optimizers], [forgetting(each) for each in optimizers]
        return [*stepped, *self.pipe.followers(optimizers), *cleared]

    def _is_sound(self, norm: Tensor) -> bool:
        """For `on_nan="skip"`: whether the step is to be made, the same on all ranks."""
        bad = (~norm.isfinite()).float()
        if self.pipe.world.world_size > 1 and not all(
            model.synced for model in self.pipe.registered.values()
        ):
            c10d.all_reduce(bad, op=c10d.ReduceOp.MAX)
        if not bad.item():
            self.skipped = 0
            return True
        self.skipped += 1
        self.log("skipped_steps", 1, reduce="sum")
        if self.skipped > self.settings.max_skips:
            raise HeadwayError(
                f"stage {self.name!r}: the gradients of {self.skipped} steps in a row, up to {self.pipe.step + 1}, are "
                "not finite: lower the learning rate, clip gradients, or look at the data"
            )
        return False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around a validation: modules in eval mode, without wrappers, with averaged weights; then as before."""
        models = self.pipe.registered.values()
        modes = [(part, part.training) for model in models for part in model.bare.modules()]
        if self.pipe.keeper:
            self.pipe.keeper.before_validation()
        self.training = False
        set_phase("validation", self.pipe.step)
        try:
            with ExitStack() as stack:
                for model in models:
                    model.bare.eval()
                    stack.enter_context(model.evaluating())
                stack.enter_context(torch.no_grad())
                yield
        finally:
            self.training = True
            for part, mode in modes:
                part.training = mode

    @contextmanager
    def running(self) -> Iterator[None]:
        before = torch.are_deterministic_algorithms_enabled()
        for model in self.pipe.registered.values():
            model.bare.train()  # pre_stage may freeze parts again
        if self.settings.deterministic:
            torch.use_deterministic_algorithms(True)
        try:
            with super().running(), self.precision.applied():
                yield
        finally:
            torch.use_deterministic_algorithms(before)

    @property
    def shares_batches(self) -> bool:
        """Whether all ranks must take part in each batch of a validation."""
        return any(model.sharded for model in self.pipe.registered.values())

    def val_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches to validate on. Sharded models need all ranks for each of them: a rank that has no more data goes
        on with its last batch, and what it logs then does not count."""
        batches, mark = self.feed(loader, self.settings.limit_val_batches), self.pipe.split.mark
        mark("data")
        if not self.shares_batches:
            for batch in batches:
                yield batch
                mark("data")
            return
        last = None
        while True:
            batch = next(batches, None)
            if not gather_rows(torch.tensor([float(batch is not None)], device=self.device)).any():
                break
            if batch is None and last is None:
                raise UsageError(
                    f"rank {self.pipe.world.rank} has no batch to validate on: a sharded model needs one on each rank"
                )
            self.muted = batch is None
            last = last if batch is None else batch
            yield last
            mark("data")
        self.muted = False

    def validation_due(self, *, epoch_ends: bool) -> bool:
        """Whether to validate after this step."""
        every = self.settings.val_every
        if (steps := self.settings.val_steps) is not None:
            return not epoch_ends and self.steps % steps == 0 and self.validated_at != self.steps
        return epoch_ends and bool(every) and (self.epoch + 1) % int(every) == 0

    def check(self) -> None:
        mine = type(self)
        if mine.step is TrainValStage.step and mine.train_step is TrainValStage.train_step:
            raise UsageError(
                f"stage {self.name!r} has no step: define step(self, batch) that returns the loss"
            )
        self.train_dataset()
        self.optimizers()

    def check_lengths(self) -> None:
        """Ranks with different numbers of batches would wait for each other for ever: they are refused instead."""
        mine = feed.length(self.train_dataset(), self.settings.limit_train_batches)
        if self.pipe.world.world_size == 1:
            return
        lengths = gather_rows(torch.tensor([-1.0 if mine is None else float(mine)], device=self.device))[:, 0]
        known = {rank: int(length) for rank, length in enumerate(lengths.tolist()) if length >= 0}
        if len(set(known.values())) > 1:
            said = ", ".join(f"{length:,} on rank {rank}" for rank, length in list(known.items())[:16])
            raise UsageError(
                f"stage {self.name!r} has different numbers of training batches: {said}; use hw.data.DataLoader, "
                "drop_last=True, or limit_train_batches"
            )

    def check_progress(self, steps: int) -> None:
        if steps == 0:
            raise UsageError(no_batch(self))

    def not_a_loss(self, returned: object) -> UsageError:
        """What is wrong with what a training step returned."""
        if not isinstance(returned, Tensor):
            return UsageError(
                f"train_step of stage {self.name!r} returned {type(returned).__name__} instead of a loss: return the "
                "tensor to call backward() on"
            )
        if returned.ndim:
            return UsageError(
                f"train_step of stage {self.name!r} returned a loss of shape {tuple(returned.shape)}: return one "
                "number, such as loss.mean()"
            )
        return UsageError(
            f"train_step of stage {self.name!r} returned a loss that no parameter has a part in: do not detach it, and "
            "let the model's parameters require gradients"
        )

    def total_steps(self) -> int | None:
        """Optimiser steps of the whole stage, if the loader knows its length."""
        batches = feed.length(self.train_dataset(), self.settings.limit_train_batches)
        known = [self.max_steps] if self.max_steps is not None else []
        if batches is not None and self.max_epochs is not None:
            known.append(math.ceil(batches / self.settings.accumulate) * self.max_epochs)
        return min(known, default=None)

    def epoch_values(self) -> dict[str, Any]:
        values = super().epoch_values() | self._validated
        self._validated = {}
        return values

    def validated(self, point: Point) -> None:
        """Notes the result of a validation, for its own row and for the epoch's."""
        self.val_meter.finish_epoch()
        self._validated, self.validated_at = dict(point.values), self.steps
        self.pipe.note(self, "validation", point)
        if self.pipe.keeper:
            self.pipe.keeper.after_validation(self)
        self.pipe.split.rest()

    def rests_next(self) -> bool:
        return super().rests_next() or self.validation_due(epoch_ends=False)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "precision": self.precision.state_dict(),
            "skipped": self.skipped,
            "validated": self._validated,
            "validated_at": self.validated_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.precision.load_state_dict(state["precision"])
        self.skipped = state["skipped"]
        self._validated, self.validated_at = state["validated"], state["validated_at"]

    def _prefixes(self) -> tuple[str, str]:
        return self.train_metric_prefix(), self.val_metric_prefix()


def forgetting(optimizer: Optimizer) -> Callable[[], None]:
    """What `optimizer.zero_grad()` does, without what it spends most of its time on: telling a profiler of itself."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        return optimizer.zero_grad  # its own

    def forget() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return forget
