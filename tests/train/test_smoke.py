"""Trying things out: `headway run --smoke`, data that costs nothing, and use in one process after another run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from toys import Batches, Classify, make_pipe

import headway as hw
from headway.train.batches import FirstBatch

SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import torch
from toys import Batches, Classify, Pipeline, make_net, sgd, warm_up

torch.set_num_threads(1)

class Memory:
    def state_dict(self):
        return {{"at": torch.tensor([pipe.steps_done])}}
    def load_state_dict(self, state):
        print("loaded", int(state["at"]))
        {load}

pipe = Pipeline(name="mine", root={root!r})
pipe.register_model("net", make_net(), ema=0.9)
pipe.register_optimizer("sgd", sgd, model="net", scheduler=warm_up)
pipe.register_dataset("train", Batches(30))
pipe.register_dataset("val", Batches(5))
pipe.register_state("memory", Memory())
pipe.append_stage(Classify(accumulate=2), max_epochs=5)
pipe.run()
print("steps", pipe.steps_done, "validations", len(pipe.history["val/loss"]))
"""


def smoke(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(text)
    command = [sys.executable, "-m", "headway", "run", "--smoke", str(script)]
    environ = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    return warm.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=110)


def script(tmp_path: Path, *, load: str = "pass") -> str:
    return SCRIPT.format(here=str(Path(__file__).parent), root=str(tmp_path / "runs"), load=load)


def test_a_smoke_run_goes_through_everything_and_leaves_nothing(tmp_path: Path) -> None:
    done = smoke(tmp_path, script(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "resuming smoke-" in done.stderr and "from step 2" in done.stderr
    assert "loaded 2" in done.stdout
    assert "steps 3 validations 2" in done.stdout
    assert "smoke run passed" in done.stderr
    assert not (tmp_path / "runs").exists() and not list(tmp_path.glob("headway-*"))


def test_a_smoke_run_finds_what_cannot_be_resumed(tmp_path: Path) -> None:
    done = smoke(tmp_path, script(tmp_path, load="raise ValueError('cannot remember')"))
    assert done.returncode == 2  # the run and the script do not fit
    assert "cannot remember" in done.stderr and "failed in the part 'save'; it is kept in" in done.stderr
    assert list(tmp_path.glob("headway-smoke-*/smoke-*/run.json"))


def test_a_script_without_a_pipeline_is_told_so(tmp_path: Path) -> None:
    done = smoke(tmp_path, "print('hello')")
    assert done.returncode == 2
    assert "the script ran no pipeline" in done.stderr


@pytest.mark.usefixtures("alone")
def test_a_smoke_run_validates_however_seldom_the_stage_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_SMOKE", "save")
    for number, (every, validations) in enumerate([("500 steps", 1), ("30min", 1), (0.5, 1), (None, 0)]):
        pipe = make_pipe(tmp_path / str(number))
        pipe.register_dataset("train", Batches(30))
        pipe.register_dataset("val", Batches(5))
        pipe.append_stage(Classify(val_every=every), max_epochs=5)
        with pytest.raises(hw.errors.Stopped):
            pipe.run()
        assert (pipe.steps_done, len(pipe.history["val/loss"])) == (2, validations), every


@pytest.mark.usefixtures("alone")
def test_fake_data_is_the_first_batch_over_and_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWAY_FAKE_DATA", "1")
    seen: list[float] = []

    class Watching(Classify):
        def train_step(self, batch: Any) -> Any:
            seen.append(batch[0].sum().item())
            return super().train_step(batch)

    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(7))
    pipe.register_dataset("val", Batches(1))
    pipe.append_stage(Watching(), max_epochs=2)
    pipe.run()
    assert len(seen) == 14 and len(set(seen)) == 1
    said = capsys.readouterr().out
    assert "dataset train: 7 batches, each the first one (HEADWAY_FAKE_DATA)\n" in said
    assert "dataset val: 1 batch, each" in said


@pytest.mark.usefixtures("alone")
def test_no_run_goes_on_with_one_of_fake_data_nor_the_other_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking(Classify):
        broken = True

        def train_step(self, batch: Any) -> Any:
            if self.broken and self.pipe.steps_done == 4:
                raise RuntimeError("enough")
            return super().train_step(batch)

    def fit() -> None:
        pipe = make_pipe(tmp_path)
        pipe.register_dataset("train", Batches(7))
        pipe.append_stage(Breaking(), max_epochs=1)
        pipe.enable_checkpointing(every=2)
        pipe.run()

    with pytest.raises(RuntimeError, match="enough"):
        fit()
    (real,) = tmp_path.iterdir()
    monkeypatch.setenv("HEADWAY_FAKE_DATA", "1")
    with pytest.raises(RuntimeError, match="enough"):
        fit()
    (fake,) = set(tmp_path.iterdir()) - {real}
    assert fake.name.startswith(f"{hw.Run.open(real).name}-fake-")
    monkeypatch.delenv("HEADWAY_FAKE_DATA")
    Breaking.broken = False
    fit()
    assert set(tmp_path.iterdir()) == {real, fake}
    assert [len(hw.Run.open(run).info()["attempts"]) for run in (real, fake)] == [2, 1]


def test_fake_data_of_unknown_length_has_no_end() -> None:
    endless = iter(FirstBatch(number for number in (4, 5)))
    assert [next(endless) for _ in range(5)] == [4] * 5
    assert list(FirstBatch([])) == []


@pytest.mark.usefixtures("alone")
def test_cells_of_a_notebook(tmp_path: Path) -> None:
    """One process, one cell after another: a run, a mistake, and a run with more epochs."""
    cells = [
        "pipe = make_pipe(folder); pipe.register_dataset('train', Batches(4))",
        "pipe.append_stage(Classify(), max_epochs=1); first = pipe.run()",
        "pipe = make_pipe(folder); pipe.append_stage(Classify(), max_epochs=1); pipe.run()",
        "pipe.register_dataset('train', Batches(4)); second = pipe.run()",
    ]
    space: dict[str, Any] = {
        "make_pipe": make_pipe,
        "Batches": Batches,
        "Classify": Classify,
        "folder": tmp_path,
    }
    failed = []
    for number, cell in enumerate(cells):
        try:
            exec(cell, space)
        except hw.errors.UsageError as error:
            failed.append((number, str(error)))
    assert [number for number, _ in failed] == [2] and "needs the dataset 'train'" in failed[0][1]
    assert space["first"].id != space["second"].id
    assert [run.info()["attempts"][-1]["status"] for run in (space["first"], space["second"])] == ["done"] * 2


@pytest.mark.usefixtures("alone")
def test_metrics_of_torchmetrics(tmp_path: Path) -> None:
    import torchmetrics

    metric = torchmetrics.classification.MulticlassAUROC(num_classes=3)
    every: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Scoring(Classify):
        def val_step(self, batch: Any) -> Any:
            x, y = batch
            scores = self.models["net"](x).softmax(1)
            metric.update(scores, y)
            every.append((scores, y))
            return super().val_step(batch)

    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", Batches(10))
    pipe.register_dataset("val", Batches(6))
    stage = Scoring()
    stage.add_metric("val/auroc", metric)
    pipe.append_stage(stage, max_epochs=2)
    pipe.run()
    expected = torchmetrics.functional.classification.multiclass_auroc
    whole = [
        expected(torch.cat([s for s, _ in part]), torch.cat([y for _, y in part]), num_classes=3).item()
        for part in (every[:6], every[6:])
    ]
    assert pipe.history["val/auroc"] == pytest.approx(whole)
