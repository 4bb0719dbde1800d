"""Builds the user's model from empty tensors and runs training steps on it, metered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from headway.plan.tracer.process import user_code
from headway.plan.tracer.process.blocks import checkpoint_blocks
from headway.plan.tracer.process.meter import Meter

STEPS = 2
"""The first makes the optimizer's state, the second is measured; a third changes nothing."""
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "mse": functional.mse_loss,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-4),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
}


@dataclass(kw_only=True)
class Request:
    """What to trace. References are `FILE.py:name`."""

    factory: str
    inputs: str | None = None
    loss: str | None = None
    optimizer: str = "adamw"
    precision: str = "amp"
    batch_size: int | None = None
    accumulate: int = 1
    arguments: dict[str, int] = field(default_factory=dict)
    fsdp: int = 1
    checkpoint: bool = False
    """Recompute each repeated block in the backward pass."""


@dataclass(kw_only=True)
class Job:
    """A model that is ready to step."""

    model: nn.Module
    batch: Any
    loss: Callable[..., torch.Tensor] | None
    optimizer: torch.optim.Optimizer
    notes: list[str]


class Step:
    """Holds the meter through building and stepping, so that a failure can still say what was built."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.meter = Meter()
        self.notes: list[str] = []
        self.parameters = 0
        self.trainable = 0
        self.state_bytes: dict[str, int] = {}
        self.built_at = 0
        self.measured_from = 0

    def run(self) -> None:
        pure = self.request.precision == "pure-bf16"
        torch.set_default_dtype(torch.bfloat16 if pure else torch.float32)
        if self.request.fsdp == 1:
            self._run(None)
            return
        from headway.plan.tracer.process.sharding import (
            pretended,  # half a second of imports, only when needed
        )

        with pretended(self.request.fsdp, self.request.precision) as shard:
            self._run(shard)

    def _run(self, shard: Callable[[nn.Module], None] | None) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True), self.meter:
            job = self._build(shard)
            self.built_at = len(self.meter.events)
            for turn in range(STEPS):
                if turn == STEPS - 1:
                    self.measured_from = len(self.meter.events)
                    self.meter.queue = []
                self._one(job)

    def _build(self, shard: Callable[[nn.Module], None] | None) -> Job:
        model, batch, loss = self._model_and_batch()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if self.request.checkpoint:
            checkpoint_blocks(model)
        if shard is not None:
            shard(model)
        for parameter in model.parameters():
            self.meter.label(parameter, "parameters")
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._label_gradient)  # type: ignore[no-untyped-call]
        for buffer in model.buffers():
            self.meter.label(buffer, "buffers")
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                self.meter.label(leaf, "inputs")
        self._name_modules(model)
        optimizer = self._optimizer([p for p in model.parameters() if p.requires_grad])
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self.state_bytes = {"parameters": weights, "gradients": trained}
        model.train()
        return Job(model=model, batch=batch, loss=loss, optimizer=optimizer, notes=self.notes)

    def _model_and_batch(self) -> tuple[nn.Module, Any, Callable[..., torch.Tensor] | None]:
        request = self.request
        made = user_code.find(request.factory)(**request.arguments)
        loss = None if request.loss is None else LOSSES.get(request.loss) or user_code.find(request.loss)
        if isinstance(made, nn.Module):
            reference = request.inputs or f"{request.factory.rpartition(':')[0]}:batch"
            return made, user_code.call_with(user_code.find(reference), request.batch_size), loss
        if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
            return made[0], made[1], made[2] if len(made) == 3 else loss
        raise user_code.NotFound(
            f"{request.factory} returned {type(made).__name__}; expected a module, or (module, batch[, loss])"
        )

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        name = self.request.optimizer
        make = OPTIMIZERS.get(name) or user_code.find(name)
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True  # what torch chooses on CUDA
        return optimizer

    def _label_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.meter.label(parameter.grad, "gradients")

    def _one(self, job: Job) -> None:
        meter = self.meter
        for _ in range(self.request.accumulate):
            with meter.during("forward"):
                loss = self._loss(job)
            with meter.during("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            del loss
        with meter.during("optimizer"):
            job.optimizer.step()
        for state in job.optimizer.state.values():
            for leaf in tree_leaves(state):
                if isinstance(leaf, torch.Tensor):
                    meter.label(leaf, "optimizer")
        job.optimizer.zero_grad(set_to_none=True)

    def _loss(self, job: Job) -> torch.Tensor:
        amp = self.request.precision == "amp" and self.request.fsdp == 1
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            if job.loss is not None:
                inputs, target = job.batch
                return job.loss(call(job.model, inputs), target)
            return self._scalar(call(job.model, job.batch))

    def _scalar(self, output: Any) -> torch.Tensor:
        """The loss, if the model returns one."""
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
        note = "the module returns no loss: the mean of its output stands in; give a loss for an exact peak"
        if note not in self.notes:
            self.notes.append(note)
        return torch.stack([leaf.float().mean() for leaf in leaves]).sum()

    def _name_modules(self, model: nn.Module) -> None:
        """Tells the meter whose forward is running."""
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


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
