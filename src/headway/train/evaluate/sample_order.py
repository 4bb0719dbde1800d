"""The samples of a prediction: how many there are, whether they come in order, and what is in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader, SequentialSampler, Subset

from headway.data import DataLoader, ShardLoader
from headway.data.fingerprint import fingerprints
from headway.data.worker_init import WorkerInit, preserve_rng, reseed
from headway.errors import UsageError
from headway.system.log import logger
from headway.train.resume.replay import checksum


def count_samples(loader: Iterable[Any], world_size: int) -> int | None:
    """Returns the number of samples, if it is known; refuses loaders whose order is not the dataset's."""
    if isinstance(loader, DataLoader) and not loader.per_rank:
        state = loader.state_dict()
        if state["shuffle"] or loader.drop_last:
            raise UsageError(
                "predictions cover the whole dataset, in its order: create the loader with shuffle=False and "
                "drop_last=False"
            )
        return int(state["length"])
    if isinstance(loader, ShardLoader):
        if not loader.in_order:
            raise UsageError(
                "predictions are in the order of the shards, each sample once: make the ShardLoader with shuffle=False "
                'and tail="carry"'
            )
        return loader.samples
    if world_size > 1:
        raise UsageError(
            f"the order of a {type(loader).__name__} over {world_size} ranks is not known: predict from "
            "hw.data.DataLoader(dataset, batch_size=...), or from a ShardLoader"
        )
    if isinstance(loader, TorchDataLoader) and not loader.drop_last:
        if not isinstance(loader.sampler, SequentialSampler):
            raise UsageError(
                "predictions are in the order of the dataset: make the loader without shuffle or sampler"
            )
        return len(loader.dataset)  # type: ignore[arg-type]
    return None


def seek(loader: Iterable[Any], position: Mapping[str, Any]) -> int:
    """Moves a loader to a position in a prediction; returns how many batches must be read again and discarded."""
    if isinstance(loader, DataLoader) and not loader.per_rank:
        loader.load_state_dict(loader.state_dict() | {"epoch": 0, "samples": position["rows"]})
        return 0
    if isinstance(loader, ShardLoader):
        loader.load_state_dict(loader.state_dict() | {"epoch": 0, "position": position["rows"]})
        return 0
    return int(position["batches"])


def describe_samples(loader: Iterable[Any]) -> dict[str, Any]:
    """Returns a cheap description of the content: fingerprints, or checksums of three samples of a user's dataset.

    A sample that differs when it is loaded again with the same random numbers has no checksum.
    """
    found: dict[str, Any] = dict(fingerprints(loader))
    if found or not isinstance(loader, DataLoader | TorchDataLoader):
        return found
    try:
        count = len(loader.dataset)  # type: ignore[arg-type]
        chosen = sorted({0, count // 2, count - 1}) if count else []
        both = [[checksum(sample) for sample in _load(loader, chosen)] for _ in range(2)]
    except Exception as error:  # noqa: BLE001  a user's dataset may raise anything, and does so again when it is read
        logger.debug(f"a dataset has no checksums: {type(error).__name__}: {error}")
        return found
    return {str(number): one for number, one, two in zip(chosen, *both, strict=True) if one == two}


def _load(loader: DataLoader | TorchDataLoader[Any], samples: list[int]) -> Iterator[Any]:
    """Yields samples of a loader's dataset; in a worker if the loader has workers, which must open their own files."""
    own = loader._torch if isinstance(loader, DataLoader) else loader
    init = own.worker_init_fn
    with preserve_rng():
        reseed(0)  # every process draws the same
        yield from TorchDataLoader(
            Subset(loader.dataset, samples),
            batch_size=None,
            num_workers=min(1, own.num_workers),
            worker_init_fn=init if isinstance(init, WorkerInit) else WorkerInit(init),
            multiprocessing_context=own.multiprocessing_context,
            generator=torch.Generator().manual_seed(0),
        )
