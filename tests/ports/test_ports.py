"""Scripts that people bring along, ported: the same numbers as by hand, on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import port_causal_lm
import port_dino
import port_gan
import port_mnist
import pytest
import torch
from torch import nn

from headway.testing import ranks
from headway.train import Pipeline

on_one_and_two = pytest.mark.parametrize(
    "size", [pytest.param(1, marks=ranks(1)), pytest.param(2, marks=ranks(2))]
)


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), expected in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(mine, expected), name


def assert_all_is_saved(pipe: Pipeline) -> None:
    assert "training changes state" not in pipe.directory.log_file(0).read_text()


@on_one_and_two
def test_mnist(size: int, tmp_path: Path) -> None:
    net, losses, accuracies = port_mnist.by_hand()
    pipe = port_mnist.ported(tmp_path)
    assert_same(pipe.registered_models["net"].bare, net)
    assert pipe.world.world_size == size
    assert pipe.history["val/loss"] == pytest.approx(losses, rel=1e-6)
    assert pipe.history["val/accuracy"] == pytest.approx(accuracies)
    assert pipe.history["lr/adadelta"] == pytest.approx([1.0, 0.7])
    assert_all_is_saved(pipe)


@on_one_and_two
def test_gan(size: int, tmp_path: Path) -> None:
    models, losses = port_gan.by_hand()
    pipe = port_gan.ported(tmp_path)
    assert pipe.world.world_size == size
    for name, model in models.items():
        assert_same(pipe.registered_models[name].bare, model)
    assert [value for _, value in pipe.history.points("loss_d")] == pytest.approx(losses, rel=1e-6)
    assert_all_is_saved(pipe)


@on_one_and_two
def test_dino(size: int, tmp_path: Path) -> None:
    student, teacher, center = port_dino.by_hand()
    pipe = port_dino.ported(tmp_path / "whole")
    assert pipe.world.world_size == size
    assert_same(pipe.registered_models["student"].bare, student)
    assert_same(pipe.registered_models["teacher"].bare, teacher)
    assert torch.equal(pipe.registered_models["loss"].bare.center, center)
    with pytest.raises(KeyboardInterrupt):
        port_dino.ported(tmp_path / "cut", stop_at=7)
    again = port_dino.ported(tmp_path / "cut")
    assert_same(again.registered_models["teacher"].bare, teacher)
    assert torch.equal(again.registered_models["loss"].bare.center, center)
    assert_all_is_saved(again)


@on_one_and_two
def test_causal_language_model_of_hugging_face(size: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for accumulate in (1, 2):
        model, losses = port_causal_lm.by_hand(accumulate)
        pipe = port_causal_lm.ported(tmp_path / str(accumulate), accumulate)
        assert pipe.world.world_size == size
        assert [value for _, value in pipe.history.points("train/loss")] == pytest.approx(losses, rel=1e-4)
        for ours, expected in zip(pipe.models["llama"].parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)
