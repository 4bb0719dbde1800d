"""An exponential moving average of a model's weights, which validation uses instead of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.errors import UsageError
from headway.train.model.mesh_groups import group_by_mesh


@final
class Ema:
    """Averages the parameters of a model: `average += (1 - decay) * (weights - average)` after each step.

    Works for whole and sharded models, since it swaps only values. Buffers are those of the model.

    >>> pipe.register_model("net", net, ema=0.999)
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        if not isinstance(decay, float | np.floating) or not 0 < decay < 1:
            raise UsageError(
                f"ema={decay!r} is not a valid decay: give a number between 0 and 1, such as 0.999"
            )
        self.decay = float(decay)
        named = dict(module.named_parameters())
        self._names = list(named)
        self._weights: list[Tensor] = list(named.values())
        self._ids = {id(weight) for weight in self._weights}
        self._average = [weight.detach().clone() for weight in self._weights]
        self._pairs = list(zip(group_by_mesh(self._average), group_by_mesh(self._weights), strict=True))

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer steps weights of this model."""
        return not all(self._ids.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups)

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average. Call it after the optimizer's step."""
        for averages, weights in self._pairs:
            torch._foreach_lerp_(averages, weights, 1 - self.decay)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Swaps the averaged weights into the model within the context, and its own back on exit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in zip(self._weights, self._average, strict=True):
            kept = weight.detach().clone()
            weight.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._average, strict=True))

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, average in zip(self._names, self._average, strict=True):
            if name in state:  # a model with adapters saves the averages of those alone
                average.copy_(state[name])
