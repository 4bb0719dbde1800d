"""Memory that is used again, and never while anything refers to it."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.data import MultiCrop, ShardLoader, pack
from headway.data.images.memory_pool import MemoryPool, _block_bytes

VIEWS: dict[str, Any] = {
    "array": lambda lent: lent,
    "view": lambda lent: lent[: len(lent) // 2 * 2].reshape(2, -1)[1:],
    "view of a view": lambda lent: lent[1:][1:].view(np.int8)[::2],
    "memoryview": lambda lent: memoryview(lent),
    "tensor": lambda lent: torch.from_numpy(lent)[3:],
    "tensor of a view": lambda lent: torch.from_numpy(lent.reshape(1, -1)).view(torch.int8).t(),
    "array of a tensor": lambda lent: torch.from_numpy(lent[2:]).numpy(),
}


def address(lent: Any) -> int:
    return int(lent.__array_interface__["data"][0])


def content(view: Any) -> set[int]:
    return set(np.asarray(view).astype(np.uint8).reshape(-1).tolist())


def test_memory_comes_back_when_nothing_refers_to_it_and_never_before() -> None:
    pool, rng = MemoryPool(), random.Random(0)
    kept: list[tuple[int, Any]] = []
    places = set()
    for number in range(600):
        lent = pool.take(rng.choice((1000, 1020, 1500)))
        places.add(address(lent))
        lent[:] = number % 251
        kept.append((number % 251, VIEWS[rng.choice(list(VIEWS))](lent)))
        del lent
        if len(kept) > 20:
            del kept[rng.randrange(len(kept))]
        if number % 20 == 0:
            assert all(content(view) == {value} for value, view in kept)
    assert len(places) < 60, "600 arrays, of which 21 are in use at a time"


@pytest.mark.parametrize("kind", VIEWS)
def test_each_kind_of_view_keeps_its_memory(kind: str) -> None:
    pool = MemoryPool()
    lent = pool.take(4096)
    place, view = address(lent), VIEWS[kind](lent)
    del lent
    gc.collect()
    other = pool.take(4096)
    assert address(other) != place
    del view
    assert address(pool.take(4096)) == place
    del other


def test_blocks_are_at_most_a_quarter_too_large() -> None:
    for size in [*range(200), 10**6, 2**30 + 1]:
        assert size <= _block_bytes(size) <= max(1, size * 1.25)
    assert len({_block_bytes(size) for size in range(2**20, 2**21)}) == 5


def test_a_loader_uses_the_memory_of_batches_that_are_gone_and_no_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (20, 24, 3), dtype=np.uint8) for _ in range(64)]
    samples = ({"__key__": f"{n:03d}", "png": _png(each)} for n, each in enumerate(pixels))
    pack(samples, tmp_path / "shards", shard_size=2**20)
    transform = MultiCrop(global_size=16, local_size=8, n_local=2)
    loader = ShardLoader(tmp_path / "shards", batch_size=4, seed=1, threads=2, transform=transform)
    kept = list(loader)
    assert len({batch.global_crops.data_ptr() for batch in kept}) == 16
    loader.set_epoch(0)
    places = set()
    for batch, before in zip(loader, kept, strict=True):
        places.add(batch.global_crops.data_ptr())
        for name in ("global_crops", "local_crops"):
            assert torch.equal(batch[name], before[name]), "what is kept stays, what is new is right"
    assert len(places) < 12, "those that are prefetched, and one or two more"


def _png(pixels: Any) -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
