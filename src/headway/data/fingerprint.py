"""Fingerprints of datasets: has the content changed since a run began? Only what costs little is read.

For shards that is their names, sizes and first bytes; for datasets in memory, or with a list of their files, the first
and the last sample. No sample is loaded through the `__getitem__` of a user's class, which may draw random numbers or
open files that data workers must open themselves. A run that is refused for nothing is worse than a change that goes
unseen: what cannot be read has no fingerprint, and what may differ for the same content is left out.
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

_MAX_SHARDS = 64  # of a dataset, whose sizes are read: every look at a file costs a network file system
_HEAD_BYTES = 1 << 14  # of the first and the last shard, with their first samples
_LISTS = ("samples", "imgs", "files", "paths", "data")
"""attributes in which datasets of torchvision and others keep their samples or their files"""
_IN_MEMORY = (list, tuple, range, bytes, np.ndarray, torch.Tensor)


def fingerprints(loader: object) -> dict[str, str]:
    """Returns a digest for each source of a loader's data; without those of whose content nothing is cheap to know.

    The one source of a `DataLoader` has the name "".

    >>> fingerprints(DataLoader(torch_data.TensorDataset(torch.arange(3)), batch_size=1))
    {'': '1e3a...'}
    """
    facts: dict[str, Iterable[str]] = {}
    if isinstance(loader, ShardLoader):
        facts = {source.name: _shard_facts(source.paths) for source in loader._sources}
    elif isinstance(loader, DataLoader):
        facts = {"": _dataset_facts(loader.dataset)}
    found = {name: _read(each) for name, each in facts.items()}
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
    """Yields what is known of shards. Their indexes may be written at any time, and say nothing of the content."""
    yield f"{len(paths)} shards"
    half = _MAX_SHARDS // 2
    for path in paths if len(paths) <= _MAX_SHARDS else [*paths[:half], *paths[-half:]]:
        yield f"{path.name} {path.stat().st_size}"
    for path in (paths[0], paths[-1]):
        with path.open("rb") as shard:
            yield _digest(shard.read(_HEAD_BYTES))


def _dataset_facts(dataset: Any) -> Iterator[str]:
    """Yields what is known of the content of a dataset; nothing if it would have to be asked for a sample."""
    if isinstance(dataset, torch_data.TensorDataset):
        for tensor in dataset.tensors:
            yield _ends(tensor)
    elif isinstance(dataset, torch_data.Subset):
        yield from (f"part {fact}" for fact in _dataset_facts(dataset.dataset))
        yield _ends(dataset.indices)
    elif isinstance(dataset, torch_data.ConcatDataset):
        for each in dataset.datasets:
            yield from _dataset_facts(each)
    elif isinstance(getattr(dataset, "_fingerprint", None), str):
        yield from _hugging_face_facts(dataset)
    elif isinstance(dataset, _IN_MEMORY):
        yield _ends(dataset)
    else:
        for name in _LISTS:
            if isinstance(found := getattr(dataset, "__dict__", {}).get(name), _IN_MEMORY):
                yield f"{name} {_ends(found)}"


def _hugging_face_facts(dataset: Any) -> Iterator[str]:
    """Yields rows, columns and files; its own fingerprint, also in names of its cache, is random for some functions."""
    files = [Path(each["filename"]).name for each in dataset.cache_files]
    yield f"{dataset.num_rows} {dataset.column_names} {[name for name in files if not name.startswith('cache-')]}"


def _ends(values: Any) -> str:
    """Returns the number of values, and digests of the first and the last one."""
    count = len(values)
    return f"{count} {[_value(values[number]) for number in ((0, count - 1) if count else ())]}"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {_digest(data)}"
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:  # whose bytes are addresses
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
