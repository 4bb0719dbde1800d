"""The losses of steps: what a step may return, and the mean over the batches since the last log point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from headway.dist.device import exact_dtype
from headway.errors import UsageError
from headway.system.text import shorten_list

if TYPE_CHECKING:
    from headway.train.train_val import TrainValStage

SMALLEST_WEIGHT = 1e-30
"""the least total weight to divide by: a step without any token has a gradient of 0"""
BatchLoss: TypeAlias = tuple[int, Tensor, int, Tensor | None]
"""the step of a batch, its loss, its samples, and its weight if the step returned one"""


@final
class RecentLosses(list[BatchLoss]):
    """The losses of the batches since the last log point."""

    def drop_empty(self) -> None:
        """Removes batches without a sample or a weight, such as repeated ones, which have no part in the mean."""
        self[:] = [one for one in self if one[2] or one[3] is not None]

    def samples(self) -> list[int]:
        """Returns the number of samples of each batch."""
        return [count for _, _, count, _ in self]

    def mean(self) -> tuple[Tensor | float, Tensor | float]:
        """Returns the mean loss and its weight: by the weights that steps returned, else by samples."""
        if not self:
            return 0.0, 0
        losses, counts = torch.stack([loss for _, loss, _, _ in self]), self.samples()
        given = [weight for _, _, _, weight in self if weight is not None]
        if given:
            weights = torch.stack(given)
            total = weights.sum()
            return losses.to(weights.dtype) @ weights / total.clamp(min=SMALLEST_WEIGHT), total
        samples, exact = max(sum(counts), 1), exact_dtype(losses.device)
        if min(counts) == max(counts):
            return losses.mean(dtype=exact), samples  # one kernel
        weights = torch.tensor(counts, dtype=exact, device=losses.device)
        return losses.to(exact) @ weights / samples, samples


def weighted(stage: TrainValStage, returned: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Returns the mean loss of a batch and its weight, such as its tokens, from the tuple that a step returned.

    The mean over no token, of weight 0, is NaN; it is returned as 0, since NaN times 0 is NaN.
    """
    if len(returned) != 2 or not isinstance(returned[0], Tensor):
        kinds = ", ".join(type(each).__name__ for each in returned)
        raise UsageError(
            f"stage {stage.name!r} returned ({kinds}) instead of a loss: return the loss, or (loss, weight)"
        )
    loss, weight = returned
    valid = (
        weight.ndim == 0
        if isinstance(weight, Tensor)
        else isinstance(weight, int | float | np.number) and 0 <= weight < math.inf
    )
    if not valid:
        raise UsageError(
            f"stage {stage.name!r} returned the weight {weight!r:.80} with its loss: give a number of at least 0, or a "
            "tensor with one, such as (labels != -100).sum()"
        )
    exact = torch.as_tensor(weight, dtype=exact_dtype(stage.device), device=stage.device).detach()
    return torch.where(exact != 0, loss, 0.0), exact


def weighs_some(stage: TrainValStage, ranks: Sequence[int] = ()) -> UsageError:
    """Returns the error for weights of some batches only: means over samples and over tokens cannot be averaged."""
    where = f"on rank {shorten_list(ranks)} only" if ranks else "of some batches only"
    return UsageError(
        f"stage {stage.name!r} returned a weight with the loss {where}: return (loss, weight) for all batches, or for "
        "none"
    )


def not_a_loss(stage: TrainValStage, returned: object) -> UsageError:
    """Returns the error for what a training step returned instead of a loss."""
    if not isinstance(returned, Tensor):
        return UsageError(
            f"train_step of stage {stage.name!r} returned {type(returned).__name__} instead of a loss: return the "
            "tensor to call backward() on"
        )
    if returned.ndim:
        return UsageError(
            f"train_step of stage {stage.name!r} returned a loss of shape {tuple(returned.shape)}: return one "
            "number, such as loss.mean()"
        )
    return UsageError(
        f"train_step of stage {stage.name!r} returned a loss that depends on no parameter: do not detach it, and "
        "let the model's parameters require gradients"
    )
