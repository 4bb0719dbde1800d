"""Batches on their way to a device: what is copied, on which thread, and that a position counts what was consumed.

The stream and its events need a GPU: tests/gpu/test_feed_gpu.py.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader as TorchLoader

import headway as hw
from headway.data.feed import batch_mover, staging_thread
from headway.data.feed.batch_mover import moving
from headway.data.feed.device_feed import (
    DeviceFeed,
    FeedableLoader,
    StagedBatch,
    check_device,
    is_small,
    to_device,
)
from headway.data.feed.nested import find_tensors, map_tensors
from headway.data.feed.pinned_ring import RingSlot, fits_slot, size_in_slot
from headway.data.images.batch import Batch

Pair = namedtuple("Pair", "image label")
CUDA = torch.device("cuda")
META = partial(torch.Tensor.to, device="meta")


class FeedOnCpu:
    """A feed without a device: it marks what it was given, and notes the threads that gave it."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def stage(self, batch: Any) -> StagedBatch:
        self.threads.append(threading.current_thread().name)
        return StagedBatch(map_tensors(batch, lambda tensor: tensor + 1000), cast(Any, None))

    def move(self, batch: Any) -> Any:
        return self.stage(batch).hand_over()


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> FeedOnCpu:
    """The feed of all devices, for pipelines that use one."""
    feed = FeedOnCpu()
    monkeypatch.setattr(batch_mover, "shared_feed", lambda _: feed)
    monkeypatch.setattr(staging_thread, "is_small", lambda _: False)
    return feed


def test_tensors_are_found_in_any_nesting_and_containers_keep_their_types() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    batch = {"a": Pair(one, ["name", two]), "b": (Batch({"crops": three}), None, 7)}
    doubled = map_tensors(batch, lambda tensor: 2 * tensor)
    assert [len(each) for each in find_tensors(doubled)] == [1, 2, 3]
    assert all(bool((each == 2).all()) for each in find_tensors(doubled))
    assert type(doubled["a"]) is Pair and doubled["a"].label[0] == "name"
    assert type(doubled["b"][0]) is Batch and doubled["b"][1:] == (None, 7)


class ReadOnly(Mapping[str, Any]):
    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts

    def __getitem__(self, name: str) -> Any:
        return self.parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


class Named(ReadOnly):
    def __init__(self, **parts: Any) -> None:
        super().__init__(parts)


class Frozen(dict[str, Any]):
    def __setitem__(self, name: str, part: Any) -> None:
        raise TypeError("it cannot be changed")


class Triple(Pair):
    """A named tuple's subclass, which has its fields from there."""


@dataclass(frozen=True, slots=True)
class Record:
    x: torch.Tensor | None
    more: Any

    def __post_init__(self) -> None:
        assert self.x is None or not self.x.is_meta, "it is made once, by the loader"


class Graph:
    """As the batches of PyTorch Geometric: it moves itself."""

    def __init__(self) -> None:
        self.x = torch.ones(2)

    def to(self, device: torch.device) -> Graph:
        moved = Graph()
        moved.x = self.x.to(device)
        return moved


@pytest.mark.parametrize(
    "move", [partial(to_device, device=torch.device("meta")), partial(map_tensors, function=META)]
)
def test_batches_of_any_type_are_moved_and_left_as_they_were(move: Callable[[Any], Any]) -> None:
    parts = {"x": torch.ones(2), "name": "a"}
    extended = UserDict(parts)
    extended.source = "web"  # type: ignore[attr-defined]
    for batch in (defaultdict(list, parts), OrderedDict(parts), extended, ReadOnly(parts), Frozen(parts)):
        moved: Any = move(batch)
        assert type(moved) is type(batch) and {**moved} == {"x": moved["x"], "name": "a"}
        assert moved["x"].is_meta and batch["x"] is parts["x"] and not parts["x"].is_meta
    assert move(defaultdict(list, parts)).default_factory is list and move(extended).source == "web"
    assert type(move(Named(**parts))) is dict, "which cannot be made from its parts"
    triple = move(Triple(parts["x"], 3))
    assert type(triple) is Triple and triple.image.is_meta and triple.label == 3
    record = Record(parts["x"], [parts["x"], "a"])
    moved = move(record)
    assert type(moved) is Record and moved.x.is_meta and moved.more[0].is_meta and moved.more[1] == "a"
    assert record.x is parts["x"] and record.more[0] is parts["x"]
    assert move(plain := Record(None, "a")) is plain


def test_an_object_with_a_method_to_moves_itself() -> None:
    graph, packed = Graph(), pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    batch = {"graph": graph, "pair": (packed, torch.ones(2))}
    moved = to_device(batch, torch.device("meta"))
    assert moved["graph"].x.is_meta and not graph.x.is_meta
    sequence, tensor = moved["pair"]
    assert type(sequence) is PackedSequence and sequence.data.is_meta and tensor.is_meta
    assert not sequence.batch_sizes.is_meta, "which recurrent layers need on the CPU"
    assert [tensor.shape for tensor in find_tensors(batch)] == [(2,)], "which a feed stages"
    staged = map_tensors(batch, META)
    assert staged["graph"] is graph and staged["pair"][0] is packed and staged["pair"][1].is_meta
    assert StagedBatch(staged, cast(Any, None)).hand_over() is staged
    later = StagedBatch(staged, cast(Any, None), torch.device("meta")).hand_over()
    assert later["graph"].x.is_meta and later["pair"][0].data.is_meta


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
    with moving(loader, torch.device("cpu")) as mover:
        opened = iter(loader)
        assert mover.read(opened) is opened and mover.move(loader[0]) is loader[0]


def test_both_loaders_can_be_fed_and_workers_then_pin() -> None:
    loader = hw.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4)), num_workers=1)  # type: ignore[arg-type]
    assert isinstance(loader, FeedableLoader) and issubclass(hw.data.ShardLoader, FeedableLoader)
    for feed, pinned in ((cast(DeviceFeed, FeedOnCpu()), True), (None, False)):
        loader.feed_to(feed)
        assert loader._torch.pin_memory is pinned


def test_batches_in_memory_are_copied_by_a_thread_of_the_feed_in_order(feed: FeedOnCpu) -> None:
    loader = [{"x": torch.tensor([number])} for number in range(7)]
    loader += [loader[0], loader[1]]
    with moving(loader, CUDA) as mover:
        found = [int(mover.move(batch)["x"]) for batch in mover.read(iter(loader))]
        assert found == [1000, 1001, 1002, 1003, 1004, 1005, 1006, 1000, 1001]
        assert feed.threads == ["headway feed"] * 9
        assert int(mover.move(loader[1])["x"]) == 1001 and feed.threads[9] == "MainThread"  # once more
    assert not running("headway feed")


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_a_buffer_that_the_loop_refills_is_not_copied_before_that(buffers: int, feed: FeedOnCpu) -> None:
    memory = [torch.tensor([number]) for number in range(buffers)]
    loader = [(memory[number % buffers], number) for number in range(9)]
    found = list[int]()
    with moving(loader, CUDA) as mover:
        for batch in mover.read(iter(loader)):
            found.append(int(mover.move(batch)[0]))
            batch[0].add_(buffers)  # for the next time that it comes
    assert found == [1000 + number for number in range(9)]
    assert feed.threads.count("headway feed") == (9 if buffers == 3 else buffers)


@pytest.mark.parametrize("taken", range(4))
def test_a_loop_that_ends_early_ends_the_thread_and_keeps_nothing(taken: int, feed: FeedOnCpu) -> None:
    loader = tuple(torch.tensor([number]) for number in range(50))
    with moving(loader, CUDA) as mover:
        source = mover.read(iter(loader))
        assert [int(mover.move(next(source))) for _ in range(taken)] == [1000, 1001, 1002][:taken]
    assert not running("headway feed") and len(feed.threads) <= taken + 3


def test_an_error_of_the_feed_is_raised_where_its_batch_is_asked_for(feed: FeedOnCpu) -> None:
    loader = [torch.ones(1), torch.ones(1), torch.ones(1, device="meta")]
    feed.stage = partial(_refuse_meta, feed.stage)  # type: ignore[method-assign]
    with moving(loader, CUDA) as mover:
        source = mover.read(iter(loader))
        assert [int(mover.move(next(source))) for _ in range(2)] == [1001, 1001]
        with pytest.raises(hw.errors.UsageError, match="tensor on meta"):
            next(source)
    assert not running("headway feed")


def _refuse_meta(stage: Any, batch: Any) -> Any:
    check_device(batch, torch.device("cpu"))
    return stage(batch)


def test_workers_of_torchs_own_loader_pin_while_a_pipeline_reads_it(feed: FeedOnCpu) -> None:
    values: Any = list(range(4))
    loader = TorchLoader(values, batch_size=2, num_workers=1)
    with moving(loader, CUDA) as mover:
        assert loader.pin_memory is True, "a thread of torch's pins, and not the one that trains"
        assert mover.read(iter([1])).__next__() == 1
    assert loader.pin_memory is False
    with moving(TorchLoader(values, batch_size=2), CUDA) as mover:  # it has no thread
        assert int(mover.move(torch.tensor([5]))) == 1005
    assert feed.threads == ["MainThread"]


def test_a_loader_that_makes_its_batches_is_never_asked_before_they_are_needed(feed: FeedOnCpu) -> None:
    made = list[int]()

    def make() -> Iterator[torch.Tensor]:
        for number in range(5):
            made.append(number)
            yield torch.tensor([number])

    loader = make()
    with moving(loader, CUDA) as mover:
        for number, batch in enumerate(mover.read(loader)):
            assert int(mover.move(batch)) == 1000 + number and made == list(range(number + 1))
    assert set(feed.threads) == {"MainThread"}


def running(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_a_batch_is_small_if_all_of_its_tensors_are() -> None:
    at_most = torch.empty(2**14)  # 64 KiB
    assert is_small(()) and is_small({"x": [at_most, at_most.long()[: 2**13]], "y": "name"})
    assert not is_small((at_most, [torch.empty(2**14 + 1)]))


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


class Mask(torch.Tensor):
    """As the masks of torchvision: what is computed from them is a plain tensor."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), settings: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(settings or {}))


def test_a_tensor_of_a_class_of_its_own_is_not_copied_through_a_slot() -> None:
    """It would lose its class, and transforms would take a mask for something else."""
    mask = torch.ones(4).as_subclass(Mask)
    slot = RingSlot(torch.zeros(size_in_slot(mask), dtype=torch.uint8), cast(Any, None))
    assert type(slot.fill(mask)) is torch.Tensor
    assert not fits_slot(mask) and fits_slot(torch.ones(4))
    assert not fits_slot(torch.ones(4).to_sparse())
