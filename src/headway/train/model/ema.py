"""An exponential moving average of a model's weights, which validation uses instead of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from headway.errors import UsageError
from headway.train.model.mesh_groups import group_by_mesh

_SMALLEST_BYTES = 4
"""of a weight: in bfloat16, an update of the average with decay=0.999 is rounded to nothing"""


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
        for name, weight in named.items():
            if weight.requires_grad and weight.element_size() < _SMALLEST_BYTES:
                raise UsageError(
                    f"ema={decay!r} cannot average {name!r}, since {weight.dtype} rounds small updates to nothing: "
                    'keep the weights in torch.float32, and pass precision="bf16" to the stage'
                )
        self._names = list(named)
        self._weights: list[Tensor] = list(named.values())
        self._ids = {id(weight) for weight in self._weights}
        self._average = [weight.detach().clone() for weight in self._weights]
        self._pairs = list(zip(group_by_mesh(self._average), group_by_mesh(self._weights), strict=True))
        self._differs = False  # whether the average was updated, or loaded with other values than the weights

    @torch.no_grad()
    def begin(self) -> None:
        """Sets the average to the weights before training: they may have been loaded since registration."""
        if not self._differs:
            for weight, average in zip(self._weights, self._average, strict=True):
                average.copy_(weight)

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer steps weights of this model."""
        return not all(self._ids.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups)

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average. Call it after the optimizer's step."""
        self._differs = True
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
        """Restores the average. Load the weights first."""
        for name, average in zip(self._names, self._average, strict=True):
            if name in state:  # a model with adapters saves the averages of those alone
                average.copy_(state[name])
        self._differs = not all(map(_equal, self._average, self._weights))


def _equal(average: Tensor, weight: Tensor) -> bool:
    """Whether the values are equal on this rank."""
    first, second = (each.to_local() if isinstance(each, DTensor) else each for each in (average, weight))
    return torch.equal(first, second)
