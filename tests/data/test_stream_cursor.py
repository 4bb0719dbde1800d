"""DataLoader over iterable datasets: their position goes with every batch, on the same ranks and workers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils import data as torch_data

from headway.data import DataLoader
from headway.errors import UsageError


class Lines(torch_data.IterableDataset[torch.Tensor]):
    """Numbers with noise, dealt to workers by their number; goes on after the last one given."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch_data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        while self.at * workers + worker < self.count:
            number = self.at * workers + worker
            self.at += 1
            yield torch.tensor([number, torch.rand(()).item()], dtype=torch.float64)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def rows(loader: DataLoader) -> list[list[list[float]]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize(("workers", "cut"), [(0, 4), (2, 1), (2, 9), (3, 4)])
def test_a_stream_goes_on_with_the_same_batches_and_random_numbers(workers: int, cut: int) -> None:
    """20 samples of 2 or 3 workers: some end earlier than others, and turns go on where they stopped."""
    how = {"batch_size": 2, "num_workers": workers, "seed": 3}
    whole = rows(DataLoader(Lines(20), **how))
    assert sorted(int(row[0]) for batch in whole for row in batch) == list(range(20))
    loader = DataLoader(Lines(20), **how)
    iterator = iter(loader)
    before = [next(iterator).tolist() for _ in range(cut)]
    state = json.loads(json.dumps(loader.state_dict()))
    del iterator
    again = DataLoader(Lines(20), **how)
    again.load_state_dict(state)
    again.set_epoch(0)  # keeps the restored position
    assert before + rows(again) == whole
    assert again.epoch == 1
    assert rows(again) != whole, "the next epoch draws other random numbers"


def test_a_stream_is_counted_and_has_a_state_per_rank() -> None:
    loader = DataLoader(Lines(5), batch_size=2)
    assert [len(batch) for batch in loader] == [2, 2, 1]
    assert loader.per_rank and not DataLoader([1, 2]).per_rank
    counted = loader.counters()
    assert (counted["samples"], counted["batches"]) == (5, 3) and counted["seconds/wait"] > 0
    assert [len(batch) for batch in DataLoader(Lines(5), batch_size=2, drop_last=True)] == [2, 2]
    with pytest.raises(TypeError, match="no length"):
        len(loader)


def test_streams_leave_the_random_numbers_of_the_model_alone() -> None:
    torch.manual_seed(0)
    untouched = torch.rand(())
    torch.manual_seed(0)
    rows(DataLoader(Lines(5), batch_size=2))
    assert torch.rand(()) == untouched


class Plain(torch_data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_what_cannot_be_resumed_is_refused() -> None:
    with pytest.raises(UsageError, match="Plain is an IterableDataset without state_dict"):
        DataLoader(Plain())
    for how in ({"shuffle": True}, {"persistent_workers": True, "num_workers": 1}):
        with pytest.raises(UsageError, match="which has its own order"):
            DataLoader(Lines(3), batch_size=1, **how)
    with pytest.raises(UsageError, match="global_batch_size=4 with Lines"):
        DataLoader(Lines(3), global_batch_size=4)


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ({"rank": 1, "world_size": 2}, "rank 1 there, 0 here; world_size 2 there, 1 here"),
        ({"num_workers": 2}, "workers 2 there, 1 here"),
    ],
)
def test_the_state_of_other_ranks_and_workers_is_refused(there: dict[str, int], says: str) -> None:
    state = DataLoader(Lines(8), batch_size=2, **there).state_dict()
    with pytest.raises(UsageError, match=says):
        DataLoader(Lines(8), batch_size=2).load_state_dict(state)
    with pytest.raises(UsageError, match="not the state of a DataLoader of an iterable dataset"):
        DataLoader(Lines(8), batch_size=2).load_state_dict({"version": 1})


class Epochs(Lines):
    """Its order is that of an epoch, and a state of another one is ignored, as Hugging Face's streams do it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in super().__iter__():
            yield row + 100 * self.epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"] if state["epoch"] == self.epoch else 0


def test_a_stream_is_told_its_epoch() -> None:
    def numbers(loader: DataLoader) -> list[int]:
        return [int(row[0]) for batch in loader for row in batch]

    loader = DataLoader(Epochs(6), batch_size=2)
    assert numbers(loader) == [0, 1, 2, 3, 4, 5]
    next(iter(loader))
    again = DataLoader(Epochs(6), batch_size=2)
    again.load_state_dict(loader.state_dict())
    assert numbers(again) == [102, 103, 104, 105]


def test_a_stream_without_batches() -> None:
    loader = DataLoader(Lines(5), batch_size=None)
    assert [int(row[0]) for row in loader] == list(range(5))


def test_a_hugging_face_stream_that_ranks_may_not_share_is_said_once(messages: list[str]) -> None:
    class Streamed(Lines):
        _distributed: object = None

    Streamed.__module__ = "datasets.iterable_dataset"
    assert len(list(DataLoader(Streamed(4), batch_size=2, rank=0, world_size=1))) == 2
    assert not messages
    loader = DataLoader(Streamed(4), batch_size=2, rank=0, world_size=2)
    assert [len(list(loader)) for _ in range(2)] == [2, 2], "its files may be divided among ranks"
    (message,) = messages
    assert "datasets.distributed.split_dataset_by_node" in message
    Streamed._distributed = object()
    assert len(list(DataLoader(Streamed(4), batch_size=2, rank=0, world_size=2))) == 2
    assert len(messages) == 1


class BufferShuffledExamplesIterable:
    """Named and nested as Hugging Face's, in a stream whose state has the source's place and not the buffer."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size


class Shuffled(torch_data.IterableDataset[int]):
    def __init__(self, count: int = 40, size: int = 10) -> None:
        self._ex_iterable = type("MappedExamplesIterable", (), {})()
        self._ex_iterable.ex_iterable = BufferShuffledExamplesIterable(count, size)
        self._distributed, self.at, self.start = object(), 0, 0

    def __iter__(self) -> Iterator[int]:
        source, buffer, order = self._ex_iterable.ex_iterable, list[int](), random.Random(3)
        self.at, self.start = self.start, 0
        while self.at < source.count or buffer:
            while self.at < source.count and len(buffer) < source.size:
                buffer.append(self.at)
                self.at += 1
            yield buffer.pop(order.randrange(len(buffer)))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


Shuffled.__module__ = "datasets.iterable_dataset"


def samples_of(loader: DataLoader, batches: int | None = None) -> list[int]:
    return [int(sample) for batch in islice(loader, batches) for sample in batch]


@pytest.mark.parametrize("kind", ["like theirs", "theirs"])
def test_a_shuffle_buffer_that_is_not_in_the_state_is_filled_again(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def stream() -> Any:
        if kind == "like theirs":
            return Shuffled()
        numbers = pytest.importorskip("datasets").Dataset.from_list([{"x": n} for n in range(40)])
        return numbers.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=10)

    def loader() -> DataLoader:
        if kind == "like theirs":
            return DataLoader(stream(), batch_size=4)
        return DataLoader(stream(), batch_size=4, collate_fn=lambda rows: [row["x"] for row in rows])

    whole, begun = samples_of(loader()), loader()
    before = samples_of(begun, 3)
    again = loader()
    with caplog.at_level("INFO", logger="headway"):
        again.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert before + samples_of(again) == whole and sorted(whole) == [*range(40)]
    assert "3 batches are read again and skipped" in caplog.text
