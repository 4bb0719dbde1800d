"""The profiler on real runs: the trace can be opened, has the steps that were asked for, and says what is missing."""

from __future__ import annotations

import gzip
import json
import logging
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from toys import FEATURES, Batches, Classify, make_pipe

import headway as hw
from headway.errors import UsageError
from headway.run import Run
from headway.system.log import logger
from headway.testing import ranks
from headway.train import Stage, TrainValStage
from headway.train.diagnose import window_trace
from headway.train.diagnose.trace_summary import covered, summarize

SLOW_SAMPLE, SLOW_S = 5 * 4, 0.03


class Slow(Dataset[Any]):
    """One sample of the fifth batch of four takes long."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == SLOW_SAMPLE:
            time.sleep(SLOW_S)
        return torch.full((FEATURES,), float(index)), index % 3


@pytest.fixture
def said() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    level, _ = logger.level, logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def run(folder: Path, stage: TrainValStage, *, loader: Any = None, epochs: int = 2, **saving: Any) -> Run:
    pipe = make_pipe(folder)
    pipe.register_dataset("train", loader or Batches(10))
    pipe.register_dataset("val", Batches(2))
    pipe.append_stage(stage, max_epochs=epochs, name="toy")
    if saving:
        pipe.enable_checkpointing(folder, **saving)
    return pipe.run()


def traces(run: Run) -> list[str]:
    return sorted(path.name for path in run.traces_dir.iterdir())


def read(run: Run) -> dict[str, Any]:
    (path,) = run.traces_dir.glob("*.json.gz")
    return dict(json.loads(gzip.decompress(path.read_bytes())))


def steps_in(document: dict[str, Any]) -> list[int]:
    """The steps that are marked, in the order of time."""
    marks = [each for each in document["traceEvents"] if each.get("name", "").startswith("headway/step ")]
    numbers = [int(each["name"].split()[1]) for each in sorted(marks, key=lambda each: each["ts"])]
    return sorted(set(numbers), key=numbers.index)


def check_schema(document: dict[str, Any]) -> None:
    """What the format of trace events demands, for each kind: duration, instant, flow, metadata, counter."""
    needed = {
        "X": {"name", "pid", "tid", "ts", "dur"},
        "M": {"name", "pid", "args"},
        "i": {"name", "ts", "pid"},
    }
    needed |= {kind: {"id", "ts", "pid", "tid"} for kind in "sft"} | {"C": {"name", "ts", "pid", "args"}}
    assert document["traceEvents"]
    for event in document["traceEvents"]:
        assert event["ph"] in needed and needed[event["ph"]] <= event.keys(), event
        assert isinstance(event.get("ts", 0.0), int | float) and event.get("dur", 0) >= 0, event


@pytest.mark.usefixtures("alone")
def test_a_trace_opens_has_its_steps_and_the_loader_on_the_same_time_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Classify()
    stage.enable_profiler(steps="5-7", memory=True)
    kept = run(tmp_path, stage, loader=hw.data.DataLoader(Slow(), batch_size=4))
    name = "step-000000000005-000000000007-rank-00000"
    assert traces(kept) == [f"{name}.json.gz", f"{name}.txt"]
    document = read(kept)
    check_schema(document)
    assert steps_in(document) == [5, 6, 7]
    names = {each.get("name") for each in document["traceEvents"]}
    assert {"aten::addmm", "[memory]", "Optimizer.step#SGD.step", "train/wait"} <= names
    facts = document["headway"]
    assert (facts["first_step"], facts["last_step"], facts["rank"], facts["run"]) == (5, 7, 0, kept.id)
    spans = [each for each in document["traceEvents"] if each.get("ph") == "X"]
    slow = max((each for each in spans if each["name"] == "train/wait"), key=lambda each: each["dur"])
    data = max((each for each in spans if each["name"] == "headway/data"), key=lambda each: each["dur"])
    assert slow["dur"] >= SLOW_S * 1e6
    assert data["ts"] - 5e3 <= slow["ts"] and slow["ts"] + slow["dur"] <= data["ts"] + data["dur"] + 5e3
    text = (kept.traces_dir / f"{name}.txt").read_text()
    assert capsys.readouterr().out.count("profile of steps 5 to 7 of stage 'toy', rank 0") == 1
    assert re.search(r"step +\d+\.\d\d ms \(median of 3", text) and "aten::addmm" in text
    share = re.search(r"data wait +([\d.]+)%", text)
    assert share and float(share[1]) > 0 and "device idle    not measured: cpu" in text


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("window", ["4-9", "5", "1-2", "10-10"])
def test_accumulation_validation_and_the_end_of_an_epoch_are_in_a_window_and_change_nothing(
    window: str, tmp_path: Path
) -> None:
    """Nine batches, two per step: the fifth step of an epoch has one."""
    plain = Classify(accumulate=2)
    run(tmp_path / "plain", plain, loader=Batches(9))
    stage = Classify(accumulate=2)
    stage.enable_profiler(steps=window)
    document = read(run(tmp_path / "traced", stage, loader=Batches(9)))
    first, _, last = window.partition("-")
    assert steps_in(document) == list(range(int(first), int(last or first) + 1))
    assert stage.losses == plain.losses
    updates = [each for each in document["traceEvents"] if each.get("name") == "Optimizer.step#SGD.step"]
    assert len(updates) == len(steps_in(document)), "each step of the window whole, and no other"


@pytest.mark.usefixtures("alone")
def test_a_resume_inside_or_after_the_window_and_a_window_out_of_reach_are_said(
    tmp_path: Path, said: list[str]
) -> None:
    class Fails(Classify):
        def step(self, batch: Any) -> Tensor:
            if self.training and self.steps_done == 13:
                raise ValueError("a bug")
            return super().step(batch)

    for window in ("15-16", "11-14", "2-3", "80-90"):
        said.clear()
        stage: TrainValStage = Fails()
        stage.enable_profiler(steps=window)
        with pytest.raises(ValueError, match="a bug"):
            run(tmp_path / window, stage, every="4 steps", background=False)
        stage = Classify()
        stage.enable_profiler(steps=window)
        kept = run(tmp_path / window, stage, every="4 steps", background=False)
        told = [message for message in said if "window" in message]
        match window:
            case "15-16":
                assert steps_in(read(kept)) == [15, 16] and told == []
            case "11-14":
                assert steps_in(read(kept)) == [13, 14]
                assert told == [
                    "the window 11-14 of stage 'toy' is traced from step 13 on: this attempt resumes there"
                ]
            case "2-3":
                assert steps_in(read(kept)) == [2, 3], "of the first attempt"
                assert told == [
                    "the window 2-3 of stage 'toy' is not traced: this attempt resumes from step 12"
                ]
            case "80-90":
                assert traces(kept) == []
                assert told == [
                    "the window 80-90 of stage 'toy' was not traced: the stage ended after 20 steps"
                ]


@pytest.mark.usefixtures("alone")
def test_the_variable_counts_the_steps_of_the_run_in_a_script_that_is_not_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    class Own(Stage):
        def run_epoch(self) -> None:
            for _ in self.batches("train"):
                torch.ones(3).sum()

    def two_stages(folder: str) -> Run:
        pipe = make_pipe(tmp_path / folder)
        pipe.register_dataset("train", Batches(10))
        first = Classify()
        if folder == "d":
            first.enable_profiler(steps="1-2")
        pipe.append_stage(first, max_epochs=1, name="first")
        pipe.append_stage(Own(), max_epochs=2, name="second")
        return pipe.run()

    monkeypatch.setenv("HEADWAY_PROFILE", "13-22")
    document = read(two_stages("a"))
    assert steps_in(document) == list(range(13, 23)) and document["headway"]["stage"] == "second"
    assert not [message for message in said if "window" in message]
    monkeypatch.setenv("HEADWAY_PROFILE", "9-12")
    assert [name for name in traces(two_stages("b")) if name.endswith("gz")] == [
        "step-000000000009-000000000010-rank-00000.json.gz",  # each is of one stage
        "step-000000000011-000000000012-rank-00000.json.gz",
    ]
    monkeypatch.setenv("HEADWAY_PROFILE", "5-6")
    assert steps_in(read(two_stages("d"))) == [5, 6], "not the window of the script"
    assert "HEADWAY_PROFILE=5-6 is traced instead of steps 1-2 of stage 'first'" in said
    assert not [message for message in said if "window" in message]
    monkeypatch.setenv("HEADWAY_PROFILE", "soon")
    with pytest.raises(
        UsageError, match="HEADWAY_PROFILE: 'soon' is not a window of steps: give the first and"
    ):
        two_stages("c")
    assert not list(tmp_path.glob("c/**/run.json")), "nothing is created"


@pytest.mark.parametrize("steps", ["", "5-3", "0-3", "a-b", -1, True, None, "1-5000", "3-"])
def test_what_is_not_a_window_is_one_sentence(steps: Any) -> None:
    with pytest.raises(UsageError, match="window of"):
        Classify().enable_profiler(steps=steps)
    with pytest.raises(UsageError, match="give the numbers of ranks"):
        Classify().enable_profiler(steps=3, ranks=(-1,))
    with pytest.raises(UsageError, match="ranks=0: give the numbers of ranks"):
        Classify().enable_profiler(steps=3, ranks=0)


@ranks(2)
def test_the_ranks_that_are_asked_for_write_a_trace_each(tmp_path: Path) -> None:
    for asked in ((0, 1), (1,)):
        stage = Classify()
        stage.enable_profiler(steps="3-4", ranks=asked)
        kept = run(tmp_path / str(len(asked)), stage, epochs=1)
        torch.distributed.barrier()
        names = [f"step-000000000003-000000000004-rank-{rank:05d}.json.gz" for rank in asked]
        assert sorted(path.name for path in kept.traces_dir.glob("*.gz")) == names


@pytest.mark.usefixtures("alone")
def test_a_trace_is_bounded_and_one_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(window_trace, "_MAX_EVENTS", 100)
    stage = Classify()
    stage.enable_profiler(steps="3-6")
    kept = run(tmp_path, stage, epochs=1)
    events = read(kept)["traceEvents"]
    assert len([each for each in events if each["ph"] == "X"]) <= 100 < read(kept)["headway"]["events"]
    assert steps_in(read(kept)) == [3, 4, 5, 6]

    class Full(Classify):
        def pre_stage(self) -> None:
            self.pipe.directory.traces_dir.rmdir()

    stage = Full()
    stage.enable_profiler(steps="3-6")
    run(tmp_path / "full", stage, epochs=1)
    assert any(re.match("the trace of steps 3 to 6 is lost: could not write", message) for message in said)

    def gone(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    said.clear()
    monkeypatch.setattr(tempfile, "mkdtemp", gone)  # which is what a full TMPDIR does
    stage = Classify()
    stage.enable_profiler(steps="3-6")
    kept = run(tmp_path / "no-space", stage, epochs=1)
    assert kept.info()["attempts"][-1]["status"] == "done" and not traces(kept)
    assert any(re.match("the trace of steps 3 to 6 is lost: could not export", message) for message in said)


@pytest.mark.usefixtures("alone")
def test_a_failure_within_the_window_is_the_failure(tmp_path: Path) -> None:
    class Fails(Classify):
        def step(self, batch: Any) -> Tensor:
            if self.steps_done == 3:
                raise ValueError("a bug")
            return super().step(batch)

    stage = Fails()
    stage.enable_profiler(steps="3-6")
    with pytest.raises(ValueError, match="a bug"):
        run(tmp_path, stage)
    assert not torch.autograd.profiler._is_profiler_enabled


def test_idle_time_and_shares_are_those_of_the_intervals() -> None:
    def span(name: str, begin: float, end: float, cat: str = "user_annotation") -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin}

    events = [
        span("headway/data", 0, 20),
        span("headway/step 1", 20, 100),
        span("headway/data", 100, 120),
        span("headway/step 2", 120, 200),
        span("gemm", 30, 60, "kernel"),
        span("copy", 50, 70, "gpu_memcpy"),  # beside it
        span("gemm", 150, 300, "kernel"),  # beyond the end
    ]
    text = summarize(events, [], title="t", device="cuda:0")
    assert "data wait      20.0%" in text and "device idle    55.0%" in text
    assert "0.10 ms (median of 2; 0.10 to 0.10 ms)" in text
    intervals = [(3, 9), (1, 4), (20, 21), (8, 8), (5, 6)]
    assert covered(intervals) == len({place for a, b in intervals for place in range(a, b)})
