"""Seeds: the same weights on every rank, different noise in every data stream.

If the rank were added to the seed, (seed 0, rank 1) would equal (seed 1, rank 0). Here the seed of every stream is a
keyed hash of (seed, purpose, rank), so any two streams are independent.
"""

from __future__ import annotations

import hashlib
import os
import random
from typing import Literal, get_args

import numpy as np
import torch
import torch.distributed as td

from headway.errors import UsageError

SeedScope = Literal["shared", "rank"]

_KEY = b"headway.dist.seeding.1"  # another key would change every run's random numbers
_LARGEST = 2**64 - 1


def seed(base: int, *, deterministic: bool = False, scope: SeedScope = "shared") -> None:
    """Seeds torch, `random` and numpy on this rank.

    torch's generators (CPU and accelerators) become equal on all ranks, so that models start with equal
    weights. `random` and numpy always differ from rank to rank, so that data noise does. Once the models are
    built, `scope="rank"` makes torch differ too: dropout and augmentation should not be the same on every
    rank.

    `deterministic=True` also requests deterministic kernels from torch, which are slower and in a few cases do not
    exist (torch then raises); call it before the first CUDA operation. `deterministic=False` does not touch these
    switches.

        hw.seed(0)                    # before building the model
        model = Net()
        hw.seed(0, scope="rank")      # before training it
    """
    _check(base, scope)
    rank = td.get_rank() if td.is_available() and td.is_initialized() else 0
    torch.manual_seed(derive_seed(base, f"torch.{scope}", 0 if scope == "shared" else rank))
    random.seed(_digest(base, "random", rank))
    np.random.seed(np.frombuffer(_digest(base, "numpy", rank), dtype="<u4"))
    if deterministic:
        _make_deterministic()


def derive_seed(base: int, purpose: str, rank: int = 0) -> int:
    """Returns a 64-bit seed for one stream of random numbers: a pure function of its arguments, on every machine.

    >>> derive_seed(0, "mixup", rank=1) == derive_seed(1, "mixup", rank=0)
    False
    """
    return int.from_bytes(_digest(base, purpose, rank)[:8], "little")


def _digest(base: int, purpose: str, rank: int) -> bytes:
    return hashlib.blake2b(f"{base}/{purpose}/{rank}".encode(), key=_KEY, digest_size=32).digest()


def _check(base: int, scope: str) -> None:
    if type(base) is not int:  # bool is an int to Python, and seed(True) a mistake
        raise UsageError(
            f"{base!r} ({type(base).__name__}) is not a valid seed: give a whole number such as 0"
        )
    if not 0 <= base <= _LARGEST:
        raise UsageError(f"seed {base} is out of range: give a number from 0 to 2**64 - 1")
    if scope not in get_args(SeedScope):
        raise UsageError(
            f'scope={scope!r} is not valid: use "shared" (equal on all ranks) or "rank" (different)'
        )


def _make_deterministic() -> None:
    # cuBLAS is repeatable only with a fixed workspace; torch reads this variable when it first uses cuBLAS.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
