"""The positions of loaders in a checkpoint: which count all ranks together, and where a pass starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headway import data
from headway.train.resume.state import StatefulObject


def is_global(loader: object) -> bool:
    """Whether a loader has one position for all ranks together."""
    return isinstance(loader, data.DataLoader | data.ShardLoader) and not loader.per_rank


def per_rank_batch_size(loader: object) -> int | None:
    """Returns the batch size of a training loader whose global batch grows with the number of ranks; None otherwise."""
    if not isinstance(loader, data.DataLoader | data.ShardLoader) or loader.per_rank:
        return None
    return loader.batch_size if loader.state_dict()["shuffle"] else None


def position(loader: StatefulObject, *, active: bool) -> dict[str, Any]:
    """Returns the position of a loader: 0 for one without shuffle between passes, since each pass starts at 0."""
    found = loader.state_dict()
    if active or not isinstance(loader, data.DataLoader | data.ShardLoader) or found.get("shuffle"):
        return found
    if isinstance(loader, data.DataLoader):
        return found | ({"next": 0, "places": {}} if loader.per_rank else {"samples": 0})
    return found | {"position": loader.samples * found["epoch"]}


def find_changes(datasets: Mapping[str, Iterable[Any]], before: int, now: int) -> Iterator[str]:
    """Yields which datasets give other samples than in the earlier attempt, because the number of ranks has changed."""
    for name, loader in datasets.items():
        if size := per_rank_batch_size(loader):
            yield (
                f"dataset {name!r}: batch_size={size} is per rank, so a step has {size * now} samples instead of "
                f"{size * before}: pass global_batch_size to keep it constant"
            )
        elif not isinstance(loader, StatefulObject):
            yield (
                f"dataset {name!r}: its batches are counted, not its samples, since it has no state_dict(): some "
                "samples of this epoch may come twice or not at all; use hw.data.DataLoader"
            )
        elif not is_global(loader):
            yield f"dataset {name!r}: its position was saved per rank, by {before} ranks, so it restarts its epoch"
