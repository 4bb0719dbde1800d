"""This process's rank and its siblings, and the exchange of small objects between ranks.

Objects are sent as pickles. Loading a pickle can run code, and the connections between ranks are not authenticated, so
each object is signed with the key of the launch and checked before it is loaded. headway itself sends nothing this way.
"""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
from torch import Tensor

from headway.dist.group import current, world
from headway.dist.signed_store import sign, verify
from headway.errors import UsageError, escape_controls

T = TypeVar("T")


def rank() -> int:
    """Returns this process's number among all ranks, from 0.

    part = files[hw.rank() :: hw.world_size()]
    """
    return world().rank


def world_size() -> int:
    """Returns the number of ranks.

    per_rank = 1024 // hw.world_size()
    """
    return world().world_size


def local_rank() -> int:
    """Returns this process's number among the ranks of its node.

    torch.cuda.set_device(hw.local_rank())                 # hw.init() has done it already
    """
    return world().local_rank


def local_world_size() -> int:
    """Returns the number of ranks on this node; nodes may differ.

    workers = os.cpu_count() // hw.local_world_size()
    """
    return world().local_world_size


def node_rank() -> int:
    """Returns this node's number among the nodes.

    if hw.local_rank() == 0:
        print(f"node {hw.node_rank()} is ready")
    """
    return world().node_rank


def is_root() -> bool:
    """Returns whether this is rank 0.

    if hw.is_root():
        Path("results.json").write_text(json.dumps(results))
    """
    return world().rank == 0


def print_root(*values: object, sep: str = " ") -> None:
    """Prints on rank 0 only, at once.

    hw.print_root(f"{hw.world_size()} ranks")              # 16 ranks
    """
    if is_root():
        # one piece, even when Python runs unbuffered
        print(f"{sep.join(map(str, values))}\n", end="", flush=True)


def report_root(line: str) -> None:
    """Prints a line of headway itself on rank 0: names in it may come from files, and cannot control the terminal."""
    print_root(escape_controls(line))


def print_rank(*values: object, sep: str = " ") -> None:
    """Prints on every rank, with the rank in front, each call as one piece.

    hw.print_rank("loss", loss.item())                     # [rank 3] loss 0.25
    """
    text = sep.join(map(str, values))
    print("".join(f"[rank {rank()}] {line}\n" for line in text.split("\n")), end="", flush=True)


def broadcast_object(value: T | None = None, *, source: int = 0) -> T:
    """Returns the object of rank `source` on every rank.

    >>> split = headway.broadcast_object(make_split() if headway.is_root() else None)
    """
    _check_rank(source)
    if world_size() == 1:
        return value  # type: ignore[return-value]
    number = _next_call()
    data = _signed(value, number) if rank() == source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    c10d.broadcast(size, src=source)
    data = data.new_empty(int(size)) if rank() != source else data
    c10d.broadcast(data, src=source)
    return value if rank() == source else _verified(data, number, source)  # type: ignore[return-value]


def gather_object(value: T, *, destination: int = 0) -> list[T] | None:
    """Collects one object from each rank, in the order of ranks, on rank `destination`; None elsewhere.

    losses = hw.gather_object(loss.item())                 # a list on rank 0, None elsewhere
    """
    _check_rank(destination)
    if world_size() == 1:
        return [value]
    number = _next_call()
    padded, sizes = _padded(_signed(value, number))
    rows = [torch.empty_like(padded) for _ in sizes] if rank() == destination else None
    c10d.gather(padded, rows, dst=destination)
    return None if rows is None else _verified_rows(rows, sizes, number)


def all_gather_object(value: T) -> list[T]:
    """Collects one object from each rank, in the order of ranks, on every rank.

    hosts = hw.all_gather_object(socket.gethostname())     # ['n1', 'n1', 'n2', 'n2'] on all ranks
    """
    if world_size() == 1:
        return [value]
    number = _next_call()
    padded, sizes = _padded(_signed(value, number))
    rows = [torch.empty_like(padded) for _ in sizes]
    c10d.all_gather(rows, padded)
    return _verified_rows(rows, sizes, number)


def _next_call() -> int:
    calls = current().calls
    calls["objects"] = calls.get("objects", 0) + 1  # in the same order on all ranks
    return calls["objects"]


def _context(number: int, sender: int) -> str:
    return f"object {number} of rank {sender}"


def _signed(value: object, number: int) -> Tensor:
    data = sign(current().key, _context(number, rank()), pickle.dumps(value))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _verified(data: Tensor, number: int, sender: int) -> Any:
    return pickle.loads(verify(current().key, _context(number, sender), data.numpy().tobytes()))


def _padded(data: Tensor) -> tuple[Tensor, list[int]]:
    """Returns the data, as long as the longest of all ranks, and the length of each: collectives need equal sizes."""
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(world_size())]
    c10d.all_gather(sizes, torch.tensor([len(data)]))
    lengths = [int(size) for size in sizes]
    return torch.nn.functional.pad(data, (0, max(lengths) - len(data))), lengths


def _verified_rows(rows: list[Tensor], sizes: list[int], number: int) -> list[Any]:
    return [
        _verified(row[:size], number, sender)
        for sender, (row, size) in enumerate(zip(rows, sizes, strict=True))
    ]


def store() -> c10d.Store:
    """Returns the key-value store that all ranks share, for small values.

    A name belongs to a value (`set`, `get`) or to a counter (`add`), never to both: values are signed, and counters
    cannot be. `add(name, 0)` reads a counter.

    >>> headway.dist.store().add("samples seen", 0)  # doctest: +SKIP
    """
    return c10d.PrefixStore("headway/user", current().store)


def _check_rank(number: int) -> None:
    if not 0 <= number < world_size():
        raise UsageError(f"rank {number} does not exist: the ranks are 0 to {world_size() - 1}")
