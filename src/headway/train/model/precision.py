"""Precision: the dtype that a stage computes in, and the loss scale that only fp16 needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from headway.errors import UsageError

Name = Literal["fp32", "tf32", "bf16", "fp16"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_name(name: str) -> None:
    """Raises `UsageError` for an unknown precision."""
    if name not in get_args(Name):
        known = ", ".join(f'"{kind}"' for kind in get_args(Name))
        raise UsageError(f"precision={name!r} is unknown: use one of {known}")


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Uses deterministic kernels within the context if `enabled`; otherwise keeps the script's choice."""
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)


def copy_loss(loss: Tensor) -> Tensor:
    """Returns a detached copy of the loss: outputs of CUDA graphs are overwritten by the next step."""
    return loss.detach().clone()


@final
class HostReadback:
    """A copy of a small tensor to the host, read later: only then does the host wait, and only for this copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._event = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        self._copy = tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor
        if self._event is not None:
            self._event.record()

    def read(self) -> list[float]:
        """Returns the values."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._copy.tolist()
        return values


@final
class MixedPrecision:
    """Autocast and, for fp16 alone, a gradient scaler: bf16 has the range of fp32 and needs none."""

    def __init__(self, name: Name, device: torch.device) -> None:
        self.name, self._device = name, device
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None

        dtype = _AUTOCAST.get(name)
        self.autocast = None if dtype is None else torch.autocast(device.type, dtype)
        """the context of forward and loss; created once, since creating it in each step costs microseconds"""
        self.backward: Callable[[Tensor], None] = (
            torch.autograd.backward if self.scaler is None else self._scaled_backward
        )
        """computes the gradients of a loss, with or without a scale"""

    @contextmanager
    def matmul_precision(self) -> Iterator[None]:
        """Computes matrix products in TF32 within the context, if that is the precision."""
        if self.name != "tf32":
            yield  # reading it raises where a script has set `torch.backends.cuda.matmul.fp32_precision`
            return
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def _scaled_backward(self, loss: Tensor) -> None:
        assert self.scaler is not None
        torch.autograd.backward(self.scaler.scale(loss))

    def step(self, optimizer: Optimizer) -> None:
        """Steps an optimizer; a scaler first removes the scale from its gradients, and skips those that overflowed."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)

    def unscale(self, optimizer: Optimizer) -> None:
        """Removes the scale from the gradients, so that their norm can be computed."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def overflow(self, optimizer: Optimizer) -> Tensor:
        """Returns 1 if the scaler skips the step of the optimizer because of an overflow, else 0.

        Call it between the optimizer's step and the update of the scale.
        """
        assert self.scaler is not None
        found: list[Tensor] = list(self.scaler._found_inf_per_device(optimizer).values())
        if len(found) == 1:
            return found[0]
        # no entry if the stage stepped it without the scaler; several if its parameters are on several devices
        return torch.tensor(any(each.item() for each in found), dtype=torch.float32, device=self._device)

    def runs_ahead(self, optimizer: Optimizer) -> bool:
        """Whether the scaler steps an optimizer without waiting for the device, as it does with fused ones."""
        return self._device.type == "cuda" and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and state:  # empty if it was saved in another precision
            self.scaler.load_state_dict(state)
