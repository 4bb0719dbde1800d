"""examples/imagenet: each option does what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import headway as hw
from headway.run import runs_under


def test_options(play: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """On made-up images. What needs a compiler or a server is not called, but would be, with these settings."""
    given: dict[str, Any] = {}
    register = hw.Pipeline.register_model

    def register_model(pipe: hw.Pipeline, name: str, model: nn.Module, **settings: Any) -> nn.Module:
        given["compile"] = settings.pop("compile")
        return register(pipe, name, model, **settings)

    monkeypatch.setattr(hw.Pipeline, "register_model", register_model)
    monkeypatch.setattr(hw.Pipeline, "enable_wandb", lambda _, **settings: given.update(settings))
    head = {"2.weight": torch.zeros(1000, 3), "2.bias": torch.zeros(1000)}
    save_file(head, "zeros.safetensors")
    play(
        "imagenet/train.py", "--model", "dummy", "--size", "8", "--batch", "2", "--epochs", "1", "--workers", "0",
        "--limit-train-samples", "5", "--limit-val-samples", "7", "--weights", "zeros.safetensors", "--profile", "1-2",
        "--compile", "default", "--wandb", "project", "--precision", "fp32", "--seed", "3",
    )  # fmt: skip
    assert given == {"compile": "default", "project": "project"}
    assert "model net: 2 of 2 tensors from" in capfd.readouterr().out
    (run,) = runs_under("runs")
    rows = [json.loads(row) for row in (run.path / "metrics" / "rank-00000.jsonl").read_text().splitlines()]
    (validated,) = [row["metrics"] for row in rows if row["kind"] == "validation"]
    assert validated["val/images"] == 6 and rows[-1]["step"] == 2, "three and two batches of two"
    assert {"val/top1", "val/top5"} <= validated.keys()
    assert list(Path(run.path, "traces").glob("*.json.gz"))
