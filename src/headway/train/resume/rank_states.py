"""Registered objects on several ranks: `register_state` demands equal states, `register_rank_state` keeps one per rank.

A checkpoint has the states of rank 3 in its part "rank-3", which only rank 3 reads. On another number of ranks all
are read, and an object gets them all, in its `load_rank_states`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.checkpoint.format import tree
from headway.dist.collective.exchange import gather_rows
from headway.errors import UsageError
from headway.system.text import shorten_list

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline
    from headway.train.resume.state import StatefulObject

_CHUNK_ELEMENTS = 1 << 20
_HOOK = "load_rank_states"


def part_of(rank: int) -> str:
    """Returns the name of a rank's part in a checkpoint.

    >>> part_of(3)
    'rank-3'
    """
    return f"rank-{rank}"


def gather(things: Mapping[str, StatefulObject], rank: int) -> dict[str, Any]:
    """Returns the part of this rank, which each rank adds to the checkpoint; nothing if there is no such object."""
    return {part_of(rank): {name: thing.state_dict() for name, thing in things.items()}} if things else {}


def parts(names: Mapping[str, object], rank: int, *, before: int, now: int) -> list[str]:
    """Returns the parts that this rank reads from a checkpoint of `before` ranks."""
    if not names:
        return []
    return [part_of(rank)] if before == now else [part_of(each) for each in range(before)]


def restore(things: Mapping[str, StatefulObject], state: Mapping[str, Any], rank: int) -> None:
    """Restores the objects of this rank from the parts that it has read."""
    if not things:
        return
    saved = sorted((part for part in state if part.startswith("rank-")), key=lambda part: int(part[5:]))
    same = saved == [part_of(rank)]
    for name, thing in things.items():
        if same:
            thing.load_state_dict(state[part_of(rank)][name])
        elif callable(load := getattr(thing, _HOOK, None)):
            load([state[part][name] for part in saved])


def check_ranks(things: Mapping[str, StatefulObject], *, before: int, now: int) -> None:
    """Raises `UsageError` if states of `before` ranks cannot become those of another number."""
    fixed = [name for name, thing in things.items() if not callable(getattr(thing, _HOOK, None))]
    if before != now and fixed:
        raise UsageError(
            f"each of {before} ranks has saved its own state {shorten_list(fixed)}, and there are {now} ranks now: "
            f"resume on {before}, or give the object {_HOOK}(states), which gets the states of all ranks in a list"
        )


def check_equal(pipe: Pipeline, states: Mapping[str, Any]) -> None:
    """Raises `UsageError` on all ranks if a state that `register_state` saves differs between them."""
    if pipe.world.world_size == 1 or not states:
        return
    digests = [_digest(state, pipe.device) for state in states.values()]
    table = gather_rows(torch.tensor(digests, dtype=torch.int64, device=pipe.device))
    for name, column in zip(states, table.T, strict=True):
        if (column != column[0]).any():
            others = [rank for rank, each in enumerate(column.tolist()) if each != int(column[0])]
            raise UsageError(
                f"state {name!r} is not the same on rank 0 and rank {shorten_list(others)}: make it equal on all "
                f"ranks, or call pipe.register_rank_state({name!r}, ...), so that each rank keeps its own"
            )


def _digest(state: Any, device: torch.device) -> int:
    """Returns a number for the values and tensors of a state."""
    packed, tensors = tree.split({"state": state})
    digest = zlib.crc32(json.dumps(packed).encode())
    for name, tensor in tensors.items():
        about = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest = digest * 31 + about + _sum_of_bits(tensor, device)
    return digest % 2**62


def _sum_of_bits(tensor: Tensor, device: torch.device) -> int:
    """Returns a sum in which each element counts with its bits and its place."""
    plain = (tensor if tensor.layout is torch.strided else tensor.to_dense()).detach().resolve_conj()
    flat = plain.contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for begin in range(0, len(flat), _CHUNK_ELEMENTS):
        part = flat[begin : begin + _CHUNK_ELEMENTS].long()
        places = torch.arange(begin + 1, begin + len(part) + 1, device=part.device)
        total += ((part + 1) * places).sum().to(device)
    return int(total)
