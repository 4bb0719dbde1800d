"""Which sample comes when: position -> (epoch, shard, sample), a pure function.

There is no shuffle buffer, no list of indices and no random generator to save. A keyed bijection takes the place of a
shuffled list, so every position can be computed alone, in any process, on any number of ranks:

    epoch    position // samples                        every epoch visits every sample exactly once
    lane     one of `lanes` equal stretches of the line of all samples, shards in an order of the epoch's own;
             neighbouring positions lie in neighbouring lanes, so that one batch draws on all lanes, and
             a node that takes a few lanes reads few shards
    window   `window` consecutive samples of a lane, in an order of the window's own

Memory does not depend on the number of samples: one number per shard, for each of the two latest epochs.

The idea of canonical lanes is MosaicML Streaming's, shuffling by an index function Google Grain's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from headway.errors import UsageError

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ROUNDS = 10  # with fewer, some orders of five things come up more often than others
_BLOCK = 16384  # positions at a time: the arrays between stay in the processor's cache
_SHARDS, _WINDOW = 1, 2  # what a key is for


# --- keys


def key(*parts: int) -> int:
    """A 64-bit number for some whole numbers: equal for equal numbers, unrelated for any others.

    >>> key(0, 1) == key(1, 0)
    False
    """
    state = 0
    for part in parts:
        state = _mix(_mix((state + _GOLDEN) & _MASK) ^ (part & _MASK))
    return state


def _mix(word: int) -> int:
    """The finaliser of splitmix64."""
    word = ((word ^ (word >> 30)) * _MULTIPLIERS[0]) & _MASK
    word = ((word ^ (word >> 27)) * _MULTIPLIERS[1]) & _MASK
    return word ^ (word >> 31)


def keys(first: int, *parts: Words) -> Words:
    """`key(first, *parts)` for many parts at once."""
    state = np.full(1, key(first), np.uint64)
    for part in parts:
        state = _mix_many(_mix_many(state + np.uint64(_GOLDEN)) ^ part)
    return state


def _mix_many(words: Words) -> Words:
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(_MULTIPLIERS[0])
    words ^= words >> np.uint64(27)
    words *= np.uint64(_MULTIPLIERS[1])
    words ^= words >> np.uint64(31)
    return words


# --- bijections


def permute(index: Ints, size: int | Ints, secret: int | Words) -> Ints:
    """Where each index of range(size) stands in the shuffled range: a bijection, computed and not stored.

    `size` and `secret` may differ from index to index.

    >>> sorted(permute(np.arange(5), 5, key(7)).tolist())
    [0, 1, 2, 3, 4]
    """
    sizes = _words(size)
    rows = np.sqrt(sizes.astype(np.float64)).astype(np.uint64) + np.uint64(
        1
    )  # a grid barely larger than size
    columns = (sizes + rows - np.uint64(1)) // rows
    secrets = [_mix_many(_words(secret) + np.uint64(turn * _GOLDEN & _MASK)) for turn in range(_ROUNDS)]
    out = _feistel(index.astype(np.uint64), rows, columns, secrets)
    outside = np.flatnonzero(out >= sizes)
    while outside.size:  # few fall outside, and go through it again
        few = [each if each.size == 1 else each[outside] for each in (sizes, rows, columns, *secrets)]
        out[outside] = _feistel(out[outside], few[1], few[2], few[3:])
        outside = outside[out[outside] >= few[0]]
    return out.astype(np.int64)


def _feistel(index: Words, rows: Words, columns: Words, secrets: Sequence[Words]) -> Words:
    row, column = np.divmod(index, columns)
    for turn, secret in enumerate(secrets):
        if turn % 2:
            column = (column + _mix_many(row ^ secret) % columns) % columns
        else:
            row = (row + _mix_many(column ^ secret) % rows) % rows
    return row * columns + column


def _words(values: int | Ints | Words) -> Words:
    return np.atleast_1d(np.asarray(values)).astype(np.uint64)


def distinct(values: Ints) -> list[int]:
    """The values that there are, rising. Not np.unique: its first call imports for longer than an image takes.

    >>> distinct(np.array([7, 3, 7]))
    [3, 7]
    """
    if not values.size:
        return []
    low, high = int(values.min()), int(values.max())
    if high - low > _BLOCK:
        return sorted(set(values.tolist()))
    return [low + value for value in np.flatnonzero(np.bincount(values - low)).tolist()]


# --- the order of one dataset


class Places(NamedTuple):
    """Where samples are: four arrays of one length."""

    epoch: Ints
    lane: Ints
    shard: Ints
    sample: Ints
    """number of the sample within its shard"""


@dataclass(frozen=True, kw_only=True)
class Shuffle:
    """How samples are mixed. Part of the order, and so of every checkpoint: other values are another order."""

    seed: int
    lanes: int = 1
    """stretches that a batch draws on; more than the nodes of the largest run, best a number with many divisors"""
    window: int | None = None
    """consecutive samples of a lane that are shuffled among each other; None: the whole lane"""

    def __post_init__(self) -> None:
        if self.lanes < 1 or (self.window is not None and self.window < 1):
            raise UsageError(f"lanes={self.lanes}, window={self.window}: both must be at least 1")


@final
class Order:
    """The endless order of one dataset, given how many samples each of its shards has.

        order = Order([1000, 980, 1000], Shuffle(seed=0, lanes=24, window=500))
        places = order.locate(np.arange(10_000_000, 10_000_064))      # at once, wherever that is

    Without a `Shuffle`, samples come as they are stored.
    """

    def __init__(self, counts: Sequence[int] | Ints, shuffle: Shuffle | None = None) -> None:
        self._counts = np.asarray(counts, np.int64)
        if self._counts.ndim != 1 or (self._counts < 0).any() or not self._counts.any():
            raise UsageError("an order needs at least one sample: give the number of samples of each shard")
        self.samples = int(self._counts.sum())
        self._shuffle = shuffle
        self._lines: dict[int, tuple[Ints, Ints]] = {}

    def reach(self) -> int:
        """In how many shards neighbouring positions lie, at most, if these are about equal: all lanes' windows."""
        shards = len(self._counts)
        if self._shuffle is None:
            return 1
        if self._shuffle.window is None:
            return shards
        in_a_window = 2 + self._shuffle.window * shards // self.samples
        return min(shards, self._shuffle.lanes * in_a_window)

    def locate(self, positions: Ints) -> Places:
        """Where the samples at these positions are; positions may lie in any epochs, in any sequence."""
        if positions.size and int(positions.min()) < 0:
            raise UsageError(f"position {int(positions.min())} is before the first sample")
        blocks = [
            self._locate(positions[at : at + _BLOCK]) for at in range(0, max(positions.size, 1), _BLOCK)
        ]
        return blocks[0] if len(blocks) == 1 else Places(*map(np.concatenate, zip(*blocks, strict=True)))

    def _locate(self, positions: Ints) -> Places:
        epoch, within = np.divmod(positions, self.samples)
        if self._shuffle is None or not positions.size:
            lane, point = np.zeros_like(within), within
        else:
            lane, point = self._shuffled(self._shuffle, epoch, within)
        shard, sample = np.empty_like(point), np.empty_like(point)
        for number in distinct(epoch):
            here = epoch == number
            shard[here], sample[here] = self._on_line(number, point[here])
        return Places(epoch, lane, shard, sample)

    def _shuffled(self, how: Shuffle, epoch: Ints, within: Ints) -> tuple[Ints, Ints]:
        """Lane, and point on the line of all samples, of each position within its epoch."""
        step, lane = np.divmod(within, how.lanes)
        short, longer = divmod(self.samples, how.lanes)
        start = lane * short + np.minimum(lane, longer)
        length = short + (lane < longer)
        window = np.zeros_like(step) if how.window is None else step // how.window
        first = window * (how.window or 0)
        size = length - first if how.window is None else np.minimum(how.window, length - first)
        secret_each = keys(how.seed, _words(_WINDOW), _words(epoch), _words(lane), _words(window))
        return lane, start + first + permute(step - first, size, secret_each)

    def _on_line(self, epoch: int, point: Ints) -> tuple[Ints, Ints]:
        line = self._lines.get(epoch)
        if line is None:
            line = self._line(epoch)
            latest = list(self._lines.items())[-1:]
            self._lines = dict([*latest, (epoch, line)])  # never changed in place: threads may be reading it
        shards, ends = line
        place = np.searchsorted(ends, point, side="right")
        shard = shards[place]
        return shard, point - (ends[place] - self._counts[shard])

    def _line(self, epoch: int) -> tuple[Ints, Ints]:
        """The shards in this epoch's order, and where each of them ends on the line of all samples."""
        shards = np.arange(len(self._counts))
        if self._shuffle is not None:
            shards = permute(shards, len(shards), key(self._shuffle.seed, _SHARDS, epoch))
        return shards, np.cumsum(self._counts[shards])


# --- ranks


def piece(count: int, rank: int, world_size: int) -> slice:
    """The part of `count` things that is a rank's: together all of them, in order, as equal as can be.

    >>> [piece(7, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 7, None)]
    """
    return slice(rank * count // world_size, (rank + 1) * count // world_size)


def check_same_order(state: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuses a position that was taken in another order of samples than ours."""
    other = [f"{name} {state[name]} there, {ours[name]} here" for name in ours if state[name] != ours[name]]
    if other:
        raise UsageError(
            f"the position belongs to another order of samples: {'; '.join(other)}. Make the loader as it was, "
            "or start without its state"
        )
