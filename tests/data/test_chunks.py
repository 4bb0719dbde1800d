"""Chunks of arrays over ranks and workers: disjoint, complete or even as asked, correct at the end."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

import headway as hw
from headway.data import ShardedXrDataset, chunk_and_shard_indices, shard_indices, sharded_xr_dataset
from headway.errors import UsageError
from headway.testing import ranks

WORLD = st.integers(1, 7)


@given(count=st.integers(0, 200), world_size=WORLD, shuffle=st.booleans(), seed=st.integers(0, 2**64 - 1))
def test_uneven_shards_are_everything_once(count: int, world_size: int, shuffle: bool, seed: int) -> None:
    how = {"shuffle": shuffle, "seed": seed, "even_shards": False}
    parts = [shard_indices(count, rank, world_size, **how) for rank in range(world_size)]
    assert sorted(index for part in parts for index in part) == list(range(count))


@given(count=st.integers(0, 200), world_size=WORLD, shuffle=st.booleans())
def test_even_shards_are_of_one_length_and_leave_out_less_than_a_round(
    count: int, world_size: int, shuffle: bool
) -> None:
    parts = [shard_indices(count, rank, world_size, shuffle=shuffle) for rank in range(world_size)]
    assert {len(part) for part in parts} == {count // world_size}
    assert len({index for part in parts for index in part}) == count // world_size * world_size


def test_what_even_shards_leave_out_differs_from_seed_to_seed() -> None:
    left_out = {
        next(
            iter({*range(7)} - {*shard_indices(7, 0, 2, True, seed=s), *shard_indices(7, 1, 2, True, seed=s)})
        )
        for s in range(40)
    }
    assert len(left_out) == 7


@given(
    count=st.integers(0, 100),
    size=st.integers(1, 20),
    overlap=st.integers(0, 25),
    world_size=WORLD,
    equal=st.booleans(),
)
def test_chunks_end_where_the_array_ends(
    count: int, size: int, overlap: int, world_size: int, equal: bool
) -> None:
    how = {"chunk_overlap": overlap, "equal_chunks": equal, "even_shards": False}
    chunks = [
        chunk
        for rank in range(world_size)
        for chunk in chunk_and_shard_indices(count, size, rank, world_size, **how)
    ]
    lengths = {end - start for start, end in chunks}
    assert all(0 <= start < end <= count for start, end in chunks)
    assert sorted(start for start, _ in chunks) == [size * number for number in range(len(chunks))]
    if equal:
        assert lengths <= {size + overlap}
        assert count - len(chunks) * size < size + overlap, "no chunk that fits was left out"
    else:
        assert {index for start, end in chunks for index in range(start, end)} == set(range(count))


@pytest.mark.parametrize(("size", "overlap"), [(0, 0), (1, -1)])
def test_bad_chunks_are_refused(size: int, overlap: int) -> None:
    with pytest.raises(UsageError, match=f"chunk_size={size}, chunk_overlap={overlap}"):
        chunk_and_shard_indices(10, size, 0, 1, chunk_overlap=overlap)
    with pytest.raises(UsageError, match="rank=2"):
        shard_indices(10, 2, 2)


def series(count: int) -> xr.Dataset:
    return xr.Dataset({"t": ("time", np.arange(count))})


def chunks_of(dataset: ShardedXrDataset, **how: object) -> list[list[int]]:
    loader = DataLoader(dataset, batch_size=None, **how)
    return [chunk["t"].values.tolist() for chunk in loader]


def test_xarray_chunks_are_views_until_loaded() -> None:
    chunks = list(
        sharded_xr_dataset(series(10), "time", 4, chunk_overlap=1, equal_chunks=False, rank=0, world_size=1)
    )
    assert [chunk["t"].values.tolist() for chunk in chunks] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9]]
    (loaded,) = sharded_xr_dataset(series(4), "time", 4, rank=0, world_size=1, load=True)
    assert loaded["t"].values.tolist() == [0, 1, 2, 3]


def test_every_option_of_the_order_arrives() -> None:
    for how in (
        {"shuffle": True, "seed": 7},
        {"even_shards": False},
        {"equal_chunks": False},
        {"chunk_overlap": 2, "equal_chunks": False, "even_shards": False},
    ):
        expected = [
            list(range(start, end))
            for start, end in chunk_and_shard_indices(23, 3, rank=0, world_size=2, **how)
        ]
        assert expected != [[*range(i, i + 3)] for i in (0, 6, 12)], "what no option gives"
        chunks = sharded_xr_dataset(series(23), "time", 3, rank=0, world_size=2, **how)
        assert [chunk["t"].values.tolist() for chunk in chunks] == expected
        if "seed" not in how:  # that of a dataset depends on the epoch, too
            assert chunks_of(ShardedXrDataset(series(23), "time", 3, rank=0, world_size=2, **how)) == expected
    seeds = [
        ShardedXrDataset(series(23), "time", 3, shuffle=True, seed=n, rank=0, world_size=1) for n in (1, 2)
    ]
    assert chunks_of(seeds[0]) != chunks_of(seeds[1])


def test_workers_share_the_chunks_of_their_rank_and_lose_none() -> None:
    dataset = ShardedXrDataset(series(21), "time", 3, rank=0, world_size=1)
    alone = chunks_of(dataset)
    assert len(dataset) == len(alone) == 7
    assert sorted(chunks_of(dataset, num_workers=2)) == alone


def test_epochs_differ_and_reach_workers_that_persist() -> None:
    dataset = ShardedXrDataset(series(30), "time", 3, shuffle=True, rank=0, world_size=1)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    seen = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        seen.append([chunk["t"].values.tolist() for chunk in loader])
    assert seen[0] == seen[2] != seen[1]
    assert sorted(seen[0]) == sorted(seen[1])


@ranks(2)
def test_ranks_find_their_own_chunks() -> None:
    mine = [chunk["t"].values.tolist() for chunk in sharded_xr_dataset(series(12), "time", 3)]
    again = chunks_of(ShardedXrDataset(series(12), "time", 3))
    assert mine == again
    assert sorted(chunk for part in hw.all_gather_object(mine) for chunk in part) == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_chunks_go_on_where_a_loader_stopped(workers: int) -> None:
    """In the second epoch, which has an order of its own."""

    def loader() -> hw.data.DataLoader:
        dataset = ShardedXrDataset(series(21), "time", 3, shuffle=True, rank=0, world_size=1)
        return hw.data.DataLoader(dataset, batch_size=None, num_workers=workers)

    def chunks(source: object) -> list[list[int]]:
        return [chunk["t"].values.tolist() for chunk in source]

    whole = loader()
    first, second = chunks(whole), chunks(whole)
    assert sorted(first) == sorted(second) and first != second
    cut = loader()
    chunks(cut)
    iterator = iter(cut)
    before = chunks(next(iterator) for _ in range(3))
    state = json.loads(json.dumps(cut.state_dict()))
    del iterator
    after = loader()
    after.load_state_dict(state)
    assert before + chunks(after) == second
