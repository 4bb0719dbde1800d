"""ShardLoader on real shards: exact, elastic, weights that change; bad samples replaced; memory and threads bounded."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import headway as hw
from headway import dist
from headway.data import Mix, ShardLoader, pack
from headway.data.catalog.shard_files import find_shards
from headway.errors import BadSample, HeadwayError, UsageError
from headway.testing import ranks

SIZES = {"a": [7, 13, 1, 9], "b": [20, 5], "c": [3]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three datasets of uneven shards; each sample's text is its dataset and number."""
    root = tmp_path_factory.mktemp("shards")
    for name, sizes in SIZES.items():
        number = 0
        for shard, size in enumerate(sizes):
            made = [
                {"__key__": f"{n:04d}", "txt": f"{name}{n}", "cls": n} for n in range(number, number + size)
            ]
            pack(made, root / name, name=f"shard{shard}")
            number += size
    return root


def mix_of(folder: Path, weights: dict[str, float], **how: object) -> Mix:
    return Mix(weights, shards={name: folder / name for name in weights}, **how)


def texts(loader: ShardLoader) -> list[list[str]]:
    return [batch["txt"] for batch in loader]


def group(world_size: int, source: object, **how: object) -> list[ShardLoader]:
    return [
        ShardLoader(source, rank=rank, world_size=world_size, threads=1, **how) for rank in range(world_size)
    ]


def global_batches(loaders: list[ShardLoader], steps: int) -> list[list[str]]:
    iterators = [iter(loader) for loader in loaders]
    batches = [[text for iterator in iterators for text in next(iterator)["txt"]] for _ in range(steps)]
    for iterator in iterators:
        iterator.close()
    return batches


# --- the order


@pytest.mark.parametrize("tail", ["carry", "drop"])
def test_passes_of_one_dataset(folder: Path, tail: str) -> None:
    loader = ShardLoader(folder / "a", batch_size=4, tail=tail, lanes=3, window=5)
    passes = [(len(loader), texts(loader)) for _ in range(4)]
    assert [length for length, _ in passes] == [len(batches) for _, batches in passes]
    assert {len(batch) for _, batches in passes for batch in batches} == {4}
    if tail == "carry":  # 30 samples, 4 at a time: every sample as often as any other
        assert [length for length, _ in passes] == [7, 8, 7, 8]
        seen = Counter(text for _, batches in passes for batch in batches for text in batch)
        assert set(seen.values()) == {4} and len(seen) == 30
    else:
        assert [length for length, _ in passes] == [7] * 4
        assert all(len({text for batch in batches for text in batch}) == 28 for _, batches in passes)
    assert loader.epoch == 4
    assert passes[0][1] != passes[1][1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_padding_fills_the_last_batch_and_says_so(folder: Path, world_size: int, shuffle: bool) -> None:
    """30 samples, 8 or 12 at a time: all ranks take as many full batches, and without the padding all is seen once."""
    loaders = group(world_size, folder / "a", global_batch_size=12, shuffle=shuffle, tail="pad", lanes=3)
    for _ in range(2):
        seen: list[str] = []
        for loader in loaders:
            batches = [batch["txt"][: len(batch["txt"]) - loader.padding] for batch in loader]
            assert len(batches) == len(loader) == 3
            seen += [text for batch in batches for text in batch]
        assert sorted(seen) == sorted(f"a{n}" for n in range(30))
    assert {loader.state_dict()["position"] for loader in loaders} == {60}


def test_padding_repeats_the_first_samples_of_the_pass(folder: Path) -> None:
    loader = ShardLoader(folder / "a", batch_size=12, tail="pad")
    whole = texts(loader)
    first = [text for batch in whole for text in batch][:30]
    assert whole[2][6:] == first[:6] and len(set(first)) == 30
    small = ShardLoader(folder / "c", batch_size=7, shuffle=False, tail="pad")
    assert texts(small) == [["c0", "c1", "c2"] * 2 + ["c0"]], "a batch larger than the data"
    assert small.padding == 4


def test_a_short_batch_of_validation_may_be_dropped(folder: Path) -> None:
    loader = ShardLoader(folder / "a", batch_size=12, shuffle=False, tail="drop")
    assert [len(batch) for batch in texts(loader)] == [12, 12] and len(loader) == 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_validation_sees_every_sample_of_all_datasets_once(folder: Path, world_size: int) -> None:
    loaders = group(world_size, mix_of(folder, {"a": 1, "b": 9, "c": 1}), batch_size=4, shuffle=False)
    parts = [texts(loader) for loader in loaders]
    assert [len(loader) for loader in loaders] == [len(part) for part in parts]
    seen = sorted(text for part in parts for batch in part for text in batch)
    assert seen == sorted(f"{name}{n}" for name, sizes in SIZES.items() for n in range(sum(sizes)))
    assert parts == [texts(loader) for loader in loaders], "and again, from the top"


@settings(max_examples=12, deadline=None)
@given(
    weights=st.tuples(*[st.integers(1, 9)] * 3),
    later=st.tuples(*[st.integers(0, 9)] * 3).filter(any),
    sizes=st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6])),
    change=st.integers(0, 8),
    cut=st.integers(0, 8),
)
def test_any_world_size_goes_on_with_the_same_global_batches(
    folder: Path,
    weights: tuple[int, ...],
    later: tuple[int, ...],
    sizes: tuple[int, int],
    change: int,
    cut: int,
) -> None:
    """With weights that change before or after the cut; 9 passes of 4 batches, so over ends of epochs."""

    def run(world_size: int, first: int, stop: int, state: object) -> tuple[list[list[str]], object]:
        mix = mix_of(folder, dict(zip("abc", weights, strict=True)))
        loaders = group(world_size, mix, global_batch_size=12, lanes=4, window=6, prefetch=2)
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
        batches = []
        for step in range(first, stop):
            if step == change:
                for loader in loaders:
                    loader.set_weights(dict(zip("abc", later, strict=True)))
            while True:
                try:
                    batches += global_batches(loaders, 1)
                    break
                except StopIteration:  # the pass had ended on all of them: the next one begins
                    for loader in loaders[1:]:
                        assert next(iter(loader), None) is None
        assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
        return batches, loaders[0].state_dict()

    whole, _ = run(1, 0, 9, None)
    before, state = run(sizes[0], 0, cut, None)
    after, _ = run(sizes[1], cut, 9, state)
    assert before + after == whole


def test_proportions_are_exact_and_counted(folder: Path) -> None:
    loader = ShardLoader(mix_of(folder, {"a": 0.5, "b": 0.3, "c": 0.2}), batch_size=10, window=4)
    iterator = iter(loader)
    shares = Counter(text[0] for _ in range(5) for text in next(iterator)["txt"])
    assert shares == {"a": 25, "b": 15, "c": 10}
    assert loader.counts() == shares


def test_weights_hold_from_the_very_next_batch(folder: Path) -> None:
    loader = ShardLoader(mix_of(folder, {"a": 1, "b": 1}), batch_size=10, prefetch=3)
    iterator = iter(loader)
    next(iterator)
    loader.set_weight("a", 0)
    assert loader.weights == {"a": 0, "b": 1}
    assert {text[0] for text in next(iterator)["txt"]} == {"b"}
    with pytest.raises(UsageError, match="'z' is not a valid dataset of the mix"):
        loader.set_weight("z", 1)
    with pytest.raises(UsageError, match=r"need the names .*: give {'a': 0, 'b': 1}, not \[0\.4, 0\.6\]"):
        loader.set_weights([0.4, 0.6])  # type: ignore[arg-type]


def test_a_schedule_is_the_same_change_at_its_step(folder: Path) -> None:
    planned = ShardLoader(mix_of(folder, {"a": 1, "b": 1}, schedule=[(2, {"b": 0})]), batch_size=10)
    by_hand = ShardLoader(mix_of(folder, {"a": 1, "b": 1}), batch_size=10)
    iterator, batches = iter(by_hand), []
    for step in range(4):
        if step == 2:
            by_hand.set_weights({"b": 0})
        batches.append(next(iterator)["txt"])
    assert texts(planned)[:4] == batches
    assert {text[0] for text in batches[2]} == {"a"}


def test_weights_may_be_set_from_another_thread(folder: Path) -> None:
    loader = ShardLoader(mix_of(folder, {"a": 1, "b": 1}), batch_size=2, prefetch=2, threads=2)

    def meddle() -> None:
        for weight in range(1, 6):
            count = len(seen)
            while len(seen) == count:
                time.sleep(0.001)
            loader.set_weights({"a": 1, "b": weight})

    seen: list[Any] = []
    thread, passes = threading.Thread(target=meddle), 0
    thread.start()
    while thread.is_alive():
        for batch in loader:
            seen.append(batch["txt"])
        passes += 1
    thread.join()
    again = ShardLoader(mix_of(folder, {"a": 1, "b": 1}), batch_size=2)
    state = loader.state_dict() | {"epoch": 0, "position": 0}
    again.load_state_dict(state)
    assert len(state["segments"]) > 1
    assert [batch["txt"] for _ in range(passes) for batch in again] == seen, (
        "the segments tell the whole story"
    )


# --- position


def test_state_counts_what_was_consumed(folder: Path) -> None:
    loader = ShardLoader(folder / "a", batch_size=4, prefetch=4)
    whole = texts(ShardLoader(folder / "a", batch_size=4))
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    assert state["position"] == 8
    assert len(json.dumps(state)) < 400
    other = ShardLoader(folder / "a", batch_size=4)
    other.load_state_dict(state)
    other.set_epoch(0)
    assert texts(other) == whole[2:]
    other.set_epoch(0)
    assert texts(other) == whole


def test_samples_carried_over_are_not_lost_when_the_batch_changes(folder: Path) -> None:
    """Batches of 4, then of 5, with set_epoch before every pass: still every sample as often as any other."""
    first = ShardLoader(folder / "a", batch_size=4)
    first.set_epoch(0)
    seen = texts(first)
    second = ShardLoader(folder / "a", batch_size=5)
    second.load_state_dict(first.state_dict())
    for epoch in (1, 2):
        second.set_epoch(epoch)
        seen += texts(second)
    assert sum(map(len, seen)) == second.state_dict()["position"] == 88, (
        "without a gap, across two ends of epochs"
    )


def test_break_goes_on_and_two_loops_are_an_error(folder: Path) -> None:
    loader = ShardLoader(folder / "a", batch_size=4)
    whole = texts(ShardLoader(folder / "a", batch_size=4))
    for _ in loader:
        break
    first = iter(loader)
    assert next(first)["txt"] == whole[1]
    second = iter(loader)
    assert next(second)["txt"] == whole[2]
    with pytest.raises(UsageError, match="a loader has one position"):
        next(first)


def test_other_shards_and_orders_are_refused(folder: Path) -> None:
    state = ShardLoader(folder / "a", batch_size=4).state_dict()
    for other, says in (
        (ShardLoader(folder / "b", batch_size=4), "datasets"),
        (ShardLoader(folder / "a", batch_size=4, seed=1), "seed 0 there, 1 here"),
        (ShardLoader(folder / "a", batch_size=4, lanes=5), "lanes 24 there, 5 here"),
        (ShardLoader(folder / "a", batch_size=4, window=5), "window"),
        (ShardLoader(folder / "a", batch_size=4, shuffle=False), "shuffle"),
    ):
        with pytest.raises(UsageError, match=says):
            other.load_state_dict(state)
    with pytest.raises(UsageError, match="not the state of a ShardLoader"):
        ShardLoader(folder / "a", batch_size=4).load_state_dict({})


def test_nodes_read_different_shards(tmp_path: Path) -> None:
    """Dealt by lane: with 8 ranks a shard is read by about one of them, not by all eight."""
    for shard in range(64):
        pack([{"__key__": str(n), "cls": shard} for n in range(40)], tmp_path, name=f"s{shard:02d}")
    loaders = group(8, tmp_path, global_batch_size=96, lanes=24, window=40)
    readers = [{shard for batch in loader for shard in batch["cls"].tolist()} for loader in loaders]
    assert set.union(*readers) == set(range(64))
    assert sum(map(len, readers)) / 64 < 2, "strided slices of batches would give 8"


# --- samples


def test_random_numbers_belong_to_the_sample(folder: Path) -> None:
    def drawn(world_size: int, **how: object) -> dict[str, float]:
        loaders = [
            ShardLoader(
                folder / "a",
                global_batch_size=6,
                transform=lambda sample, rng: (sample["txt"], rng.random()),
                collate_fn=list,
                rank=rank,
                world_size=world_size,
                **how,
            )
            for rank in range(world_size)
        ]
        return {text: number for loader in loaders for batch in loader for text, number in batch}

    one = drawn(1)
    assert len(set(one.values())) == 30
    assert one == drawn(2) == drawn(3, threads=4)
    other = drawn(1, seed=1)
    assert all(one[text] != other[text] for text in one)


def damaged(folder: Path, bad: set[int], count: int = 200) -> Path:
    pack([{"__key__": f"{n:03d}", "cls": "x" if n in bad else n} for n in range(count)], folder)
    return folder


def test_a_bad_sample_is_replaced_by_the_same_one_every_time(tmp_path: Path) -> None:
    damaged(tmp_path, {17})
    runs = []
    for world_size in (1, 2):
        loaders = group(world_size, tmp_path, global_batch_size=20)
        seen = sorted(n for loader in loaders for batch in loader for n in batch["cls"].tolist())
        assert [bad.key for loader in loaders for bad in loader.bad] == ["017"]
        runs.append(seen)
    assert runs[0] == runs[1]
    assert len(runs[0]) == 200 and set(runs[0]) == set(range(200)) - {17}


def test_too_many_bad_samples_stop_the_run(tmp_path: Path) -> None:
    damaged(tmp_path, set(range(0, 200, 20)))
    with pytest.raises(
        HeadwayError, match=r"10 of \d+ samples could not be used, more than max_bad=0\.001.*shard-000000"
    ):
        list(ShardLoader(tmp_path, batch_size=10))
    with pytest.raises(HeadwayError, match=r"1 of \d+ samples could not be used, more than max_bad=0;"):
        list(ShardLoader(tmp_path, batch_size=10, max_bad=0))
    loader = ShardLoader(tmp_path, batch_size=10, max_bad=0.2)
    assert sum(len(batch["cls"]) for batch in loader) == 200
    assert len(loader.bad) >= 10


def test_two_bad_samples_on_one_of_many_ranks_are_chance(tmp_path: Path) -> None:
    """Two of 4,000 are half of what may be bad, and stopped the rank that met both."""
    damaged(tmp_path / "good", set(), 4000)
    batches = iter(ShardLoader(tmp_path / "good", batch_size=25, rank=3, world_size=16, threads=1))
    bad = set(next(batches)["cls"].tolist()[:2])
    batches.close()
    damaged(tmp_path / "bad", bad, 4000)
    loader = ShardLoader(tmp_path / "bad", batch_size=25, rank=3, world_size=16, threads=1)
    assert [len(batch["cls"]) for batch in loader] == [25] * 10
    assert {int(sample.key) for sample in loader.bad} == bad


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_leaves_bad_samples_out(world_size: int, tmp_path: Path) -> None:
    """A mean over what is there is exact on any number of ranks; in the last batch, one rank has nothing left."""
    bad = {0, 7, 8, 9, 10, 11, 22}
    damaged(tmp_path, bad, 23)
    good = sorted(set(range(23)) - bad)
    loaders = group(world_size, tmp_path, global_batch_size=6, shuffle=False, max_bad=0.5)
    seen = [number for loader in loaders for batch in loader for number in batch["cls"].tolist()]
    assert sorted(seen) == good
    assert sorted(int(each.key) for loader in loaders for each in loader.bad) == sorted(bad)
    assert sum(loader.counters()["bad"] for loader in loaders) == len(bad)
    for tail, length in (("pad", 24), ("drop", 18)):
        loaders = group(world_size, tmp_path, global_batch_size=6, shuffle=False, max_bad=1, tail=tail)
        seen, steps, rows = [], set(), 0
        for loader in loaders:
            batches = [(batch["cls"].tolist(), loader.padding) for batch in loader]
            seen += [number for batch, padding in batches for number in batch[: len(batch) - padding]]
            rows += sum(len(batch) for batch, _ in batches)
            steps.add(len(batches))
        assert sorted(seen) == [number for number in good if number < length], "the rest is padding"
        assert steps == {length // 6}, "all ranks take equally many steps"
        assert rows == 24 if tail == "pad" else rows < 18


def test_a_shard_of_nothing_but_bad_samples_ends(tmp_path: Path) -> None:
    damaged(tmp_path, set(range(20)), 20)
    with pytest.raises(HeadwayError, match="consecutive samples"):
        list(ShardLoader(tmp_path, batch_size=10, max_bad=1))


def test_an_error_in_the_transform_is_the_users_own(folder: Path) -> None:
    def broken(sample: dict[str, object], rng: object) -> object:  # noqa: ARG001
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        next(iter(ShardLoader(folder / "a", batch_size=4, transform=broken)))


def test_batches_wait_within_the_given_memory(tmp_path: Path) -> None:
    pack([{"__key__": str(n), "bin": bytes(1000)} for n in range(200)], tmp_path)
    lock, made, taken, most = threading.Lock(), 0, 0, 0

    def count(sample: dict[str, object], rng: object) -> dict[str, object]:  # noqa: ARG001
        nonlocal made, most
        with lock:
            made += 1
            most = max(most, made - taken)
        return {"x": np.zeros(1000, np.uint8)}

    for batch in ShardLoader(tmp_path, batch_size=10, transform=count, threads=2, prefetch=10, memory=35_000):
        with lock:
            taken += len(batch["x"])
    assert most <= 40, "samples made and not yet taken: three batches wait, and one is being taken"


def test_default_batches(tmp_path: Path) -> None:
    pack([{"__key__": str(n), "cls": n, "txt": "t", "json": {"n": n}} for n in range(4)], tmp_path)
    (batch,) = ShardLoader(tmp_path, batch_size=4, shuffle=False)
    assert torch.equal(batch["cls"], torch.arange(4))
    assert batch["txt"] == ["t"] * 4
    assert torch.equal(batch["json"]["n"], torch.arange(4))
    assert batch["__key__"] == ["0", "1", "2", "3"]


def test_a_part_that_one_sample_lacks_is_not_lost_in_silence(tmp_path: Path) -> None:
    """It was missing from the whole batch; within JSON, nothing is lost either."""
    made = [
        {"__key__": f"{n:02d}", "cls": n, "json": {"n": n} | ({"m": 1} if n == 2 else {})} for n in range(8)
    ]
    del made[5]["cls"]
    pack(made, tmp_path)
    with pytest.raises(
        HeadwayError, match="sample '05' has no 'cls', as other samples of its batch have: add it"
    ):
        list(ShardLoader(tmp_path, batch_size=8, shuffle=False))

    def need(sample: dict[str, object], rng: object) -> dict[str, object]:  # noqa: ARG001
        if "cls" not in sample:
            raise BadSample("it has no cls")
        return sample

    for how, expected in (({"shuffle": False}, 7), ({"lanes": 1}, 8)):
        loader = ShardLoader(tmp_path, batch_size=8, transform=need, max_bad=1, **how)
        (batch,) = loader
        assert len(batch["cls"]) == expected and 5 not in batch["cls"]
        assert {(bad.key, bad.reason) for bad in loader.bad} == {("05", "it has no cls")}
        assert {"n": 2, "m": 1} in batch["json"]


def test_counters_tell_what_was_done(folder: Path) -> None:
    loader = ShardLoader(
        mix_of(folder, {"a": 3, "b": 1}),
        batch_size=8,
        transform=lambda sample, rng: sample | {"r": rng.random()},
    )
    iterator = iter(loader)
    next(iterator), next(iterator)
    counted = loader.counters()
    assert (counted["samples"], counted["batches"], counted["bad"]) == (16, 2, 0)
    assert (counted["share/a"], counted["target/a"], counted["share/b"]) == (0.75, 0.75, 0.25)
    assert counted["bytes_read"] == sum(len(text) + len(text[1:]) for text in read(folder, loader))
    assert counted["bytes_decoded"] > 0
    assert {f"seconds/{stage}" for stage in ("read", "decode", "transform", "collate", "wait")} <= {*counted}
    loader.set_weights({"a": 1})
    next(iterator)
    assert loader.counters()["share/a"] == loader.counters()["target/a"] == 0.5, "since the change"


def read(folder: Path, loader: ShardLoader) -> list[str]:
    """The texts of the first 16 samples, by another loader with the same history."""
    again = ShardLoader(mix_of(folder, {"a": 3, "b": 1}), batch_size=16)
    again.load_state_dict(loader.state_dict() | {"position": 0})
    return next(iter(again))["txt"]


def test_a_trace_shows_every_stage(folder: Path, tmp_path: Path) -> None:
    loader = ShardLoader(folder / "a", batch_size=8, threads=2, trace=tmp_path / "traces" / "train.json")
    assert len(texts(loader)) == 3
    events = json.loads((tmp_path / "traces" / "train-rank-00000.json").read_text())["traceEvents"]
    assert Counter(event["name"] for event in events) == {"read": 12, "decode": 12, "collate": 3, "wait": 3}
    assert all(event["ph"] == "X" and event["dur"] >= 0 and event["pid"] == 0 for event in events)


@ranks(1)
def test_in_a_run_a_trace_is_in_its_directory(tmp_path: Path) -> None:
    pack(({"__key__": f"{n}", "cls": n} for n in range(4)), tmp_path / "data")
    run = dist.open_run(tmp_path / "runs")
    list(ShardLoader(tmp_path / "data", batch_size=4, trace="traces/train.json"))
    assert (run.traces_dir / "train-rank-00000.json").exists()


def test_loops_leave_no_threads_behind(folder: Path) -> None:
    before = threading.active_count()
    loader = ShardLoader(folder / "a", batch_size=4, threads=3)
    for _ in loader:
        break
    list(loader)
    assert threading.active_count() == before


# --- on ranks


def steps(folder: Path, state: object, first: int, stop: int, alone: bool) -> tuple[list[list[str]], object]:
    """The global batches of some steps, by the ranks of this run or by one process; weights change at step 3."""
    mix = mix_of(folder, {"a": 3, "b": 2, "c": 1})
    place = {"rank": 0, "world_size": 1} if alone else {}
    loader = ShardLoader(mix, global_batch_size=6, lanes=6, window=5, **place)
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    batches, iterator = [], iter(loader)
    for step in range(first, stop):
        if step == 3:
            loader.set_weights({"a": 1, "b": 0, "c": 4})
        mine = next(iterator)["txt"]
        parts = [mine] if alone else hw.all_gather_object(mine)
        batches.append([text for part in parts for text in part])
    iterator.close()
    return batches, loader.state_dict()


CUTS = pytest.mark.parametrize("cut", [2, 3, 5])  # before the change of weights, at it, after it


@ranks(3)
@CUTS
def test_three_ranks_come_to_the_state_that_one_comes_to(folder: Path, cut: int) -> None:
    batches, state = steps(folder, None, 0, cut, alone=False)
    assert (batches, state) == steps(folder, None, 0, cut, alone=True)
    assert len({json.dumps(other) for other in hw.all_gather_object(state)}) == 1


@ranks(2)
@CUTS
def test_two_ranks_go_on_from_that_state(folder: Path, cut: int) -> None:
    _, state = steps(folder, None, 0, cut, alone=True)
    whole, _ = steps(folder, None, 0, 8, alone=True)
    assert steps(folder, state, cut, 8, alone=False)[0] == whole[cut:]
    assert steps(folder, state, cut, 8, alone=True)[0] == whole[cut:]


# --- refusals


@pytest.mark.parametrize(
    ("source", "how", "says"),
    [
        ("nowhere/*.tar", {}, r"no shards found at 'nowhere/\*\.tar'"),
        ("pipe:touch x", {}, "is not a path"),
        ("http://169.254.169.254/x.tar", {}, "is not a path"),
        ("a", {"tail": "wag"}, "'wag' is not a valid tail"),
        ("a", {"prefetch": 0}, "prefetch=0"),
        ("a", {"threads": 0}, "threads=0"),
        ("a", {"max_bad": 2}, "max_bad=2"),
        ("a", {"batch_size": None}, "give one of them"),
        ("a", {"batch_size": 0}, "a batch has 0 samples: give at least 1"),
        (".", {}, "no shards found at '.'; there are some in a, b"),
        ("a/shard{0..99}-000000.tar", {}, r"no shards found at 'a/shard\d-000000.tar'"),
        (
            "a",
            {"transform": lambda sample: sample},
            r"cannot be called .* transform=lambda sample, rng: augment\(",
        ),
        ("a", {"transform": str.upper}, r"transform upper cannot be called with a sample and its generator"),
        ("a/shard-{9..0}.tar", {}, r"no shards found at 'a/shard-{9\.\.0}\.tar'"),
        ("a/shard-{x}.tar", {}, r"{x} in 'a/shard-{x}.tar' is not a range or a choice: write {000\.\.099}"),
    ],
)
def test_bad_arguments_are_refused(
    source: str, how: dict[str, object], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=says):
        ShardLoader(source, **({"batch_size": 4} | how))


def test_braces_are_those_of_webdataset(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    braceexpand = pytest.importorskip("braceexpand").braceexpand  # what WebDataset calls
    monkeypatch.chdir(folder)
    for text in (
        "a/shard{0..1}-{000000..000000}.tar",
        "{a,b}/shard{0..1}-000000.tar",
        "{a,b}/shard{0,1}-*.tar",
    ):
        wanted = sorted(path for each in braceexpand(text) for path in Path().glob(each))
        assert find_shards("train", text) == wanted and len(wanted) > 1
    for path in (tmp_path / "x{1..2}.tar", tmp_path / "x::y.tar"):
        path.touch()
        assert find_shards("train", path) == [path] == find_shards("train", [path]), "a file of that name"


def test_a_list_may_have_patterns_and_joined_paths_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    found = find_shards("train", ["b/shard0-000000.tar", "a/shard{0..1}-000000.tar", "b/*1-*.tar"])
    assert [*map(str, found)] == [
        f"{name}-000000.tar" for name in ("b/shard0", "a/shard0", "a/shard1", "b/shard1")
    ]
    with pytest.raises(UsageError, match=r"no shards found at 'a/\*\.tgz'"):
        find_shards("train", ["b/shard0-000000.tar", "a/*.tgz"])
    with pytest.raises(UsageError, match=r"dataset 'train' lists b/shard0-000000\.tar twice: its samples"):
        find_shards("train", ["b/*.tar", "b/shard0-000000.tar"])
    with pytest.raises(
        UsageError, match=r"'a/\{x,y\}\.tar::b\.tar' joins paths by '::', .* give a list of them"
    ):
        find_shards("train", "a/{x,y}.tar::b.tar")


def test_a_list_may_have_directories(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = find_shards("train", ["b", "a/shard1-000000.tar"])
    assert found == [*sorted(Path("b").glob("*.tar")), Path("a/shard1-000000.tar")] and len(found) > 2
    with pytest.raises(UsageError, match=f"no shards found at '{tmp_path}'"):
        find_shards("train", ["a", tmp_path])


def test_a_folder_of_folders_is_no_dataset_and_says_which_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)  # where its name might be one of the catalogue, too
    with pytest.raises(
        UsageError, match=f"no shards found at '{folder.name}'; there are some in {folder.name}/a"
    ):
        ShardLoader(folder.name, batch_size=4)


def test_a_batch_larger_than_the_data_and_weights_without_shuffle_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="a global batch has 31 samples"):
        iter(ShardLoader(folder / "a", batch_size=31))
    with pytest.raises(UsageError, match="has no weights"):
        ShardLoader(folder / "a", batch_size=3, shuffle=False).set_weight("data", 2)


def test_a_shard_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    (path,) = pack([{"__key__": str(n), "cls": n} for n in range(10)], tmp_path / "one")
    pack([{"__key__": str(n), "cls": n} for n in range(9)], tmp_path / "two")
    loader = ShardLoader(tmp_path / "one", batch_size=5)
    for new in (tmp_path / "two").iterdir():  # with its index and its checksum
        new.replace(path.with_name(new.name))
    with pytest.raises(UsageError, match="has 9 samples, but had 10"):
        list(loader)


def test_threads_of_a_loader_compute_on_one_core_and_others_keep_theirs(tmp_path: Path) -> None:
    pack(({"__key__": f"{n}", "cls": n} for n in range(8)), tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen = list[int]()
        where = {"transform": lambda sample, _: (seen.append(torch.get_num_threads()), sample)[1]}
        for _ in ShardLoader(tmp_path, batch_size=2, threads=2, **where):
            assert torch.get_num_threads() == 3
        fresh = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        fresh.start()
        fresh.join()
        assert seen == [1] * 8 + [3]
    finally:
        torch.set_num_threads(before)
