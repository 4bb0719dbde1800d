"""Large arrays in chunks along a dimension: which chunks belong to which rank, and xarray datasets read that way.

The functions take the arguments of dmlcloud 0.3.3. Chunks start every `chunk_size` elements and, with an overlap,
extend into the next one; `equal_chunks` makes all chunks equally long, `even_shards` gives all ranks equally many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
import torch.distributed as c10d
from torch.utils.data import IterableDataset, get_worker_info

from headway.data.order.batch_split import BatchSplit
from headway.data.order.permutation import derive_key, permute
from headway.errors import UsageError

if TYPE_CHECKING:
    import xarray as xr


def shard_indices(
    num_elements: int,
    rank: int,
    world_size: int,
    shuffle: bool = False,
    even_shards: bool = True,
    seed: int = 0,
) -> list[int]:
    """Returns the elements of one rank: every `world_size`-th, of the shuffled list if `shuffle`.

    `even_shards` omits the last few, so that all ranks have equally many; with shuffle and another seed for each epoch,
    it omits others each time. Without it, every element belongs to a rank, and ranks may differ by one element.

    >>> shard_indices(10, rank=1, world_size=3), shard_indices(10, rank=0, world_size=3, even_shards=False)
    ([1, 4, 7], [0, 3, 6, 9])
    """
    if num_elements < 0:
        raise UsageError(f"num_elements={num_elements}: give a number of at least 0")
    BatchSplit(batch_size=1, global_batch_size=None, rank=rank, world_size=world_size)
    count = num_elements - num_elements % world_size if even_shards else num_elements
    mine = np.arange(rank, count, world_size)
    chosen: list[int] = (permute(mine, num_elements, derive_key(seed)) if shuffle else mine).tolist()
    return chosen


def chunk_and_shard_indices(
    num_elements: int,
    chunk_size: int,
    rank: int,
    world_size: int,
    chunk_overlap: int = 0,
    even_shards: bool = True,
    equal_chunks: bool = True,
    shuffle: bool = False,
    seed: int = 0,
) -> list[tuple[int, int]]:
    """Returns the chunks of one rank as (start, end); no chunk ends beyond the last element.

    `equal_chunks` omits chunks at the end that would be shorter than the others, including the overlap.

    >>> chunk_and_shard_indices(10, 4, rank=0, world_size=1, equal_chunks=False)
    [(0, 4), (4, 8), (8, 10)]
    >>> chunk_and_shard_indices(10, 4, rank=0, world_size=1, chunk_overlap=3)
    [(0, 7)]
    """
    if chunk_size < 1 or chunk_overlap < 0:
        raise UsageError(
            f"chunk_size={chunk_size}, chunk_overlap={chunk_overlap}: give at least 1 and at least 0 elements"
        )
    if equal_chunks:
        count = max(0, (num_elements - chunk_overlap) // chunk_size)
    else:
        count = -(-num_elements // chunk_size)
    mine = shard_indices(count, rank, world_size, shuffle=shuffle, even_shards=even_shards, seed=seed)
    starts = [chunk * chunk_size for chunk in mine]
    return [(start, min(start + chunk_size + chunk_overlap, num_elements)) for start in starts]


def sharded_xr_dataset(
    ds: xr.Dataset | xr.DataArray,
    dim: str,
    chunk_size: int,
    chunk_overlap: int = 0,
    even_shards: bool = True,
    equal_chunks: bool = True,
    shuffle: bool = False,
    seed: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    process_group: c10d.ProcessGroup | None = None,
    load: bool = False,
    load_kwargs: dict[str, Any] | None = None,
) -> Iterator[xr.Dataset | xr.DataArray]:
    """Yields this rank's chunks of an xarray dataset along one dimension; lazily, unless `load`.

    for week in hw.data.sharded_xr_dataset(xr.open_zarr("era5.zarr"), "time", chunk_size=7 * 24, shuffle=True):
        ...
    """
    rank, world_size = _rank_and_world_size(rank, world_size, process_group)
    chunks = chunk_and_shard_indices(
        len(ds[dim]),
        chunk_size,
        rank,
        world_size,
        chunk_overlap=chunk_overlap,
        even_shards=even_shards,
        equal_chunks=equal_chunks,
        shuffle=shuffle,
        seed=seed,
    )
    return _read(ds, dim, chunks, load_kwargs or {} if load else None)


def _read(
    ds: xr.Dataset | xr.DataArray, dim: str, chunks: list[tuple[int, int]], load: dict[str, Any] | None
) -> Iterator[xr.Dataset | xr.DataArray]:
    for start, end in chunks:
        chunk = ds.isel({dim: slice(start, end)})
        yield chunk if load is None else chunk.load(**load)


def _rank_and_world_size(
    rank: int | None, world_size: int | None, process_group: c10d.ProcessGroup | None
) -> tuple[int, int]:
    if process_group is not None and rank is None and world_size is None:
        return c10d.get_rank(process_group), c10d.get_world_size(process_group)
    return BatchSplit(
        batch_size=1, global_batch_size=None, rank=rank, world_size=world_size
    ).rank_and_world_size()


@final
class ShardedXrDataset(IterableDataset["xr.Dataset | xr.DataArray"]):
    """`sharded_xr_dataset` for a DataLoader: workers share their rank's chunks, and each epoch has its own order.

        loader = hw.data.DataLoader(hw.data.ShardedXrDataset(ds, "time", chunk_size=24, shuffle=True), batch_size=None)
        for epoch in range(10):
            for chunk in loader:
                ...

    With `hw.data.DataLoader` it can be resumed, on the same number of ranks and workers. With torch's loader, call
    `set_epoch`, which also reaches persistent workers.
    """

    def __init__(
        self,
        ds: xr.Dataset | xr.DataArray,
        dim: str,
        chunk_size: int,
        chunk_overlap: int = 0,
        even_shards: bool = True,
        equal_chunks: bool = True,
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: c10d.ProcessGroup | None = None,
        load: bool = False,
        load_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.ds, self.dim = ds, dim
        self.rank, self.world_size = _rank_and_world_size(rank, world_size, process_group)
        self._chunk_arguments: dict[str, Any] = {
            "chunk_size": chunk_size,
            "chunk_overlap": chunk_overlap,
            "even_shards": even_shards,
            "equal_chunks": equal_chunks,
            "shuffle": shuffle,
        }
        self._load = load_kwargs or {} if load else None
        self.seed = seed
        # in shared memory, so that set_epoch reaches persistent workers
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._first = self._given = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, and with it the order of the next pass."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Returns the number of chunks of this rank, over all of its workers."""
        return len(self._chunks())

    def __iter__(self) -> Iterator[xr.Dataset | xr.DataArray]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self._given, self._first = self._first, 0
        mine = self._chunks()[number::workers]
        for chunk in _read(self.ds, self.dim, mine[self._given :], self._load):
            self._given += 1
            yield chunk

    def state_dict(self) -> dict[str, Any]:
        """Returns how many chunks of the epoch this worker has yielded."""
        return {"epoch": int(self._epoch), "chunks": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next pass of this worker continue after those chunks."""
        self.set_epoch(int(state["epoch"]))
        self._first = int(state["chunks"])

    def _chunks(self) -> list[tuple[int, int]]:
        return chunk_and_shard_indices(
            len(self.ds[self.dim]),
            rank=self.rank,
            world_size=self.world_size,
            seed=derive_key(self.seed, int(self._epoch)),
            **self._chunk_arguments,
        )
