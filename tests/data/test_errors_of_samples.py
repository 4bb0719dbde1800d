"""What a user's transform or decoder raises names its sample; single bad samples in several shards are no reason to
stop."""

from __future__ import annotations

import traceback
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from headway.cli import main
from headway.data import DataLoader, Mix, ShardLoader, pack
from headway.data.tools import check_shard
from headway.errors import HeadwayError


def shards(root: Path, count: int = 40, per_shard: int = 20, bad: frozenset[int] = frozenset()) -> Path:
    for first in range(0, count, per_shard):
        numbers = range(first, min(first + per_shard, count))
        made = [{"__key__": f"{n:04d}", "cls": "x" if n in bad else n, "own": b"7"} for n in numbers]
        pack(made, root, name=f"s{first:04d}")
    return root


def broken(sample: dict[str, Any], _: np.random.Generator) -> Any:
    if sample["cls"] == 33:
        raise ZeroDivisionError("no such thing")
    return sample


def broken_decoder(_: bytes) -> int:
    raise ZeroDivisionError("no such thing")


@pytest.mark.parametrize(
    ("how", "key"),
    [({"transform": broken}, "'0033'"), ({"decoders": {"own": broken_decoder}}, "'00")],
    ids=["transform", "decoder"],
)
def test_an_exception_names_dataset_shard_and_key(how: dict[str, Any], key: str, tmp_path: Path) -> None:
    mix = Mix({"birds": 1.0}, shards={"birds": shards(tmp_path)})
    with pytest.raises(ZeroDivisionError) as error:
        list(ShardLoader(mix, batch_size=4, **how))
    shown = "".join(traceback.format_exception(error.value))
    assert f"sample {key}" in shown and "of dataset 'birds', in " in shown
    assert str(tmp_path / ("s0020-000000.tar" if "transform" in how else "s00")) in shown
    assert len(error.value.__notes__) == 1


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> int:
        if number == 5:
            raise ZeroDivisionError("no such thing")
        return number


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_a_map_style_dataset_names_the_sample(workers: int) -> None:
    with pytest.raises(ZeroDivisionError) as error:
        list(DataLoader(Numbers(), batch_size=4, num_workers=workers))
    assert "sample 5 of Numbers, in epoch 0" in "".join(traceback.format_exception(error.value))


Pair = namedtuple("Pair", ["image", "label"])


@pytest.mark.parametrize("kind", [lambda *parts: parts, Pair], ids=["tuple", "named"])
def test_tuples_are_collated_by_position(kind: Callable[..., Any], tmp_path: Path) -> None:
    def pair(sample: dict[str, Any], _: np.random.Generator) -> Any:
        number = sample["cls"]
        return (
            kind(np.full((2, 3), number, np.float32), {"label": number}, sample["__key__"])[:3]
            if (kind is not Pair)
            else kind(np.full((2, 3), number, np.float32), {"label": number})
        )

    loader = ShardLoader(shards(tmp_path), batch_size=4, shuffle=False, transform=pair)
    batch = next(iter(loader))
    image, label, *keys = batch
    assert torch.equal(image[:, 0, 0], torch.arange(4.0)) and image.shape == (4, 2, 3)
    assert label["label"].tolist() == [0, 1, 2, 3]
    assert keys == ([] if kind is Pair else [["0000", "0001", "0002", "0003"]])
    assert type(batch) is (Pair if kind is Pair else tuple)


def test_tuples_of_several_lengths_are_refused(tmp_path: Path) -> None:
    def some(sample: dict[str, Any], _: np.random.Generator) -> Any:
        return (1, 2) if sample["cls"] % 2 else (1,)

    with pytest.raises(HeadwayError, match="returned a tuple of 2 and a tuple of 1 for samples of one batch"):
        list(ShardLoader(shards(tmp_path), batch_size=4, shuffle=False, transform=some))


def test_one_bad_sample_in_each_of_five_shards_does_not_end_a_run(tmp_path: Path) -> None:
    root = shards(tmp_path, 200, 40, bad=frozenset({3, 47, 91, 130, 188}))
    loader = ShardLoader(root, batch_size=10)
    assert sum(len(batch["cls"]) for batch in loader) == 200
    assert {bad.key for bad in loader.bad} == {"0003", "0047", "0091", "0130", "0188"}


def test_many_bad_samples_are_counted_by_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = shards(tmp_path, 200, 40, bad=frozenset({*range(40, 49), 3, 91}))
    with pytest.raises(HeadwayError) as error:
        list(ShardLoader(root, batch_size=200, threads=1))
    text = str(error.value)
    assert f"{root}/s0040-000000.tar" in text and f"1 in {root}/s0000-000000.tar" in text
    command = text.rpartition("find all with: headway ")[2]
    assert command == f"data check {root}"
    assert main(command.split()) == 1
    assert "'0091'" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["s0000-000000.idx", "s0000-000000.tar.idx"])
@pytest.mark.parametrize("content", [b"", b"hello, world\n", bytes(range(3, 200)), b"v1.1 many\n"])
def test_a_broken_index_is_found(name: str, content: bytes, tmp_path: Path) -> None:
    root = shards(tmp_path, 20)
    (root / "s0000-000000.idx").unlink()
    assert check_shard(root / "s0000-000000.tar") == []
    (root / name).write_bytes(content)
    (problem,) = check_shard(root / "s0000-000000.tar")
    assert name in problem and "remove it" in problem
