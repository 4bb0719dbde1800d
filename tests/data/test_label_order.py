"""Shards in the order of their classes: not written by default, and said by pack, check and the loader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from headway.data import ShardLoader, pack
from headway.data.label_watch import LabelWatch
from headway.data.shards.decode import decode
from headway.data.shards.label_order import LabelOrder
from headway.data.shards.shard import Shard
from headway.data.tools import check_label_order
from headway.errors import UsageError

CLASSES, EACH = 40, 30


def dependence(labels: np.ndarray, shard_size: int) -> str:
    order = LabelOrder()
    for at, label in enumerate(labels):
        order.add(at // shard_size, at % shard_size, int(label))
    return order.dependence()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    classes=st.integers(1, 300),
    count=st.integers(1, 3000),
    shard_size=st.integers(1, 1000),
    skew=st.floats(0, 3),
)
def test_shuffled_labels_are_never_taken_for_sorted_ones(
    seed: int, classes: int, count: int, shard_size: int, skew: float
) -> None:
    weights = np.arange(1, classes + 1) ** -skew
    labels = np.random.default_rng(seed).choice(classes, count, p=weights / weights.sum())
    assert dependence(labels, shard_size) == ""


@pytest.mark.parametrize(
    ("classes", "each", "shard_size"),
    [(1000, 4, 100), (10, 100, 100), (2, 500, 100), (2, 100, 1000), (100, 13, 200)],
)
def test_sorted_labels_are_found_whatever_the_shards(classes: int, each: int, shard_size: int) -> None:
    """Also where each shard has one class only, so that nothing differs within it."""
    labels = np.repeat(np.arange(classes), each)
    assert "have the same cls" in dependence(labels, shard_size)
    few = np.random.default_rng(0).choice(len(labels), min(len(labels), 2000), replace=False)
    order = LabelOrder()  # as a loader meets them: some of them, in any sequence
    for at in few:
        order.add(int(at) // shard_size, int(at) % shard_size, int(labels[at]))
    assert "have the same cls" in order.dependence()


def directories(root: Path) -> Path:
    """A directory per class, of files that are no images: nobody decodes them here."""
    for number in range(CLASSES):
        (root / f"n{number:03d}").mkdir(parents=True)
        for image in range(EACH):
            (root / f"n{number:03d}" / f"{image}.jpg").write_bytes(b"%d" % image)
    return root


def labels_of(paths: list[Path]) -> list[int]:
    shards = [Shard.open(path) for path in paths]
    return [decode({"cls": shard[n]["cls"]})["cls"] for shard in shards for n in range(len(shard))]


def classes_of_batches(folder: Path) -> float:
    loader = ShardLoader(folder, batch_size=50, window=50, lanes=2, decoders={"jpg": bytes}, collate_fn=list)
    return float(np.mean([len({sample["cls"] for sample in batch}) for batch in loader]))


def test_class_directories_are_packed_in_random_order(tmp_path: Path, messages: list[str]) -> None:
    source = directories(tmp_path / "in")
    packed = {
        name: pack(source, tmp_path / name, shard_size=100_000, **how)
        for name, how in {"a": {}, "again": {}, "b": {"seed": 1}, "sorted": {"shuffle": False}}.items()
    }
    found = {name: labels_of(paths) for name, paths in packed.items()}
    assert found["sorted"] == sorted(found["a"]) == sorted(found["b"]) == sorted(found["sorted"])
    assert found["a"] == found["again"] != found["b"]
    assert [path.read_bytes() for path in packed["a"]] == [path.read_bytes() for path in packed["again"]]
    assert not messages, "who asks for the order of names gets it"
    assert check_label_order(packed["a"]) == ""
    assert "in 9" in check_label_order(packed["sorted"])
    assert classes_of_batches(tmp_path / "a") > 25
    assert not messages
    assert classes_of_batches(tmp_path / "sorted") < 10
    (message,) = messages
    assert message.startswith("dataset 'data': neighbors in its shards have the same cls in 9")
    assert "headway data pack" in message


def test_a_loader_is_silent_in_validation_and_says_it_once(tmp_path: Path, messages: list[str]) -> None:
    pack([{"__key__": f"{n}", "cls": n // 50} for n in range(1000)], tmp_path, shuffle=False)
    list(ShardLoader(tmp_path, batch_size=50, shuffle=False))
    list(ShardLoader(tmp_path, batch_size=25, rank=1, world_size=2))
    assert not messages
    loader = ShardLoader(tmp_path, batch_size=50)
    for _ in range(3):
        list(loader)
    assert len(messages) == 1


def test_the_samples_of_a_second_epoch_are_no_neighbors_of_the_first(messages: list[str]) -> None:
    labels = np.random.default_rng(1).integers(100, size=1000).tolist()
    rows = [(0, 0, number, label) for number, label in enumerate(labels)]
    watch = LabelWatch(watching=True)
    for _ in range(2):  # more often within an epoch of a mix
        watch.add(rows, ["data", "empty"])
    assert watch.watching and not messages
    watch.end_pass(["data", "empty"])
    assert not watch.watching
    watch.add(rows, ["data", "empty"])
    watch.end_pass(["data", "empty"])
    assert not messages and not watch.watching


def test_samples_that_come_sorted_are_said_and_a_list_can_be_shuffled(
    tmp_path: Path, messages: list[str]
) -> None:
    made = [{"__key__": f"{n}", "cls": n // 20} for n in range(400)]
    pack(made, tmp_path / "sorted")
    assert len(messages) == 1 and "shuffle the samples before packing them" in messages[0]
    paths = pack(made, tmp_path / "shuffled", shuffle=True)
    assert labels_of(paths) != sorted(labels_of(paths)) and len(labels_of(paths)) == 400
    with pytest.raises(UsageError, match="shuffle=True with a generator"):
        pack((sample for sample in made), tmp_path / "never", shuffle=True)
    assert len(messages) == 1


def test_two_images_of_one_name_are_refused_wherever_they_would_lie(tmp_path: Path) -> None:
    source = directories(tmp_path / "in")
    (source / "n003" / "7.png").write_bytes(b"")
    with pytest.raises(UsageError, match=r"7\.png has the __key__ '000003/7' of another image"):
        pack(source, tmp_path / "out")
