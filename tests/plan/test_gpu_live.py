"""On a GPU: a run meets the plan that was traced at its start, and a lie about it is found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo

import headway as hw
from headway import dist
from headway.system import jsonlines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # no calibration: the constants of the catalog
    yield
    dist.leave()


class UntilCompared(hw.TrainValStage):
    """GPT-2 124M with a batch of 8, until it was compared with its plan."""

    def step(self, batch: Any) -> torch.Tensor:
        points = self.pipe.history.log_points
        if points and "plan/step" in points[-1].values:
            self.stop_stage()
        loss: torch.Tensor = self.models["gpt"](*batch)
        return loss


def train(root: Path, plan: Path | None) -> Path:
    pipe = hw.Pipeline(name="planned", root=root)
    pipe.register_model("gpt", zoo.make(0))
    pipe.register_optimizer("adamw", lambda params: torch.optim.AdamW(params, lr=1e-4))
    pipe.register_dataset("train", [zoo.language_batch(8)] * 20)
    pipe.append_stage(UntilCompared(log_every=5, precision="bf16"), max_epochs=200)
    pipe.enable_plan(plan)
    return pipe.run().path


def test_the_plan_of_the_registered_model_is_right_and_a_lie_is_found(tmp_path: Path) -> None:
    run = train(tmp_path / "runs", None)
    plan = json.loads((run / "plan.json").read_text())
    rows = [row["metrics"] for row in jsonlines.read(run / "metrics" / "rank-00000.jsonl")]
    memory = [row["plan/memory"] for row in rows if "plan/memory" in row]
    step = [row["plan/step"] for row in rows if "plan/step" in row]
    print(f"memory {memory[-1] - 1:+.2%}, step {step[-1] - 1:+.1%} of", plan["answers"]["time.step"])
    assert abs(memory[-1] - 1) < 0.02
    texts = [row["text"] for row in jsonlines.read(run / "events.jsonl") if row["kind"] == "plan"]
    assert not [text for text in texts if "memory" in text]

    for bound in ("value", "low", "high"):
        plan["answers"]["memory.allocated"][bound] /= 2
    lie = tmp_path / "lie.json"
    lie.write_text(json.dumps(plan))
    dist.leave()
    other = train(tmp_path / "others", lie)
    texts = [row["text"] for row in jsonlines.read(other / "events.jsonl") if row["kind"] == "plan"]
    assert len([text for text in texts if "memory of rank 0: " in text]) == 1
