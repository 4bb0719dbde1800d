"""Which samples a batch had, told from the order alone: what the loaders really gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from headway.data import DataLoader, Mix, ShardLoader, pack
from headway.data.order.lookup import SampleLookup, TraceableLoader

SIZES = {"a": [7, 13, 1, 9], "b": [20, 5]}


def asked(loader: DataLoader | ShardLoader) -> list[list[int]]:
    """The answer, by way of JSON."""
    order, given = loader.order(), loader.last_span()
    assert isinstance(loader, TraceableLoader) and order is not None and given is not None
    return SampleLookup(json.loads(json.dumps(order))).samples(*given).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("shuffle", [True, False])
def test_of_a_dataloader(shuffle: bool) -> None:
    data = TensorDataset(torch.arange(50 if shuffle else 48))  # without, ranks may end a batch apart
    for world_size in (1, 2, 4):
        loaders = [
            DataLoader(data, global_batch_size=8, shuffle=shuffle, seed=3, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for _ in range(2):
            for parts in zip(*loaders, strict=True):
                seen = [number for (part,) in parts for number in part.tolist()]
                short = len(seen) != len(set(seen))  # a rank without a sample gets one twice
                for loader in loaders:
                    told = [sample for _, _, sample in asked(loader)]
                    assert told == (list(dict.fromkeys(seen)) if short else seen)


def test_nothing_was_given_yet() -> None:
    assert DataLoader(TensorDataset(torch.arange(50)), batch_size=8).last_span() is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    for name, sizes in SIZES.items():
        for shard, size in enumerate(sizes):
            made = [{"__key__": f"{n}", "txt": f"{name} {shard} {n}"} for n in range(size)]
            pack(made, root / name, name=f"shard{shard}")
    return root


@pytest.mark.parametrize("shuffle", [True, False])
def test_of_a_shard_loader(folder: Path, shuffle: bool) -> None:
    mix = Mix({"a": 0.7, "b": 0.3}, shards={name: folder / name for name in SIZES})
    for world_size in (1, 2):
        loaders = [
            ShardLoader(
                mix, global_batch_size=6, shuffle=shuffle, seed=3, rank=rank, world_size=world_size, threads=1
            )
            for rank in range(world_size)
        ]
        iterators = [iter(loader) for loader in loaders]
        for step in range(6):
            if step == 3 and shuffle:
                for loader in loaders:
                    loader.set_weights({"a": 0.1, "b": 0.9})
            seen = sorted(text for iterator in iterators for text in next(iterator)["txt"])
            for loader in loaders:
                told = sorted(f"{'ab'[dataset]} {shard} {sample}" for dataset, shard, sample in asked(loader))
                assert told == seen
                assert loader.last_span() == (6 * step, 6 * step + 6)
        for iterator in iterators:
            iterator.close()  # type: ignore[attr-defined]
    words = SampleLookup(loaders[0].order()).labels(0, 2)
    assert len(words) == 2 and all(word.startswith(("a shard", "b shard")) for word in words)
