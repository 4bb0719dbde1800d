"""`show` of files that others wrote: torch's .pt files and distributed checkpoints. Nothing in them ever executes."""

from __future__ import annotations

import codecs
import io
import json
import os
import pickle
import random
import sys
import time
import tracemalloc
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from headway.checkpoint.inspect import opcodes
from headway.checkpoint.inspect.overview import read
from headway.cli import checkpoint as command
from headway.errors import NoValidCheckpoint, UsageError

NET = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
STATE: dict[str, Any] = {
    "net": NET.state_dict(),
    "list": [torch.ones(2, dtype=torch.bfloat16), {"deep": torch.zeros(())}],
    "parameter": torch.nn.Parameter(torch.ones(5)),
    "odd": torch.ones(3, dtype=torch.uint16),
    "small": torch.ones(2).to(torch.float8_e5m2),
    "large": torch.ones(2, dtype=torch.complex128),
    "turned": torch.ones(2, 7).t(),
    "epoch": 3,
    "name": "x",
}
EXPECTED = {
    "net.0.weight": ("F32", (4, 3), 48), "net.0.bias": ("F32", (4,), 16), "net.1.weight": ("F32", (4,), 16),
    "net.1.bias": ("F32", (4,), 16), "net.1.running_mean": ("F32", (4,), 16), "net.1.running_var": ("F32", (4,), 16),
    "net.1.num_batches_tracked": ("I64", (), 8), "list.0": ("BF16", (2,), 4), "list.1.deep": ("F32", (), 4),
    "parameter": ("F32", (5,), 20), "odd": ("U16", (3,), 6), "small": ("F8_E5M2", (2,), 2), "large": ("C128", (2,), 32),
    "turned": ("F32", (7, 2), 56),
}  # fmt: skip


def shown(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    return {tensor.name: (tensor.dtype, tensor.shape, tensor.bytes) for tensor in read(path).tensors}


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file(tmp_path: Path, zipped: bool) -> None:
    torch.save(STATE, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    assert shown(tmp_path / "x.pt") == EXPECTED
    assert read(tmp_path / "x.pt").about == {"format": "torch file", "imports": [], "calls": []}


def test_a_whole_module_is_shown_by_the_names_of_its_state(tmp_path: Path) -> None:
    torch.save(NET, tmp_path / "net.pt")
    assert shown(tmp_path / "net.pt") == {
        name.removeprefix("net."): about for name, about in EXPECTED.items() if name.startswith("net.")
    }
    assert "torch.nn.modules.linear.Linear" in read(tmp_path / "net.pt").about["imports"]


def distributed(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is alone
        dcp.save({"net": NET.state_dict(), "x": torch.ones(2, 3), "epoch": 3}, checkpoint_id=folder)
    return folder


def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    expected = {name: about for name, about in EXPECTED.items() if name.startswith("net.")}
    assert shown(distributed(tmp_path / "dcp")) == expected | {"x": ("F32", (2, 3), 24)}
    assert read(tmp_path / "dcp").about == {
        "format": "torch distributed checkpoint",
        "imports": [],
        "calls": [],
    }


def test_the_command_warns_of_what_a_file_would_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": torch.ones(1), "bomb": Bomb(Path("executed"))}, tmp_path / "x.pt")
    assert command.main(["show", str(tmp_path / "x.pt")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "would import: posix.mkdir" in out and "1 tensors" in out
    assert "would call: posix.mkdir('executed')" in out
    assert not (tmp_path / "executed").exists()


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("place", ["zip", "legacy", "pickle", "metadata", "shard", "safetensors"])
def test_a_pickle_in_any_place_is_never_executed(tmp_path: Path, place: str, protocol: int) -> None:
    marker, file = tmp_path / "executed", tmp_path / "x.pt"
    bomb = {"a": torch.ones(1), "b": Bomb(marker)}
    live = pickle.dumps(Bomb(marker), protocol)
    match place:
        case "zip":
            torch.save(bomb, file, pickle_protocol=max(protocol, 2))
        case "legacy":
            torch.save(bomb, file, pickle_protocol=max(protocol, 2), _use_new_zipfile_serialization=False)
        case "pickle":
            file.write_bytes(live)
        case "safetensors":
            file = tmp_path / "x.safetensors"
            file.write_bytes(len(live).to_bytes(8, "little") + live)
        case _:
            file = distributed(tmp_path / "dcp")
            (file / {"metadata": ".metadata", "shard": "__0_0.distcp"}[place]).write_bytes(live)
    with suppress(NoValidCheckpoint, UsageError):
        read(file)
    assert not marker.exists()
    pickle.loads(live)  # it was live
    assert marker.is_dir()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_bare_pickle_says_what_it_would_have_called(
    tmp_path: Path, protocol: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    live = pickle.dumps(Bomb(Path("executed")), protocol)
    (tmp_path / "model.pt").write_bytes(live)
    assert command.main(["show", str(tmp_path / "model.pt")]) == 0
    out = capsys.readouterr().out
    assert "format: pickle, not written by torch" in out and "damaged" not in out
    assert "would call: posix.mkdir('executed')" in out
    (tmp_path / "model.pt").write_bytes(b"\x80\x02" + live[:-1])  # loading fails after the call
    with pytest.raises(NoValidCheckpoint, match=r"would first call posix\.mkdir"):
        read(tmp_path / "model.pt")
    assert not (tmp_path / "executed").exists()


def test_a_call_of_what_another_call_returns_is_shown(tmp_path: Path) -> None:
    hidden = b"\x80\x02cbuiltins\ngetattr\ncposix\nfork\nX\x02\x00\x00\x00__\x86R)R."
    (tmp_path / "x.pt").write_bytes(hidden)
    assert read(tmp_path / "x.pt").about["calls"] == [
        "builtins.getattr(posix.fork, '__')",
        "<builtins.getattr>()",
    ]


def test_a_long_program_and_a_long_list_have_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for body in (b"2" * 1_100_000, b"20" * 60):
        monkeypatch.setattr(opcodes, "_MOST_INSTRUCTIONS", 12_000_000 if len(body) > 1000 else 100)
        with pytest.raises(NoValidCheckpoint, match="more instructions than any"):
            read(archive(tmp_path / "x.pt", b"\x80\x02N" + body + b"."))
    header = {f"m{i}.w": {"dtype": "U8", "shape": [], "data_offsets": [i, i + 1]} for i in range(1500)}
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(1500))
    assert command.main(["show", str(tmp_path / "x.safetensors")]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") < 2100 and "... and 500 more: --json lists all" in out and "1500 tensors" in out


@pytest.mark.parametrize("length", [0x80, 0x180, 0x280])
def test_a_header_whose_length_begins_like_a_pickle(tmp_path: Path, length: int) -> None:
    header = b'{"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}'.ljust(length)
    (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + header + b"1")
    assert shown(tmp_path / "x.safetensors") == {"x": ("U8", (), 1)}


def archive(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as made:
        made.writestr("x/data.pkl", data)
    return path


def laughs(depth: int) -> bytes:
    """A list of lists, each with the same list ten times: 10 ** depth in some hundred bytes."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value] * 10
    return pickle.dumps(value, 4)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x80", b"not a pickle", b"\x80\x04.", b"\x80\x04]", b"(((((((t.", b"\x80\x04h\x05.",
        b"\x80\x04\x82\x01.", b"\x80\x04R.", b"\x80\x04)R.", b"\x80\x04K\x01K\x02\x93.", b"\x80\x04cosno\n.",
        b"\x80\x04\x8f(K\x01\x90.",
        b"\x80\x04](K\x01K\x02K\x03u.", b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", b"I99999999999\n.", b"F1e999\n.",
        laughs(40), b"\x80\x04" + b"]" * 5000 + b"a" * 4999 + b".", b"\x80\x04K\x01" + b"2\x86" * 100 + b"K\x01\x93.",
    ],
)  # fmt: skip
def test_hostile_pickles_are_refused_or_empty(tmp_path: Path, data: bytes) -> None:
    begin = time.process_time()
    with suppress(NoValidCheckpoint):
        assert read(archive(tmp_path / "x.pt", data)).tensors == ()
    assert time.process_time() - begin < 60


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    bomb = archive(tmp_path / "x.pt", pickle.dumps(b"\0" * 10_000_000), zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 100_000
    with pytest.raises(NoValidCheckpoint, match="or compressed"):
        read(bomb)


@pytest.mark.parametrize("kind", ["zip", "metadata"])
def test_damaged_files_are_refused_in_words(tmp_path: Path, kind: str) -> None:
    """Whatever bytes are changed: an answer or one of our errors, and never a call."""
    rng = random.Random(0)
    if kind == "zip":
        buffer = io.BytesIO()
        torch.save(STATE, buffer)
        name = next(name for name in zipfile.ZipFile(buffer).namelist() if name.endswith("data.pkl"))
        whole, file = zipfile.ZipFile(buffer).read(name), tmp_path / "x.pt"
    else:
        file = distributed(tmp_path / "dcp")
        whole = (file / ".metadata").read_bytes()
    for codec in ("ascii", "cp437", "latin-1", "raw-unicode-escape", "unicode-escape", "utf-8"):
        codecs.lookup(codec)  # imported at its first use: for names in a zip file, strings in a pickle
    outcomes = set()
    for _ in range(300):
        data = bytearray(whole[: rng.randrange(1, len(whole))] if rng.random() < 0.2 else whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if kind == "zip":
            archive(file, bytes(data))
        else:
            (file / ".metadata").write_bytes(data)
        imported = set(sys.modules)
        try:
            read(file)
            outcomes.add("shown")
        except NoValidCheckpoint:
            outcomes.add("refused")
        assert set(sys.modules) == imported
    assert outcomes == {"shown", "refused"}


def test_a_number_of_many_digits_is_no_name(tmp_path: Path) -> None:
    """Python refuses to print it."""
    state = {10**5000: torch.ones(2), "x": {10**5000: 1}}
    torch.save(state, tmp_path / "x.pt")
    assert [tensor.shape for tensor in read(tmp_path / "x.pt").tensors] == [(2,)]


def storage_of(shape: bytes) -> bytes:
    """A pickle of a dict with one tensor of floats, with these instructions for its shape."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + b")\x89NtR"
    return b"\x80\x02}X\x01\x00\x00\x00x" + tensor + b"s."


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_a_shape_that_no_tensor_has_is_refused(json_too: list[str], tmp_path: Path) -> None:
    """Its number of elements could not be printed; that of a longer one would take hours to compute."""
    good = archive(tmp_path / "good.pt", storage_of(b"(K\x03K\x04t"))
    assert shown(good) == {"x": ("F32", (3, 4), 48)}
    large = b"\x8a\xff" + b"\x7f" * 255  # an integer of 255 bytes
    for number, shape in enumerate((large + b"\x85", b"(" + large + b"2" * 300 + b"t")):
        path = archive(tmp_path / f"{number}.pt", storage_of(shape))
        with pytest.raises(NoValidCheckpoint, match="has no valid shape"):
            command.main(["show", str(path), *json_too])
    huge = 10**4000
    header = json.dumps({"x": {"dtype": "F4", "shape": [huge, huge], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(NoValidCheckpoint, match="is inconsistent"):
        command.main(["show", str(tmp_path / "x.safetensors"), *json_too])


@pytest.mark.parametrize("kind", ["itself", "long key"])
def test_what_a_small_file_describes_takes_little_memory(kind: str, tmp_path: Path) -> None:
    """Members were counted when they were looked at, not when they were listed: a hundred times all of them."""
    items: list[Any] = [None] * 20_000
    items[0] = items
    value = items if kind == "itself" else {"k" * 20_000: [None] * 50_000}
    path = archive(tmp_path / "x.pt", pickle.dumps(value, 2))
    tracemalloc.start()
    try:
        with suppress(NoValidCheckpoint):
            assert read(path).tensors == ()
        assert tracemalloc.get_traced_memory()[1] < 250_000_000
    finally:
        tracemalloc.stop()
