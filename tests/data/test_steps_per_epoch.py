"""`steps_per_epoch`: epochs of so many batches over an endless stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.data import Mix, ShardLoader, pack
from headway.errors import UsageError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards")
    pack(({"__key__": f"{n:03d}", "cls": n} for n in range(50)), out, shard_size=2**14)
    return out


def loader(source: Path, **how: Any) -> ShardLoader:
    return ShardLoader(source, **{"batch_size": 4, "seed": 1, "threads": 1, "lanes": 2, "window": 8, **how})


def epoch(of: ShardLoader) -> list[list[int]]:
    return [batch["cls"].tolist() for batch in of]


def test_epochs_are_cut_out_of_the_same_stream(source: Path) -> None:
    plain, cut = loader(source), loader(source, steps_per_epoch=5)
    stream = [batch for _ in range(3) for batch in epoch(plain)]
    found = [epoch(cut) for _ in range(6)]
    assert len(cut) == 5 and [len(each) for each in found] == [5] * 6
    assert [batch for each in found for batch in each] == stream[:30]
    long = loader(source, steps_per_epoch=30)
    assert epoch(long) == stream[:30], "an epoch may be longer than the data"
    small = loader(source, batch_size=64, steps_per_epoch=2)
    assert [len(batch) for batch in epoch(small)] == [64, 64], "and so may a batch"


def test_a_run_resumes_inside_an_epoch_on_other_ranks_with_the_same_stream(source: Path) -> None:
    whole = loader(source, steps_per_epoch=5)
    stream = [batch for _ in range(3) for batch in epoch(whole)]
    first = loader(source, steps_per_epoch=5)
    epoch(first)
    running = iter(first)
    next(running), next(running)
    state = first.state_dict()
    running.close()
    again = loader(source, steps_per_epoch=5)
    again.load_state_dict(state)
    assert again.epoch == 1 and epoch(again) == stream[7:10] and epoch(again) == stream[10:15]
    ranks = [loader(source, batch_size=2, steps_per_epoch=5, rank=rank, world_size=2) for rank in range(2)]
    for each in ranks:
        each.load_state_dict(state)
    parts = [epoch(each) for each in ranks]
    joined = [sorted(left + right) for left, right in zip(*parts, strict=True)]
    assert joined == [sorted(batch) for batch in stream[7:10]]


def test_another_length_applies_from_the_epoch_that_is_under_way(source: Path) -> None:
    first = loader(source, steps_per_epoch=5)
    stream = [batch for _ in range(3) for batch in epoch(first)]
    begun = loader(source, steps_per_epoch=5)
    epoch(begun)
    running = iter(begun)
    next(running)
    state = begun.state_dict()
    running.close()
    longer = loader(source, steps_per_epoch=8)
    longer.load_state_dict(state)
    assert epoch(longer) == stream[6:13], "the epoch began at batch 5 and now has 8"
    assert longer.epoch == 2 and longer.state_dict()["position"] == 4 * 13
    plain = loader(source)
    plain.load_state_dict(state)
    assert len(epoch(plain)) == (20 + 50) // 4 - 6


@pytest.mark.parametrize("tail", ["carry", "drop", "pad"])
def test_an_epoch_that_is_beyond_its_new_length_ends_where_it_is(tail: str, source: Path) -> None:
    """No batch comes twice, and the next epochs have the new length."""
    first = loader(source, steps_per_epoch=5, tail=tail)
    stream = [batch for _ in range(3) for batch in epoch(first)]
    begun = loader(source, steps_per_epoch=5, tail=tail)
    running = iter(begun)
    for _ in range(4):
        next(running)
    state = begun.state_dict()
    running.close()
    shorter = loader(source, steps_per_epoch=2, tail=tail)
    shorter.load_state_dict(state)
    assert epoch(shorter) == [] and shorter.epoch == 1
    assert epoch(shorter) == stream[4:6] and epoch(shorter) == stream[6:8]


def test_an_epoch_has_its_steps_also_with_another_dataset(source: Path) -> None:
    """Of 30 steps, more than all samples, 28 are done when a dataset is added: two are left."""
    alone = Mix({"a": 1}, shards={"a": source})
    first = ShardLoader(alone, batch_size=4, threads=1, steps_per_epoch=30)
    running = iter(first)
    for _ in range(28):
        next(running)
    state = first.state_dict()
    running.close()
    both = ShardLoader(
        Mix({"a": 1, "b": 1}, shards={"a": source, "b": source}, added=["b"]),
        batch_size=4,
        threads=1,
        steps_per_epoch=30,
    )
    both.load_state_dict(state)
    assert [len(epoch(both)) for _ in range(2)] == [2, 30]


def test_lengths_that_mean_nothing_are_refused(source: Path) -> None:
    with pytest.raises(UsageError, match="steps_per_epoch=0"):
        loader(source, steps_per_epoch=0)
    with pytest.raises(UsageError, match="with shuffle=False, an epoch is every sample once"):
        loader(source, steps_per_epoch=3, shuffle=False)


def test_an_epoch_that_is_resumed_on_other_ranks_is_padded_with_its_own_first_samples(source: Path) -> None:
    """Two steps of 4, then ranks for 12 at a time: the epoch of three steps ends after 28 more, in the first 50."""
    first = loader(source, steps_per_epoch=3, tail="pad")
    running = iter(first)
    seen = [next(running)["cls"].tolist(), next(running)["cls"].tolist()]
    state = first.state_dict()
    running.close()
    larger = loader(source, batch_size=12, steps_per_epoch=3, tail="pad")
    larger.load_state_dict(state)
    batches = epoch(larger)
    assert [len(batch) for batch in batches] == [12, 12, 12] and larger.padding == 8
    assert sorted(batches[2][4:]) == sorted(seen[0] + seen[1])
