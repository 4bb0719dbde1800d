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
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import psutil
import pytest
import torch
from each_rank import EachRank
from waiting import wait_until

from headway.dist import World
from headway.dist.control.signals import STOP_SIGNALS
from headway.errors import MissingExtra, Stopped, StorageError, UsageError
from headway.record.media import read_media
from headway.record.media.content import take_histogram, take_image, take_text
from headway.record.media.writer import MediaSettings, MediaWriter
from headway.record.sinks import (
    Csv,
    Mlflow,
    Sink,
    TensorBoard,
    Wandb,
    check_sink,
    feeding,
    mlflow as mlflow_sink,
    scalars,
)
from headway.record.sinks.options import MlflowOptions, TensorBoardOptions, WandbOptions, check_options
from headway.record.sinks.replayer import replay
from headway.record.sinks.tensorboard import media_value
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


def wandb_media(rows: list[dict[str, Any]], name: str, step: int) -> dict[str, Any]:
    (row,) = [row for row in rows if row["step"] == step and f"{name}/_type" in row]
    return {key.removeprefix(f"{name}/"): value for key, value in row.items() if key.startswith(f"{name}/")}


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


def log_media(run: Run, *steps: int) -> None:
    """An image, a histogram and a text, as a stage logs them."""
    world = World(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        nodes=1,
        host="here",
        launcher="none",
        device=torch.device("cpu"),
    )
    with MediaWriter(run, MediaSettings(), world=world, attempt=1) as media:
        for step in steps:
            image = take_image(
                torch.full((3, 2, 4), 50 * step % 256, dtype=torch.uint8), caption="a cat", columns=None
            )
            for name, content in (
                ("val/x: y", image),
                ("weights", take_histogram([1.0, 2.0, 2.0], bins=2)),
                ("said", take_text(f"<step {step}>")),
            ):
                media.add(name, content, step=step, stage="fit", epoch=0)


def event_values(run: Run) -> dict[str, list[Any]]:
    """The media in the event files, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(
        str(run.path / "tensorboard"), size_guidance={"images": 0, "tensors": 0, "histograms": 0}
    )
    found.Reload()
    return {
        "image": found.Images("val/x: y"),
        "histogram": found.Histograms("weights"),
        "text": found.Tensors("said/text_summary"),
    }


@pytest.mark.filterwarnings("ignore")  # of the packages' own
def test_every_sink_gets_every_row_the_media_and_the_settings(run: Run, store: str, tmp_path: Path) -> None:
    """A restart in the middle, whose rows come by `headway runs sync`: one run, and each step once."""
    write(run, 1, 2)
    named: dict[str, Any] = {"run_name": "the third", "notes": "why", "artifacts": ["config.yaml"]}
    sinks = [
        Wandb(project="p", mode="offline", group="g", job_type="train", tags=["a"], **named),
        TensorBoard(filename_suffix=".mine"),
        Mlflow(tracking_uri=store, tags={"team": "t"}, artifact_location=str(tmp_path / "art"), **named),
        Csv(),
    ]
    with pytest.raises(ValueError), feeding(run, sinks, finish_s=120):
        write(run, 3)
        log_media(run, 3)
        raise ValueError
    assert wandb_exit(run) == 1 and mlflow_run(store, run)[1].info.status == "FAILED"
    run.begin_attempt(world={})
    write(run, 2, 3, 4)  # from the checkpoint of step 1
    write(run, 4, kind="epoch")
    log_media(run, 3, 4)
    run.end_attempt(2, status="done", exit_code=0)
    assert replay(run) == {"csv": True, "mlflow": True, "tensorboard": True, "wandb": True}
    assert events(run) == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25)]
    assert events(run, "epoch/hits/1") == [(4, 4.0)]
    assert events(run, "headway/seconds/data")[0] == (1, 0.5)
    assert all(path.name.endswith(".mine") for path in (run.path / "tensorboard").iterdir())
    media = event_values(run)
    assert [event.step for kind in ("image", "histogram") for event in media[kind]] == 2 * [3, 4]
    assert [event.step for event in media["text"]] == [3, 3, 4], "TensorBoard hides no texts; these are equal"
    picture = run.media_dir / "rank-00000" / "val" / "x%3A y" / "step-000000000003-000.png"
    assert media["image"][0].encoded_image_string == picture.read_bytes()
    assert media["text"][2].tensor_proto.string_val == [b"<step 4>"]
    assert (media["histogram"][0].histogram_value.bucket, media["histogram"][0].histogram_value.num) == (
        [1, 2],
        3,
    )
    rows = wandb_history(run)
    own = [row for row in rows if "hits/0" in row or "epoch/hits/0" in row]
    assert [row["step"] for row in own] == [1, 2, 3, 4, 4]
    assert [row.get("train/loss") for row in own] == [1.0, 0.5, 1 / 3, 0.25, None]
    assert {r.run.run_id for r in wandb_records(run) if r.WhichOneof("record_type") == "run"} == {run.id}
    image = wandb_media(rows, "val/x: y", 3)
    assert (image["_type"], image["width"], image["height"], image["caption"]) == (
        "image-file",
        4,
        2,
        "a cat",
    )
    (kept,) = run.path.glob(f"wandb/offline-run-*/files/{image['path']}")
    assert kept.read_bytes() == picture.read_bytes()
    histogram = wandb_media(rows, "weights", 4)
    assert histogram == {"_type": "histogram", "values": [1, 2], "bins": [1.0, 1.5, 2.0]}
    text = wandb_media(rows, "said", 4)
    (page,) = run.path.glob(f"wandb/offline-run-*/files/{text['path']}")
    assert page.read_text() == "<pre>&lt;step 4&gt;</pre>"
    assert wandb_exit(run) == 0
    made = next(r.run for r in wandb_records(run) if r.WhichOneof("record_type") == "run")
    assert (made.display_name, made.notes, made.run_group, made.job_type) == (
        "the third",
        "why",
        "g",
        "train",
    )
    assert [*made.tags] == ["a"] and "hush" not in str(made.config) and "depth" in str(made.config)
    (artifact,) = [r.artifact for r in wandb_records(run) if r.WhichOneof("record_type") == "artifact"]
    assert (artifact.type, [entry.path for entry in artifact.manifest.contents]) == ("run", ["config.yaml"])
    client, found = mlflow_run(store, run)
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert found.info.status == "FINISHED" and found.info.run_name == "the third"
    assert (found.data.tags["team"], found.data.tags["mlflow.note.content"]) == ("t", "why")
    assert found.data.params == {"lr": "0.1", "model.depth": "2", "api_key": "[redacted]"}
    uploaded = {path.name for path in (tmp_path / "art").rglob("*") if path.is_file()}
    assert {"config.yaml", "step-000000000004-000.json", "step-000000000004-000.txt"} <= uploaded
    images = [name for name in uploaded if name.startswith("val~x_ y+step+") and name.endswith(".png")]
    assert sorted(name.split("+")[2] for name in images) == ["3", "4"]
    with run.csv_file.open(newline="") as file:
        values = [
            (int(r["step"]), float(r["value"])) for r in csv.DictReader(file) if r["name"] == "train/loss"
        ]
    assert values == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert json.loads(run.sink_media_file("wandb").read_text()) == {
        "0": run.media_index_file(0).stat().st_size
    }


def test_tensorboard_shows_what_was_repeated_also_after_rows_that_an_earlier_attempt_could_not_deliver(
    run: Run,
) -> None:
    """The machine went down: rows of the first attempt come from the process of the second, before its own."""
    run.begin_attempt(world={})
    point = {"kind": "train", "time": 1e9, "stage": "fit", "epoch": 0}
    values = [(30, {"train/loss": 0.5}), (40, {"train/loss": 0.4}), (20, {"train/loss": 3.0})]
    values += [(30, {"train/loss": 2.0, "plan/step": 0.1})]
    rows: list[dict[str, Any]] = [
        {**point, "step": step, "metrics": metrics, "samples_per_second": 64.0} for step, metrics in values
    ]
    # a second log point of a step has names of the first, and no samples
    rows.append(rows[-1] | {"metrics": {"fid": 9.0, "plan/step": 0.1}, "samples_per_second": 0.0})
    sink = TensorBoard()
    sink.open(run)
    sink.write(rows)
    sink.close("done", 0)
    assert events(run) == [(20, 3.0), (30, 2.0)] and events(run, "fid") == [(30, 9.0)]


def test_tensorboard_keeps_the_step_at_which_an_attempt_resumes_with_its_validation(run: Run) -> None:
    """A stop does not wait for a validation: the next attempt begins with it, and repeats no step that was saved."""
    point = {"kind": "train", "time": 1e9, "stage": "fit", "epoch": 0, "samples_per_second": 64.0}
    sink = TensorBoard()
    sink.open(run)
    sink.write([{**point, "step": step, "metrics": {"train/loss": float(step)}} for step in (10, 20, 30)])
    sink.close("stopped", 75)
    run.begin_attempt(world={})
    run.note_attempt(2, step_started=20)
    log_media(run, 20)
    again = TensorBoard()
    again.open(run)
    again.write_media(read_media(run))  # of the validation, before its row
    again.write([point | {"kind": "validation", "step": 20, "metrics": {"val/loss": 3.0}}])
    again.write([{**point, "step": 30, "metrics": {"train/loss": 2.0}}])
    again.close("done", 0)
    assert events(run) == [(10, 10.0), (20, 20.0), (30, 2.0)] and events(run, "val/loss") == [(20, 3.0)]
    assert [event.step for event in event_values(run)["image"]] == [20]


@pytest.mark.parametrize("kind", ["epoch", "checkpoint"])
def test_the_last_rows_of_a_resumed_run_hide_nothing_in_tensorboard(run: Run, kind: str) -> None:
    """They come by `headway runs sync`: the row of an epoch has the step of its last log point, a save an earlier."""
    run.begin_attempt(world={})
    write(run, 1, 2, 3)
    with feeding(run, [TensorBoard()], finish_s=120):
        pass
    write(run, 3 if kind == "epoch" else 2, kind=kind, metrics={})
    assert replay(run) == {"tensorboard": True}
    assert [step for step, _ in events(run)] == [1, 2, 3]


def test_settings_that_mlflow_did_not_get_come_with_the_next_start(
    run: Run, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server went away while the run was made there, between two of its settings."""
    from mlflow import MlflowClient

    log_param, given = MlflowClient.log_param, list[str]()

    def once(client: Any, run_id: str, name: str, value: str) -> Any:
        if given:
            raise ConnectionError
        given.append(name)
        return log_param(client, run_id, name, value)

    monkeypatch.setattr(MlflowClient, "log_param", once)
    with pytest.raises(ConnectionError):
        Mlflow(tracking_uri=store).open(run)
    monkeypatch.undo()
    Mlflow(tracking_uri=store).open(run)
    found = mlflow_run(store, run)[1]
    assert found.data.params == {"lr": "0.1", "model.depth": "2", "api_key": "[redacted]"}


def test_names_that_mlflow_would_refuse_are_changed() -> None:
    """One of them would end the feeding of all."""
    from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name

    names = ["a//b", "/a", "a/", "../a", "..a", ".", "a/./b", "a/../b", "loss: é", "a/b.c-d e", "x/" * 200]
    for name in names:
        valid = mlflow_sink._valid_name(name)
        _validate_metric_name(valid)
        assert 0 < len(valid) <= MAX_ENTITY_KEY_LENGTH
    assert mlflow_sink._valid_name("a/b.c-d e") == "a/b.c-d e" and mlflow_sink._valid_name("a//b") == "a/_/b"


def test_events_of_media_are_those_that_torch_writes(run: Run) -> None:
    from torch.utils.tensorboard import summary

    log_media(run, 1)
    values = {item.kind: media_value(item, item.path(run)) for item in read_media(run)}
    assert values["text"] == summary.text("said", "<step 1>").value[0]
    (theirs,) = summary.histogram_raw("weights", 1.0, 2.0, 3, 0.0, 0.0, [1.5, 2.0], [1, 2]).value
    mine = values["histogram"]
    mine.histo.sum, mine.histo.sum_squares = 0.0, 0.0  # of the middles of the bins, since values are not kept
    assert mine == theirs
    image = summary.image("val/x: y", np.full((3, 2, 4), 50, np.uint8), dataformats="CHW").value[0]
    image.image.encoded_image_string = values["image"].image.encoded_image_string
    assert values["image"] == image


def test_all_ranks_write_to_one_run_of_wandb_and_rank_0_alone_finishes_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no server here: `wandb.init` itself is replaced, and its settings are the real ones."""
    import wandb

    given: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **arguments: given.append(arguments) or MagicMock())
    for rank in (0, 3):
        sink = Wandb(project="p", shared=True, notes="why", settings={"x_stats_sampling_interval": 30.0})
        sink.rank, sink.local_rank = rank, rank % 2
        sink.open(run)
        sink.write([{"kind": "train", "step": 5, "metrics": {}, "memory_peak": 7}])
        (logged,) = sink._run.log.call_args.args
        assert logged == {
            f"{f'rank-{rank}/' if rank else ''}headway/memory_peak": 7.0,
            "step": 5,
            "epoch": None,
        }
        sink.close("stopped", 75)
        assert sink._run.mark_preempting.called == (rank == 0)
        assert sink._run.finish.call_args.kwargs == {"exit_code": 75}
    first, other = given
    facts = ("mode", "x_primary", "x_label", "x_update_finish_state", "x_stats_gpu_device_ids")
    assert [getattr(first["settings"], fact) for fact in facts] == ["shared", True, "rank-0", True, [0]]
    assert [getattr(other["settings"], fact) for fact in facts] == ["shared", False, "rank-3", False, [1]]
    assert first["settings"].x_stats_sampling_interval == 30.0
    assert first["id"] == other["id"] == run.id and first["notes"] == "why"
    assert "notes" not in other and "config" not in other and "mode" not in first
    with pytest.raises(UsageError, match="shared=True needs a server"):
        Wandb(shared=True, mode="offline")


def test_other_ranks_feed_only_what_all_ranks_feed_and_wait_for_rank_0(run: Run) -> None:
    with run.metrics_file(2).open("w") as file:
        file.write('{"kind": "train", "time": 1.0, "step": 1, "rank_metrics": {"x": 2.0}}\n')
    sink = EachRank(file=str(run.path / "ranks.txt"))
    with feeding(run, [sink, Csv()], rank=2, finish_s=60), feeding(run, [sink], finish_s=60):
        write(run, 7)
    assert sorted((run.path / "ranks.txt").read_text().split()) == ["0:7", "2:1"]
    assert not run.csv_file.exists() and run.sink_log("eachrank", 2).exists()
    assert run.sink_offset_file("eachrank", 2).read_text() == f"{run.metrics_file(2).stat().st_size}\n"
    assert replay(run, ["eachrank"], from_start=True) == {"eachrank": True}
    assert sorted((run.path / "ranks.txt").read_text().split()) == ["0:7", "0:7", "2:1", "2:1"]


def test_a_killed_run_that_is_fed_again_has_failed(run: Run) -> None:
    sink = EachRank(file=str(run.path / "ranks.txt"))
    with feeding(run, [sink], finish_s=60):
        write(run, 7)
    assert (run.path / "ranks.txt.end").read_text() == "done 0"
    assert run.info()["attempts"][-1]["exit_code"] is None, "nobody has recorded its end"
    assert replay(run) == {"eachrank": True}
    assert (run.path / "ranks.txt.end").read_text() == "failed 1"


def test_what_trackers_take_is_what_their_packages_take() -> None:
    import inspect

    import wandb
    from torch.utils.tensorboard import SummaryWriter

    ours = set(WandbOptions.__annotations__) - {"artifacts", "shared"}
    assert ours <= set(inspect.signature(wandb.init).parameters)
    assert set(TensorBoardOptions.__annotations__) <= set(inspect.signature(SummaryWriter).parameters)
    for options, sink in ((WandbOptions, Wandb), (MlflowOptions, Mlflow), (TensorBoardOptions, TensorBoard)):
        names = {"run_name" if name == "name" else name for name in options.__annotations__}
        assert names == {each.name for each in fields(sink)} - {"directory"}
    with pytest.raises(
        UsageError, match=r"'job_typ' is not a valid setting of .* \(did you mean 'job_type'\?\)"
    ):
        check_options(WandbOptions, Wandb.title, {"job_typ": "train"})
    for wrong in ("config.yaml", ["/etc/passwd"], ["../x"], [""]):
        with pytest.raises(UsageError, match="artifact"):
            Wandb(artifacts=wrong)
    with pytest.raises(UsageError, match="the tags of MLflow have values"):
        Mlflow(tags=["a"])  # type: ignore[arg-type]


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


def test_a_sink_that_is_killed_is_named_with_the_remedy(run: Run, messages: list[str]) -> None:
    before = set(psutil.Process().children())
    with feeding(run, [Csv()], finish_s=60):
        (sink,) = set(psutil.Process().children()) - before
        sink.kill()
    (message,) = messages
    assert message.startswith(
        f"Csv was killed by SIGKILL; to send the rest: headway runs sync {run.shell_name}; all metrics are in"
    )


def test_a_log_of_a_sink_that_cannot_be_opened_is_trouble_with_the_storage(run: Run) -> None:
    run.sink_log("csv", 0).mkdir(parents=True)
    with pytest.raises(StorageError, match="Is a directory"), feeding(run, [Csv()]):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_signals_to_the_run_end_no_sink(run: Run, messages: list[str]) -> None:
    """SLURM may send them to all processes of the job."""
    before = set(psutil.Process().children())
    with feeding(run, [Csv()], finish_s=60):
        (sink,) = set(psutil.Process().children()) - before
        for number in STOP_SIGNALS:  # its interpreter has just started
            sink.send_signal(number)
        write(run, 1)
        wait_until(lambda: run.csv_file.exists() and "loss" in run.csv_file.read_text(), "the sink has a row")
        for number in STOP_SIGNALS:
            sink.send_signal(number)
        write(run, 2)
        status = dict(line.split(":\t") for line in Path(f"/proc/{sink.pid}/status").read_text().splitlines())
    assert messages == [] and run.csv_file.read_text().count("train/loss") == 2
    bits = sum(1 << number - 1 for number in STOP_SIGNALS)
    for kind in ("SigBlk", "SigIgn"):
        assert not int(status[kind], 16) & bits, "programs that it starts handle signals as usual"


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


def test_a_sink_that_fails_without_its_log_is_reported_and_no_more(run: Run, messages: list[str]) -> None:
    """Somebody has removed the file, or its server is gone: the run is done all the same."""
    with feeding(run, [Mlflow(tracking_uri="nonsense://")], finish_s=60):
        run.sink_log("mlflow").unlink()
    assert [message.split(":")[0] for message in messages] == ["MLflow failed"]


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


@pytest.mark.parametrize("defined", [{"rank": 3}, {"__annotations__": {"local_rank": int}}])
def test_a_setting_of_a_sink_is_not_overwritten(defined: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"sink Mine defines '(local_)?rank', which headway sets"):
        type("Mine", (Csv,), defined)


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
