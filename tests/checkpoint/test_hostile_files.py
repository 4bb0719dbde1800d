"""Checkpoints and weights that were made to hurt: none hangs, fills memory, ends in a traceback, or lies."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway import checkpoint
from headway.checkpoint import Weights, export
from headway.checkpoint.format.manifest import TensorChunk, covers
from headway.checkpoint.weights.loading import load_weights
from headway.cli import main
from headway.errors import HeadwayError, NoValidCheckpoint, UsageError

pytestmark = pytest.mark.timeout(60)  # a pipe that is opened blocks for ever

OLD, NEW = "step-000000000001", "step-000000000002"
SPARSE_BYTES = 40 << 30


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    for step in (1, 2):
        state = {"net": {"a": torch.arange(64.0), "b": torch.ones(3, 5)}, "epoch": step, "pair": (1, 2.0)}
        checkpoint.save(tmp_path, state, step=step, local={"rng": "00"})
    return tmp_path


def forge(directory: Path, name: str, change: Callable[[Any], object]) -> None:
    """Changes a JSON file of a checkpoint, and makes all checksums hold, as an attacker can."""
    document = json.loads((directory / name).read_bytes())
    changed = change(document["holds"])
    if changed is not None:
        document["holds"] = changed
    data = json.dumps(document).encode()
    (directory / name).write_bytes(data)
    seal(directory, {name: {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}})


def seal(directory: Path, facts: dict[str, Any], **values: Any) -> None:
    manifest = json.loads((directory / "manifest.json").read_bytes())
    del manifest["crc32"]
    manifest["files"] |= facts
    body = json.dumps(manifest | values, indent=1).removesuffix("\n}").encode()
    crc = zlib.crc32(body)
    (directory / "manifest.json").write_bytes(body + f',\n "crc32": "{crc:08x}"\n}}\n'.encode())


def assert_falls_back(shelf: Path, problem: str) -> None:
    assert problem in "\n".join(checkpoint.verify(shelf / NEW))
    with pytest.raises(NoValidCheckpoint, match="is damaged"):
        checkpoint.load(shelf / NEW)
    loaded = checkpoint.load_latest(shelf)
    assert loaded is not None and loaded.state["epoch"] == 1


# --- chunks


def test_chunks_that_overlap_leave_a_part_of_the_tensor_without_values(shelf: Path) -> None:
    def overlap(index: Any) -> None:
        (whole,) = index["net.a"]["chunks"]
        begin, half = whole["bytes"][0], {**whole, "shape": [32], "offsets": [0]}
        half["bytes"] = [begin, begin + 128]
        index["net.a"]["chunks"] = [half, half]

    forge(shelf / NEW, "index.json", overlap)
    assert_falls_back(shelf, "the chunks of tensor 'net.a' do not cover it once")


def test_an_empty_chunk_does_not_hide_one_with_values(shelf: Path) -> None:
    def hide(index: Any) -> None:
        (whole,) = index["net.a"]["chunks"]
        begin = whole["bytes"][0]
        index["net.a"]["chunks"].append({**whole, "shape": [0], "bytes": [begin, begin]})

    forge(shelf / NEW, "index.json", hide)
    assert torch.equal(checkpoint.load(shelf / NEW).state["net"]["a"], torch.arange(64.0))


def box(begin: tuple[int, ...], shape: tuple[int, ...]) -> TensorChunk:
    return TensorChunk(file="f", begin=0, end=0, offsets=begin, shape=shape)


@pytest.mark.parametrize(
    ("whole", "boxes", "expected"),
    [
        ((), [((), ())], True),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))], True),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 4))], True),
        # a pinwheel, which no line through the whole divides
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))], True),
        ((0, 4), [], True),
        ((4,), [], False),
        ((4, 4), [((0, 0), (2, 4)), ((0, 0), (2, 4))], False),
        ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))], False),
        ((4,), [((0,), (3,)), ((2,), (1,))], False),
        ((4, 4), [((0, 0), (4, 2)), ((0, 1), (4, 2))], False),
        ((2, 2), [((0, 0), (1, 1)), ((1, 1), (1, 1)), ((0, 0), (1, 1)), ((1, 1), (1, 1))], False),
        ((2,) * 40, [((0,) * 40, (1,) * 40)] * 2, False),
    ],
)  # fmt: skip
def test_chunks_cover_a_tensor_once(whole: Any, boxes: list[Any], expected: bool) -> None:
    assert covers([box(*each) for each in boxes], whole) is expected


# --- names


def test_a_tensor_with_the_name_of_the_metadata_is_not_lost(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'__metadata__' is a name that safetensors reserves"):
        checkpoint.save(tmp_path, {"__metadata__": torch.ones(2)}, step=1)
    path = checkpoint.save(tmp_path, {"net": {"__metadata__": torch.ones(2), "a": torch.ones(1)}}, step=1)
    assert export(path, tmp_path / "all.safetensors") == [tmp_path / "all.safetensors"]
    with pytest.raises(UsageError, match="'__metadata__' is a name that safetensors reserves"):
        export(path, tmp_path / "net.safetensors", part="net")
    assert not (tmp_path / "net.safetensors").exists()


def test_an_export_does_not_write_two_tensors_under_one_name(shelf: Path) -> None:
    forge(shelf / NEW, "index.json", lambda index: index.update(a=index["net.a"]))
    forge(shelf / NEW, "state.json", lambda state: state["net"].update(c={"$tensor": "a"}))
    with pytest.raises(UsageError, match=r"two tensors of .* would have the name 'a'"):
        export(shelf / NEW, shelf / "net.safetensors", part="net")


# --- the tree


def deep(state: Any) -> None:
    for _ in range(500):
        state["epoch"] = [state["epoch"]]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda _: [], "it is not a state"),
        (lambda state: state.update(epoch={"$mark": 1}), "is not a known mark"),
        (lambda state: state.update(epoch={"$dict": [[[], 1]]}), "is not a known mark"),
        (lambda state: state.update(epoch={"$tensor": "net.c"}), "is not a known mark"),
        (deep, "nested too deeply"),
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_loaded_is_not_valid(shelf: Path, change: Any, problem: str) -> None:
    forge(shelf / NEW, "state.json", change)
    assert_falls_back(shelf, problem)


def test_the_state_of_a_rank_that_cannot_be_loaded_is_not_valid(shelf: Path) -> None:
    forge(shelf / NEW, "rank-00000.json", lambda local: local.update(rng={"$tensor": "net.a"}))
    assert_falls_back(shelf, "is not a known mark")


@pytest.mark.parametrize("metrics", [{"val/loss": float("inf")}, {"val/loss": 10**400}, {"val/loss": True}])
def test_metrics_that_are_not_finite_are_not_of_a_manifest(shelf: Path, metrics: Any) -> None:
    seal(shelf / NEW, {}, metrics=metrics)
    assert_falls_back(shelf, "it is not a manifest")


# --- sizes and kinds of files


def test_a_file_that_is_longer_than_its_manifest_says_is_not_read(shelf: Path) -> None:
    """Reading a terabyte takes half an hour."""
    os.truncate(shelf / NEW / "rank-00000.safetensors", 1 << 40)
    assert_falls_back(shelf, f"{1 << 40} bytes, ")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, SPARSE_BYTES)


KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "sparse": sparse,
}
PLACES = [
    "model.safetensors.index.json", "x.safetensors.index.json", "pytorch_model.bin.index.json",
    "x.safetensors", "model.safetensors", "pytorch_model.bin", "manifest.json",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLACES)
def test_weights_are_read_from_regular_files_of_a_plausible_size(
    tmp_path: Path, kind: Any, name: str
) -> None:
    KINDS[kind](tmp_path / name)
    with pytest.raises(HeadwayError) as caught:
        load_weights(Weights(tmp_path), {"a": torch.zeros(1)}, model="net")
    assert "\n" not in str(caught.value)


A = '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
B = '"b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}'
HALF = A.replace("[0, 4]", "[2, 6]").replace('"a"', '"b"')
LAYOUTS = {
    "shared": (f"{{{A}, {HALF}}}", 6, "'b' begins inside another tensor"),
    "hole": (f"{{{B}}}", 8, "'b' follows bytes of no tensor"),
    "twice": (f"{{{A}, {B.replace('b', 'a', 1)}}}", 8, "'a' follows bytes of no tensor"),
    "cut off": (f"{{{A}, {B}}}", 4, "4 bytes of tensors, 8 expected"),
    "more": (f"{{{A}}}", 8, "8 bytes of tensors, 4 expected"),
    "negative": (f"{{{A.replace('[0, 4]', '[-4, 0]')}}}", 0, "the entry of tensor 'a' is inconsistent"),
}


@pytest.mark.parametrize(("header", "data_bytes", "complaint"), LAYOUTS.values(), ids=LAYOUTS)
def test_weights_whose_bytes_are_not_of_one_tensor_each_are_refused(
    tmp_path: Path, header: str, data_bytes: int, complaint: str
) -> None:
    """They were loaded, with values of another tensor, and shown as if nothing was wrong; safetensors refuses them."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(data_bytes))
    with pytest.raises(NoValidCheckpoint, match=complaint):
        load_weights(Weights(path), {"a": torch.zeros(1), "b": torch.zeros(1)}, model="net")
    assert main(["checkpoint", "show", str(path)]) == 86


# --- torch files


def load_torch(value: object, path: Path) -> None:
    torch.save(value, path)
    load_weights(Weights(path), {"a": torch.zeros(1)}, model="net")


def test_a_torch_file_that_contains_itself_is_refused(tmp_path: Path) -> None:
    value: dict[str, Any] = {"a": torch.ones(1)}
    value["self"] = value
    with pytest.raises(UsageError, match="is nested too deeply, or contains itself"):
        load_torch(value, tmp_path / "x.pt")


def test_a_small_torch_file_that_describes_endlessly_many_tensors_is_refused(tmp_path: Path) -> None:
    value: dict[str, Any] = {"a": torch.ones(1)}
    for _ in range(40):
        value = {"x": value, "y": value}
    with pytest.raises(UsageError, match="has more than 1,000,000 values"):
        load_torch(value, tmp_path / "x.pt")


def test_tensors_of_a_torch_file_without_values_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no named tensors"):
        load_torch({"a": torch.ones(1, device="meta")}, tmp_path / "x.pt")


# --- what cannot be saved or exported


def test_a_lazy_module_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"'net.weight' is a parameter without a shape.*: call the model once"
    ):
        checkpoint.save(tmp_path, {"net": nn.LazyLinear(3).state_dict()}, step=1)


def test_a_sparse_buffer_is_refused_by_its_name(tmp_path: Path) -> None:
    net = nn.Linear(1, 1)
    net.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(UsageError, match=r"'net.table' is a torch.sparse_coo tensor"):
        checkpoint.save(tmp_path, {"net": net.state_dict()}, step=1)


def test_a_state_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    state: Any = 1
    for _ in range(5000):
        state = [state]
    with pytest.raises(UsageError, match=r"'list.* is nested too deeply"):
        checkpoint.save(tmp_path, {"list": state}, step=1)


def test_an_export_to_the_root_directory_is_refused(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "export", str(shelf / NEW), "/"]) == 2
    assert (
        capsys.readouterr().err
        == "headway: '/' is not the name of a file: give a name like net.safetensors\n"
    )
