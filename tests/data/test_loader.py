"""DataLoader: torch's batches without shuffle, every sample once with it; stops anywhere, goes on on any world size."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils import data as torch_data
from waiting import check_duration

import headway as hw
from headway.data import DataLoader
from headway.errors import UsageError
from headway.testing import ranks


class Numbers(torch_data.Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index


class Noise(Numbers):
    """Each sample draws from all three sources of random numbers."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(
            [index, torch.rand(()).item(), random.random(), np.random.random()], dtype=torch.float64
        )


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(())


def rows(loader: DataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def on_all_ranks(world_size: int, count: int, **how: object) -> list[DataLoader]:
    return [DataLoader(Numbers(count), rank=rank, world_size=world_size, **how) for rank in range(world_size)]


def global_batches(loaders: list[DataLoader], steps: int | None = None) -> list[list[int]]:
    """The batches of all ranks put together, step by step; a rank may be done one step before the others."""
    iterators = [iter(loader) for loader in loaders]
    batches = []
    while steps is None or len(batches) < steps:
        parts = [next(iterator, None) for iterator in iterators]
        if all(part is None for part in parts):
            break
        batches.append([sample for part in parts if part is not None for sample in part.tolist()])
    return batches


# --- as torch's


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_without_shuffle_batches_are_those_of_torch(workers: int, drop_last: bool) -> None:
    dataset = torch_data.TensorDataset(torch.arange(23), torch.rand(23, 3))
    how = {"batch_size": 4, "num_workers": workers, "drop_last": drop_last}
    theirs, ours = list(torch_data.DataLoader(dataset, **how)), list(DataLoader(dataset, **how))
    assert len(theirs) == len(ours) == len(DataLoader(dataset, **how))
    for one, other in zip(theirs, ours, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_collate_and_worker_start_are_honoured(tmp_path: Path) -> None:
    loader = DataLoader(
        Numbers(6),
        batch_size=3,
        num_workers=2,
        collate_fn=sum,
        worker_init_fn=lambda w: (tmp_path / str(w)).touch(),
    )
    assert list(loader) == [3, 12]
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_persistent_workers_follow_the_epochs(context: str) -> None:
    how = {"batch_size": 4, "shuffle": True, "seed": 5}
    loader = DataLoader(
        Numbers(10), num_workers=1, persistent_workers=True, multiprocessing_context=context, **how
    )
    alone = DataLoader(Numbers(10), **how)
    assert [rows(loader) for _ in range(3)] == [rows(alone) for _ in range(3)]


# --- the order


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 100),
    batch=st.integers(1, 20),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    cut=st.integers(0, 30),
    seed=st.integers(0, 1000),
)
def test_any_world_size_goes_on_with_the_same_global_batches(
    count: int, batch: int, sizes: tuple[int, int], cut: int, seed: int
) -> None:
    """Cut anywhere, both epoch boundaries included."""
    how = {"global_batch_size": batch * sizes[0] * sizes[1], "shuffle": True, "seed": seed}
    exact = global_batches(on_all_ranks(1, count, **how))
    first = on_all_ranks(sizes[0], count, **how)
    before = global_batches(first, cut)
    state = json.loads(json.dumps(first[0].state_dict()))
    assert all(loader.state_dict() == state for loader in first)
    second = on_all_ranks(sizes[1], count, **how)
    for loader in second:
        loader.load_state_dict(state)
    after = global_batches(second)
    if cut > len(exact):  # the pass had ended: this is the next one
        exact += next_epoch(count, how)
    whole = before + after
    for got, expected in zip(whole, exact, strict=True):
        assert got == expected or (len(expected) < max(sizes) and set(got) == set(expected))


def next_epoch(count: int, how: dict[str, object]) -> list[list[int]]:
    loader = DataLoader(Numbers(count), **how)
    loader.set_epoch(1)
    return rows(loader)


@given(count=st.integers(1, 100), batch=st.integers(1, 10), world_size=st.integers(1, 8))
def test_validation_sees_every_sample_once_whatever_the_world_size(
    count: int, batch: int, world_size: int
) -> None:
    loaders = on_all_ranks(world_size, count, batch_size=batch)
    parts = [rows(loader) for loader in loaders]
    assert [len(loader) for loader in loaders] == [len(part) for part in parts]
    assert sorted(sample for part in parts for batch_ in part for sample in batch_) == list(range(count))


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 100), batch=st.integers(1, 10), world_size=st.integers(1, 8))
def test_training_takes_as_many_steps_on_every_rank(count: int, batch: int, world_size: int) -> None:
    loaders = on_all_ranks(world_size, count, batch_size=batch, shuffle=True)
    parts = [rows(loader) for loader in loaders]
    assert (
        {len(part) for part in parts}
        == {len(loader) for loader in loaders}
        == {-(-count // (batch * world_size))}
    )
    seen = Counter(sample for part in parts for batch_ in part for sample in batch_)
    assert set(seen) == set(range(count))
    assert seen.total() - count < world_size, "only where a rank would have had nothing"


def test_epochs_differ_and_seeds_differ_and_repeat() -> None:
    def epochs(seed: int) -> list[list[list[int]]]:
        loader = DataLoader(Numbers(50), batch_size=10, shuffle=True, seed=seed)
        return [rows(loader) for _ in range(3)]

    assert epochs(1) == epochs(1)
    assert len({str(epoch) for seed in (1, 2) for epoch in epochs(seed)}) == 6


def test_dropping_the_short_batch() -> None:
    loader = DataLoader(Numbers(11), batch_size=4, shuffle=True, drop_last=True)
    assert [len(row) for row in rows(loader)] == [4, 4]
    assert len(loader) == 2
    assert loader.epoch == 1
    with pytest.raises(UsageError, match="a global batch has 12 samples, but the dataset has 11"):
        iter(DataLoader(Numbers(11), batch_size=12, drop_last=True))


# --- positions


def test_a_shuffled_loader_goes_on_after_a_break() -> None:
    loader = DataLoader(Numbers(12), batch_size=4, shuffle=True)
    whole = rows(DataLoader(Numbers(12), batch_size=4, shuffle=True))
    for batch in loader:
        assert batch.tolist() == whole[0]
        break
    assert rows(loader) == whole[1:]
    assert loader.epoch == 1


def test_an_ordered_loader_starts_from_the_top_after_a_break() -> None:
    loader = DataLoader(Numbers(12), batch_size=4)
    next(iter(loader))
    assert rows(loader) == rows(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("shuffle", [True, False])
def test_state_counts_what_was_consumed_not_what_workers_loaded(shuffle: bool) -> None:
    how = {"batch_size": 2, "shuffle": shuffle, "num_workers": 2, "prefetch_factor": 4}
    whole = rows(DataLoader(Numbers(20), **how))
    loader = DataLoader(Numbers(20), **how)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    assert state["samples"] == 6
    assert len(json.dumps(state)) < 200
    del iterator
    other = DataLoader(Numbers(20), **how)
    other.load_state_dict(state)
    assert rows(other) == whole[3:]


def test_a_state_of_the_last_step_ends_the_epoch_first() -> None:
    """Neither skips the next epoch nor counts one epoch twice."""
    loader = DataLoader(Numbers(8), batch_size=4, shuffle=True)
    iterator = iter(loader)
    next(iterator), next(iterator)
    at_last_step = loader.state_dict()
    assert next(iterator, None) is None
    after_the_pass = loader.state_dict()
    assert (at_last_step["epoch"], after_the_pass["epoch"]) == (0, 1)
    following = rows(loader)
    for state, passes in ((at_last_step, [[], following]), (after_the_pass, [following])):
        again = DataLoader(Numbers(8), batch_size=4, shuffle=True)
        again.load_state_dict(state)
        assert [rows(again) for _ in passes] == passes


def test_set_epoch_keeps_a_restored_position_and_else_begins_anew() -> None:
    whole = rows(DataLoader(Numbers(12), batch_size=4, shuffle=True))
    loader = DataLoader(Numbers(12), batch_size=4, shuffle=True)
    next(iter(loader))
    state = loader.state_dict()
    loader.set_epoch(0)
    assert rows(loader) == whole
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert rows(loader) == whole[1:]
    loader.load_state_dict(state)
    loader.set_epoch(1)
    assert len(rows(loader)) == 3
    with pytest.raises(UsageError, match=r"set_epoch\(-1\)"):
        loader.set_epoch(-1)


def test_a_second_loop_ends_the_first_with_an_error() -> None:
    loader = DataLoader(Numbers(12), batch_size=4)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second).tolist() == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="a loader has one position"):
        next(first)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"count": 11}, "length 12 there, 11 here"),
        ({"seed": 1}, "seed 0 there, 1 here"),
        ({"shuffle": False}, "shuffle"),
    ],
)
def test_the_state_of_another_order_is_refused(change: dict[str, object], says: str) -> None:
    state = DataLoader(Numbers(12), batch_size=4, shuffle=True).state_dict()
    how = {"count": 12, "seed": 0, "shuffle": True} | change
    other = DataLoader(Numbers(how.pop("count")), batch_size=4, **how)
    with pytest.raises(UsageError, match=says):
        other.load_state_dict(state)
    with pytest.raises(UsageError, match="not the state of a DataLoader"):
        other.load_state_dict({"version": 1})


# --- random numbers


@pytest.mark.parametrize("collate", [None, noisy_collate])
def test_random_numbers_belong_to_the_sample(collate: object) -> None:
    def drawn(**how: object) -> torch.Tensor:
        loader = DataLoader(Noise(12), batch_size=4, shuffle=True, collate_fn=collate, **how)
        return torch.cat(list(loader))

    exact = drawn()
    torch.rand(7), random.random(), np.random.random()
    assert torch.equal(drawn(), exact)
    assert torch.equal(drawn(num_workers=2), exact)
    assert not torch.equal(drawn(seed=1)[:, 1:], exact[:, 1:])
    assert len(exact[:, 1:].unique()) == 36


def test_random_numbers_do_not_depend_on_the_ranks_and_do_on_the_epoch() -> None:
    def drawn(world_size: int, epoch: int) -> dict[int, list[float]]:
        loaders = [
            DataLoader(Noise(12), global_batch_size=6, shuffle=True, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for loader in loaders:
            loader.set_epoch(epoch)
        return {int(row[0]): row[1:].tolist() for loader in loaders for batch in loader for row in batch}

    assert drawn(1, 0) == drawn(2, 0) == drawn(3, 0)
    assert all(drawn(1, 0)[sample] != drawn(1, 1)[sample] for sample in range(12))


def test_loading_leaves_the_random_numbers_of_the_model_alone() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    untouched = torch.rand(()), random.random(), np.random.random()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    list(DataLoader(Noise(12), batch_size=4))
    assert (torch.rand(()), random.random(), np.random.random()) == untouched


# --- on ranks


@ranks(3)
def test_ranks_share_a_pass_and_leave_a_state() -> None:
    loader = DataLoader(Numbers(50), global_batch_size=6, shuffle=True, seed=3, num_workers=1)
    alone = DataLoader(Numbers(50), global_batch_size=6, shuffle=True, seed=3, rank=0, world_size=1)
    batches = iter(loader)
    for expected in list(alone)[:4]:
        parts = hw.all_gather_object(next(batches).tolist())
        assert [sample for part in parts for sample in part] == expected.tolist()
    assert len({json.dumps(state) for state in hw.all_gather_object(loader.state_dict())}) == 1
    assert loader.state_dict()["samples"] == 24


@ranks(2)
def test_two_ranks_go_on_where_three_stopped() -> None:
    state = {"version": 1, "length": 50, "seed": 3, "shuffle": True, "epoch": 0, "samples": 24}
    loader = DataLoader(Numbers(50), global_batch_size=6, shuffle=True, seed=3)
    loader.load_state_dict(state)
    alone = DataLoader(Numbers(50), global_batch_size=6, shuffle=True, seed=3, rank=0, world_size=1)
    rest = [batch.tolist() for batch in alone][4:]
    mine = [batch.tolist() for batch in loader]
    parts = hw.all_gather_object(mine)
    assert [[*one, *two] for one, two in zip(*parts, strict=True)] == rest


@ranks(3)
def test_a_mean_over_validation_batches_is_exact_on_ranks() -> None:
    total = sum(batch.sum().item() for batch in DataLoader(Numbers(10), batch_size=2))
    assert sum(hw.all_gather_object(total)) == sum(range(10))


# --- refusals


def test_bad_arguments_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="give one of them"):
        DataLoader(Numbers(3), batch_size=1, global_batch_size=1)
    with pytest.raises(UsageError, match="at least 1"):
        DataLoader(Numbers(3), batch_size=0)
    with pytest.raises(UsageError, match="give both or neither"):
        DataLoader(Numbers(3), rank=1)
    with pytest.raises(UsageError, match="rank=2 is not one"):
        DataLoader(Numbers(3), rank=2, world_size=2)
    with pytest.raises(UsageError, match="Numbers is empty"):
        DataLoader(Numbers(0))
    with pytest.raises(UsageError, match="cannot be split into 2 equal parts"):
        len(DataLoader(Numbers(30), global_batch_size=7, rank=0, world_size=2))


def test_a_process_that_has_not_joined_its_peers_is_told_so() -> None:
    code = "from headway.data import DataLoader; next(iter(DataLoader([1, 2, 3])))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "has not joined the others" in done.stderr


def test_workers_leave_nothing_behind(no_leaks: None) -> None:  # noqa: ARG001
    loader = DataLoader(Numbers(1000), batch_size=2, num_workers=2, shuffle=True)
    for _ in range(2):
        for _batch in loader:
            break


def test_persistent_workers_end_with_their_loader() -> None:
    before = psutil.Process().children()
    loader = DataLoader(Numbers(10), batch_size=4, num_workers=1, persistent_workers=True)
    rows(loader)
    (worker,) = set(psutil.Process().children()) - set(before)
    began = time.monotonic()
    del loader
    worker.wait(9)
    check_duration(time.monotonic() - began, 9, "the worker had ended (10 s if references form a ring)")


@pytest.mark.parametrize("workers", [0, 1])
def test_closing_a_loader_ends_its_loop_as_break_does(workers: int) -> None:
    closed, left = (
        DataLoader(Numbers(10), batch_size=2, num_workers=workers, shuffle=True) for _ in range(2)
    )
    for _ in closed:
        closed.close()
    for _ in left:
        break
    assert closed.state_dict() == left.state_dict()
    assert rows(closed) == rows(left) and len(rows(closed)) == 5


class Shielded(Numbers):
    """Tells whether stop signals were held back when it arrived in its worker, before anything could ignore them."""

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ = state
        self.held = {signal.SIGUSR1, signal.SIGTERM} <= signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def __getitem__(self, index: int) -> tuple[bool, bool]:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        return self.held, True


def test_workers_are_deaf_to_the_signals_of_their_rank() -> None:
    (batch,) = DataLoader(Shielded(2), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    assert [part.tolist() for part in batch] == [[True, True], [True, True]]


def test_a_batch_looks_up_no_lazy_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank and world size are asked for several times per batch: a lazy lookup took 10 us where 0.06 us would do."""
    batches = iter(DataLoader(torch_data.TensorDataset(torch.arange(64)), batch_size=4, shuffle=True))
    next(batches)
    lookups: list[str] = []
    load = hw.dist.__getattr__

    def count(name: str) -> object:
        lookups.append(name)
        return load(name)

    for name in hw.dist.__all__:
        monkeypatch.delitem(
            vars(hw.dist), name, raising=False
        )  # as if never used: a lookup calls __getattr__
    monkeypatch.setattr(hw.dist, "__getattr__", count)
    for _ in range(10):
        next(batches)
    assert lookups == []
    assert hw.dist.is_initialized() is False and lookups == ["is_initialized"], "it does count"


# --- whole batches


class Fetched(Numbers):
    """Counts how it is asked; `__getitems__` may draw random numbers, as a transform on batches does."""

    def __init__(self, count: int, *, draws: bool = False, short: bool = False) -> None:
        super().__init__(count)
        self.draws, self.short = draws, short
        self.single = self.batched = 0

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.single += 1
        return index, random.random() if self.draws else 0.5

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        self.batched += 1
        samples = [(index, random.random() if self.draws else 0.5) for index in indices]
        return samples[1:] if self.short else samples


class Overridden(Fetched):
    """Knows more than `__getitems__` of its parent does."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return super().__getitem__(index)[0] + 100, 0.0


def pairs(loader: DataLoader) -> list[list[tuple[int, float]]]:
    return [list(zip(*(part.tolist() for part in batch), strict=True)) for batch in loader]


def test_a_dataset_that_can_is_asked_for_whole_batches() -> None:
    dataset = Fetched(12)
    batches = pairs(DataLoader(dataset, batch_size=4, shuffle=True))
    assert (dataset.single, dataset.batched) == (0, 4), "the first sample alone: does it draw random numbers?"
    assert [[index for index, _ in batch] for batch in batches] == rows(
        DataLoader(Numbers(12), batch_size=4, shuffle=True)
    )
    with pytest.raises(UsageError, match="__getitems__ of Fetched returned 0 samples for 1 indices"):
        pairs(DataLoader(Fetched(12, short=True), batch_size=4))
    wrapped = torch_data.Subset(Fetched(12), range(4, 8))
    assert pairs(DataLoader(wrapped, batch_size=4)) == [[(n, 0.5) for n in range(4, 8)]]
    assert (wrapped.dataset.single, wrapped.dataset.batched) == (0, 2)
    assert pairs(DataLoader(Overridden(4), batch_size=4)) == [[(n + 100, 0.0) for n in range(4)]]


@pytest.mark.parametrize("workers", [0, 1])
def test_random_numbers_of_whole_batches_belong_to_the_sample_all_the_same(workers: int) -> None:
    class OneByOne(Fetched):
        __getitems__ = None

    how = {"shuffle": True, "num_workers": workers}
    exact = dict(
        pair for batch in pairs(DataLoader(OneByOne(12, draws=True), batch_size=4, **how)) for pair in batch
    )
    for size in (4, 3):
        drawn = pairs(DataLoader(Fetched(12, draws=True), batch_size=size, **how))
        assert {index: number for batch in drawn for index, number in batch} == exact
    quiet, other = (
        torch.cat([batch[1] for batch in DataLoader(kind(12), batch_size=4, collate_fn=noisy_pairs, **how)])
        for kind in (Fetched, OneByOne)
    )
    assert torch.equal(quiet, other), "also those that collate_fn draws after them"


def test_a_first_sample_that_draws_is_that_of_the_uninterrupted_epoch() -> None:
    class Different(Fetched):
        def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
            return [(index, 1 + random.random()) for index in indices]  # not as __getitem__ draws

    whole = pairs(DataLoader(Different(12, draws=True), batch_size=4, shuffle=True))
    cut, again = (DataLoader(Different(12, draws=True), batch_size=4, shuffle=True) for _ in range(2))
    next(iter(cut))
    again.load_state_dict(cut.state_dict())
    assert pairs(again) == whole[1:]


def test_every_sample_is_fetched_once() -> None:
    class Noted(Numbers):
        def __init__(self, count: int, *, draws: bool) -> None:
            super().__init__(count)
            self.draws, self.fetched = draws, list[int]()

        def __getitem__(self, index: int) -> tuple[int, float]:
            self.fetched.append(index)
            return index, random.random() if self.draws else 0.5

    class AtOnce(Noted):
        def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
            return [self[index] for index in indices]

    for kind, draws, size in itertools.product((Noted, AtOnce), (True, False), (1, 4, 12)):
        dataset = kind(12, draws=draws)
        parts = torch_data.random_split(dataset, [8, 4])
        for each in (dataset, *parts, torch_data.Subset(parts[0], range(5))):
            dataset.fetched.clear()
            batches = pairs(DataLoader(each, batch_size=size, shuffle=True))
            tried = dataset.fetched[: draws and kind is AtOnce]  # fetched again, alone, since it drew
            assert dataset.fetched == tried + [index for batch in batches for index, _ in batch]
            assert len(dataset.fetched) == len(each) + len(tried)


def noisy_pairs(samples: list[tuple[int, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([index for index, _ in samples]), torch.rand(len(samples))


def test_batches_that_come_collated_stay_as_they_are() -> None:
    class Table(Numbers):
        def __getitems__(self, indices: list[int]) -> dict[str, list[int]]:
            return {"x": indices}

    assert list(DataLoader(Table(4), batch_size=2, collate_fn=dict)) == [{"x": [0, 1]}, {"x": [2, 3]}]


# --- without batches


def test_no_batch_size_gives_samples_as_torch_does() -> None:
    dataset = torch_data.TensorDataset(torch.arange(5), torch.rand(5, 2))
    theirs = list(torch_data.DataLoader(dataset, batch_size=None))
    loader = DataLoader(dataset, batch_size=None)
    assert len(loader) == 5 and loader.batch_size is None
    for one, other in zip(theirs, loader, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert list(DataLoader(Numbers(3), batch_size=None, collate_fn=str)) == ["0", "1", "2"]
    assert [len(batch) for batch in DataLoader(Numbers(3))] == [1, 1, 1], "torch's default is one"
    shared = [DataLoader(Numbers(7), batch_size=None, shuffle=True, rank=r, world_size=2) for r in range(2)]
    assert sorted({*shared[0], *shared[1]}) == list(range(7)) and len(shared[1]) == 4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sampler": torch_data.SequentialSampler([])}, r"sampler=SequentialSampler: .*Subset\(dataset"),
        ({"batch_sampler": [[0, 1]]}, "batch_sampler=list: .*batch_size=None"),
        ({"generator": torch.Generator()}, "generator=Generator: .*pass seed"),
        ({"in_order": False}, "in_order=False: .*remove it"),
    ],
)
def test_arguments_of_torch_that_an_exact_order_excludes(given: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        DataLoader(Numbers(3), **given)
    neutral = {"sampler": None, "batch_sampler": None, "generator": None, "in_order": True, "shuffle": None}
    assert rows(DataLoader(Numbers(3), batch_size=3, **neutral)) == [[0, 1, 2]]


def test_numbers_of_numpy_are_numbers_and_fractions_are_refused() -> None:
    """From a sweep or a division: positions are saved, so that they must be numbers of Python's own."""
    plain = DataLoader(Numbers(10), batch_size=4, shuffle=True, seed=3)
    other = DataLoader(Numbers(10), batch_size=np.int64(4), shuffle=True, seed=np.int64(3))
    for loader in (plain, other):
        next(iter(loader))
    assert json.loads(json.dumps(other.state_dict())) == plain.state_dict()
    for wrong in ({"batch_size": 4.0}, {"global_batch_size": 8 / 2}, {"batch_size": 4, "seed": 0.5}):
        with pytest.raises(UsageError, match="give a whole number"):
            DataLoader(Numbers(10), **wrong)
