"""The history of a run, asked as people ask a mapping, also after resumes, in forks, and where its rows are gone."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from test_resume import Cut, Traced, assert_same, make, seeded, weights
from toys import Batches, Classify, make_pipe

import headway as hw
from headway.system import jsonlines
from headway.testing import ranks
from headway.train import Pipeline
from headway.train.metrics import history as bounds
from headway.train.metrics.history import History, HistoryRow

alone = pytest.mark.usefixtures("alone")


def row(step: int, *, epoch: int = 0, **values: Any) -> HistoryRow:
    return HistoryRow(stage="fit", epoch=epoch, step=step, values=values)


def test_membership_and_iteration_end() -> None:
    history = History()
    assert "val/loss" not in history and list(history) == []
    history.add_epoch(row(2, **{"val/loss": 0.5, "train/loss": 0.7}))
    assert "val/loss" in history and "val/accuracy" not in history
    assert list(history) == ["train/loss", "val/loss"]


def test_a_metric_of_log_points_alone_has_its_last_value_of_each_epoch() -> None:
    """What is measured against a plan is never reduced over an epoch."""
    history = History()
    for epoch, values in enumerate(([1.5, 1.2], [1.1, 0.9])):
        for step, value in enumerate(values):
            history.add_log_point(row(2 * epoch + step, epoch=epoch, **{"plan/step": value}))
        if epoch == 0:
            history.add_epoch(row(2, **{"train/loss": 0.5}))
    assert history["plan/step"] == [1.2], "the second epoch has not ended"
    assert history["train/loss"] == [0.5] and history["val/loss"] == []


def test_its_memory_is_bounded_by_values_and_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_VALUES", 3000)
    monkeypatch.setattr(bounds, "MAX_ROWS", 50)
    history = History()
    for step in range(200):
        wide = {f"m{number}": step + number / 300 for number in range(300)}
        history.add_log_point(row(step, **wide))
        history.add_epoch(row(step, epoch=step, **wide))
    assert [step for step, _ in history.points("m7")] == list(range(190, 200))
    assert [each.step for each in history.epochs] == list(range(190, 200))
    for step in range(200):
        history.add_log_point(row(step, m=0.5))
    assert len(history.log_points) == 50
    for step in range(3000):  # and other names each time
        history.add_log_point(row(step, **{f"at {step}": 0.5}))
    assert len(history._points._names) <= 1000
    assert sum(map(sys.getsizeof, history._points.rows[0])) < 400


def test_values_of_every_shape_come_back_from_the_rows(tmp_path: Path) -> None:
    odd = {"nan": math.nan, "inf": -math.inf, "table": [[1.0, math.nan], [2.0, 3.0]], "loss": 0.1 + 0.2}
    whole, file = History(), tmp_path / "rows.jsonl"
    with jsonlines.JsonLinesWriter(file) as rows:
        whole.write_to(rows)
        whole.add_log_point(row(1, **odd))
        place = {"stage": "fit", "epoch": 0, "step": 1}
        rows.write({"kind": "train", **place, "metrics": odd})
        again = History()
        again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    again.read_from(file)
    assert repr(again.log_points) == repr(whole.log_points)


# --- of a run


def entries(pipe: Pipeline) -> list[HistoryRow]:
    return [*pipe.history.epochs, *pipe.history.log_points]


def cut_twice(folder: Path) -> Pipeline:
    """Killed after step 14 with a checkpoint of step 12, and after step 25 with one of 24; then resumed."""
    for cut in (14, 25):
        with pytest.raises(Cut):
            seeded(make(folder, Traced(cut=cut, log_every=1), every=6)).run()
    pipe = make(folder, Traced(log_every=1), every=6)
    pipe.run()
    return pipe


@alone
def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    whole = seeded(make(tmp_path / "whole", Traced(log_every=1), every=6))
    whole.run()
    resumed = cut_twice(tmp_path / "cut")
    rows = jsonlines.read(resumed.directory.metrics_file(0))
    lost = [each["step"] for each in rows if each["kind"] == "train"]
    assert len(lost) > len(set(lost)), "the rows of the lost steps are in the file"
    assert entries(resumed) == entries(whole)
    assert resumed.history["val/loss"] == whole.history["val/loss"] != []
    # a finished run, too
    again = make(tmp_path / "cut", Traced(log_every=1), every=6, resume=str(resumed.directory.path))
    again.run()
    assert entries(again) == entries(whole)


@ranks(2)
def test_every_rank_has_the_same_history_after_a_resume(tmp_path: Path) -> None:
    resumed = cut_twice(tmp_path)
    steps = [each.step for each in entries(resumed)]
    assert hw.all_gather_object(steps) == [steps, steps] and len(steps) > 30
    assert len(set(hw.all_gather_object(tuple(resumed.history["train/loss"])))) == 1


@alone
@pytest.mark.parametrize("damage", ["removed", "cut off", "changed"])
def test_a_run_whose_rows_are_gone_resumes_exactly_and_says_so_once(
    damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = seeded(make(tmp_path / "whole", Traced(log_every=1), every=6, keep_best="val/loss"))
    whole.run()
    with pytest.raises(Cut):
        seeded(make(tmp_path / "cut", Traced(cut=14, log_every=1), every=6, keep_best="val/loss")).run()
    resumed = make(tmp_path / "cut", Traced(log_every=1), every=6, keep_best="val/loss")
    (run,) = hw.run.runs_under(tmp_path / "cut")
    file = run.metrics_file(0)
    data = file.read_bytes()
    file.unlink()
    if damage != "removed":
        file.write_bytes(data[:700] if damage == "cut off" else data[:700] + b"7" + data[701:])
    resumed.run()
    assert_same(weights(resumed), weights(whole))
    assert "metric history" not in capfd.readouterr().err, "nobody has asked for it"
    steps = [step for step, _ in resumed.history.points("train/loss")]
    assert steps == list(range(13, 34)) and resumed.history["train/loss"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("headway: the metric history of earlier attempts is incomplete: ")
    assert line.endswith(f"{file.name} was changed or removed; training does not need it")


def test_a_fork_has_the_history_of_its_parent_which_is_gone(tmp_path: Path) -> None:
    def train(ends_before: int | None = None, **settings: Any) -> tuple[Pipeline, hw.Run]:
        class Ends(Classify):
            def train_step(self, batch: Any) -> Any:
                if self.pipe.steps_done == ends_before:
                    raise KeyboardInterrupt
                return super().train_step(batch)

        pipe = make_pipe(tmp_path)
        pipe.register_dataset("train", Batches(5))
        pipe.append_stage(Ends(log_every=1), max_epochs=2)
        pipe.enable_checkpointing(every=2, keep_last=10, background=False, **settings)
        return pipe, pipe.run()

    first, parent = train()
    chosen = parent.checkpoint_dir(6)
    with pytest.raises(KeyboardInterrupt):
        train(9, resume=chosen)
    shutil.rmtree(parent.path)
    second, child = train(resume=chosen)
    assert child.id != parent.id
    assert entries(second) == entries(first)
    rows = list(jsonlines.read(child.metrics_file(0)))
    assert min(each["step"] for each in rows if "step" in each) > 6, (
        "trackers get the steps of this run alone"
    )


def test_what_a_script_loaded_is_there_after_a_resume(tmp_path: Path) -> None:
    def make_one(name: str, epochs: int, *, ends_in: int | None = None) -> Pipeline:
        class Ends(Classify):
            def pre_epoch(self) -> None:
                if self.epoch == ends_in:
                    raise KeyboardInterrupt

        pipe = make_pipe(tmp_path / name)
        pipe.register_dataset("train", Batches(5))
        pipe.append_stage(Ends(log_every=1), max_epochs=epochs)
        pipe.enable_checkpointing(every=2, background=False)
        return pipe

    first = make_one("first", 1)
    first.run()
    second = make_one("second", 3, ends_in=2)
    second.load_state_dict(first.state_dict())
    with pytest.raises(KeyboardInterrupt):
        second.run()
    again = make_one("second", 3)
    again.run()
    assert [each.step for each in again.history.epochs] == [5, 10, 15]
    assert [step for step, _ in again.history.points("train/loss")] == list(range(1, 16))
    assert entries(again)[0] == entries(first)[0]
