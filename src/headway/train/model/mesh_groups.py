"""Grouping of tensors by device mesh: where torch works on a list of tensors, all of them must be on one mesh.

With tensor parallelism some parameters of a model are split over ranks (DTensors) and the others are whole. With FSDP
in addition, they are on different meshes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

T = TypeVar("T", bound=Tensor)


def group_by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Groups tensors by the mesh that they are split over and keeps their order; one group if all are whole.

    >>> group_by_mesh([torch.zeros(2), torch.zeros(3)])
    [[tensor([0., 0.]), tensor([0., 0., 0.])]]
    """
    kinds: dict[object, list[T]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(kinds.values())


def split_param_groups(optimizer: Optimizer) -> bool:
    """Splits parameter groups so that each has the parameters of one mesh; returns whether any was split."""
    groups = [
        group | {"params": kind}
        for group in optimizer.param_groups
        for kind in group_by_mesh(group["params"]) or [[]]
    ]
    if len(groups) == len(optimizer.param_groups):
        return False
    optimizer.param_groups[:] = groups
    return True


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the total norm of all gradients, over all ranks."""
    norms = [get_total_norm(kind) for kind in group_by_mesh(gradients) or [[]]]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))
