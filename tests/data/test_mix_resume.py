"""Positions of a mix go by name: in any order of keys, with datasets added and removed; old positions are honored."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headway.data import Mix, ShardLoader, pack
from headway.data.order.lookup import SampleLookup
from headway.errors import UsageError

SIZES = {"b": [20, 5], "a": [7, 13, 1, 9], "c": [3]}
"""a position of version 1 of the order, and what came next; datasets in the places b, a, c"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    for name, sizes in SIZES.items():
        for shard, size in enumerate(sizes):
            keys = [f"{name}{shard}x{n}" for n in range(size)]
            pack([{"__key__": key, "txt": key} for key in keys], root / name, name=f"shard{shard}")
    return root


def loader_of(folder: Path, weights: dict[str, float], *, batch: int = 6, **mix: Any) -> ShardLoader:
    """Its batches are pairs of a key and the first random number of the sample."""
    return ShardLoader(
        Mix(weights, shards={name: folder / name for name in weights}, **mix),
        batch_size=batch,
        lanes=4,
        window=6,
        threads=1,
        transform=lambda sample, rng: (sample["txt"], rng.random()),
        collate_fn=list,
    )


def take(loader: ShardLoader, batches: int) -> list[tuple[str, float]]:
    """The samples of some batches, over ends of passes."""
    found = list[list[tuple[str, float]]]()
    while len(found) < batches:
        iterator = iter(loader)
        while len(found) < batches and (batch := next(iterator, None)) is not None:
            found.append(batch)
        iterator.close()
    return [sample for batch in found for sample in batch]


def sorted_dump(state: Any) -> Any:
    return json.loads(json.dumps(state, sort_keys=True))


def test_the_order_of_the_names_does_not_matter(folder: Path) -> None:
    first = loader_of(folder, {"b": 0.1, "c": 0.2, "a": 0.7}, schedule=[(2, {"a": 0.1})])
    other = loader_of(folder, {"a": 0.7, "b": 0.1, "c": 0.2}, schedule=[(2, {"a": 0.1})])
    assert take(first, 3) == take(other, 3)
    assert first.state_dict() == other.state_dict() and first.order() == other.order()
    state, counts, then = first.state_dict(), first.counts(), take(first, 12)
    for dump in (lambda state: state, sorted_dump):
        for weights in ({"a": 0.7, "b": 0.1, "c": 0.2}, {"c": 0.2, "b": 0.1, "a": 0.7}):
            again = loader_of(folder, weights)
            again.load_state_dict(dump(state))
            assert again.counts() == counts and again.weights["a"] == 0.1
            assert take(again, 12) == then


def test_weights_that_were_edited_are_named_on_resume(folder: Path, messages: list[str]) -> None:
    first = loader_of(folder, {"a": 0.5, "b": 0.5}, schedule=[(2, {"a": 0.1})])
    take(first, 3)
    first.set_weights({"b": 0.9})
    state = sorted_dump(first.state_dict())
    for weights, schedule, said in (
        ({"a": 0.5, "b": 0.5}, [(2, {"a": 0.1})], None),
        ({"b": 2, "a": 2}, [(2, {"a": 0.4})], None),  # in the same proportions
        ({"a": 0.3, "b": 0.5}, [], "a is 0.1 and not 0.3, b is 0.9 and not 0.5;"),
        ({"a": 0.5, "b": 0.5}, [(2, {"a": 0.2})], "a is 0.1 and not 0.2, b is 0.9 and not 0.5;"),
    ):
        messages.clear()
        again = loader_of(folder, weights, schedule=schedule)
        again.load_state_dict(state)
        assert again.weights == {"a": 0.1, "b": 0.9}
        assert [said in text for text in messages] == [True] if said else messages == []


def test_a_described_order_may_be_dumped_with_sorted_keys(folder: Path) -> None:
    loader = loader_of(folder, {"b": 0.9, "a": 0.1})
    take(loader, 4)
    loader.set_weights({"a": 2})
    order = loader.order()
    assert SampleLookup(order).labels(0, 40) == SampleLookup(sorted_dump(order)).labels(0, 40)
    shares = Counter(name.split()[0] for name in SampleLookup(sorted_dump(order)).labels(0, 20))
    assert shares == {"b": 18, "a": 2}


@pytest.mark.parametrize("later", [{"c": 0.25, "a": 0.25, "b": 0.5}, {"a": 0.5, "c": 0.5}, {"b": 1}])
def test_datasets_are_added_and_removed_and_the_others_go_on_where_they_were(
    folder: Path, later: dict[str, float]
) -> None:
    """Each dataset has an endless order of its own, of which every sample comes once, whatever else is in the mix."""
    alone = {name: take(loader_of(folder, {name: 1}, batch=1), 60) for name in SIZES}
    loader = loader_of(folder, {"a": 0.6, "b": 0.4}, batch=10)
    before = take(loader, 3)
    assert loader.counts() == {"a": 18, "b": 12}
    changes = {"added": [*({*later} & {"c"})], "removed": [*({"a", "b"} - {*later})]}
    changed = loader_of(folder, later, batch=10, **changes)
    changed.load_state_dict(sorted_dump(loader.state_dict()))
    assert changed.weights == later and {**changed.counts(), "c": 0} == {"a": 18, "b": 12, "c": 0}
    samples = before + take(changed, 4)
    expected = Counter(a=18, b=12) + Counter({name: round(40 * share) for name, share in later.items()})
    assert changed.counts() == expected
    for name in SIZES:
        mine = [sample for sample in samples if sample[0].startswith(name)]
        assert sorted(mine) == sorted(alone[name][: expected[name]])
    # the same script starts again, with the same words, from a later state
    again = loader_of(folder, later, batch=10, **changes)
    again.load_state_dict(sorted_dump(changed.state_dict()))
    assert again.epoch == changed.epoch and take(again, 9) == take(changed, 9)


def test_passes_have_the_length_of_the_datasets_that_are_there(folder: Path) -> None:
    """63 samples with b, 33 without: the pass that had 50 ends at once, and the next ones have 33."""
    loader = loader_of(folder, {"a": 0.5, "b": 0.5}, batch=5)
    take(loader, 10)
    small = loader_of(folder, {"a": 1, "c": 1}, batch=5, added=["c"], removed=["b"])
    small.load_state_dict(loader.state_dict())
    assert [(small.epoch, len(list(small))) for _ in range(4)] == [(0, 0), (1, 6), (2, 7), (3, 6)]
    large = loader_of(folder, {"a": 1, "b": 1, "c": 1}, batch=5, added=["c"])
    large.load_state_dict(loader.state_dict())
    assert [(large.epoch, len(list(large))) for _ in range(2)] == [(0, 1), (1, 12)], (
        "58 samples, 50 were taken"
    )
    with pytest.raises(UsageError, match="was removed from the mix"):
        SampleLookup(small.order()).samples(0, 10)


def test_padding_repeats_no_sample_of_a_dataset_that_was_removed(folder: Path) -> None:
    """The pass began before the change, with samples of b, and its last batch is filled with those since."""

    def padded(weights: dict[str, float], **mix: Any) -> ShardLoader:
        shards = {name: folder / name for name in weights}
        return ShardLoader(Mix(weights, shards=shards, **mix), batch_size=8, tail="pad", threads=1)

    loader = padded({"a": 1, "b": 1})
    next(iter(loader))
    smaller = padded({"a": 1}, removed=["b"])
    smaller.load_state_dict(loader.state_dict())
    batches = [batch["txt"] for batch in smaller]
    assert [len(batch) for batch in batches] == [8, 8, 8] and smaller.padding == 2, "30 samples, 8 were taken"
    assert {*batches[2][-2:]} < {*batches[0]}, "of the first batch since the change"


def test_validation_begins_its_pass_again_with_other_datasets(folder: Path) -> None:
    def loader_for(weights: dict[str, float], **mix: Any) -> ShardLoader:
        shards = {name: folder / name for name in weights}
        return ShardLoader(Mix(weights, shards=shards, **mix), batch_size=5, shuffle=False)

    loader = loader_for({"b": 1})
    next(iter(loader))
    changed = loader_for({"c": 1, "b": 1}, added=["c"])
    changed.load_state_dict(loader.state_dict())
    assert sum(len(batch["txt"]) for batch in changed) == 28


def test_a_change_that_was_not_stated_is_refused_with_the_word_to_say(folder: Path) -> None:
    state = loader_of(folder, {"a": 1, "b": 1}).state_dict()
    for weights, words, says in (
        ({"a": 1}, {}, r"removed=\['b'\]\)"),
        ({"a": 1, "b": 1, "c": 1}, {}, r"added=\['c'\]\)"),
        ({"a": 1, "c": 1}, {"added": ["c"]}, r"Mix\(\.\.\., removed=\['b'\]\)"),
        ({"a": 1, "c": 1}, {"added": ["a"], "removed": ["b"]}, r"Mix\(\.\.\., added=\['c'\]\)"),
    ):
        loader = loader_of(folder, weights, **words)
        with pytest.raises(UsageError, match=says):
            loader.load_state_dict(state)
        assert loader.counts() == dict.fromkeys(weights, 0), "nothing was changed"
    for build, says in (
        (lambda: Mix({"a": 1}, added=["c"]), "'c' is not a valid dataset of the mix"),
        (lambda: Mix({"a": 1}, removed=["a"]), "are datasets of this mix"),
        (lambda: Mix({"ab": 1}, added="ab"), r"give a list of names, \['ab'\]"),
    ):
        with pytest.raises(UsageError, match=says):
            build()


def test_a_position_of_another_version_of_the_order_is_refused(folder: Path) -> None:
    loader = loader_of(folder, {"a": 1})
    state = loader.state_dict()
    with pytest.raises(UsageError, match=f"version {state['version'] + 1} there, {state['version']} here"):
        loader.load_state_dict(state | {"version": state["version"] + 1})
