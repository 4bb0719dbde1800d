"""examples/dino.py: multi-crop, masks, teacher and centers, on one rank and two, killed and resumed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch

import headway as hw
from headway.testing import ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "dino.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("dino_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dino_example"] = module
    spec.loader.exec_module(module)
    return module


def run(
    dino: Any, data: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int = -1
) -> tuple[dict[str, torch.Tensor], int]:
    """Returns the states of all models, and how many steps were taken."""
    words = ["--data", str(data), "--batch", "8", "--epochs", "2", "--tiny", "--save", "2 steps"]
    save = hw.Pipeline.enable_checkpointing
    with monkeypatch.context() as patch:  # what is saved must not depend on how busy the machine is
        patch.setattr(
            hw.Pipeline, "enable_checkpointing", lambda *given, **how: save(*given, **how, background=False)
        )
        pipe = dino.make_pipeline(dino.parse(words))
    step, taken = dino.Dino.step, list[int]()

    def stopping(stage: Any, batch: Any) -> torch.Tensor:
        if stage.steps_done == stop_at:
            raise KeyboardInterrupt
        taken.append(stage.steps_done)
        found: torch.Tensor = step(stage, batch)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(dino.Dino, "step", stopping)
        pipe.run()
    states = {
        f"{name}.{key}": value.clone()
        for name in ("student", "teacher", "loss")
        for key, value in pipe.registered_models[name].bare.state_dict().items()
    }
    return states, len(taken)


@pytest.mark.parametrize("size", [pytest.param(1, marks=ranks(1)), pytest.param(2, marks=ranks(2))])
def test_a_run_that_was_killed_ends_as_the_one_that_was_not(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    shards = tmp_path / "shards"
    if hw.rank() == 0:
        rng = np.random.default_rng(0)
        photos = [rng.integers(0, 256, (40, 48 + n, 3), dtype=np.uint8) for n in range(24)]
        samples = ({"__key__": f"{n}", "jpg": simplejpeg.encode_jpeg(each)} for n, each in enumerate(photos))
        hw.data.pack(samples, shards)
        for name in ("whole", "cut"):
            (tmp_path / name).mkdir()
    hw.barrier()
    dino = example()
    monkeypatch.chdir(tmp_path / "whole")
    whole, taken = run(dino, shards, monkeypatch)
    assert taken == 6 and hw.world_size() == size
    monkeypatch.chdir(tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        run(dino, shards, monkeypatch, stop_at=5)
    again, taken = run(dino, shards, monkeypatch)
    assert taken == 2, "it was saved after the fourth step"
    assert whole.keys() == again.keys()
    for name, value in whole.items():
        assert torch.equal(value, again[name]), name
    assert any(
        not torch.equal(whole[f"student.{key}"], whole[f"teacher.{key}"]) for key in ("token", "places")
    )
    assert whole["loss.centers"].abs().sum() > 0


@ranks(1)
def test_the_loss_is_that_of_the_papers_term_by_term() -> None:
    dino, out = example(), 5
    draw = torch.Generator().manual_seed(0)
    classes, patches = torch.randn(4 * 3, out, generator=draw), torch.randn(2 * 3, 4, out, generator=draw)
    seen, whole = torch.randn(2 * 3, out, generator=draw), torch.randn(2 * 3, 4, out, generator=draw)
    masks = torch.rand(6, 4, generator=draw) < 0.5
    masks[1] = False
    loss = dino.DinoLoss(out)
    loss.centers.copy_(torch.randn(2, out, generator=draw))
    centers = loss.centers.clone()
    found = loss((classes, patches), (seen, whole), masks, (2, 4))

    def entropy(target: torch.Tensor, center: torch.Tensor, view: torch.Tensor) -> float:
        wanted = ((target - center) / 0.04).softmax(-1)
        return -float((wanted * (view / 0.1).log_softmax(-1)).sum())

    pairs = [
        entropy(seen[3 * i + n], centers[0], classes[3 * j + n])
        for i in range(2)
        for j in range(4)
        for n in range(3)
        if i != j
    ]
    assert float(found[0]) == pytest.approx(np.mean(pairs), rel=1e-5)
    hidden = [
        np.mean([entropy(whole[n, at], centers[1], patches[n, at]) for at in range(4) if masks[n, at]])
        for n in range(6)
        if masks[n].any()
    ]
    assert float(found[1]) == pytest.approx(np.mean(hidden), rel=1e-5)
    expected = 0.9 * centers + 0.1 * torch.stack([seen.mean(0), whole.flatten(0, 1).mean(0)])
    torch.testing.assert_close(loss.centers, expected)
