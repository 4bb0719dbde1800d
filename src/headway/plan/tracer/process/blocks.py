"""The repeated part of a model: what FSDP shards one by one and what checkpointing recomputes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(model: nn.Module) -> None:
    """Each repeated block is recomputed in the backward pass."""
    for block in repeated_blocks(model):
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the lists that hold most parameters: the layers of a transformer, the stages of others."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    if not lists:
        return []
    largest = max(lists, key=lambda module: sum(p.numel() for p in module.parameters()))
    return [child for child in largest if any(True for _ in child.parameters())]
