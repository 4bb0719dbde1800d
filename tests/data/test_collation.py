"""Default batches: numbers are not changed, what no tensor can hold is a list, and no part takes another's place."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headway.data import BlockMasks, CenterCrop, Mixup, MultiCrop, ShardLoader, pack
from headway.data.samples.collate import collate
from headway.errors import UsageError


def shards(where: Path, **parts: list[Any]) -> Path:
    count = len(next(iter(parts.values())))
    pack(
        ({"__key__": str(n), **{name: values[n] for name, values in parts.items()}} for n in range(count)),
        where,
    )
    return where


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def photo() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (9, 90, 200)).save(file, "JPEG")
    return file.getvalue()


def only_batch(source: Path, **how: Any) -> Any:
    (batch,) = ShardLoader(source, batch_size=4, shuffle=False, threads=1, **how)
    return batch


def test_numbers_are_the_same_in_a_batch(tmp_path: Path) -> None:
    times = [1_700_000_000.0 + 10 * n for n in range(4)]
    found = only_batch(shards(tmp_path, json=[json.dumps({"t": t, "i": 2**53 + 1}) for t in times]))["json"]
    assert found["t"].dtype == torch.float64 and found["t"].tolist() == times
    assert found["i"].tolist() == [2**53 + 1] * 4
    for values in ([2**70, 1], [1.5, 2**53 + 1], [-(2**63) - 1, 0], [1.5, 10**400]):
        assert collate([{"json": value} for value in values])["json"] == values
    edges = [2**63 - 1, -(2**63)]
    assert collate([{"json": value} for value in edges])["json"].tolist() == edges
    assert collate([{"json": value} for value in (1, 2.5, True)])["json"].tolist() == [1.0, 2.5, 1.0]
    assert collate([{"json": value} for value in (True, False)])["json"].dtype == torch.bool


def test_a_label_beyond_64_bits_is_a_bad_sample(tmp_path: Path) -> None:
    loader = ShardLoader(
        shards(tmp_path, cls=["1", str(2**70), "3", "4"]), batch_size=4, shuffle=False, max_bad=1.0
    )
    assert [batch["cls"].tolist() for batch in loader] == [[1, 3, 4]]
    assert [(bad.key, str(2**70) in bad.reason) for bad in loader.bad] == [("1", True)]


def test_arrays_that_no_tensor_can_hold_are_lists(tmp_path: Path) -> None:
    kinds = ("U2", "S3", "M8[s]", "m8[D]", [("a", "f4")], "V5", np.longdouble, np.clongdouble)
    for number, kind in enumerate(kinds):
        for shape in ((3,), ()):
            array = np.zeros(shape, kind)
            found = only_batch(shards(tmp_path / f"{number}{len(shape)}", npy=[npy(array)] * 4))["npy"]
            assert isinstance(found, list) and all(np.array_equal(each, array) for each in found), kind


def test_numpy_scalars_are_a_tensor_of_their_type() -> None:
    for value in (np.float32(1.5), np.int64(2**62), np.uint8(7), np.bool_(True)):
        found = collate([{"x": value}, {"x": value}])["x"]
        assert isinstance(found, torch.Tensor) and found.numpy().dtype == value.dtype
        assert found.tolist() == [value.item()] * 2
    for odd in ([np.float32(1.5), np.int64(1)], [np.str_("a")] * 2, [np.datetime64("2026-01-01")] * 2):
        assert collate([{"x": value} for value in odd])["x"] == odd


@pytest.mark.parametrize("kind", [*"bBhHiIlL", *"efdFD?", ">f4", ">i8", ">u2"])
def test_all_other_arrays_are_tensors(kind: str) -> None:
    for shape in ((3,), (), (2, 0)):
        array = np.ones(shape, kind)
        found = collate([{"npy": array}, {"npy": array}])["npy"]
        assert found.shape == (2, *shape) and (found.numpy() == 1).all()


def shard_with(part: str, where: Path) -> Path:
    where.mkdir()
    with tarfile.open(where / "a.tar", "w") as tar:
        for number in range(4):
            for name, data in (("jpg", photo()), *([(part, b"1")] if number == 2 else [])):
                entry = tarfile.TarInfo(f"{number}.{name}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return where


def test_a_part_with_a_name_of_the_batch_is_a_bad_sample(tmp_path: Path) -> None:
    for part, output in (("images", "bf16"), ("samples", "bf16"), ("__image__", "bf16"), ("fp8", "fp8")):
        transform = CenterCrop(8, resize=8, output=output)
        source = shard_with(part, tmp_path / part)
        loader = ShardLoader(source, batch_size=4, shuffle=False, transform=transform, max_bad=1.0)
        (batch,) = loader
        assert batch.samples.tolist() == [[0, 0, 0, number] for number in (0, 1, 3)]
        ((key, reason),) = [(bad.key, bad.reason) for bad in loader.bad]
        assert key == "2" and f"{part!r}" in reason and "rename it" in reason
    loader = ShardLoader(shard_with("__key__", tmp_path / "key"), batch_size=4, shuffle=False, max_bad=1.0)
    assert [batch["__key__"] for batch in loader] == [["0", "1", "3"]]


def test_masks_do_not_replace_a_part_of_that_name(tmp_path: Path) -> None:
    source = shards(tmp_path, jpg=[photo()] * 4, masks=[b"1"] * 4)
    with pytest.raises(UsageError, match=r"'masks'.*rename"):
        only_batch(source, transform=CenterCrop(8, resize=8, then=(BlockMasks(patch=4),)))
    assert only_batch(source, transform=CenterCrop(8, resize=8))["masks"].shape == (4, 1)


def test_a_part_may_have_a_name_that_this_batch_does_not_use(tmp_path: Path) -> None:
    source = shards(tmp_path, jpg=[photo()] * 4, images=[b"ab"] * 4)
    batch = only_batch(source, transform=MultiCrop(global_size=8, local_size=4))
    assert batch["images"].shape == (4, 2) and batch.global_crops.shape[1] == 4
    assert only_batch(source)["images"].shape == (4, 2)


def test_a_collate_fn_makes_the_parts_other_than_crops_and_then_runs_after_it(tmp_path: Path) -> None:
    source = shards(tmp_path, jpg=[photo()] * 4, cls=["0", "1", "2", "1"])
    given = list[set[str]]()

    def with_names(samples: list[dict[str, Any]]) -> dict[str, Any]:
        given.extend(set(sample) for sample in samples)
        return collate(samples) | {"names": [sample["__key__"] for sample in samples]}

    for output in ("bf16", "fp8"):
        transform = CenterCrop(8, resize=8, output=output, then=(Mixup(classes=3),))
        expected = only_batch(source, transform=transform)
        found = only_batch(source, transform=transform, collate_fn=with_names)
        assert found.pop("names") == ["0", "1", "2", "3"] and found.keys() == expected.keys()
        assert torch.equal(found.images.float(), expected.images.float())
        assert found.labels.shape == (4, 3) and torch.equal(found.labels, expected.labels)
    assert given == [{"__key__", "cls"}] * 8
    with pytest.raises(UsageError, match="collate_fn returned a list: with an image transform, return"):
        only_batch(source, transform=transform, collate_fn=list)
