"""Grouping of whole and split tensors: where torch works on a list of tensors at once, all must be on one mesh.

With tensor parallelism some parameters of a model are split over ranks (DTensors) and the rest are whole; sharded by
FSDP as well, they lie on different meshes.
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
    """Groups tensors by the mesh that they are split over, in their order; one group if all are whole.

    >>> group_by_mesh([torch.zeros(2), torch.zeros(3)])
    [[tensor([0., 0.]), tensor([0., 0., 0.])]]
    """
    kinds: dict[object, list[T]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(kinds.values())


def split_param_groups(optimizer: Optimizer) -> bool:
    """Gives the parameters of each mesh a group of their own, with the same settings; returns whether it had to."""
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
    """Returns the norm of all gradients together, on all ranks."""
    norms = [get_total_norm(kind) for kind in group_by_mesh(gradients) or [[]]]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))
