"""A plan against its run: right numbers are confirmed, a lie is found once, and `plan check` says the same."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import headway as hw
from headway.cli import plan as cli
from headway.errors import UsageError
from headway.system import jsonlines
from headway.testing import ranks
from headway.train import Pipeline, TrainValStage

STEP_S = 0.02


class Steady(TrainValStage):
    """Every step takes as long as the plan says."""

    def step(self, batch: Any) -> torch.Tensor:
        time.sleep(STEP_S)
        return self.models["net"](batch[0]).square().mean()


def train(root: Path, plan: Path) -> Path:
    data = torch.utils.data.TensorDataset(torch.randn(96, 4))
    pipe = Pipeline(name="planned", root=root)
    pipe.register_model("net", torch.nn.Linear(4, 1))
    pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=0.1))
    pipe.register_dataset("train", hw.data.DataLoader(data, batch_size=4 // hw.world_size()))
    pipe.append_stage(Steady(log_every=2), max_epochs=1)
    pipe.enable_plan(plan)
    return pipe.run().path


def write_plan(file: Path, seconds: float) -> Path:
    step = {"value": seconds, "low": 0.5 * seconds, "high": 6 * seconds, "unit": "s"}
    file.write_text(json.dumps({"headway_plan": 1, "title": "steady", "answers": {"time.step": step}}))
    return file


@ranks(2)
@pytest.mark.parametrize("lie", [False, True])
def test_a_lie_is_found_and_the_truth_is_not(lie: bool, tmp_path: Path) -> None:
    plan = write_plan(tmp_path / f"plan-{hw.rank()}.json", STEP_S / 50 if lie else STEP_S)
    run = train(tmp_path / "runs", plan)
    hw.barrier()
    if not hw.is_root():
        return
    rows = [row for row in jsonlines.read(run / "metrics" / "rank-00000.jsonl") if row["kind"] == "train"]
    ratios = [row["metrics"]["plan/step"] for row in rows if "plan/step" in row["metrics"]]
    assert len(ratios) >= 5
    told = [row["text"] for row in jsonlines.read(run / "events.jsonl") if row["kind"] == "plan"]
    if lie:
        assert min(ratios) > 20 and len(told) == 1
        assert told[0].startswith("the run differs from its plan: step time: ") and "planned" in told[0]
    else:
        assert all(0.5 < ratio < 6 for ratio in ratios) and not told
    assert json.loads((run / "plan.json").read_text())["title"] == "steady"


def test_plan_check_reads_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path / "runs", write_plan(tmp_path / "plan.json", STEP_S / 50))
    assert cli.main(["check", str(run)]) == 1
    said = capsys.readouterr().out
    assert "step: " in said and "planned" in said and "differs" in said
    write_plan(run / "plan.json", STEP_S)
    assert cli.main(["check", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["differs"] is False
    (run / "plan.json").unlink()
    with pytest.raises(UsageError, match=r"has no plan.json; save one with"):
        cli.main(["check", str(run)])


def test_a_file_that_is_not_a_plan_is_refused_at_once(tmp_path: Path) -> None:
    pipe = Pipeline(name="planned", root=tmp_path)
    with pytest.raises(UsageError, match=r"cannot read .*nothing.json"):
        pipe.enable_plan(tmp_path / "nothing.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(UsageError, match=r"other.json is not a plan"):
        pipe.enable_plan(tmp_path / "other.json")
