"""Averages over ranks, for loops without DistributedDataParallel, and moving optimizer state to a device.

Tensors are sent in a few flat buckets, one per device and dtype, instead of one collective each. Every rank must call
these functions with the same parameters; if they differ, all ranks raise an error instead of hanging.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.dist.collective.exchange import rank_and_size
from headway.errors import UsageError

BUCKET_BYTES = 64 * 2**20  # how much memory flattening takes at a time


@torch.no_grad()
def average_gradients(model: nn.Module | Iterable[Tensor], *, weight: float = 1.0) -> None:
    """Replaces each gradient by its mean over all ranks, weighted by `weight`, such as its batch size.

    A parameter that has a gradient on some ranks only (a branch not taken) counts as zero on the others and
    has one everywhere afterwards; a parameter without a gradient anywhere keeps none. With one rank, nothing changes.

        loss.backward()
        dist.average_gradients(model, weight=len(batch))
        optimizer.step()
    """
    if not (math.isfinite(weight) and weight >= 0):
        raise UsageError(
            f"weight={weight!r} is not a valid weight: give a number >= 0, such as this rank's number of samples"
        )
    parameters = [parameter for parameter in _parameters(model) if parameter.requires_grad]
    if rank_and_size()[1] == 1 or not parameters:
        return
    _check_equal(parameters)
    present, total = _census(parameters, weight)
    if total == 0:
        raise UsageError(
            "the weights of all ranks are 0, so there is no mean: give some rank a weight above 0"
        )
    gradients = [
        _gradient(parameter) for parameter, has_one in zip(parameters, present, strict=True) if has_one
    ]
    if weight != 1.0:
        for gradient in gradients:
            gradient.mul_(weight)
    _average(gradients, total)


@torch.no_grad()
def average_parameters(model: nn.Module | Iterable[Tensor]) -> None:
    """Replaces each parameter by its mean over all ranks, as in local SGD. With one rank, nothing changes.

    if step % 16 == 0:
        dist.average_parameters(model)
    """
    parameters = [p for p in _parameters(model) if p.is_floating_point() or p.is_complex()]
    _, size = rank_and_size()
    if size == 1 or not parameters:
        return
    _check_equal(parameters)
    _average(parameters, size)


def optimizer_to(optimizer: Optimizer, device: torch.device | str) -> None:
    """Moves an optimizer's state to a device, because `model.to(device)` does not.

    Step counters stay on the CPU, where torch keeps them, unless their group is `capturable` or `fused`.

        model.to("cuda")
        hw.dist.optimizer_to(optimizer, "cuda")
    """
    on_device = {
        parameter: bool(group.get("capturable") or group.get("fused"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for parameter, state in optimizer.state.items():
        for key in state:
            if key != "step" or on_device.get(parameter, False):
                state[key] = _move(state[key], device)


def _move(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _move(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_move(item, device) for item in value)
    return value


def _parameters(model: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    from torch.distributed.tensor import DTensor

    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            raise UsageError(
                "this model is sharded (its parameters are DTensors), so a mean over ranks would mix different parts; "
                "leave it to FSDP, which averages gradients itself"
            )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UsageError(
                "a gradient is sparse: build the nn.Embedding with sparse=False to average gradients"
            )
    return parameters


def _check_equal(parameters: Sequence[Tensor]) -> None:
    """Raises on all ranks if their parameters differ: collectives of unequal sizes hang, or mix up the values."""
    described = [(tuple(p.shape), str(p.dtype), p.device.type) for p in parameters]
    # 56 bits, so that -mark fits into an int64, too
    digest = hashlib.blake2b(repr(described).encode(), digest_size=7).digest()
    mark = int.from_bytes(digest, "little")
    extremes = torch.tensor([mark, -mark], device=parameters[0].device)
    td.all_reduce(extremes, op=td.ReduceOp.MAX)
    largest, negated_smallest = extremes.tolist()
    if largest != -negated_smallest:
        raise UsageError(
            f"the ranks hold different parameters (rank {td.get_rank()} has {len(parameters)}, with "
            f"{sum(p.numel() for p in parameters):,} numbers): call this with the same model on every rank"
        )


def _census(parameters: Sequence[Tensor], weight: float) -> tuple[list[bool], float]:
    """Returns which parameters have a gradient on any rank, and the sum of the ranks' weights."""
    counts = [float(parameter.grad is not None) for parameter in parameters]
    votes = torch.tensor([*counts, weight], dtype=torch.float64, device=parameters[0].device)
    td.all_reduce(votes)
    *present, total = votes.tolist()
    return [count > 0 for count in present], total


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return parameter.grad


def _average(tensors: Sequence[Tensor], total: float) -> None:
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        td.all_reduce(flat)
        flat.div_(total)
        parts: Sequence[Tensor] = torch.split_with_sizes(flat, [tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in kinds.values():
        bucket, size = [kind[0]], kind[0].nbytes
        for tensor in kind[1:]:
            if size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket
