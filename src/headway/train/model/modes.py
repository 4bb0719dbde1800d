"""The modes of modules: training or eval."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def restore_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Restores the modes of modules, from the top down, with `train()` where the mode differs."""
    for part, mode in modes:
        if part.training is not mode:
            part.train(mode)
    for part, mode in modes:  # a `train()` that a module overrides may have left some unchanged
        part.training = mode
