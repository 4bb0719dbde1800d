"""Sinks, with the real packages: what they were given is read back with those packages."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from headway.errors import MissingExtra, Stopped, UsageError
from headway.record.sinks import Csv, Mlflow, Sink, TensorBoard, Wandb, check_sink, feeding, scalars
from headway.record.sinks.replayer import replay
from headway.run import Run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.create(
        tmp_path / "runs", name="digits", config={"lr": 0.1, "model": {"depth": 2}, "api_key": "hush"}
    )
    made.begin_attempt(world={})
    return made


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of MLflow's without runs: it takes seconds to make one."""
    from mlflow import MlflowClient

    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def store(tmp_path: Path, empty_store: Path) -> str:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def write(run: Run, *steps: int, **more: Any) -> None:
    """Rows as training writes them; the loss of a step is one over it."""
    with run.metrics_file(0).open("a") as file:
        for step in steps:
            row = {"kind": "train", "time": 1e9 + step, "stage": "fit", "epoch": 0, "step": step}
            row |= {"metrics": {"train/loss": 1 / step, "hits": [1, step]}, "seconds": {"data": 0.5}, **more}
            file.write(json.dumps(row) + "\n")


def wandb_records(run: Run) -> list[Any]:
    """What `wandb sync` would send: messages in the form of a LevelDB log, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(run.path.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, piece = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:  # no header fits into the rest of a block
                at += 32768 - at % 32768
                continue
            size, kind = struct.unpack_from("<HB", data, at + 4)
            piece += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # a whole message, or the last part of one
                found.append(wandb_internal_pb2.Record.FromString(piece))
                piece = b""
    return found


def wandb_history(run: Run) -> list[dict[str, Any]]:
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(run)
        if record.WhichOneof("record_type") == "history"
    ]


def wandb_exit(run: Run) -> int:
    *_, last = (r.exit.exit_code for r in wandb_records(run) if r.WhichOneof("record_type") == "exit")
    return int(last)


def mlflow_run(store: str, run: Run) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name(run.name)
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    assert len(found) == 1
    return client, found[0]


def events(run: Run, name: str = "train/loss") -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.path / "tensorboard"), purge_orphaned_data=True)
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


@pytest.mark.filterwarnings("ignore")  # of the packages' own
def test_every_sink_gets_every_row_and_the_settings(run: Run, store: str) -> None:
    """A restart in the middle, whose rows come by `headway runs sync`: one run, and each step once."""
    write(run, 1, 2)
    sinks = [Wandb(project="p", mode="offline"), TensorBoard(), Mlflow(tracking_uri=store), Csv()]
    with pytest.raises(ValueError), feeding(run, sinks, finish_s=120):
        write(run, 3)
        raise ValueError
    assert wandb_exit(run) == 1 and mlflow_run(store, run)[1].info.status == "FAILED"
    run.begin_attempt(world={})
    write(run, 2, 3, 4)  # from the checkpoint of step 1
    write(run, 4, kind="epoch")
    run.end_attempt(2, status="done", exit_code=0)
    assert replay(run) == {"csv": True, "mlflow": True, "tensorboard": True, "wandb": True}
    assert events(run) == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25)]
    assert events(run, "epoch/hits/1") == [(4, 4.0)]
    assert events(run, "headway/seconds/data")[0] == (1, 0.5)
    rows = wandb_history(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 4]
    assert [row.get("train/loss") for row in rows] == [1.0, 0.5, 1 / 3, 0.25, None]
    assert {r.run.run_id for r in wandb_records(run) if r.WhichOneof("record_type") == "run"} == {run.id}
    assert wandb_exit(run) == 0
    client, found = mlflow_run(store, run)
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert found.info.status == "FINISHED"
    assert found.data.params == {"lr": "0.1", "model.depth": "2", "api_key": "[redacted]"}
    with run.csv_file.open(newline="") as file:
        values = [
            (int(r["step"]), float(r["value"])) for r in csv.DictReader(file) if r["name"] == "train/loss"
        ]
    assert values == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    config = next(r.run.config for r in wandb_records(run) if r.WhichOneof("record_type") == "run")
    assert "hush" not in str(config) and "depth" in str(config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ValueError("no"), "FAILED", 1),
        (KeyboardInterrupt(), "KILLED", 130),
        (Stopped("by SIGUSR1"), "KILLED", 75),
    ],
    ids=["failure", "Ctrl-C", "stopped"],
)
def test_how_a_run_ended(error: BaseException, status: str, code: int, run: Run, store: str) -> None:
    sinks = [Wandb(mode="offline"), Mlflow(tracking_uri=store)]
    with pytest.raises(type(error)), feeding(run, sinks, finish_s=120):
        write(run, 1)
        raise error
    assert wandb_exit(run) == code
    assert mlflow_run(store, run)[1].info.status == status
    kinds = [record.WhichOneof("record_type") for record in wandb_records(run)]
    assert ("preempting" in kinds) == isinstance(error, Stopped)


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_is_killed_has_failed_and_loses_no_row(run: Run, store: str) -> None:
    script = f"""
import os, signal
from headway.record.sinks import Mlflow, feeding
from headway.run import Run
run = Run.open({str(run.path)!r})
with feeding(run, [Mlflow(tracking_uri={store!r})]):
    with run.metrics_file(0).open("a") as file:
        file.write('{{"kind": "train", "time": 1.0, "step": 1, "metrics": {{"loss": 0.5}}}}\\n')
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    place = run.sink_offset_file("mlflow")
    wait_until(
        lambda: place.exists() and mlflow_run(store, run)[1].info.status != "RUNNING",
        "the tracker knows that the run has ended",
        timeout_s=100,
        interval_s=0.5,
    )
    found = mlflow_run(store, run)[1]
    assert found.info.status == "FAILED"
    assert found.data.metrics == {"loss": 0.5}


@pytest.mark.usefixtures("no_leaks")
def test_a_sink_that_cannot_be_reached_holds_nothing_up(
    run: Run, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody answers there
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with feeding(run, [Wandb(project="p", mode="online")], finish_s=3):
        began = time.monotonic()
        write(run, *range(1, 2000))
        assert time.monotonic() - began < 60
    (message,) = messages
    assert "Weights & Biases" in message and "all metrics are in the run directory" in message


def test_a_sink_that_fails_is_reported_and_no_more(run: Run, messages: list[str]) -> None:
    with feeding(run, [Mlflow(tracking_uri="nonsense://")], finish_s=60):
        write(run, 1)
    assert [message.split(": ")[0] for message in messages] == ["MLflow failed"]


def test_a_missing_package_is_reported_when_the_sink_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        MissingExtra, match=r"wandb is needed to feed Weights & Biases: pip install 'headway\[wandb\]'"
    ):
        Wandb()


def test_a_wrong_mode_is_refused() -> None:
    with pytest.raises(UsageError, match='use "online" or "offline"'):
        Wandb(mode="sometimes")  # type: ignore[arg-type]


def test_half_a_line_waits_and_rows_that_were_not_written_come_again(run: Run, tmp_path: Path) -> None:
    rows = run.metrics_file(0)
    rows.write_bytes(
        b'{"kind": "train", "step": 1, "x": 1}\nnonsense\n[3]\n{"kind": "no step"}\n{"kind": "tra'
    )
    with feeding(run, [Csv()], finish_s=60):
        pass
    assert run.csv_file.read_text().splitlines()[1:] == ["1,,train,,,headway/x,1.0"]
    assert int(run.sink_offset_file("csv").read_text()) == rows.read_bytes().rfind(b"\n") + 1
    with rows.open("ab") as rest:
        rest.write(b'in", "step": 2, "x": 2}\n')
    with feeding(run, [Csv()], finish_s=60):
        pass
    assert [line.split(",")[0] for line in run.csv_file.read_text().splitlines()] == ["step", "1", "2"]
    run.sink_offset_file("csv").unlink()  # as if no row had been written
    with feeding(run, [Csv(file=tmp_path / "again.csv")], finish_s=60):
        pass
    assert (tmp_path / "again.csv").read_text() == run.csv_file.read_text()


class Unusable(Sink):
    """Has what the interface asks for, and settings that cannot travel."""

    def __init__(self, file: str) -> None:
        self.file = file

    def open(self, run: Run) -> None: ...

    def write(self, rows: Sequence[dict[str, Any]]) -> None: ...

    def close(self, status: str, exit_code: int) -> None: ...


def test_what_cannot_travel_to_another_process_is_refused() -> None:
    class Local(Csv):  # type: ignore[misc]
        pass

    with pytest.raises(UsageError, match=r"Local cannot be imported from .*: define it at the top level"):
        check_sink(Local())
    with pytest.raises(UsageError, match=r"file=<object .* of sink Csv cannot be written as JSON"):
        sink = Csv()
        sink.file = object()  # type: ignore[assignment]
        check_sink(sink)
    with pytest.raises(UsageError, match="Unusable has an __init__ of its own: make it a dataclass"):
        check_sink(Unusable("x"))
    with pytest.raises(UsageError, match="there is a sink named 'csv' already"):
        check_sink(Csv(), [Csv(file="x")])
    with pytest.raises(UsageError, match="'csv' is not a sink"):
        check_sink("csv")  # type: ignore[arg-type]


def test_numbers_of_a_row() -> None:
    row = {
        "kind": "checkpoint",
        "step": 3,
        "time": 0.0,
        "bytes": 10,
        "path": "x",
        "metrics": {"a": "nan", "b": None},
    }
    found = scalars(row)
    assert found.pop("a") != found.get("a")
    assert found == {"headway/checkpoint/bytes": 10.0}
