"""The repeated blocks of a model: the units of FSDP and of activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(model: nn.Module) -> None:
    """Makes the backward pass recompute each repeated block."""
    for block in repeated_blocks(model):
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Finds the members of the list with the most parameters: a transformer's layers, or another network's stages."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    if not lists:
        return []
    largest = max(lists, key=lambda module: sum(p.numel() for p in module.parameters()))
    return [child for child in largest if any(True for _ in child.parameters())]
