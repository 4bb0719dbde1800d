"""Models that begin with the weights of a run, of safetensors, of Hugging Face and of torch files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from toys import Batches, Classify, Net, make_net, make_pipe

import headway as hw
from headway import checkpoint
from headway.checkpoint import Weights
from headway.checkpoint.weights.loading import has_averages, load_weights
from headway.errors import NoValidCheckpoint, StorageError, UsageError
from headway.system import files
from headway.testing import ranks
from headway.train import Fsdp, Pipeline, empty_parameters


def other_net(**settings: Any) -> Net:
    torch.manual_seed(99)
    return Net(**settings)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def assert_same(net: nn.Module, expected: dict[str, Tensor]) -> None:
    found = net.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(whole(found[name]), whole(tensor), rtol=0, atol=0, check_device=False)


def trained(folder: Path, **model: Any) -> tuple[Pipeline, Any]:
    """A run of four steps with a checkpoint of each; its losses rise and fall."""
    pipe = make_pipe(folder, **model)
    pipe.register_dataset("train", Batches(4))
    pipe.register_dataset("val", Batches(1, rank=3))
    pipe.append_stage(Classify(val_every="1 steps", log_every=1), max_epochs=1)
    pipe.enable_checkpointing(every=1, keep_last=10, keep_best="max:val/loss", background=False)
    return pipe, pipe.run()


def shard(folder: Path, state: dict[str, Tensor]) -> None:
    """Writes a directory as Hugging Face does: two files and an index; links, as in its cache."""
    folder.mkdir()
    (folder / "blobs").mkdir()
    where = {}
    for number, names in enumerate((list(state)[:3], list(state)[3:]), 1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({key: state[key].contiguous() for key in names}, folder / "blobs" / f"{number}")
        (folder / name).symlink_to(f"blobs/{number}")
        where |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_every_kind_of_source_gives_the_same_weights(tmp_path: Path) -> None:
    state = other_net().state_dict()
    save_file(state, tmp_path / "net.safetensors")
    shard(tmp_path / "hub", state)
    torch.save(state, tmp_path / "net.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(
        {"epoch": 3, "state_dict": {f"module._orig_mod.{k}": v for k, v in state.items()}},
        tmp_path / "more.ckpt",
    )
    save_file({f"backbone.{k}": v for k, v in state.items()}, tmp_path / "named.safetensors")
    save_file(
        {k: v.half() if v.is_floating_point() else v for k, v in state.items()}, tmp_path / "half.safetensors"
    )
    saved = checkpoint.save(tmp_path / "checkpoints", {"net": state, "epoch": 3}, step=7)
    checkpoint.export(saved, tmp_path / "out" / "net.safetensors", part="net", shard_bytes=500)
    assert len(list((tmp_path / "out").iterdir())) > 2, "several files, and an index of that name"
    for source in ("net.safetensors", "hub", "net.pt", "old.pt", "more.ckpt", saved, "checkpoints", "out"):
        pipe = Pipeline(root=tmp_path)
        pipe.register_model("net", make_net(), init_from=tmp_path / source, ema=0.9)
        model = pipe.registered_models["net"]
        assert_same(model.bare, state)
        assert model.ema is not None
        for name, average in model.ema.state_dict().items():  # it begins with them, too
            assert average.equal(state[name])
    for rename in ({"backbone.": ""}, lambda name: name.removeprefix("backbone.")):
        net = make_net()
        Pipeline(root=tmp_path).register_model(
            "net",
            net,
            init_from=tmp_path / "named.safetensors",
            rename=rename,  # type: ignore[arg-type]
        )
        assert_same(net, state)
    net = make_net()
    Pipeline(root=tmp_path).register_model("net", net, init_from=tmp_path / "half.safetensors")
    assert_same(net, {k: v.half().float() if v.is_floating_point() else v for k, v in state.items()})


def test_what_does_not_match_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = other_net().state_dict()
    head = {"last.weight": torch.zeros(5, 24), "last.bias": torch.zeros(5)}
    given = {**{k: v for k, v in state.items() if k != "first.bias"}, **head, "old.scale": torch.ones(1)}
    save_file(given, tmp_path / "net.safetensors")
    pipe, net = Pipeline(root=tmp_path), make_net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    message = (
        r"model 'net' does not match the given weights: 6 of 9 tensors from .*net.safetensors; "
        r"missing: first.bias; of another shape: last.weight, last.bias; left over: old.scale; pass strict=False"
    )
    with pytest.raises(UsageError, match=message):
        pipe.register_model("net", net, init_from=tmp_path / "net.safetensors")
    assert_same(net, before)  # nothing was changed
    pipe.register_model("net", net, init_from=tmp_path / "net.safetensors", strict=False)
    report = pipe.registered_models["net"].initial
    assert report is not None
    assert (len(report.matched), report.missing, report.left_over) == (6, ("first.bias",), ("old.scale",))
    assert "missing: first.bias; of another shape" in capfd.readouterr().out
    assert net.first.weight.equal(state["first.weight"])
    assert net.last.weight.equal(before["last.weight"])
    save_file({"else.weight": torch.ones(1)}, tmp_path / "else.safetensors")
    with pytest.raises(UsageError, match="has none of the tensors"):
        Pipeline(root=tmp_path).register_model(
            "net", make_net(), init_from=tmp_path / "else.safetensors", strict=False
        )


def test_nothing_is_trained_that_has_no_values(tmp_path: Path) -> None:
    state = other_net().state_dict()
    save_file({k: v for k, v in state.items() if k != "last.bias"}, tmp_path / "most.safetensors")
    with empty_parameters():
        empty = make_net()
    with pytest.raises(UsageError, match=r"was built without values, and .* has none for last.bias"):
        Pipeline(root=tmp_path).register_model(
            "net", empty, init_from=tmp_path / "most.safetensors", strict=False
        )
    with empty_parameters():
        net = make_net()
    net.last = make_net().last  # a new head, with values of its own
    Pipeline(root=tmp_path).register_model("net", net, init_from=tmp_path / "most.safetensors", strict=False)
    assert_same(net, {**state, "last.bias": make_net().last.bias})


def test_a_torch_file_that_would_execute_is_refused(tmp_path: Path) -> None:
    torch.save({"net": nn.Linear(2, 2)}, tmp_path / "whole.pt")
    with pytest.raises(UsageError, match="cannot be read safely"):
        Pipeline(root=tmp_path).register_model("net", make_net(), init_from=tmp_path / "whole.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(UsageError, match="has no named tensors"):
        Pipeline(root=tmp_path).register_model("net", make_net(), init_from=tmp_path / "list.pt")
    header = json.dumps({"a": {"dtype": "F8_E8M0", "shape": [1], "data_offsets": [0, 1]}}).encode()
    new = len(header).to_bytes(8, "little") + header + b"\0"
    (tmp_path / "new.safetensors").write_bytes(new)  # whole, of a type that is not known here
    with pytest.raises(UsageError, match="has tensor 'a' of type 'F8_E8M0', which cannot be loaded"):
        Pipeline(root=tmp_path).register_model("net", make_net(), init_from=tmp_path / "new.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"not weights at all, but long enough")
    with pytest.raises(NoValidCheckpoint, match=r"junk.safetensors: it is not a safetensors file"):
        Pipeline(root=tmp_path).register_model("net", make_net(), init_from=tmp_path / "junk.safetensors")
    for source, rename, words in (
        ({"a": 1}, None, "weights cannot be read from a value of type dict: give the path"),
        (3, None, "weights cannot be read from a value of type int"),
        (tmp_path / "whole.pt", ["a"], r"rename=\['a'\]: give a dict"),
    ):
        with pytest.raises(UsageError, match=words):
            Pipeline(root=tmp_path).register_model("net", make_net(), init_from=source, rename=rename)  # type: ignore[arg-type]
    torch.save(argparse.Namespace(lr=0.1), tmp_path / "args.pt")
    with pytest.raises(UsageError, match="cannot be read safely") as caught:
        Pipeline(root=tmp_path).register_model("net", make_net(), init_from=tmp_path / "args.pt")
    assert "\x1b" not in str(caught.value)
    save_file({k: torch.ones(3, 3, 3) for k in make_net().state_dict()}, tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match=r"no tensor with the same shape as in .*; of another shape: first"):
        Pipeline(root=tmp_path).register_model("net", make_net(), init_from=tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match="there are no weights at"):
        Pipeline(root=tmp_path).register_model("net", make_net(), init_from=tmp_path / "nowhere")
    (tmp_path / "hub").mkdir()
    index = {"weight_map": {"first.weight": "../whole.pt"}}
    (tmp_path / "hub" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(NoValidCheckpoint, match="not an index"):
        Pipeline(root=tmp_path).register_model("net", make_net(), init_from=tmp_path / "hub")


def test_the_last_the_best_or_any_checkpoint_of_a_run(tmp_path: Path) -> None:
    pipe, run = trained(tmp_path, ema=0.5)
    saved = {step: checkpoint.load(run.checkpoint_dir(step)) for step in range(5)}
    losses = {step: loaded.metrics["val/loss"] for step, loaded in saved.items() if step}
    best = max(losses, key=losses.__getitem__)
    assert best != 4
    assert checkpoint.load_best(run).step == best
    assert checkpoint.load_best(run, metric="val/loss").step == min(losses, key=losses.__getitem__)
    for source, step, kind in (
        (run, 4, "models"),
        (Weights(run.path, at="best"), best, "models"),
        (Weights(run, at=2), 2, "models"),
        (Weights(run, at=2, ema=True), 2, "averages"),
        (run.checkpoint_dir(3), 3, "models"),
    ):
        net = other_net()
        Pipeline(root=tmp_path).register_model("student", net, init_from=source)  # type: ignore[arg-type]
        state = saved[step].state
        assert_same(net, {**state["models"]["net"], **state[kind]["net"]})
    assert (
        not saved[2]
        .state["averages"]["net"]["first.weight"]
        .equal(saved[2].state["models"]["net"]["first.weight"])
    )
    with pytest.raises(
        UsageError, match=r"no checkpoint of step 9: its checkpoints are of steps 0, 1, 2, 3, 4"
    ):
        Weights(run, at=9).locate()
    with pytest.raises(
        UsageError, match=r"has the metric 'val/bleu', so none is the best; saved metrics: .*val/loss"
    ):
        checkpoint.load_best(run, metric="val/bleu")
    del pipe


@ranks(2)
def test_shards_are_read_without_the_whole(tmp_path: Path) -> None:
    state = {k: v.clone() for k, v in other_net(norm=False).state_dict().items()}
    pipe = Pipeline(root=tmp_path)
    if pipe.world.is_root:
        shard(tmp_path / "hub", state)
        torch.save(state, tmp_path / "net.pt")
    hw.barrier()
    for name in ("hub", "net.pt"):
        with empty_parameters():
            net = make_net(norm=False)
        assert net.first.weight.is_meta
        pipe.register_model(name, net, parallel=Fsdp(blocks=(nn.Linear,)), init_from=tmp_path / name)
        assert isinstance(net.first.weight, DTensor)
        assert net.first.weight.to_local().shape == (12, 10)
        assert_same(net, state)
    with empty_parameters():
        net = make_net(norm=False)
    with pytest.raises(UsageError, match="pass init_from= to fill them"):
        pipe.register_model("empty", net)


class Tied(nn.Module):
    """Two layers with one weight. A checkpoint has it under both names, and its average under the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.last = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))  # type: ignore[no-any-return]


def test_the_average_of_a_tied_weight_is_not_replaced_by_the_trained_one(tmp_path: Path) -> None:
    pipe, run = trained(tmp_path, net=Tied(), ema=0.5)
    state = checkpoint.load(run.checkpoint_dir(4)).state
    models, averages = state["models"]["net"], state["averages"]["net"]
    assert "second.weight" in models and "second.weight" not in averages
    assert not models["first.weight"].equal(averages["first.weight"])
    net = Tied()
    Pipeline(root=tmp_path).register_model("net", net, init_from=Weights(run, ema=True))
    for name, average in averages.items():
        assert net.get_parameter(name).equal(average), name
    assert net.second.weight is net.first.weight
    del pipe


@pytest.mark.parametrize(
    "data",
    [
        b"hello",  # as a pickle: take what was remembered as number 101
        b"\x80\x02.",
        b"\x80\x02X\x05",
        b"\x80\x02K",
        b"\x80\x02}K\x01]s.",
        b"\x80\x02}(]K\x01u.",
    ],
)
def test_a_file_that_is_no_torch_file_is_refused_in_words(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(data)
    with pytest.raises(UsageError, match=r"net.pt (cannot be read safely as weights|has no named tensors)"):
        Pipeline(root=tmp_path).register_model("net", make_net(), init_from=tmp_path / "net.pt")


def test_an_old_torch_file_that_was_cut_is_refused_in_words(tmp_path: Path) -> None:
    torch.save(other_net().state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    whole_file = (tmp_path / "old.pt").read_bytes()
    for length in range(1, len(whole_file), 97):
        (tmp_path / "cut.pt").write_bytes(whole_file[:length])
        with pytest.raises(UsageError, match=r"cut.pt cannot be read safely as weights"):
            Pipeline(root=tmp_path).register_model("net", make_net(), init_from=tmp_path / "cut.pt")


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.pt").write_bytes(b"")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(
        files, "open_regular", refuse
    )  # root, who runs tests in containers, may read everything
    with pytest.raises(StorageError, match=r"could not read .*net.pt: Permission denied"):
        load_weights(Weights(tmp_path / "net.pt"), {"w": torch.zeros(1)}, model="net")


class Ensemble(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.models = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))


@pytest.mark.parametrize("count", [1, 2])
def test_a_file_whose_names_begin_like_those_of_a_checkpoint(count: int, tmp_path: Path) -> None:
    """A checkpoint of a pipeline has "models.net.first.weight"; a model may have a part of that name itself."""
    state = Ensemble(count).state_dict()
    save_file(state, tmp_path / "net.safetensors")
    torch.save(state, tmp_path / "net.pt")
    for name in ("net.safetensors", "net.pt"):
        net = Ensemble(count)
        Pipeline(root=tmp_path).register_model("net", net, init_from=tmp_path / name)
        assert_same(net, state)


def test_the_name_of_a_model_may_have_a_dot(tmp_path: Path) -> None:
    first, second = ({"w": torch.full((3,), value)} for value in (1.0, 2.0))
    state = {"models": {"net.a": first, "net.b": second}, "averages": {"net.b": {"w": torch.full((3,), 9.0)}}}
    path = checkpoint.save(tmp_path, state, step=1)
    for model, ema, value in (("net.a", None, 1.0), ("net.b", None, 2.0), ("net.b", True, 9.0)):
        tensors = {"w": torch.zeros(3)}
        load_weights(Weights(path, ema=ema), tensors, model=model)
        assert tensors["w"].tolist() == [value] * 3
    assert [has_averages(Weights(path), model, path) for model in ("net.a", "net.b")] == [False, True]
