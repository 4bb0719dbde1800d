"""Detection of ranks whose mixes have different weights: samples would be lost and others seen twice.

The weights of a mix decide which samples the positions of a batch have, and each rank loads its own positions.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from headway.data import ShardLoader
from headway.errors import UsageError
from headway.system.text import shorten_list
from headway.train.metrics.meter import LogPoint

_LARGEST = 1 << 24  # whole numbers up to here are exact in single precision


def mix_checksum(datasets: Mapping[str, Iterable[Any]]) -> int:
    """Returns a checksum of the weights of all mixes of this rank; a log point exchanges it."""
    sums = [each.weights_checksum() for each in datasets.values() if isinstance(each, ShardLoader)]
    return zlib.crc32(repr(sums).encode()) % _LARGEST if sums else 0


def check_mixes(datasets: Mapping[str, Iterable[Any]], point: LogPoint, step: int) -> None:
    """Raises `UsageError` on all ranks if the weights of some ranks are not those of the others."""
    if len({*point.mixes}) == 1:
        return
    usual = Counter(point.mixes).most_common(1)[0][0]  # of rank 0, if they are equally many
    odd = [rank for rank, mine in enumerate(point.mixes) if mine != usual]
    names = " or ".join(repr(name) for name, each in datasets.items() if isinstance(each, ShardLoader))
    raise UsageError(
        f"at step {step:,}, the weights of dataset {names} on rank {shorten_list(odd)} differ from those on rank "
        f"{point.mixes.index(usual)}, so that samples are lost and others come twice: call set_weights on all ranks "
        "after the same step, with the same weights"
    )
