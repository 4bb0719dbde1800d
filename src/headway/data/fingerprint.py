"""Fingerprints of datasets: has the content changed since a run began? Only what costs little is read.

For shards that is their names, sizes and indexes; for datasets in memory, or with a list of their files, the first and
the last sample. No sample is loaded through `__getitem__`, which may draw random numbers or open files that data
workers must open themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

from headway.data.loader import DataLoader
from headway.data.shard_loader import ShardLoader

_MAX_SHARDS = (
    64  # of a dataset, whose sizes and indexes are read: every look at a file costs a network file system
)
_HEAD_BYTES = 1 << 14  # of the first and the last shard, with their first samples
_LISTS = ("samples", "imgs", "files", "paths", "data")
"""attributes in which datasets of torchvision and others keep their samples or their files"""


def fingerprint(loader: object) -> str | None:
    """Returns a digest of a loader's data; None if nothing about its content is cheap to know.

    >>> fingerprint(DataLoader(torch_data.TensorDataset(torch.arange(3)), batch_size=1))
    '1e3a...'
    """
    if isinstance(loader, ShardLoader):
        facts = [fact for source in loader._sources for fact in _shard_facts(source.name, source.paths)]
    elif isinstance(loader, DataLoader):
        facts = list(_dataset_facts(loader.dataset))
    else:
        return None
    return _digest("\n".join(facts).encode(errors="replace")) if facts else None


def _shard_facts(name: str, paths: Sequence[Path]) -> Iterator[str]:
    yield f"{name}: {len(paths)} shards"
    half = _MAX_SHARDS // 2
    for path in paths if len(paths) <= _MAX_SHARDS else [*paths[:half], *paths[-half:]]:
        with suppress(OSError):  # a shard that cannot be read is the loader's to report
            yield f"{path.name} {path.stat().st_size}"
        with suppress(OSError):
            yield _digest(path.with_suffix(".idx").read_bytes())
    for path in (paths[0], paths[-1]):
        with suppress(OSError), path.open("rb") as shard:
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
    elif isinstance(getattr(dataset, "_fingerprint", None), str):  # a Hugging Face dataset
        yield dataset._fingerprint
    elif isinstance(dataset, list | tuple):
        yield _ends(dataset)
    else:
        for name in _LISTS:
            if isinstance(found := vars(dataset).get(name), list | tuple | np.ndarray | torch.Tensor):
                yield f"{name} {_ends(found)}"


def _ends(values: Any) -> str:
    """Returns the number of values, and digests of the first and the last one."""
    count = len(values)
    return f"{count} {[_value(values[number]) for number in ((0, count - 1) if count else ())]}"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {_digest(data)}"
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
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
