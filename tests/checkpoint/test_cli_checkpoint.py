"""`headway checkpoint show | verify | export`."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headway
from headway import checkpoint
from headway.cli import checkpoint as command
from headway.errors import NoValidCheckpoint, StorageError, UsageError
from headway.run import Run
from headway.testing import faults, ranks

STATE = {
    "net": {
        "layer.weight": torch.arange(12.0).reshape(4, 3),
        "layer.bias": torch.ones(4),
        "head": torch.tensor(True),
    },
    "adamw": {"state": {0: {"exp_avg": torch.zeros(4, 3, dtype=torch.bfloat16)}}},
    "epoch": 3,
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.create(tmp_path, name="digits")
    for step in (1, 2):
        checkpoint.save(made, STATE, step=step, metrics={"val/loss": 0.5})
    return made


def test_show_prints_a_table_by_module(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", str(run.path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["step:", "2"] in lines and ["metrics:", "val/loss", "0.5"] in lines
    assert ["net.layer", "16", "64", "B"] in lines
    assert ["weight", "F32", "4", "x", "3", "48", "B"] in lines
    assert ["head", "BOOL", "scalar", "1", "B"] in lines
    assert ["exp_avg", "BF16", "4", "x", "3", "24", "B"] in lines
    assert ["4", "tensors", "29", "89", "B"] in lines


def test_show_as_json(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", str(run.checkpoint_dir(1)), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["world_size"], shown["metrics"]) == (1, 1, {"val/loss": 0.5})
    assert shown["total"] == {"tensors": 4, "elements": 29, "bytes": 89}
    assert shown["modules"]["net.layer"] == {"tensors": 2, "elements": 16, "bytes": 64}
    assert {"name": "net.layer.weight", "dtype": "F32", "shape": [4, 3], "bytes": 48} in shown["tensors"]


def test_show_of_a_plain_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a.w": torch.zeros(2, 3)}, tmp_path / "x.safetensors")
    assert command.main(["show", str(tmp_path / "x.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"] == {"tensors": 1, "elements": 6, "bytes": 24}


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 a torch file", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]"])
def test_show_of_another_file_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "x.pt"
    file.write_bytes(data)
    with pytest.raises((UsageError, NoValidCheckpoint), match=r"x\.pt"):
        command.main(["show", str(file)])


def test_names_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint.save(tmp_path, {"net": {"evil\x1b[2J.w": torch.ones(1)}}, step=1)
    command.main(["show", str(path)])
    assert "\x1b" not in capsys.readouterr().out


def test_verify_says_which_and_what(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["verify", str(run.path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["whole", "whole"]
    file = run.checkpoint_dir(2) / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert command.main(["verify", str(run.path)]) == 86
    out = capsys.readouterr().out
    assert "damaged" in out and "whole" in out and "bytes" in out
    assert command.main(["verify", str(run.checkpoint_dir(1)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {str(run.checkpoint_dir(1)): []}
    assert command.main(["verify", str(run.path), "--json"]) == 86
    assert run.checkpoint_dir(2).is_dir()  # looking moves nothing


def test_export_of_a_part_is_what_was_saved(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "net.safetensors"
    assert command.main(["export", str(run.path), str(out), "--part", "net", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == out.stat().st_size
    exported = load_file(out)
    assert exported.keys() == STATE["net"].keys()  # type: ignore[attr-defined]
    for name, tensor in STATE["net"].items():  # type: ignore[attr-defined]
        assert torch.equal(exported[name], tensor) and exported[name].dtype == tensor.dtype
    with pytest.raises(UsageError, match="exists already"):
        command.main(["export", str(run.path), str(out)])
    with pytest.raises(UsageError, match=r"'nets' with tensors: its parts with tensors are 'net', 'adamw'"):
        command.main(["export", str(run.path), str(tmp_path / "y.safetensors"), "--part", "nets"])
    command.main(["export", str(run.path), str(tmp_path / "all.safetensors")])
    assert len(load_file(tmp_path / "all.safetensors")) == 4


def test_a_part_and_an_adapter_are_not_exported_together(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--part and --adapter are both given"):
        command.main(["export", str(run.path), str(tmp_path / "x"), "--part", "net", "--adapter", "net"])


def test_an_adapter_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    state = {
        "models": {"lm": {"layer.lora_A.default.weight": torch.ones(2)}},
        "run": {"adapters": {"lm": {"r": 8}}},
    }
    path = checkpoint.save(tmp_path / "checkpoints", state, step=1)
    out = tmp_path / "new" / "adapter"
    with (
        faults.at("checkpoint.before_fsync", action="errno=ENOSPC"),
        pytest.raises(StorageError, match="No space left"),
    ):
        checkpoint.export_adapter(path, out)
    assert not list(out.parent.iterdir())
    written = checkpoint.export_adapter(path, out)
    assert sorted(written) == sorted(out.iterdir()) and [file.parent for file in written] == [out, out]
    assert list(load_file(out / "adapter_model.safetensors")) == ["layer.lora_A.weight"]


def test_a_run_whose_name_begins_like_that_of_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path, name="step-decay")
    checkpoint.save(run, STATE, step=1)
    assert command.main(["verify", str(run.path)]) == 0
    assert command.main(["show", str(run.path)]) == 0
    assert "net.layer" in capsys.readouterr().out


def test_export_of_one_model_of_several(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 3)
    state = {"models": {"net": net.state_dict(), "ema": net.state_dict()}, "epoch": 3}
    path = checkpoint.save(tmp_path / "checkpoints", state, step=1)
    checkpoint.export(path, tmp_path / "out" / "net.safetensors", part="models.net")  # it makes the directory
    torch.nn.Linear(2, 3).load_state_dict(load_file(tmp_path / "out" / "net.safetensors"))
    with pytest.raises(UsageError, match=r"with tensors are 'models', 'models.net', 'models.ema'$"):
        checkpoint.export(path, tmp_path / "x.safetensors", part="models.nets")


def test_export_in_several_files_with_an_index(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "net.safetensors"
    command.main(["export", str(run.path), str(out), "--part", "net", "--shard-gb", "50e-9", "--json"])
    files = [Path(file).name for file in json.loads(capsys.readouterr().out)["files"]]
    shards = ["net-00001-of-00002.safetensors", "net-00002-of-00002.safetensors"]
    assert files == [*shards, "net.safetensors.index.json"]
    index = json.loads((tmp_path / "net.safetensors.index.json").read_bytes())
    assert index["metadata"] == {"total_size": 48 + 16 + 1}
    assert index["weight_map"] == {"layer.weight": shards[0], "layer.bias": shards[1], "head": shards[1]}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], STATE["net"][name])  # type: ignore[index]
    with pytest.raises(UsageError, match="exists already"):
        command.main(["export", str(run.path), str(out), "--part", "net", "--shard-gb", "50e-9"])
    with pytest.raises(UsageError, match="is not a number above 0"):
        command.main(["export", str(run.path), str(out), "--shard-gb", "0"])


def test_export_of_damage_writes_nothing(run: Run, tmp_path: Path) -> None:
    file = run.checkpoint_dir(2) / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    with pytest.raises(NoValidCheckpoint, match="damaged"):
        command.main(["export", str(run.path), str(tmp_path / "out.safetensors")])
    assert not list(tmp_path.glob("*out*"))


@ranks(3)
def test_export_joins_what_three_ranks_wrote(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    whole = {"rows": torch.arange(35.0).reshape(7, 5), "columns": torch.arange(35).reshape(7, 5)}
    sharded = {
        name: distribute_tensor(t, mesh, [Shard(number)]) for number, (name, t) in enumerate(whole.items())
    }
    path = checkpoint.save(tmp_path, {"net": sharded}, step=1)
    out = tmp_path / f"{headway.rank()}.safetensors"
    checkpoint.export(path, out, part="net")
    exported = load_file(out)
    assert all(torch.equal(exported[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize(
    "argv", [["show", "/nowhere"], ["verify", "/nowhere"], ["verify", "/"], ["look", "x"]]
)
def test_bad_input_is_a_usage_error(argv: list[str]) -> None:
    with pytest.raises(UsageError):
        command.main(argv)


def test_help_and_looking_need_no_torch(run: Run) -> None:
    code = f"""
import sys
from headway.cli import checkpoint
checkpoint.main([]); checkpoint.main(["show", {str(run.path)!r}]); checkpoint.main(["verify", {str(run.path)!r}])
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_best_of_what_is_left_is_said_to_be_that(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("headway"), "propagate", True)
    checkpoint.save(run, STATE, step=3, metrics={"val/loss": 0.2})
    assert checkpoint.load_best(run, metric="val/loss").step == 3 and not caplog.messages
    assert checkpoint.load_best(run).step == 3
    (said,) = caplog.messages
    assert (
        "trained without keep_best: step 3 has the lowest val/loss of the checkpoints that are left" in said
    )
    caplog.clear()
    checkpoint.save(run, {**STATE, "run": {"keep_best": "val/loss"}}, step=4, metrics={"val/loss": 0.1})
    assert checkpoint.load_best(run).step == 4 and not caplog.messages


def test_show_lists_all_checkpoints_of_a_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.save(run, STATE, step=3, metrics={"val/loss": 0.2})
    checkpoint.save(run, STATE, step=4, metrics={"val/loss": 0.9})
    assert command.main(["show", str(run.path)]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step-0")]
    assert [line[:2] for line in listed[:2]] == [
        ["step-000000000004", "newest"],
        ["step-000000000003", "best"],
    ]
    assert len(listed) == 4 and listed[3][-2:] == ["val/loss", "0.5"]
    assert command.main(["show", str(run.path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step"] == 4  # as before: what follows is the newest
    marks = [(each["step"], each["newest"], each["best"]) for each in facts["checkpoints"]]
    assert marks == [(4, True, False), (3, False, True), (2, False, False), (1, False, False)]
    state = {**STATE, "run": {"keep_best": "max:val/loss"}}  # what a pipeline was told
    checkpoint.save(run, state, step=5, metrics={"val/loss": 0.1})
    assert command.main(["show", str(run.path), "--json"]) == 0
    assert [c["step"] for c in json.loads(capsys.readouterr().out)["checkpoints"] if c["best"]] == [4]


def test_a_run_may_be_named_by_its_id_or_the_end_of_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = str(run.path.parent)
    for number, name in enumerate([run.id, run.id.rpartition("-")[2], run.name]):
        out = Path(f"{number}.safetensors")
        assert command.main(["export", name, str(out), "--part", "net", "--root", root]) == 0
        assert load_file(out).keys() == STATE["net"].keys()  # type: ignore[attr-defined]
    Run.create(run.path.parent, name=run.name, world={})
    with pytest.raises(UsageError, match=f"'{run.name}' matches 2 runs in {root}; give the path"):
        command.main(["verify", run.name, "--root", root])
    with pytest.raises(UsageError, match="nobody cannot be read: No such file or directory"):
        command.main(["show", "nobody", "--root", root])
