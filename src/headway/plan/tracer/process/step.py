"""Builds the user's model from tensors without data, and runs training steps under the memory meter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as functional
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from headway.plan.tracer.process import user_code
from headway.plan.tracer.process.blocks import checkpoint_blocks
from headway.plan.tracer.process.memory_meter import MemoryMeter
from headway.plan.tracer.settings import TraceSettings

_Optimizers = Sequence[torch.optim.Optimizer]
_STEPS = 2
"""The first step creates the optimizer's state, the second is measured; a third would change nothing."""
_LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "mse": functional.mse_loss,
}
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-4),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
}


@dataclass(kw_only=True)
class TrainingSetup:
    """A model, its batch, and functions that compute the loss and make the optimizers."""

    model: nn.Module
    batch: Any
    forward: Callable[[], Any]
    """Returns the loss, or an output that contains it."""
    optimizers: Callable[[list[nn.Parameter]], Sequence[torch.optim.Optimizer]]
    """Called when the model is sharded, which replaces its parameters."""
    keeps_gradients: bool = False
    """Gradients stay allocated between steps, as in the buckets of DDP."""
    others: Sequence[torch.Tensor] = ()
    """Further tensors on the device, such as averages of the weights."""


@final
class StepTracer:
    """Builds and runs the step. After a failure, the counts of the model that was built remain.

    `make` builds the training setup under the meter; by default, from the functions that the settings name.
    """

    def __init__(
        self,
        settings: TraceSettings,
        make: Callable[[], TrainingSetup] | None = None,
        backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    ) -> None:
        self.settings, self._backward = settings, backward
        self._make = make or (lambda: setup_of(settings))
        self.meter = MemoryMeter()
        self.notes: list[str] = []
        self.parameters = 0
        self.trainable = 0
        self.state_bytes: dict[str, int] = {}
        self.built_at = 0
        self.measured_from = 0

    def run(self) -> None:
        pure = self.settings.precision == "pure-bf16"
        torch.set_default_dtype(torch.bfloat16 if pure else torch.float32)
        if self.settings.fsdp == 1:
            self._run(None)
            return
        # takes half a second to import
        from headway.plan.tracer.process.sharding import fake_sharding

        with fake_sharding(self.settings.fsdp, self.settings.precision) as shard:
            self._run(shard)

    def _run(self, shard: Callable[[nn.Module], None] | None) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True), self.meter:
            setup, optimizers = self._build(shard)
            self.built_at = len(self.meter.events)
            for turn in range(_STEPS):
                if turn == _STEPS - 1:
                    self.measured_from = len(self.meter.events)
                    self.meter.queue = []
                self._step(setup, optimizers)

    def _build(self, shard: Callable[[nn.Module], None] | None) -> tuple[TrainingSetup, _Optimizers]:
        setup = self._make()
        model = setup.model
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if self.settings.checkpoint:
            checkpoint_blocks(model)
        if shard is not None:
            shard(model)
        for parameter in model.parameters():
            self.meter.label(parameter, "parameters")
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._label_gradient)  # type: ignore[no-untyped-call]
        for buffer in model.buffers():
            self.meter.label(buffer, "buffers")
        for name, tensors in (("inputs", tree_leaves(setup.batch)), ("averages", setup.others)):
            for leaf in tensors:
                if isinstance(leaf, torch.Tensor):
                    self.meter.label(leaf, name)
        self._name_modules(model)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self.state_bytes = {"parameters": weights, "gradients": trained}
        model.train()
        return setup, self._optimizers(setup)

    def _optimizers(self, setup: TrainingSetup) -> _Optimizers:
        optimizers = setup.optimizers([p for p in setup.model.parameters() if p.requires_grad])
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True  # torch's default on CUDA
        return optimizers

    def _label_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.meter.label(parameter.grad, "gradients")

    def _step(self, setup: TrainingSetup, optimizers: _Optimizers) -> None:
        meter = self.meter
        for _ in range(self.settings.accumulate):
            with meter.during("forward"):
                losses = [self._loss(setup)]
            with meter.during("backward"):
                self._backward(losses.pop())
        with meter.during("optimizer"):
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            for leaf in tree_leaves(list(optimizer.state.values())):
                if isinstance(leaf, torch.Tensor):
                    meter.label(leaf, "optimizer")
            optimizer.zero_grad(set_to_none=not setup.keeps_gradients)

    def _loss(self, setup: TrainingSetup) -> torch.Tensor:
        amp = self.settings.precision == "amp" and self.settings.fsdp == 1
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            return self._scalar(setup.forward())

    def _scalar(self, output: Any) -> torch.Tensor:
        """Returns the model's loss; for a model that returns none, the mean of its output."""
        if isinstance(output, dict):
            output = output.get("loss", output)
        loss = getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor):
            return loss
        if isinstance(output, torch.Tensor) and output.dim() == 0:
            return output
        leaves = [
            leaf
            for leaf in tree_leaves(output)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        ]
        note = "the module returns no loss, so the mean of its output is used; give a loss for an exact peak"
        if note not in self.notes:
            self.notes.append(note)
        return torch.stack([leaf.float().mean() for leaf in leaves]).sum()

    def _name_modules(self, model: nn.Module) -> None:
        """Sets `meter.module` to the module whose forward is running."""
        meter = self.meter
        for name, module in model.named_modules():
            stack: list[str] = []

            def enter(_: Any, __: Any, name: str = name, stack: list[str] = stack) -> None:
                stack.append(meter.module)
                meter.module = name

            def leave(_: Any, __: Any, ___: Any, stack: list[str] = stack) -> None:
                meter.module = stack.pop() if stack else ""

            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave, always_call=True)


def setup_of(settings: TraceSettings) -> TrainingSetup:
    """Calls the functions that the settings name."""
    made = user_code.load_function(settings.factory)(**settings.arguments)
    loss = named_loss(settings)
    if isinstance(made, nn.Module):
        model, batch = made, make_batch(settings, settings.batch_size)
    elif isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        model, batch = made[:2]
        loss = made[2] if len(made) == 3 else loss
    else:
        raise user_code.UserCodeError(
            f"{settings.factory} returned {type(made).__name__}; expected a module, or (module, batch[, loss])"
        )

    def forward() -> Any:
        if loss is None:
            return call(model, batch)
        inputs, target = batch
        return loss(call(model, inputs), target)

    return TrainingSetup(
        model=model,
        batch=batch,
        forward=forward,
        optimizers=lambda parameters: [make_optimizer(settings, parameters)],
    )


def named_loss(settings: TraceSettings) -> Callable[..., torch.Tensor] | None:
    """Returns the loss function that the settings name, if they name one."""
    if settings.loss is None:
        return None
    return _LOSSES.get(settings.loss) or user_code.load_function(settings.loss)


def make_optimizer(settings: TraceSettings, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Creates the optimizer that the settings name."""
    make = _OPTIMIZERS.get(settings.optimizer) or user_code.load_function(settings.optimizer)
    optimizer: torch.optim.Optimizer = make(parameters)
    return optimizer


def make_batch(settings: TraceSettings, batch_size: int | None) -> Any:
    """Calls the user's function that makes a batch."""
    reference = settings.inputs or f"{settings.factory.rpartition(':')[0]}:batch"
    return user_code.call_batch_function(user_code.load_function(reference), batch_size)


def call(model: nn.Module, inputs: Any) -> Any:
    """Calls a model with a mapping, a sequence or one value as its inputs."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
