"""The order of samples: position -> (epoch, shard, sample), a pure function.

There is no shuffle buffer, no list of indices and no random generator to save. A keyed bijection replaces the
shuffled list, so every position can be computed alone, in any process, on any number of ranks:

    epoch    position // samples                        every epoch visits every sample exactly once
    lane     one of `lanes` equal stretches of the line of all samples, with the shards in the epoch's own order;
             neighboring positions lie in neighboring lanes, so one batch draws on all lanes, and
             a node that takes a few lanes reads few shards
    window   `window` consecutive samples of a lane, shuffled among themselves

Memory does not depend on the number of samples: one number per shard, for each of the two latest epochs.

Canonical lanes come from MosaicML Streaming, shuffling by an index function from Google Grain.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from headway.data.order.permutation import (
    Ints,
    as_uints,
    derive_key,
    derive_keys,
    distinct_values,
    permute,
)
from headway.errors import UsageError

_BLOCK_POSITIONS = 16384  # located at a time: intermediate arrays stay in the processor's cache
_SHARDS, _WINDOW = 1, 2  # the purpose of a key: part of what is hashed
ORDER_VERSION = 1
"""A change of the formulas below counts it up: a position of another version is refused, since its samples differ."""


class SampleLocations(NamedTuple):
    """The locations of samples, as four arrays of equal length."""

    epoch: Ints
    lane: Ints
    shard: Ints
    sample: Ints
    """number of the sample within its shard"""


@dataclass(frozen=True, kw_only=True)
class Shuffle:
    """How samples are shuffled. These values are part of every checkpoint: with other values, the order differs.

    hw.data.Shuffle(seed=0, lanes=64, window=4096)
    """

    seed: int
    lanes: int = 1
    """stretches that a batch draws on: at least the number of nodes in the largest run, ideally with many divisors"""
    window: int | None = None
    """consecutive samples of a lane that are shuffled among themselves; None: the whole lane"""

    def __post_init__(self) -> None:
        if self.lanes < 1 or (self.window is not None and self.window < 1):
            raise UsageError(f"lanes={self.lanes}, window={self.window}: both must be at least 1")


@final
class Order:
    """The endless order of one dataset, computed from the number of samples in each of its shards.

        order = Order([1000, 980, 1000], Shuffle(seed=0, lanes=24, window=500))
        locations = order.locate(np.arange(10_000_000, 10_000_064))      # takes no longer than position 0

    Without a `Shuffle`, samples come in the order in which they are stored.
    """

    def __init__(self, counts: Sequence[int] | Ints, shuffle: Shuffle | None = None) -> None:
        self._counts = np.asarray(counts, np.int64)
        if self._counts.ndim != 1 or (self._counts < 0).any() or not self._counts.any():
            raise UsageError("an order needs at least one sample: give the number of samples of each shard")
        self.samples = int(self._counts.sum())
        self._shuffle = shuffle
        self._lines: dict[int, tuple[Ints, Ints]] = {}

    def max_open_shards(self) -> int:
        """Returns how many shards neighboring positions can lie in, if shards are about equal in size."""
        shards = len(self._counts)
        if self._shuffle is None:
            return 1
        if self._shuffle.window is None:
            return shards
        per_window = 2 + self._shuffle.window * shards // self.samples
        return min(shards, self._shuffle.lanes * per_window)

    def locate(self, positions: Ints) -> SampleLocations:
        """Locates the samples at these positions, which may lie in any epochs and come in any order."""
        if positions.size and int(positions.min()) < 0:
            raise UsageError(f"position {int(positions.min())} is before the first sample")
        starts = range(0, max(positions.size, 1), _BLOCK_POSITIONS)
        blocks = [self._locate(positions[start : start + _BLOCK_POSITIONS]) for start in starts]
        if len(blocks) == 1:
            return blocks[0]
        return SampleLocations(*map(np.concatenate, zip(*blocks, strict=True)))

    def _locate(self, positions: Ints) -> SampleLocations:
        epoch, within = np.divmod(positions, self.samples)
        if self._shuffle is None or not positions.size:
            lane, point = np.zeros_like(within), within
        else:
            lane, point = self._shuffled(self._shuffle, epoch, within)
        shard, sample = np.empty_like(point), np.empty_like(point)
        for number in distinct_values(epoch):
            here = epoch == number
            shard[here], sample[here] = self._on_line(number, point[here])
        return SampleLocations(epoch, lane, shard, sample)

    def _shuffled(self, shuffle: Shuffle, epoch: Ints, within: Ints) -> tuple[Ints, Ints]:
        """Returns lane and point on the line of all samples, for each position within its epoch."""
        step, lane = np.divmod(within, shuffle.lanes)
        short, longer = divmod(self.samples, shuffle.lanes)
        start = lane * short + np.minimum(lane, longer)
        length = short + (lane < longer)
        window = np.zeros_like(step) if shuffle.window is None else step // shuffle.window
        first = window * (shuffle.window or 0)
        size = length - first if shuffle.window is None else np.minimum(shuffle.window, length - first)
        secrets = derive_keys(
            shuffle.seed, as_uints(_WINDOW), as_uints(epoch), as_uints(lane), as_uints(window)
        )
        return lane, start + first + permute(step - first, size, secrets)

    def _on_line(self, epoch: int, point: Ints) -> tuple[Ints, Ints]:
        line = self._lines.get(epoch)
        if line is None:
            line = self._line(epoch)
            latest = list(self._lines.items())[-1:]
            self._lines = dict([*latest, (epoch, line)])  # never changed in place: threads may be reading it
        shards, ends = line
        at = np.searchsorted(ends, point, side="right")
        shard = shards[at]
        return shard, point - (ends[at] - self._counts[shard])

    def _line(self, epoch: int) -> tuple[Ints, Ints]:
        """Returns the shards in the order of this epoch, and where each of them ends on the line of all samples."""
        shards = np.arange(len(self._counts))
        if self._shuffle is not None:
            secret = derive_key(self._shuffle.seed, _SHARDS, epoch)
            shards = permute(shards, len(shards), secret)
        return shards, np.cumsum(self._counts[shards])


def whole_number(name: str, value: Any) -> int:
    """Converts a number of any integer type, such as numpy's, to an int, as states and hashes need it."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise UsageError(f"{name}={value!r}: give a whole number") from error


def check_same_order(state: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuses a saved position that belongs to another order of samples."""
    if differences := list_differences(state, ours):
        raise UsageError(
            f"the position belongs to another order of samples: {differences}. Create the loader with the same "
            "arguments as before, or start without its state"
        )


def list_differences(state: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Returns the settings of a saved position that differ from ours, as text; an empty string if all are equal."""
    differing = (name for name in ours if state[name] != ours[name])
    return "; ".join(f"{name} {state[name]} there, {ours[name]} here" for name in differing)
