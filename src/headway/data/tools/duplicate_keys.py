"""Finds samples with the same key in several shards of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from headway.data.shards.shard import walk
from headway.errors import HeadwayError

_MAX_KEYS = 100  # that are listed


def find_duplicates(shards: Iterable[Path]) -> list[tuple[str, list[Path]]]:
    """Returns keys that occur in more than one shard, with these shards; a hundred at most.

    Takes eight bytes per sample: keys are hashed first, and only those with equal hashes are compared.
    """
    paths = list(shards)
    hashes = [np.fromiter(map(hash, _keys(path)), np.int64) for path in paths]
    values, counts = np.unique(np.concatenate([np.unique(each) for each in hashes]), return_counts=True)
    twice = values[counts > 1]
    repeated = {*twice.tolist()}
    where: dict[str, list[Path]] = {}
    for path, each in zip(paths, hashes, strict=True):
        if np.isin(each, twice).any():
            for key in sorted(set(_keys(path))):
                if hash(key) in repeated:
                    where.setdefault(key, []).append(path)
    return [(key, shards_of) for key, shards_of in sorted(where.items()) if len(shards_of) > 1][:_MAX_KEYS]


def _keys(path: Path) -> Sequence[str]:
    """Returns the keys of a shard; none if it cannot be read, which `check_shard` reports."""
    with suppress(HeadwayError):
        entries = walk(path)
        return [entries.key(number) for number in range(len(entries))]
    return []
