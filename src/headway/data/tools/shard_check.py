"""Checks shards: structure, names, index, checksum, whether every sample can be decoded, and the order of labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from headway.data.shards import checksums, indexes
from headway.data.shards.decode import Decoder, decode
from headway.data.shards.entries import ShardEntries
from headway.data.shards.indexes import read_dali, stale_index
from headway.data.shards.label_order import LABEL, LabelOrder
from headway.data.shards.shard import Shard, walk
from headway.data.shards.shard_file import open_file
from headway.data.shards.tar import ShardLimits
from headway.errors import BadSample, BadShard, HeadwayError, StorageError, UsageError

_MAX_PROBLEMS = 100  # that are listed per shard
_LABELED_SHARDS, _LABELS_PER_SHARD = 64, 512  # at most, whose labels are read


def check_shard(
    path: Path, limits: ShardLimits | None = None, decoders: Mapping[str, Decoder] | None = None
) -> list[str]:
    """Returns the problems of a shard, one sentence each. Reads every byte of it.

    >>> check_shard(Path("shard-000000.tar"))
    []
    """
    problems = _until_unreadable(_problems(path, limits or ShardLimits(), decoders or {}))
    found = list(islice(problems, _MAX_PROBLEMS))
    rest = sum(1 for _ in problems)
    return [*found, f"{path}: and {rest} more problems"] if rest else found


def check_label_order(paths: Sequence[Path]) -> str:
    """Describes how often neighbors in the shards of a dataset have the same label, if that is not chance."""
    order = LabelOrder()
    chosen = paths[:: -(-len(paths) // _LABELED_SHARDS)] if paths else []
    for number, path in enumerate(chosen):
        for sample, label in _labels(path):
            order.add(number, sample, label)
    return order.dependence()


def _labels(path: Path) -> Iterator[tuple[int, int]]:
    """Yields the first labels of a shard; `check_shard` reports what is wrong with it."""
    with suppress(HeadwayError, ValueError):
        entries, file = walk(path), open_file(path)
        for number in range(min(len(entries), _LABELS_PER_SHARD)):
            for part in entries.parts(number):
                if part.extension == LABEL:
                    yield number, int(file.read(part.offset, part.offset + part.size))


def _until_unreadable(problems: Iterator[str]) -> Iterator[str]:
    """Yields problems; ends with the error of a file that cannot be read."""
    try:
        yield from problems
    except StorageError as error:
        yield str(error)


def _problems(path: Path, limits: ShardLimits, decoders: Mapping[str, Decoder]) -> Iterator[str]:
    try:
        entries = walk(path, limits)
    except (BadShard, UsageError) as error:
        yield str(error)
        return
    if not len(entries):
        yield f"{path} has no samples: no file in it is named like KEY.EXTENSION"
    yield from _repeated_keys(path, entries)
    try:
        if checksums.read(path) is not None:
            checksums.compare(path, checksums.sum_file(open_file(path)))
    except BadShard as error:
        yield str(error)
    try:
        indexes.check_files(path)
        _compare_with_index(path, entries, limits)
        shard = Shard.open(path, limits)
    except BadShard as error:
        yield str(error)
        return
    for number in range(len(shard)):
        try:
            decode(shard[number], decoders, limits)
        except (BadSample, BadShard) as error:
            yield f"{path}: {shard.entries.key(number)!r}: {error}"


def _repeated_keys(path: Path, entries: ShardEntries) -> Iterator[str]:
    seen: set[str] = set()
    for number in range(len(entries)):
        key = entries.key(number)
        if key in seen:
            yield f"{path}: the key {key!r} occurs twice, with other samples in between"
        seen.add(key)


def _compare_with_index(path: Path, walked: ShardEntries, limits: ShardLimits) -> None:
    indexed = read_dali(path, path.stat().st_size, limits)
    if indexed is None:
        return
    if len(indexed) != len(walked) or any(_differ(indexed, walked, n) for n in range(len(walked))):
        raise stale_index(path)


def _differ(indexed: ShardEntries, walked: ShardEntries, number: int) -> bool:
    key = walked.key(number)
    plain = key.isascii() and "\\" not in key  # `wds2idx` escapes others
    return indexed.parts(number) != walked.parts(number) or (plain and indexed.key(number) != key)
