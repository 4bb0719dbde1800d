"""Keyed hashes, and permutations that are computed instead of stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
UInts = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ROUNDS = 10
# elements; the grid's shifts favor some orders of few elements: with seven, half of the orders are twice as likely
_MAX_RANKED = 32
_MAX_BINCOUNT = 16384


# --- keys


def derive_key(*parts: int) -> int:
    """Hashes integers to 64 bits: equal for equal arguments, unrelated for any others.

    >>> derive_key(0, 1) == derive_key(1, 0)
    False
    """
    state = 0
    for part in parts:
        state = _mix(_mix((state + _GOLDEN) & _MASK) ^ (part & _MASK))
    return state


def _mix(word: int) -> int:
    """Applies the finalizer of splitmix64."""
    word = ((word ^ (word >> 30)) * _MULTIPLIERS[0]) & _MASK
    word = ((word ^ (word >> 27)) * _MULTIPLIERS[1]) & _MASK
    return word ^ (word >> 31)


def derive_keys(first: int, *parts: UInts) -> UInts:
    """Computes `derive_key(first, *parts)` for arrays of parts."""
    state = np.full(1, derive_key(first), np.uint64)
    for part in parts:
        state = _mix_array(_mix_array(state + np.uint64(_GOLDEN)) ^ part)
    return state


def hash_streams(keys: UInts, numbers: UInts) -> UInts:
    """Returns the words at places `numbers` of the splitmix64 streams that begin at the keys; no state is needed."""
    return _mix_array(keys + (numbers + np.uint64(1)) * np.uint64(_GOLDEN))


def _mix_array(words: UInts) -> UInts:
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(_MULTIPLIERS[0])
    words ^= words >> np.uint64(27)
    words *= np.uint64(_MULTIPLIERS[1])
    words ^= words >> np.uint64(31)
    return words


# --- bijections


def permute(index: Ints, size: int | Ints, secret: int | UInts) -> Ints:
    """Maps each index of range(size) to its place in the shuffled range, by a keyed bijection.

    `size` and `secret` may differ from index to index.

    >>> sorted(permute(np.arange(5), 5, derive_key(7)).tolist())
    [0, 1, 2, 3, 4]
    """
    sizes = as_uints(size)
    out = _on_grid(index, sizes, as_uints(secret))
    small = np.flatnonzero(np.broadcast_to(sizes <= np.uint64(_MAX_RANKED), index.shape))
    if small.size:
        words = np.broadcast_to(as_uints(secret), index.shape)[small]
        out[small] = _ranked(index[small], np.broadcast_to(sizes, index.shape)[small], words)
    return out


def _ranked(index: Ints, sizes: UInts, secret: UInts) -> Ints:
    """Ranks each index by its hash; no two hashes are equal, and all orders are equally likely."""
    start = _mix_array(secret + np.uint64(_GOLDEN))
    mine, rank = _mix_array(start ^ index.astype(np.uint64)), np.zeros_like(index)
    for other in range(int(sizes.max())):
        rank += (_mix_array(start ^ np.uint64(other)) < mine) & (np.uint64(other) < sizes)
    return rank


def _on_grid(index: Ints, sizes: UInts, secret: UInts) -> Ints:
    """Shuffles by shifting rows and columns of a grid by hashes of the other coordinate."""
    # a grid that is barely larger than size
    rows = np.sqrt(sizes.astype(np.float64)).astype(np.uint64) + np.uint64(1)
    columns = (sizes + rows - np.uint64(1)) // rows
    secrets = [_mix_array(secret + np.uint64(turn * _GOLDEN & _MASK)) for turn in range(_ROUNDS)]
    out = _feistel(index.astype(np.uint64), rows, columns, secrets)
    outside = np.flatnonzero(out >= sizes)
    while outside.size:  # cycle walking: the few that fall outside the range are permuted again
        few = [each if each.size == 1 else each[outside] for each in (sizes, rows, columns, *secrets)]
        out[outside] = _feistel(out[outside], few[1], few[2], few[3:])
        outside = outside[out[outside] >= few[0]]
    return out.astype(np.int64)


def _feistel(index: UInts, rows: UInts, columns: UInts, secrets: Sequence[UInts]) -> UInts:
    row, column = np.divmod(index, columns)
    for turn, secret in enumerate(secrets):
        if turn % 2:
            column = (column + _mix_array(row ^ secret) % columns) % columns
        else:
            row = (row + _mix_array(column ^ secret) % rows) % rows
    return row * columns + column


def as_uints(values: int | Ints | UInts) -> UInts:
    """Converts a number or an array to an array of 64-bit words."""
    return np.atleast_1d(np.asarray(values)).astype(np.uint64)


def distinct_values(values: Ints) -> list[int]:
    """Returns the sorted distinct values. `np.unique` is not used: its first call imports modules for milliseconds.

    >>> distinct_values(np.array([7, 3, 7]))
    [3, 7]
    """
    if not values.size:
        return []
    low, high = int(values.min()), int(values.max())
    if high - low > _MAX_BINCOUNT:
        return sorted(set(values.tolist()))
    return [low + value for value in np.flatnonzero(np.bincount(values - low)).tolist()]
