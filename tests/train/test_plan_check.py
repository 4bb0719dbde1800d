"""A plan against its run: right numbers are confirmed, a lie is found once, and `plan check` says the same."""

from __future__ import annotations

import json
import multiprocessing.context
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import headway as hw
from headway.cli import plan as cli
from headway.errors import HeadwayError, UsageError
from headway.plan.tracer.measurement import machine_here
from headway.system import jsonlines
from headway.testing import ranks
from headway.train import Pipeline, TrainValStage
from headway.watch.planned import compare_with_plan

STEP_S = 0.1  # a busy machine adds some hundredths, and the plan allows six times as much


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


@pytest.mark.usefixtures("alone")
def test_plan_check_reads_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path / "runs", write_plan(tmp_path / "plan.json", STEP_S / 50))
    assert cli.main(["check", str(run)]) == 1
    said = capsys.readouterr().out
    assert "step: " in said and "planned" in said and "differs" in said
    write_plan(run / "plan.json", STEP_S)
    assert cli.main(["check", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["differs"] is False
    for wrong in (-1.0, float("nan"), "soon", None):
        broken = {"answers": {"time.step": {"value": wrong}}}
        (run / "plan.json").write_text(json.dumps(broken))
        with pytest.raises(
            UsageError, match=r"plan.json: time.step is .*expected a value, low and high above 0"
        ):
            cli.main(["check", str(run)])
    (run / "plan.json").write_text('{"answers": {}}')
    with pytest.raises(
        UsageError, match=r"cannot be compared with its plan, which has neither step time nor memory"
    ):
        cli.main(["check", str(run)])
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


def calibrate(home: Path, *, kernel_s: float, memory_GB: float) -> dict[str, str]:
    """Writes what `headway plan calibrate` would, and returns the environment in which it is found."""
    device = {"name": "cpu", "memory_GB": memory_GB, "hbm_GBps": 10, "bf16": 0.1, "achievable": 1.0}
    constants = {"kernel_s": kernel_s, "device": "cpu", "measured": ["kernel_s"], "source": "measured on cpu"}
    file = home / ".headway" / "machine.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    node = {"name": "this", "device": device, "gpus": 1}
    file.write_text(yaml.safe_dump({"node": node, "calibration": constants}))
    return {"HOME": str(home)}


class Blocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class UntilCompared(TrainValStage):
    """Trains until the plan was traced and steps were compared with it."""

    def step(self, batch: Any) -> torch.Tensor:
        time.sleep(STEP_S)
        points = self.pipe.history.log_points
        if self.pipe.world.is_root and points and "plan/step" in points[-1].values:
            self.stop_stage()
        return self.models["net"](batch[0]).square().mean()


class Greedy(TrainValStage):
    """Needs more than the device has, unless it computes without data."""

    def step(self, batch: Any) -> torch.Tensor:
        if not isinstance(batch[0], FakeTensor):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.models["net"](batch[0]).square().mean()


def traced_pipe(root: Path, width: int, rows: int, collate_fn: Any = None) -> Pipeline:
    data = torch.utils.data.TensorDataset(torch.randn(8 * rows, width))
    pipe = Pipeline(name="traced", root=root)
    pipe.register_model("net", Blocks(width), ema=0.9)
    pipe.register_optimizer("adamw", lambda params: torch.optim.AdamW(params))
    pipe.register_dataset("train", hw.data.DataLoader(data, batch_size=rows, collate_fn=collate_fn))
    pipe.enable_plan()
    return pipe


@ranks(2)
def test_a_plan_is_traced_from_the_registered_model(tmp_path: Path) -> None:
    home = calibrate(tmp_path / f"home-{hw.rank()}", kernel_s=1e-3, memory_GB=20)
    pipe = traced_pipe(tmp_path / "runs", 32, 4)
    # a log point before the first batch of training
    pipe.register_dataset(
        "val", hw.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(2, 32)), batch_size=1)
    )
    pipe.append_stage(
        UntilCompared(log_every=1, val_at_start=True, val_every="1000 epochs"), max_epochs=10_000
    )
    with mock.patch.dict(os.environ, home):
        found = pipe.run()
    if not hw.is_root():
        assert not any("plan/step" in row.values for row in pipe.history.log_points)
        return
    plan = json.loads((found.path / "plan.json").read_text())
    weights = [weight.numel() * 4 for weight in pipe.registered_models["net"].bare.parameters()]
    size = sum(-(-each // 512) * 512 for each in weights)  # as CUDA's allocator rounds
    parts = {key: plan["answers"][f"memory.part.{key}"]["value"] for key in ("parameters", "averages")}
    assert parts == {"parameters": size, "averages": size}
    assert plan["answers"]["memory.part.gradients"]["value"] >= size  # DDP's buckets stay
    assert plan["answers"]["memory.part.optimizer"]["value"] >= 2 * size
    step = plan["answers"]["time.step"]
    launches = plan["answers"]["time.launches"]["value"] / 1e-3
    assert step["value"] == pytest.approx(1e-3 * launches, rel=0.1) and launches > 40
    ratio = next(row.values["plan/step"] for row in pipe.history.log_points if "plan/step" in row.values)
    told = [row["text"] for row in jsonlines.read(found.path / "events.jsonl") if row["kind"] == "plan"]
    assert len(told) == (not step["low"] <= ratio * step["value"] <= step["high"])
    compared = compare_with_plan(found)
    assert compared[0].what == "step" and compared[0].measured is not None


@pytest.mark.usefixtures("alone")
def test_what_would_have_fitted_is_said_when_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """302 MiB reserved: for cuBLAS 64, for states 33, and for activations."""
    monkeypatch.setenv("HOME", calibrate(tmp_path, kernel_s=1e-5, memory_GB=0.19)["HOME"])
    pipe = traced_pipe(tmp_path / "runs", 256, 4096)
    pipe.append_stage(Greedy(), max_epochs=1)
    with pytest.raises(HeadwayError) as caught:
        pipe.run()
    said = str(caught.value)
    assert (
        "the plan predicted 0.3 of 0.2 GiB, and that this would fit: batches of 1024 with accumulate=4"
        in said
    )
    assert "batches of 2048" not in said  # 0.96 GiB


def with_lock(samples: list[Any]) -> list[Any]:
    return [torch.stack([sample[0] for sample in samples]), threading.Lock()]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("why", ["a batch cannot be sent", "the tracing process ended"])
def test_a_step_that_cannot_be_traced_is_trained(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked for the plan alone: what another process cannot get, or its end, costs the plan."""
    pipe = traced_pipe(tmp_path / "runs", 8, 4, with_lock if why.startswith("a batch") else None)
    if why.startswith("the tracing"):
        monkeypatch.setattr("headway.train.diagnose.traced_plan.ForkedTrace._serve", lambda *_: os._exit(7))
        wait = multiprocessing.context.ForkProcess.start
        monkeypatch.setattr(
            "multiprocessing.context.ForkProcess.start", lambda self: (wait(self), self.join())[0]
        )
    pipe.append_stage(Steady(log_every=2), max_epochs=1)
    run = pipe.run()
    assert pipe.steps_done == 8
    (said,) = [row["text"] for row in jsonlines.read(run.path / "events.jsonl") if row["kind"] == "plan"]
    assert said.startswith(f"the run has no plan: {why}")


def test_a_device_that_nobody_knows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"'abacus' is not in the catalog; .* headway plan calibrate"):
        machine_here("abacus")
    assert machine_here("NVIDIA H200")[0].device.name == "h200-sxm-141"
    calibrate(tmp_path, kernel_s=7e-6, memory_GB=1.0)
    assert machine_here("cpu")[1].kernel_s == 7e-6
