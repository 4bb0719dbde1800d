"""Compares states: by type, value and, for tensors, a checksum of their bits.

A checksum is enough, and needed: a model is loaded in place, so its tensors are those of the loaded state; and tensors
that are saved may have changed when they are read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""integers as wide as the elements of a tensor, by bytes"""
_CHUNK = 1 << 20
"""elements that are widened to int64 at once"""
_ODD = 0x2545F4914F6CDD1D


class TensorFacts(NamedTuple):
    """What must be equal of two tensors; the checksum is that of this rank's part."""

    is_sharded: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: int


def checksum(tensor: Tensor) -> int:
    """Returns a number for the bits of this rank's part of a tensor and their order."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach().resolve_conj().resolve_neg()
    words = (torch.view_as_real(local) if local.is_complex() else local).contiguous().view(-1)
    words = words.view(_WORDS[words.element_size()])
    weights = torch.arange(1, min(_CHUNK, words.numel()) + 1, dtype=torch.int64, device=words.device) * _ODD
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in torch.split(words, _CHUNK):
        total = total * 31 + (weights[: chunk.numel()] * (chunk.to(torch.int64) + 1)).sum()
    return int(total)


def describe_tensor(tensor: Tensor) -> TensorFacts:
    return TensorFacts(isinstance(tensor, DTensor), tensor.dtype, tuple(tensor.shape), checksum(tensor))


def describe(state: object, of_tensor: Callable[[Tensor], object] = describe_tensor) -> Any:
    """Returns a state with a description of each tensor in its place, to compare it later."""
    if isinstance(state, Tensor):
        return of_tensor(state)
    if isinstance(state, Mapping):
        return {key: describe(value, of_tensor) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [describe(value, of_tensor) for value in state]
    return type(state), _with_nan(state)


def find_difference(loaded: Any, now: Any) -> str | None:
    """Returns the path of the first value in the result of `describe` that differs; None if all are equal."""
    return next(_differences(loaded, now, ""), None)


def _differences(loaded: Any, now: Any, path: str) -> Iterator[str]:
    if isinstance(loaded, dict) and isinstance(now, dict):
        for key in {**loaded, **now}:
            yield from _differences(loaded.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(loaded, list) and isinstance(now, list) and len(loaded) == len(now):
        for number, (one, other) in enumerate(zip(loaded, now, strict=True)):
            yield from _differences(one, other, f"{path}.{number}")
    elif loaded != now:
        yield path


def _with_nan(value: object) -> object:
    return repr(value) if isinstance(value, float) else value
