"""A sink that is not headway's: it uses nothing but the interface, and a pipeline feeds it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from headway.run import find_latest

SINK = """
import json, os, sqlite3, sys
from collections.abc import Sequence
from dataclasses import dataclass
from headway.record.sinks import MetricRow, RunStatus, Sink
from headway.run import Run

@dataclass
class SqliteSink(Sink):
    file: str
    table: str = "rows"

    def open(self, run: Run) -> None:
        self.database = sqlite3.connect(self.file, isolation_level=None)
        self.database.execute(f"create table if not exists {self.table} (run, step, kind, metrics)")
        self.database.execute("create table if not exists ends (run, status, exit_code, pid, torch)")
        self.run = run.id

    def write(self, rows: Sequence[MetricRow]) -> None:
        values = [(self.run, row["step"], row["kind"], json.dumps(row.get("metrics"))) for row in rows]
        self.database.executemany(f"insert into {self.table} values (?, ?, ?, ?)", values)

    def close(self, status: RunStatus, exit_code: int) -> None:
        facts = (self.run, status, exit_code, os.getpid(), "torch" in sys.modules)
        self.database.execute("insert into ends values (?, ?, ?, ?, ?)", facts)
        self.database.close()
"""
TRAIN = """
import os, sys
import torch
import headway as hw

class Fit(hw.TrainValStage):
    def step(self, batch):
        if sys.argv[2:] == ["fail"] and batch[0] > 6:
            raise ValueError("a batch of the user's")
        return (self.models["net"](batch) - 1).square().mean()

def main():
    pipe = hw.Pipeline(name="own-sink")
    pipe.register_model("net", torch.nn.Linear(1, 1), parallel="none")
    pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=0.01))
    pipe.register_dataset("train", [torch.tensor([float(number)]) for number in range(8)])
    pipe.append_stage(Fit(log_every=1), max_epochs=1)
    pipe.add_sink(SqliteSink(sys.argv[1], table="points"))
    pipe.run()
    print("pid", os.getpid())

if __name__ == "__main__":
    main()
"""


def train(script: Path, database: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [sys.executable, str(script), str(database), *arguments],
        cwd=database.parent,
        capture_output=True,
        text=True,
    )


def write(directory: Path, sink: str) -> None:
    """A script with its sink in a module of its own, whose process does without torch."""
    (directory / "sqlite_sink.py").write_text(sink)
    (directory / "train.py").write_text("from sqlite_sink import SqliteSink\n" + TRAIN)


def ends(database: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute("select status, exit_code, torch, pid from ends").fetchall()


@pytest.mark.parametrize("where", ["a module", "the script"])
def test_a_users_sink_gets_every_row_and_the_end(where: str, tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"  # not the directory in which the run is started
    scripts.mkdir()
    if where == "a module":
        write(scripts, SINK)
    else:
        (scripts / "train.py").write_text(SINK + TRAIN)
    database = tmp_path / "metrics.db"
    done = train(scripts / "train.py", database)
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run, step, kind, metrics from points order by rowid").fetchall()
    run = find_latest(tmp_path / "runs")
    assert run is not None and {row[0] for row in rows} == {run.id}
    assert [row[1] for row in rows if row[2] == "train"] == list(range(1, 9))
    assert '"train/loss": ' in rows[0][3]
    ((status, code, torch, pid),) = ends(database)
    assert (status, code) == ("done", 0)
    assert torch == (where == "the script"), (
        "what needs torch is the user's script, and not the sink's process"
    )
    assert f"pid {pid}" not in done.stdout, "a sink runs in a process of its own"


def test_it_learns_that_the_run_failed(tmp_path: Path) -> None:
    write(tmp_path, SINK)
    done = train(tmp_path / "train.py", tmp_path / "metrics.db", "fail")
    assert done.returncode == 1
    assert ends(tmp_path / "metrics.db")[0][:2] == ("failed", 1)


@pytest.mark.parametrize("method", ["open", "write", "close"])
def test_a_sink_that_raises_does_not_touch_the_run(method: str, tmp_path: Path) -> None:
    broken = SINK.replace(
        f"def {method}(", f"def {method}(self, *arguments): raise OSError('gone')\n    def unused("
    )
    write(tmp_path, broken)
    done = train(tmp_path / "train.py", tmp_path / "metrics.db")
    assert done.returncode == 0, done.stderr
    assert "headway: SqliteSink failed: OSError: gone; all metrics are in the run directory" in done.stderr
    run = find_latest(tmp_path / "runs")
    assert run is not None and run.info()["attempts"][-1]["status"] == "done"
