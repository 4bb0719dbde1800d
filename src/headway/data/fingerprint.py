"""Fingerprints of datasets show whether their content has changed since a run began. They read only what costs little.

For shards, that is names, sizes and first bytes; for datasets in memory, or with a list of their files, the first and
the last sample. A user's `__getitem__` is never called: it may draw random numbers, or open files that data workers
must open themselves. Refusing a run without reason is worse than missing a change, so data that cannot be read has no
fingerprint, and values that may differ for the same content are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

from headway.data.loader import DataLoader
from headway.data.shard_loader import ShardLoader
from headway.system.log import logger

_MAX_SHARDS = 64  # of a dataset, whose sizes are read: each is a request to a network file system
_HEAD_BYTES = 1 << 14  # of the first and the last shard; these hold their first samples
_LISTS = ("samples", "imgs", "files", "paths", "data")
"""attributes in which datasets of torchvision and others keep their samples or their files"""
_IN_MEMORY = (list, tuple, range, bytes, np.ndarray, torch.Tensor)


def fingerprints(loader: object) -> dict[str, str]:
    """Returns a digest for each source of a loader's data that can be examined cheaply.

    The one source of a `DataLoader` has the name "".

    >>> fingerprints(DataLoader(torch_data.TensorDataset(torch.arange(3)), batch_size=1))
    {'': '1e3a...'}
    """
    facts: dict[str, Iterable[str]] = {}
    if isinstance(loader, ShardLoader):
        facts = {source.name: _shard_facts(source.paths) for source in loader._sources}
    elif isinstance(loader, DataLoader):
        facts = {"": _dataset_facts(loader.dataset)}
    found = {name: _read(facts_of) for name, facts_of in facts.items()}
    return {name: digest for name, digest in found.items() if digest is not None}


def _read(facts: Iterable[str]) -> str | None:
    """Returns a digest of facts; None if there are none, or one cannot be read."""
    try:
        text = "\n".join(facts)
    except Exception as error:  # noqa: BLE001  a user's dataset or a file system may raise anything
        logger.debug(f"a dataset has no fingerprint: {type(error).__name__}: {error}")
        return None
    return _digest(text.encode(errors="replace")) if text else None


def _shard_facts(paths: Sequence[Path]) -> Iterator[str]:
    """Yields facts about shards. Their index files are left out: they may be written at any time."""
    yield f"{len(paths)} shards"
    half = _MAX_SHARDS // 2
    for path in paths if len(paths) <= _MAX_SHARDS else [*paths[:half], *paths[-half:]]:
        yield f"{path.name} {path.stat().st_size}"
    for path in (paths[0], paths[-1]):
        with path.open("rb") as shard:
            yield _digest(shard.read(_HEAD_BYTES))


def _dataset_facts(dataset: Any) -> Iterator[str]:
    """Yields facts about the content of a dataset; nothing if that would need its `__getitem__`."""
    if isinstance(dataset, torch_data.TensorDataset):
        for tensor in dataset.tensors:
            yield _ends(tensor)
    elif isinstance(dataset, torch_data.Subset):
        yield from (f"part {fact}" for fact in _dataset_facts(dataset.dataset))
        yield _ends(dataset.indices)
    elif isinstance(dataset, torch_data.ConcatDataset):
        for part in dataset.datasets:
            yield from _dataset_facts(part)
    elif isinstance(getattr(dataset, "_fingerprint", None), str):
        yield from _hugging_face_facts(dataset)
    elif isinstance(dataset, _IN_MEMORY):
        yield _ends(dataset)
    else:
        for name in _LISTS:
            if isinstance(found := getattr(dataset, "__dict__", {}).get(name), _IN_MEMORY):
                yield f"{name} {_ends(found)}"


def _hugging_face_facts(dataset: Any) -> Iterator[str]:
    """Yields rows, columns and files. Its own fingerprint, which is part of cache file names, may be random."""
    files = [Path(file["filename"]).name for file in dataset.cache_files]
    yield f"{dataset.num_rows} {dataset.column_names} {[name for name in files if not name.startswith('cache-')]}"


def _ends(values: Any) -> str:
    """Returns the number of values, and digests of the first and the last one."""
    count = len(values)
    return f"{count} {[_value(values[number]) for number in ((0, count - 1) if count else ())]}"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {_digest(data)}"
    # the bytes of an array of objects are addresses, which differ between processes
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {_digest(value.tobytes())}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value[:100]))}]"
    if isinstance(value, Path):
        return value.name  # data may be copied to another directory
    if isinstance(value, str):
        return _digest((Path(value).name if "/" in value else value).encode(errors="replace"))
    return repr(value) if isinstance(value, int | float | bool | None) else type(value).__name__


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
