"""What a sink gets: each row once, also of epochs without a step, and media whose files are still there."""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headway.record.media.index import MediaItem
from headway.record.sinks import Csv, Sink, TensorBoard
from headway.record.sinks.__main__ import SinkSource
from headway.run import Run


@dataclass
class Takes(Sink):
    fails: bool = False
    thins: bool = False
    rows: list[Any] = field(default_factory=list)
    items: list[str] = field(default_factory=list)

    def open(self, run: Run) -> None:
        self.run = run

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows += [(row["epoch"], row["step"]) for row in rows]

    def write_media(self, items: Sequence[MediaItem]) -> None:
        for item in items:
            if self.thins and item.name == "c":  # the training process does so meanwhile
                item.path(self.run).unlink()
            if self.fails:
                raise OSError("no server")
            item.path(self.run).read_bytes()
            self.items.append(item.name)

    def close(self, status: str, exit_code: int) -> None: ...


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path, name="digits")


def append(file: Path, *rows: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def write(run: Run, *places: tuple[int, int]) -> None:
    facts = {"kind": "epoch", "time": 1.0, "stage": "fit", "metrics": {"score": 1.0}}
    append(run.metrics_file(0), *({**facts, "epoch": epoch, "step": step} for epoch, step in places))


def show(run: Run, *names: str) -> None:
    facts = {"kind": "text", "time": 1.0, "attempt": 1, "rank": 0, "step": 1, "stage": "fit", "epoch": 0}
    for name in names:
        file = run.media_dir / "rank-00000" / name / "step-000000000001-000.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("text")
        more = {"name": name, "number": 0, "file": f"rank-00000/{name}/{file.name}", "bytes": 4}
        append(run.media_index_file(0), facts | more)


def opened(run: Run, sink: Takes) -> tuple[Takes, SinkSource]:
    sink.open(run)
    return sink, SinkSource(run, sink)


def test_each_epoch_of_a_stage_without_steps_comes_once_also_after_a_restart(run: Run) -> None:
    write(run, (0, 0), (1, 0), (2, 0))
    sink, source = opened(run, Takes())
    assert source.feed() and sink.rows == [(0, 0), (1, 0), (2, 0)]
    write(run, (2, 0), (3, 0))  # a new attempt repeats an epoch
    sink, source = opened(run, Takes())
    assert source.feed() and sink.rows == [(3, 0)]
    assert not source.feed()


def test_rows_before_an_item_that_a_sink_fails_at_do_not_come_again(run: Run) -> None:
    write(run, (0, 1))
    show(run, "a")
    _, source = opened(run, Takes(fails=True))
    with pytest.raises(OSError, match="no server"):
        source.feed()
    sink, source = opened(run, Takes())
    source.feed()
    assert sink.rows == [] and sink.items == ["a"]


def test_a_file_that_goes_while_the_sink_reads_it_is_passed_over(run: Run) -> None:
    show(run, "a", "b", "c", "d")
    (run.media_dir / "rank-00000/b/step-000000000001-000.txt").unlink()
    sink, source = opened(run, Takes(thins=True))
    source.feed()
    assert sink.items == ["a", "d"]
    write(run, (0, 1))
    source.feed()
    assert sink.rows == [(0, 1)]


_CLOCK = itertools.count(1.5)


def log_point(step: int, *, rate: float = 64.0, **metrics: float) -> dict[str, Any]:
    facts = {"kind": "train", "time": next(_CLOCK), "stage": "fit", "epoch": 0, "seconds": {"data": 0.5}}
    return facts | {"step": step, "metrics": metrics, "samples_per_second": rate}


def csv_values(run: Run) -> list[tuple[int, str, float]]:
    with run.csv_file.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return [
        (int(line["step"]), line["name"], float(line["value"]))
        for line in lines
        if not line["name"].startswith("headway/")
    ]


def test_a_csv_file_has_all_log_points_of_a_step_and_of_a_restart_the_repeated_ones(run: Run) -> None:
    """A loop of one's own logs after its last step, which was a log point: the end of the epoch is another one."""
    sink = Csv()
    sink.open(run)
    again = {"rate": 0.0, "plan": 1.5}  # which is in each row, and no sample is trained since the one before
    points = [log_point(10, loss=0.5), log_point(20, loss=0.4, plan=1.5), log_point(20, fid=9.0, **again)]
    sink.write(points)
    sink.close("stopped", 75)
    first = (10, "loss", 0.5)
    plan = (20, "plan", 1.5)
    assert csv_values(run) == [first, (20, "loss", 0.4), plan, (20, "fid", 9.0), plan]
    sink = Csv()
    sink.open(run)
    sink.write([log_point(20, loss=0.3), log_point(20, fid=8.0, **again)])  # from the checkpoint of step 10
    sink.close("done", 0)
    assert csv_values(run) == [first, (20, "loss", 0.3), (20, "fid", 8.0), plan]
    sink = Csv()
    sink.open(run)
    sink.write([log_point(20, extra=1.0, rate=0.0), log_point(30, loss=0.2)])
    sink.close("done", 0)
    assert csv_values(run)[4:] == [(20, "extra", 1.0), (30, "loss", 0.2)]


def test_rows_that_are_sent_again_are_in_a_csv_file_once(run: Run) -> None:
    """The process was killed before it had noted the rows, once also within a row; or all rows are sent again."""
    start = {
        "kind": "validation",
        "time": 1.25,
        "stage": None,
        "epoch": 0,
        "step": 0,
        "metrics": {"val": 3.0},
    }
    rows = [
        start,
        log_point(10, loss=0.5),
        log_point(20, loss=0.4, norm=2.0),
        log_point(20, fid=9.0, rate=0.0),
    ]
    first = [(0, "val", 3.0), (10, "loss", 0.5), (20, "loss", 0.4)]
    middle, last = (20, "norm", 2.0), (20, "fid", 9.0)

    def send(rows: list[dict[str, Any]]) -> list[tuple[int, str, float]]:
        sink = Csv()
        sink.open(run)
        sink.write(rows)
        sink.close("done", 0)
        return csv_values(run)

    assert send(rows[:3]) == [*first, middle]
    lines = run.csv_file.read_text().splitlines(keepends=True)
    cut = next(at for at, line in enumerate(lines) if ",norm," in line)
    run.csv_file.write_text("".join(lines[:cut]) + lines[cut][:5])
    assert send(rows[2:]) == [*first, middle, last]
    assert send(rows) == [*first, middle, last]
    again = [log_point(20, loss=0.3), log_point(30, loss=0.2)]  # after a restart
    assert send([*rows, *again]) == [*first[:2], (20, "loss", 0.3), (30, "loss", 0.2)]
    assert send([*rows, *again]) == [*first[:2], (20, "loss", 0.3), (30, "loss", 0.2)]


def test_rows_are_on_the_disk_before_they_count_as_sent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[int]()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), fsync(fd)))
    sink = Csv()
    sink.open(run)
    for step in (10, 20, 10):
        sink.write([log_point(step, loss=0.5)])
        assert synced[-1] == run.csv_file.stat().st_size
    assert len(synced) == 4, "the file without the repeated lines, too"
    sink.close("done", 0)
    events = TensorBoard()
    events.open(run)
    for step in (10, 20):
        events.write([log_point(step, loss=0.5)])
        (file,) = run.tensorboard_dir.iterdir()
        assert file.read_bytes().count(b"loss") == step / 10
    events.close("done", 0)
