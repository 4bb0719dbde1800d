"""Seeds: the same weights on every rank, other random numbers in the training of each.

If the rank were added to the seed, (seed 0, rank 1) would equal (seed 1, rank 0). Here the seed of every stream is a
keyed hash of (seed, purpose, rank), so any two streams are independent.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as td

from headway.errors import UsageError

SeedScope = Literal["shared", "rank"]

_KEY = b"headway.dist.seeding.1"  # another key would change every run's random numbers
_LARGEST = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Streams:
    """How the random numbers of this process relate to those of other ranks; part of the state of its generators."""

    scope: SeedScope = "rank"
    data_seed: int | None = None
    """the seed of `hw.seed`, from which `random` and numpy were seeded; None if the script seeds them itself"""
    common: int | None = None
    """torch's seed before the first batch"""
    own: int | None = None
    """torch's seed since then: the script has seeded torch again if it has another one by now"""


_streams = Streams()


def seed(base: int, *, deterministic: bool = False, scope: SeedScope = "rank") -> None:
    """Seeds torch, `random` and numpy on this rank.

    All ranks draw the same numbers from torch until the first batch, so that models start with equal weights. From then
    on, each rank has its own stream: it drops other units and draws other noise. Ranks that share a batch, as in tensor
    parallelism, share a stream; within hooks, which may initialize a model, all ranks do. The same holds after a plain
    `torch.manual_seed`. `random` and numpy differ from rank to rank from the beginning.

    With `scope="shared"`, torch, `random` and numpy stay equal on all ranks.

    `deterministic=True` also requests deterministic kernels from torch, which are slower and in a few cases do not
    exist (torch then raises); call it before the first CUDA operation. `deterministic=False` does not touch these
    switches.

        hw.seed(0)                    # before building the model
    """
    global _streams
    _check(base, scope)
    torch.manual_seed(derive_seed(base, "torch.shared"))
    _seed_data(base, 0 if scope == "shared" else _rank())
    _streams = Streams(scope=scope, data_seed=base if scope == "rank" else None)
    if deterministic:
        _make_deterministic()


def separate_streams(rank: int, *, ranks_share: bool = False) -> None:
    """Gives this rank its own stream of torch's random numbers, unless it has one; that of rank 0 continues.

    Called before each pass over data. `rank` is that of the rank's data; `ranks_share` is whether any ranks have the
    same, which then also draw the same numbers from `random` and numpy if `seed` has seeded them.
    """
    global _streams
    common = torch.initial_seed()
    if _streams.scope == "shared" or common == _streams.own:
        return
    if rank:
        torch.manual_seed(derive_seed(common, "torch.rank", rank))
    if ranks_share and _streams.data_seed is not None:
        _seed_data(_streams.data_seed, rank)
    _streams = replace(_streams, common=common, own=torch.initial_seed())


def join_streams(purpose: str) -> None:
    """Makes all ranks draw the same numbers from torch again until the next batch: a function of seed and purpose.

    It changes nothing before the first batch, and in a run of one process.
    """
    global _streams
    if are_separate():
        torch.manual_seed(derive_seed(_streams.common or 0, purpose))
        _streams = replace(_streams, common=None, own=None)


def are_separate() -> bool:
    """Whether ranks draw different numbers from torch now."""
    others = td.is_available() and td.is_initialized() and td.get_world_size() > 1
    return others and _streams.common is not None and torch.initial_seed() == _streams.own


def streams_state() -> dict[str, Any]:
    """Returns how the streams of this rank relate to those of others, as plain values."""
    return asdict(_streams)


def load_streams_state(state: Mapping[str, Any]) -> None:
    """Restores the result of `streams_state`."""
    global _streams
    _streams = Streams(**state)


def current_scope() -> SeedScope:
    """Returns the scope of the last `seed`."""
    return _streams.scope


def derive_seed(base: int, purpose: str, rank: int = 0) -> int:
    """Returns a 64-bit seed for one stream of random numbers: a pure function of its arguments, on every machine.

    >>> derive_seed(0, "mixup", rank=1) == derive_seed(1, "mixup", rank=0)
    False
    """
    return int.from_bytes(_digest(base, purpose, rank)[:8], "little")


def _digest(base: int, purpose: str, rank: int) -> bytes:
    return hashlib.blake2b(f"{base}/{purpose}/{rank}".encode(), key=_KEY, digest_size=32).digest()


def _rank() -> int:
    return td.get_rank() if td.is_available() and td.is_initialized() else 0


def _seed_data(base: int, rank: int) -> None:
    random.seed(_digest(base, "random", rank))
    np.random.seed(np.frombuffer(_digest(base, "numpy", rank), dtype="<u4"))


def _check(base: int, scope: str) -> None:
    if type(base) is not int:  # bool is an int to Python, and seed(True) a mistake
        raise UsageError(
            f"{base!r} ({type(base).__name__}) is not a valid seed: give a whole number such as 0"
        )
    if not 0 <= base <= _LARGEST:
        raise UsageError(f"seed {base} is out of range: give a number from 0 to 2**64 - 1")
    if scope not in get_args(SeedScope):
        raise UsageError(
            f'scope={scope!r} is not valid: use "rank" (different in training) or "shared" (equal on all ranks)'
        )


def _make_deterministic() -> None:
    # cuBLAS is repeatable only with a fixed workspace; torch reads this variable when it first uses cuBLAS.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
