"""Ranks whose loaders yield different numbers of batches: all stop with the shortest, or continue to the longest.

Each training step needs all ranks. Where all loaders know their lengths, ranks compare these once per epoch. Where one
does not, ranks exchange before each step how many batches they have for it, on the host, without waiting for a device.
No rank begins a step that another rank does not begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, repeat
from typing import Any, Literal, final

import torch
import torch.distributed as c10d

from headway import dist
from headway.dist.collective.exchange import gather_rows
from headway.system.log import logger
from headway.system.text import plural, shorten_list

Uneven = Literal["shortest", "longest"]
_COUNT_S = 0.5
"""how long a rank counts the batches that it has left, for a warning"""


@final
class Repeated:
    """The last batch of a rank that has no more while others train: it takes part in a step and does not count."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


@final
class BatchAgreement:
    """How many batches each rank takes for each step of one pass, the same on all ranks.

    `lengths` are the batches of all ranks, if known; `given` are the batches that an earlier attempt has taken.
    """

    def __init__(
        self, uneven: Uneven, *, window: int, lengths: Sequence[int] | None = None, given: int = 0
    ) -> None:
        self.longest = uneven == "longest"
        self.repeating = False
        """whether some rank repeats a batch in this step"""
        self.left: Callable[[], tuple[int, bool]] | None = None
        """set if the pass ended while some rank had batches: counts those of this rank, and whether these are all"""
        self._window, self._lengths, self._given = window, lengths, given

    def batches(
        self, source: Iterator[Any], stand_in: Callable[[], Any], *, one_pass: bool = False
    ) -> Iterator[Any]:
        """Yields the batches that this rank takes; `stand_in` makes one to repeat for a rank that has had none.

        If the source has only `one_pass`, its remaining batches belong to the next epoch and are not counted.
        """
        last: Any = None
        while True:
            mine = list(islice(source, self._window))
            fewest, most = self._bounds(len(mine))
            uneven, count = fewest < most, most if self.longest else fewest
            self.repeating = uneven and self.longest
            yield from mine[:count]
            if count > len(mine):
                last = mine[-1] if mine else stand_in() if last is None else last
                yield from repeat(Repeated(last), count - len(mine))
            last = mine[-1] if mine else last
            self._given += count
            if uneven and not self.longest:
                self.left = partial(self._count_left, len(mine) - count, () if one_pass else source)
            if count < self._window:
                return

    def _bounds(self, mine: int) -> tuple[int, int]:
        """Returns the fewest and the most batches that any rank has for this step."""
        if self._lengths is not None:
            counts = [min(self._window, max(0, length - self._given)) for length in self._lengths]
            return min(counts), max(counts)
        both = torch.tensor([mine, -mine])  # on the host
        c10d.all_reduce(both, op=c10d.ReduceOp.MAX)
        return -int(both[1]), int(both[0])

    def _count_left(self, taken: int, source: Iterable[Any]) -> tuple[int, bool]:
        """Returns how many batches are left, including those `taken` and not used, and whether these are all."""
        if self._lengths is not None:
            return self._lengths[dist.rank()] - self._given, True
        until = time.monotonic() + _COUNT_S
        for _ in source:
            taken += 1
            if time.monotonic() > until:
                return taken, False
        return taken, source != ()


def gather_lengths(batches: int | None, device: torch.device) -> list[int] | None:
    """Returns how many batches each rank has; None if a rank does not know. Call it on all ranks."""
    mine = torch.tensor([-1 if batches is None else batches], dtype=torch.int64, device=device)
    lengths = [int(length) for length in gather_rows(mine)[:, 0]]
    return None if min(lengths) < 0 else lengths


def report_left(agreement: BatchAgreement, where: str, advice: str) -> bool:
    """Warns, on rank 0, about batches that were left when the shortest rank ended; returns whether there were any."""
    if agreement.left is None:
        return False
    count, exact = agreement.left()
    rows = gather_rows(torch.tensor([float(count), float(exact)], dtype=torch.float64)).tolist()
    out = [str(rank) for rank, (left, _) in enumerate(rows) if not left]
    more = [
        f"{'' if whole else 'at least '}{plural(int(left), 'batch', 'batches')} left on rank {rank}"
        for rank, (left, whole) in enumerate(rows)
        if left
    ]
    if dist.is_root():
        logger.warning(
            f"{where}, when rank {shorten_list(out)} had no more batches, with {shorten_list(more)}: {advice}"
        )
    return True
