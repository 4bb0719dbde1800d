"""What a run writes and shows: metric rows of every rank, lines in files, a table on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
import warm
from torch import Tensor
from toys import Batches, Classify, make_pipe

import headway as hw
from headway.run import Run
from headway.testing import ranks
from headway.train.metrics.display import ProgressSnapshot, TableDisplay
from headway.train.metrics.timing import PhaseTimer

SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from toys import Batches, Classify, make_pipe
import headway.train.metrics.display as progress
progress.LINE_SECONDS = 0.0
class Shown(Classify):
    def pre_stage(self):
        self.add_column("train/accuracy")
pipe = make_pipe(Path({folder!r}))
pipe.register_dataset("train", Batches(20))
pipe.register_dataset("val", Batches(2))
pipe.append_stage(Shown(log_every=5), max_epochs=2)
pipe.run()
"""


def rows_of(run: Run, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics_file(rank).read_text().splitlines()]


class Slow(Classify):
    """Takes its time where the split should see it."""

    def step(self, batch: Any) -> Tensor:
        time.sleep(0.01)
        self.log("mine", float(hw.rank()), scope="rank")
        return super().step(batch)


class SlowBatches(Batches):
    pause_s = 0.02

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            time.sleep(self.pause_s)
            yield batch


@ranks(2)
def test_every_rank_writes_rows_and_the_root_the_metrics(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", SlowBatches(10, rank=hw.rank()))
    pipe.register_dataset("val", Batches(2, rank=hw.rank()))
    pipe.append_stage(Slow(log_every=5), max_epochs=2)
    run = pipe.run()
    rows = rows_of(run, hw.rank())
    train = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in train] == [5, 10, 15, 20]
    assert [row["epoch"] for row in train] == [0, 0, 1, 1]
    assert all(row["rank_metrics"] == {"train/mine": hw.rank()} for row in train)
    for row in train:
        assert row["seconds"]["data"] > 0.09
        assert row["seconds"]["compute"] > 0.045
        assert 0 < row["seconds"]["optimizer"] < row["seconds"]["data"]
        assert row["samples_per_second"] > 0
    if hw.rank() == 0:
        assert [row["metrics"]["train/loss"] for row in train] == [
            v for _, v in pipe.history.points("train/loss")
        ]
        epochs = [row for row in rows if row["kind"] == "epoch"]
        assert [row["metrics"]["val/loss"] for row in epochs] == pipe.history["val/loss"]
        assert [row["step"] for row in rows if row["kind"] == "validation"] == [10, 20]
    else:
        assert all(row["metrics"] == {} for row in rows)


@pytest.mark.usefixtures("alone")
def test_rows_tell_what_the_loaders_have_done(tmp_path: Path) -> None:
    samples = [sample for x, y in Batches(6) for sample in zip(x, y, strict=True)]
    pipe = make_pipe(tmp_path)
    pipe.register_dataset("train", hw.data.DataLoader(samples, batch_size=8, shuffle=True))
    pipe.register_dataset("val", Batches(1))  # a loader that does not count
    pipe.append_stage(Classify(log_every=2), max_epochs=1)
    rows = [row for row in rows_of(pipe.run(), 0) if row["kind"] == "train"]
    assert [row["data"]["train"]["batches"] for row in rows] == [row["step"] for row in rows]
    assert rows[-1]["data"]["train"]["samples"] == len(samples)
    assert all(set(row["data"]) == {"train"} and row["data"]["train"]["seconds/wait"] > 0 for row in rows)


@pytest.mark.usefixtures("alone")
def test_the_time_before_a_validation_is_not_the_validations(tmp_path: Path) -> None:
    pipe = make_pipe(tmp_path)
    slow = SlowBatches(4)
    slow.pause_s = 0.3
    pipe.register_dataset("train", slow)
    pipe.register_dataset("val", Batches(1))
    pipe.append_stage(Classify(), max_epochs=1)
    train, validation, epoch = rows_of(pipe.run(), 0)
    assert [row["kind"] for row in (train, validation, epoch)] == ["train", "validation", "epoch"]
    assert train["seconds"]["data"] > 1.1
    assert validation["seconds"]["data"] < 1.1
    assert validation["seconds"]["validation"] > 0


class OwnValidation(hw.Stage):
    """A loop of one's own, whose metrics are updated in the epoch on one rank, and after it on all."""

    def pre_stage(self) -> None:
        self.during, self.after = torchmetrics.SumMetric(), torchmetrics.SumMetric()
        self.add_metric("during", self.during)
        self.add_metric("val/after", self.after)
        self.add_column("val/after")

    def run_epoch(self) -> None:
        for _ in self.batches("train"):
            if hw.is_root():
                self.during.update(1)

    def post_epoch(self) -> None:
        assert self.history["during"][-1] == 3.0
        self.after.update(self.epoch)


def run_own_validation(folder: Path) -> None:
    pipe = make_pipe(folder)
    pipe.register_dataset("train", Batches(3))
    pipe.append_stage(OwnValidation(), max_epochs=3)
    pipe.run()
    assert pipe.history["during"] == [3.0, 3.0, 3.0]
    assert pipe.history["val/after"] == [epoch * hw.world_size() for epoch in (1.0, 2.0, 3.0)]


@ranks(2)
def test_metrics_that_are_updated_after_an_epoch_belong_to_it(tmp_path: Path) -> None:
    run_own_validation(tmp_path)


@pytest.mark.usefixtures("alone")
def test_the_line_of_an_epoch_has_what_was_logged_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_own_validation(tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ownvalidation: epoch")]
    assert [line.split(", ")[:3] for line in lines[-3:]] == [
        [f"ownvalidation: epoch {epoch}/3", f"step {3 * epoch}", f"val/after {epoch}"] for epoch in (1, 2, 3)
    ]


def test_in_a_file_there_are_plain_lines(tmp_path: Path) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    ended = warm.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "\r" not in ended.stderr
    assert "\x1b" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("shown: ")]
    assert len(lines) == 12  # log points at 5, 10, 15, 20, a validation and the end, per epoch
    number = r"[\d.e-]+"
    assert re.fullmatch(
        rf"shown: epoch 2/2, step 40, train/loss {number}, val/loss {number}, train/accuracy {number}, "
        r"samples/s [\d,]+, data wait \d+%, ETA 0:00:00",
        lines[-1],
    )
    assert "model net: 387 parameters, not wrapped" in ended.stdout
    assert "dataset train: 20 batches" in ended.stdout


def test_on_a_terminal_there_is_a_table(tmp_path: Path) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        os.execve(sys.executable, [sys.executable, "-c", script], environment)
    shown = b""
    while True:
        try:
            data = os.read(fd, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"epoch +step +train/loss +val/loss +train/accuracy +samples/s +data wait +ETA", text)
    assert re.search(r"2/2 +40 ", text)


def test_time_is_split_by_what_it_was_spent_on() -> None:
    began = time.perf_counter()
    split = PhaseTimer(torch.device("cpu"))
    split.mark("data")
    time.sleep(0.05)
    split.mark("compute")
    time.sleep(0.02)
    first = split.take()
    time.sleep(0.03)
    second = split.take()
    assert first["data"] >= 0.05
    assert first["compute"] >= 0.02
    assert sum(first.values()) + sum(second.values()) <= time.perf_counter() - began, "no time counts twice"
    assert second.keys() == {"compute"}
    assert second["compute"] >= 0.03


def test_the_live_table_fits_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ["train/loss", "val/loss", "val/accuracy"]
    snapshot = ProgressSnapshot(
        stage="classify", epoch=1, max_epochs=8, step=1234, values=dict.fromkeys(columns, 0.1234), columns=columns,
        samples_per_second=12345, data_wait=0.05, seconds_left=4000, checkpoint_age_s=13,
    )  # fmt: skip
    monkeypatch.setenv("COLUMNS", "80")
    display = TableDisplay()
    display.end_epoch(snapshot)
    display.close()
    _, heads, row, *_ = capsys.readouterr().err.splitlines()
    assert heads.split() == [
        "epoch",
        "step",
        "train/loss",
        "val/loss",
        "val/accuracy",
        "samples/s",
        "data",
        "wait",
        "ETA",
        "saved",
    ]
    assert row.split() == [
        "1/8",
        "1,234",
        "0.1234",
        "0.1234",
        "0.1234",
        "12,345",
        "5%",
        "1:06:40",
        "13s",
        "ago",
    ]
