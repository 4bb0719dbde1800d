"""Samples of one name in several shards of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from headway.data.shards.shard import walk

_MOST = 100  # that are named


def duplicates(shards: Iterable[Path]) -> list[tuple[str, list[Path]]]:
    """Keys that come in more than one shard, with these shards; a hundred at most.

    Eight bytes per sample: keys are hashed first, and only those that seem to come twice are compared.
    """
    paths = list(shards)
    hashes = [np.fromiter((hash(key) for key in _keys(path)), np.int64) for path in paths]
    values, counts = np.unique(np.concatenate([np.unique(each) for each in hashes]), return_counts=True)
    twice = values[counts > 1]
    where: dict[str, list[Path]] = {}
    for path, each in zip(paths, hashes, strict=True):
        if np.isin(each, twice).any():
            for key in sorted(set(_keys(path))):
                if hash(key) in twice:
                    where.setdefault(key, []).append(path)
    return [(key, places) for key, places in sorted(where.items()) if len(places) > 1][:_MOST]


def _keys(path: Path) -> Sequence[str]:
    entries = walk(path)
    return [entries.key(number) for number in range(len(entries))]
