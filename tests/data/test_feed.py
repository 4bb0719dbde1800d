"""Batches on their way to a device: what is copied, on which thread, and that a position counts what was consumed.

The stream and its events need a GPU: tests/gpu/test_feed_gpu.py.
"""

from __future__ import annotations

import threading
from collections import namedtuple
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import headway as hw
from headway.data.feed.device_feed import DeviceFeed, FeedableLoader, StagedBatch, check_device
from headway.data.feed.nested import find_tensors, map_tensors
from headway.data.feed.pinned_ring import RingSlot, size_in_slot
from headway.data.images.batch import Batch
from headway.train.batches import moving

Pair = namedtuple("Pair", "image label")


class FeedOnCpu:
    """A feed without a device: it marks what it was given, and notes the threads that gave it."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def stage(self, batch: Any) -> StagedBatch:
        self.threads.append(threading.current_thread().name)
        return StagedBatch(map_tensors(batch, lambda tensor: tensor + 1000), cast(Any, None))


def test_tensors_are_found_in_any_nesting_and_containers_keep_their_types() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    batch = {"a": Pair(one, ["name", two]), "b": (Batch({"crops": three}), None, 7)}
    doubled = map_tensors(batch, lambda tensor: 2 * tensor)
    assert [len(each) for each in find_tensors(doubled)] == [1, 2, 3]
    assert all(bool((each == 2).all()) for each in find_tensors(doubled))
    assert type(doubled["a"]) is Pair and doubled["a"].label[0] == "name"
    assert type(doubled["b"][0]) is Batch and doubled["b"][1:] == (None, 7)


def test_shards_are_fed_by_the_threads_of_the_loader_and_the_position_is_what_was_consumed(
    tmp_path: Path,
) -> None:
    samples = ({"__key__": f"{n:03d}", "cls": n} for n in range(32))
    hw.data.pack(samples, tmp_path / "shards", shard_size=2**20)
    plain = hw.data.ShardLoader(tmp_path / "shards", batch_size=4, seed=1, rank=0, world_size=1)
    expected = [(batch["cls"], plain.state_dict()) for batch in plain]
    fed = hw.data.ShardLoader(tmp_path / "shards", batch_size=4, seed=1, rank=0, world_size=1)
    feed = FeedOnCpu()
    fed.feed_to(cast(DeviceFeed, feed))
    found = [(batch["cls"], fed.state_dict()) for batch in fed]
    assert [labels.tolist() for labels, _ in found] == [(labels + 1000).tolist() for labels, _ in expected]
    assert [state for _, state in found] == [state for _, state in expected]
    assert {name.rpartition("_")[0] for name in feed.threads} == {"headway collate"}
    fed.feed_to(None)
    assert all(int(batch["cls"].max()) < 1000 for batch in fed)


def test_on_the_cpu_a_batch_is_not_touched_and_no_loader_is_asked_to_feed() -> None:
    class Loader(list[torch.Tensor]):
        def feed_to(self, _: DeviceFeed | None) -> None:
            raise AssertionError("a pipeline on the CPU has no feed")

    loader = Loader([torch.ones(2)])
    assert isinstance(loader, FeedableLoader)
    with moving(loader, torch.device("cpu")) as move:
        assert move(loader[0]) is loader[0]


def test_both_loaders_can_be_fed_and_workers_then_pin() -> None:
    loader = hw.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4)), num_workers=1)  # type: ignore[arg-type]
    assert isinstance(loader, FeedableLoader) and issubclass(hw.data.ShardLoader, FeedableLoader)
    for feed, pinned in ((cast(DeviceFeed, FeedOnCpu()), True), (None, False)):
        loader.feed_to(feed)
        assert loader._torch.pin_memory is pinned


def test_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(hw.errors.UsageError, match="a batch has a tensor on meta, but this rank uses cuda:0"):
        check_device(torch.ones(1, device="meta"), torch.device("cuda", 0))


def test_a_slot_keeps_values_types_and_layouts_apart() -> None:
    tensors = [
        torch.arange(5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor([True, False]),
        torch.randn(3, 8).to(torch.bfloat16)[:, ::2],
        torch.empty(0),
    ]
    slot = RingSlot(torch.full((sum(map(size_in_slot, tensors)),), 7, dtype=torch.uint8), cast(Any, None))
    filled = [slot.fill(tensor) for tensor in tensors]  # all, before any is looked at
    assert all(torch.equal(here, there) for here, there in zip(filled, tensors, strict=True))
    assert [each.dtype for each in filled] == [each.dtype for each in tensors]
    assert filled[1].is_contiguous(memory_format=torch.channels_last) and filled[3].is_contiguous()
