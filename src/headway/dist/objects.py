"""Small facts and small objects: this process's rank, and objects of the other ranks.

Objects are sent as pickles between the ranks of one run, as torch's own object collectives do; SECURITY.md says what
that means. headway itself sends nothing that way.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as c10d

from headway.dist.group import current, world
from headway.errors import UsageError

T = TypeVar("T")


def rank() -> int:
    """Returns this process's number among all ranks, from 0."""
    return world().rank


def world_size() -> int:
    """Returns the number of ranks."""
    return world().world_size


def local_rank() -> int:
    """Returns this process's number among the ranks of its node."""
    return world().local_rank


def local_world_size() -> int:
    """Returns the number of ranks on this node; nodes may differ."""
    return world().local_world_size


def node_rank() -> int:
    """Returns this node's number among the nodes."""
    return world().node_rank


def is_root() -> bool:
    """Returns whether this is rank 0."""
    return world().rank == 0


def print_root(*values: object, sep: str = " ") -> None:
    """Prints on rank 0 only, at once."""
    if is_root():
        # one piece, also when Python runs unbuffered
        print(f"{sep.join(map(str, values))}\n", end="", flush=True)


def print_rank(*values: object, sep: str = " ") -> None:
    """Prints on every rank, with the rank in front, each call as one piece."""
    text = sep.join(map(str, values))
    print("".join(f"[rank {rank()}] {line}\n" for line in text.split("\n")), end="", flush=True)


def broadcast_object(value: T | None = None, *, source: int = 0) -> T:
    """Returns the object of rank `source` on every rank.

    >>> split = headway.broadcast_object(make_split() if headway.is_root() else None)
    """
    _check_rank(source)
    box: list[T | None] = [value]
    if world_size() > 1:
        c10d.broadcast_object_list(box, src=source, device=torch.device("cpu"))
    return box[0]  # type: ignore[return-value]


def gather_object(value: T, *, destination: int = 0) -> list[T] | None:
    """Collects one object from each rank, in the order of ranks, on rank `destination`; None elsewhere."""
    _check_rank(destination)
    if world_size() == 1:
        return [value]
    here: list[T] | None = [value] * world_size() if rank() == destination else None
    c10d.gather_object(value, here, dst=destination)
    return here


def all_gather_object(value: T) -> list[T]:
    """Collects one object from each rank, in the order of ranks, on every rank."""
    everything = [value] * world_size()
    if world_size() > 1:
        c10d.all_gather_object(everything, value)
    return everything


def store() -> c10d.Store:
    """Returns the key-value store that all ranks share, for small values."""
    return c10d.PrefixStore("headway/user", current().store)


def _check_rank(number: int) -> None:
    if not 0 <= number < world_size():
        raise UsageError(f"rank {number} does not exist: the ranks are 0 to {world_size() - 1}")
