"""The view of a run: what is shown is what the files say, in bounded memory, whatever the files are."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from synthetic_run import events, make_run, node_sample, row, write_rows

from headway import checkpoint
from headway.cli import main
from headway.launcher import sweep
from headway.run import Run
from headway.schedulers.base import JobStatus, Queue
from headway.watch.comparison import compare
from headway.watch.planned import compare_with_plan
from headway.watch.report import render
from headway.watch.runs import last_metrics
from headway.watch.terminal import layout
from headway.watch.terminal.lines import describe
from headway.watch.view import RunView, metric_rows, ranks, series as curves, source
from headway.watch.view.metric_rows import MetricRows
from headway.watch.view.series import Series
from headway.watch.web.blocks import blocks, to_json
from headway.watch.web.heat_map import heat_map


def append(path: Path, *rows: dict[str, Any], tail: str = "") -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in rows) + tail)


def test_what_is_shown_is_what_the_rows_say(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=16, log_points=20, slow_rank=13)
    run.checkpoint_dir(100).mkdir(parents=True)
    with run.lock():
        shown = RunView(run).refresh()
    header = shown.header
    assert (header.state, header.step, header.total_steps, header.progress) == ("running", 200, 400, 0.5)
    assert (header.nodes, header.world_size, header.attempts, header.epoch) == (2, 16, 1, 1)
    assert header.eta_s == pytest.approx(20, rel=0.01), "200 steps, ten of them in a second"
    assert header.silent_s is None and 20 <= header.elapsed_s < 60
    assert shown.curves["train/loss"].steps == list(range(10, 210, 10))
    assert shown.speed.step_median_s == pytest.approx(0.1) and shown.speed.samples_per_s == 4096
    assert sum(shown.speed.shares.values()) == pytest.approx(1) and shown.speed.shares[
        "data"
    ] == pytest.approx(0.2)
    slowest = shown.ranks[0]
    assert (slowest.rank, slowest.relative, slowest.is_straggler, slowest.host) == (13, 2.0, True, "cn001")
    assert [each.rank for each in shown.ranks if each.is_straggler] == [13]
    assert slowest.gpu["uuid"] == "GPU-cn001-5", "the sixth rank of its node has the sixth GPU"
    assert shown.safety.step == 100 and shown.safety.age_s == pytest.approx(90, abs=20)
    assert (shown.data[0].bad, shown.data[0].cache_hits) == (3, 0.9)
    assert [message.text for message in shown.messages] == ["the learning rate is high"]


def test_a_run_that_another_job_continues_is_that_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A screen that stays open asks about the job that the run has now."""
    monkeypatch.setattr("headway.watch.view.run_view._QUEUE_S", 0.0)
    monkeypatch.setattr("headway.watch.view.run_view._QUEUE_WAIT_S", 60.0)
    states = {
        "7": JobStatus(state="failed", why="time limit"),
        "8": JobStatus(state="queued", why="Priority"),
    }
    monkeypatch.setattr(
        "headway.schedulers.queue",
        lambda jobs: Queue(statuses={(ids.scheduler, ids.number): states[ids.job_id] for ids in jobs}),
    )
    run = make_run(tmp_path, ranks=1, log_points=2)
    view = RunView(run)
    seen = []
    for job in ("7", "8"):
        run.submission_file.write_text(json.dumps({"scheduler": "slurm", "job_id": job}))
        seen.append(view.refresh().header.state)
    assert seen == ["failed", "queued"]


def test_no_step_is_beyond_the_last_one(tmp_path: Path) -> None:
    """Epochs of shards differ by a batch, and the steps of all are told from those of the first."""
    run = make_run(tmp_path, ranks=1, log_points=20)
    append(run.metrics_file(0), row(401, 0, time.time()))
    header = RunView(run).refresh().header
    assert (header.step, header.total_steps, header.progress) == (401, 401, 1.0)


@pytest.mark.parametrize("ranks", [4, 64])
def test_the_heat_map_reads_as_many_rows_of_each_rank(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of rank 0 are long, since they have the metrics."""
    monkeypatch.setattr("headway.watch.web.heat_map._BUDGET_S", 60.0)
    run = make_run(tmp_path, ranks=ranks, log_points=60)
    norms = {f"norm/layers.{number}.weight": 1.0 for number in range(900)}
    for rank in range(ranks):
        rows = [row(10 * n, rank, time.time() - 60 + n) for n in range(1, 61)]
        write_rows(run.metrics_file(rank), [each | {"metrics": norms if rank == 0 else {}} for each in rows])
    found = heat_map(run, ranks, "own")
    assert found["steps"] == list(range(10, 610, 10))
    assert found["ranks"] == [[1.0] * 60] * ranks


def test_a_rank_is_a_straggler_only_if_it_stays_slow(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, log_points=6)
    append(run.metrics_file(2), row(70, 2, time.time(), slow=3.0))
    for rank in (0, 1, 3):
        append(run.metrics_file(rank), row(70, rank, time.time()))
    slowest = RunView(run).refresh().ranks[0]
    assert (slowest.rank, slowest.relative, slowest.is_straggler) == (2, 3.0, False)


def test_the_rule_is_that_of_the_loop() -> None:
    from headway.train.metrics import stragglers

    for name in ("SLOW_FACTOR", "SLOW_LOG_POINTS", "MIN_LOST_FRACTION", "MIN_LOST_S"):
        assert getattr(ranks, name) == getattr(stragglers, name)


def test_new_rows_are_added_and_restarts_replace_what_they_repeat(tmp_path: Path) -> None:
    run = make_run(tmp_path, log_points=4)
    view = RunView(run)
    assert view.refresh().header.step == 40
    again = row(30, 0, time.time()) | {"metrics": {"train/loss": 9.0}}
    append(run.metrics_file(0), again, tail='{"kind": "train", "step": 40, "met')
    shown = view.refresh()
    assert shown.curves["train/loss"].steps == [10, 20, 30], "step 40 is of an attempt that was lost"
    assert shown.curves["train/loss"].last == 9 and shown.header.step == 30
    append(run.metrics_file(0), {"time": 0}, row(40, 0, time.time()))
    assert view.refresh().curves["train/loss"].steps == [10, 20, 30, 40], "the line that was torn is skipped"


def test_another_log_point_of_a_step_is_not_a_restart(tmp_path: Path) -> None:
    """A loop of one's own logs after its last step, which was a log point: the end of the epoch is another one."""
    run = make_run(tmp_path, ranks=2, log_points=20)
    seconds = {"seconds": {"other": 0.1}, "samples_per_second": 0.0}
    append(
        run.metrics_file(0),
        row(200, 0, time.time()) | {"metrics": {"fid": 9.0, "train/grad_norm": 2.5}} | seconds,
    )
    view = RunView(run)
    shown = view.refresh()
    part, (compared,) = view.metrics.within("train/loss", 10, 1000), compare([run], metrics=["train/loss"])
    assert part is not None and part.steps[-1] == 200
    assert compared.metrics["train/loss"].last == shown.curves["train/loss"].last
    assert shown.curves["train/grad_norm"].last == 2.5, "a name may be in both"
    assert shown.curves["fid"].last == 9 and shown.curves["train/loss"].steps[-1] == 200
    assert shown.speed.samples_per_s == 4096 and shown.speed.step_median_s == pytest.approx(0.1)
    assert view.metrics.samples.highs[-1] == 2 * 64 * 200 and view.metrics.phases["data"].steps[-1] == 200
    assert len(view.metrics.step_ranges) == 1
    append(run.metrics_file(0), row(200, 0, time.time()) | {"metrics": {"train/loss": 7.0}})
    shown = view.refresh()
    assert shown.curves["train/loss"].steps[-1] == 200 and shown.curves["train/loss"].last == 7
    assert "fid" not in shown.curves, "a restart repeats this step, and has not come to the end of the epoch"


def test_what_a_restart_abandons_is_neither_shown_nor_compared(tmp_path: Path) -> None:
    run = make_run(tmp_path, log_points=1)
    rows = [row(10 * n, 0, time.time() - 20 + n) for n in range(1, 11)]
    for number, each in enumerate(rows, start=1):
        each["metrics"]["train/gap"] = "nan" if number > 8 else 0.5
        each["metrics"] |= {"train/late": 1.0} if number > 7 else {}
    validations = [
        rows[at] | {"kind": "validation", "metrics": {"val/loss": value}}
        for at, value in ((4, 0.9), (9, 0.1))
    ]
    write_rows(run.metrics_file(0), [*rows[:5], validations[0], *rows[5:], validations[1]])
    view = RunView(run)
    before = view.refresh().curves
    assert before["val/loss"].steps == [50, 100] and before["train/gap"].non_finite == 2
    append(run.metrics_file(0), row(60, 0, time.time()))
    shown = view.refresh().curves
    assert (shown["val/loss"].steps, shown["val/loss"].last) == ([50], 0.9)
    assert (shown["train/gap"].steps[-1], shown["train/gap"].last, shown["train/gap"].non_finite) == (
        50,
        0.5,
        0,
    )
    assert shown["train/loss"].steps == [10, 20, 30, 40, 50, 60] and "train/late" not in shown
    part = view.metrics.within("val/loss", 10, 1000)
    assert part is not None and part.steps == [50]
    run.end_attempt(1, status="stopped", exit_code=75)
    (one,) = compare([run], metrics=["val/loss", "train/loss"])
    assert (one.metrics["val/loss"].last, one.metrics["val/loss"].best) == (0.9, 0.9)
    assert one.metrics["train/loss"].last == shown["train/loss"].last


def test_values_that_were_not_numbers_count_only_where_a_restart_has_not_repeated_them(
    tmp_path: Path,
) -> None:
    """Finite up to the checkpoint, and then not: the restart repeats no step with a finite value."""
    run = make_run(tmp_path, log_points=1)
    rows = [row(10 * n, 0, time.time() - 20 + n) for n in range(1, 11)]
    for number, each in enumerate(rows, start=1):
        each["metrics"] |= {"train/loss": "nan" if number in (3, 9, 10) else 0.5, "train/late": "nan"}
    write_rows(run.metrics_file(0), rows)
    view = RunView(run)
    assert view.refresh().curves["train/loss"].non_finite == 3
    append(run.metrics_file(0), row(90, 0, time.time()) | {"metrics": {"train/loss": 0.4}})
    shown = view.refresh().curves
    assert (shown["train/loss"].non_finite, shown["train/loss"].last) == (1, 0.4), "that at step 30 stays"
    assert (shown["train/late"].non_finite, shown["train/late"].steps) == (8, [])


def test_of_countless_values_that_are_not_numbers_few_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "CAPACITY", 8)
    series = Series()
    for step in range(100):
        series.add(step, 0.0, math.nan)
    assert (series.non_finite, len(series.bad_steps)) == (100, 8)
    series.cut(5)
    assert (
        series.non_finite == len(series.bad_steps) == 5
        and series.last is not None
        and math.isnan(series.last)
    )


def test_the_pace_is_that_of_one_attempt(tmp_path: Path) -> None:
    """A job that waited an hour to be started again has made no step in it."""
    run = make_run(tmp_path, ranks=1, log_points=10)
    info, now = run.info(), time.time()
    stamp = lambda at: datetime.fromtimestamp(at, UTC).isoformat()  # noqa: E731
    first = info["attempts"][0] | {
        "started": stamp(now - 3605),
        "ended": stamp(now - 3589),
        "status": "stopped",
    }
    second = info["attempts"][0] | {"number": 2, "started": stamp(now - 8)}
    run.info_file.write_text(json.dumps(info | {"attempts": [first, second]}))
    earlier = [row(10 * n, 0, now - 3600 + n) for n in range(1, 11)]
    write_rows(run.metrics_file(0), [*earlier, *(row(10 * n, 0, now - 16 + n) for n in range(11, 16))])
    with run.lock():
        shown = RunView(run).refresh()
    assert shown.header.step == 150 and shown.header.total_steps == 200
    assert shown.header.eta_s == pytest.approx(5, rel=0.1), "50 steps, ten of them in a second"
    assert shown.speed.step_p95_s == pytest.approx(0.1, rel=0.1)


def test_metrics_may_be_of_any_size(tmp_path: Path) -> None:
    """Operations of a run are 1e21, and the loss of one that diverges is anything."""
    run = make_run(tmp_path, log_points=2)
    values = [2e15, -3e18, 1e40, 1e289, 1e308, 1e308]
    rows = [row(30 + n, 0, time.time()) | {"metrics": {"flops": value}} for n, value in enumerate(values)]
    append(run.metrics_file(0), *rows)
    shown = RunView(run).refresh()
    found = shown.curves["flops"]
    assert found.means == values[:4] and found.last == math.inf and found.non_finite == 2
    assert any("flops" in line.plain for line in layout(shown, 100, 40)) and "flops" in render(run)
    assert json.loads(to_json(found.means)) == values[:4]
    run.end_attempt(1, status="done", exit_code=0)
    assert compare([run], metrics=["max:flops"])[0].metrics["flops"].best == 1e289


def test_rows_with_many_metrics_are_read_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.watch.view.metric_rows._WHOLE_BYTES", 1 << 18)
    monkeypatch.setattr("headway.watch.view.metric_rows._KEPT_BYTES", 1 << 16)
    monkeypatch.setattr("headway.watch.view.metric_rows._PLACES", 120)
    run = make_run(tmp_path, ranks=2, log_points=60)
    norms = {f"norm/layers.{number}.weight": 1.0 for number in range(900)}
    rows = [row(10 * n, 0, time.time() - 60 + n) for n in range(1, 61)]
    write_rows(run.metrics_file(0), [each | {"metrics": each["metrics"] | norms} for each in rows])
    view = RunView(run)
    shown = view.refresh()
    assert view.metrics.is_sampled and len(shown.curves["train/loss"].steps) > 50
    assert shown.curves["train/loss"].steps[0] <= 20, "the beginning of the run is seen, too"
    assert sorted(each.rank for each in shown.ranks) == [0, 1]
    append(run.metrics_file(0), row(610, 0, time.time()) | {"metrics": {"train/loss": 3.0} | norms})
    assert {each.rank: each.step for each in view.refresh().ranks}[0] == 610
    assert last_metrics(run)["step"] == 610


def test_checkpoints_do_not_crowd_messages_out(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    saved = {"kind": "checkpoint", "rank": 0, "text": "saved", "step": 7}
    append(run.events_file(0), *(saved | {"time": time.time() + n} for n in range(300)))
    shown = RunView(run).refresh()
    assert [message.text for message in shown.messages] == ["the learning rate is high"]


def test_the_newest_checkpoint_is_the_newest_on_disk(tmp_path: Path) -> None:
    """After a crash the last one may have no event, and a loop of the script writes none."""
    run = make_run(tmp_path)
    run.checkpoint_dir(100).mkdir(parents=True)
    view = RunView(run)
    assert (view.refresh().safety.step, view.refresh().safety.size_bytes) == (100, 4_200_000_000)
    checkpoint.save(run, {"x": 1}, step=120)
    assert (safety := view.refresh().safety).step == 120
    assert safety.age_s is not None and safety.age_s < 60 and safety.size_bytes is None
    assert "<b>step 120</b>" in render(run)
    shutil.rmtree(run.checkpoint_dir(120))
    assert view.refresh().safety.step == 100
    shutil.rmtree(run.checkpoints_dir)
    assert view.refresh().safety.step is None, "they were removed"


def test_devices_are_those_of_the_nodes_of_this_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2)
    view = RunView(run)
    assert [node["host"] for node in view.refresh().nodes] == ["cn000"]
    info = run.info()
    started = datetime.fromtimestamp(time.time() - 1, UTC).isoformat()
    info["attempts"].append(info["attempts"][0] | {"number": 2, "started": started})
    run.info_file.write_text(json.dumps(info))
    write_rows(run.node_file("cn007"), [node_sample("cn007", 2) | {"time": time.time()}])
    assert [node["host"] for node in view.refresh().nodes] == ["cn007"], "the screen has stayed open"


def test_silence_is_noticed(tmp_path: Path) -> None:
    run = make_run(tmp_path, log_points=4, waited_s=1000)
    rows = [row(10 * n, 0, time.time() - 100 + n) for n in range(1, 5)]
    write_rows(run.metrics_file(0), rows)
    run.events_file(0).unlink()
    with run.lock():
        header = RunView(run).refresh().header
    assert header.state == "running" and header.silent_s == pytest.approx(96, abs=10)
    slow = [row(10 * n, 0, time.time() - 300 + 50 * n) for n in range(1, 5)]
    write_rows(run.metrics_file(0), slow)
    with run.lock():
        assert RunView(run).refresh().header.silent_s is None, "a log point per 50 s is usual here"


def test_a_first_log_point_and_validations_are_not_silence(tmp_path: Path) -> None:
    """Where log points are minutes apart, or validations take minutes, each start and each epoch would alarm."""
    run = make_run(tmp_path, log_points=1, waited_s=1000)
    run.events_file(0).unlink()

    def silent_s(*ago_s: float) -> float | None:
        now = time.time()
        write_rows(run.metrics_file(0), [row(10 * n, 0, now - ago) for n, ago in enumerate(ago_s, start=1)])
        with run.lock():
            header = RunView(run).refresh().header
        assert header.state == "running"
        return header.silent_s

    steady = [300 - second for second in range(150)]
    assert silent_s(400) is None, "the first log point took 600 s"
    assert silent_s(400, *steady) is None, "there was a pause of 100 s before"
    assert silent_s(*steady) == pytest.approx(151, abs=20)


def test_a_long_file_is_sampled_and_the_end_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, log_points=6000)
    monkeypatch.setattr("headway.watch.view.metric_rows._WHOLE_BYTES", 1 << 16)
    monkeypatch.setattr("headway.watch.view.metric_rows._KEPT_BYTES", 1 << 15)
    sampled, whole = RunView(run).refresh(), RunView(run, thorough=True).refresh()
    assert sampled.header.step == whole.header.step == 60_000
    few, many = sampled.curves["train/loss"], whole.curves["train/loss"]
    assert 300 < len(few.steps) < 800 and 1000 < len(many.steps) <= curves.CAPACITY
    for step, mean in zip(few.steps, few.means, strict=True):
        assert mean == pytest.approx(1 + 2 * math.exp(-step / 1e4)), "a sampled value is a real one"
    assert sampled.speed.step_median_s == pytest.approx(0.1, rel=0.01)


def test_of_a_long_file_no_validation_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are few of them among the log points, and the best of them decides."""
    monkeypatch.setattr("headway.watch.view.metric_rows._WHOLE_BYTES", 1 << 16)
    monkeypatch.setattr("headway.watch.view.metric_rows._KEPT_BYTES", 1 << 12)
    monkeypatch.setattr("headway.watch.view.metric_rows._PLACES", 20)
    monkeypatch.setattr("headway.watch.view.source._CHUNK_BYTES", 1 << 14)
    run = make_run(tmp_path, log_points=2000)
    rows = [row(n, 0, time.time() + n / 1e3) for n in range(1, 2001)]
    for at in range(1900, 0, -100):
        value = 0.1 if at == 700 else 1.0
        rows.insert(at, rows[at - 1] | {"kind": "validation", "metrics": {"val/loss": value}})
        rows.insert(at + 1, {"kind": "epoch", "time": rows[at]["time"], "step": at, "metrics": {"score": at}})
    write_rows(run.metrics_file(0), rows)
    view = RunView(run)
    found = view.refresh().curves
    assert view.metrics.is_sampled and len(found["train/loss"].steps) < 100
    assert found["val/loss"].steps == found["score"].steps == list(range(100, 2000, 100))
    assert found["val/loss"].means[6] == 0.1 and found["score"].means[6] == 700


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(4, 32))
def test_a_merged_curve_keeps_mean_and_extremes(values: list[float], capacity: int) -> None:
    series = Series()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "CAPACITY", capacity)
        for step, value in enumerate(values):
            series.add(step, float(step), value)
    assert len(series.steps) <= capacity and series.steps == sorted(set(series.steps))
    assert (min(series.lows), max(series.highs), series.last) == (min(values), max(values), values[-1])
    mean = sum(m * c for m, c in zip(series.means, series.counts, strict=True)) / len(values)
    assert mean == pytest.approx(sum(values) / len(values), abs=1e-3)
    assert sum(series.counts) == len(values)


def test_a_run_began_with_its_first_attempt(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    created = datetime.fromisoformat(run.info()["created"]).timestamp()
    assert RunView(run).refresh().header.began == created
    run.begin_attempt(world={})
    info = run.info()
    info["attempts"][0]["started"] = "2090-01-01T00:00:00+00:00"  # it has waited in a queue
    run.info_file.write_text(json.dumps(info))
    header = RunView(run).refresh().header
    assert (header.created, header.began) == (created, datetime(2090, 1, 1, tzinfo=UTC).timestamp())


def test_hostile_directories_are_shown_as_far_as_they_are_sane(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, log_points=3)
    secret = tmp_path / "secret.jsonl"
    write_rows(secret, [{"time": time.time(), "kind": "warning", "rank": 0, "text": "SECRET"}])
    (run.path / "log" / "events-00001.jsonl").symlink_to(secret)
    os.mkfifo(run.path / "log" / "events-00002.jsonl")
    (run.path / "nodes" / "evil.jsonl").symlink_to("/etc/passwd")
    noise = random.Random(0).randbytes(200_000) + b"\n"
    with run.metrics_file(0).open("ab") as file:
        file.write(
            noise + b'{"kind": "train", "step": 1e999, "metrics": 7}\n[[[[[\n' + b"[" * 100_000 + b"\n"
        )
        file.write(b'{"kind": "train", "step": 7, "time": 1, "pad": "' + b"x" * (3 << 20) + b'"}\n')
        file.write(b'{"kind": "train", "step": "7", "time": null, "seconds": [1], "data": 3}\n')
    append(
        run.events_file(0),
        {"time": time.time(), "kind": "warning", "rank": "x", "text": "\x1b]0;gone\x07a\nb\u202e"},
    )
    append(run.events_file(0), {"time": "never", "kind": 7}, {"kind": "warning"})
    append(run.metrics_file(0), row(40, 0, time.time()) | {"stage": "\x1b[2Jfit"})
    run.plan_file.write_text('{"answers": [1, 2]}')
    shown = RunView(run).refresh()
    assert shown.header.step == 40 and shown.header.stage == "fit"
    assert [message.text for message in shown.messages] == ["the learning rate is high", "a b"]
    assert "SECRET" not in repr(shown) and "root:" not in repr(shown)


@pytest.mark.parametrize("moment", [1e14, -1e14, 5e9])
def test_times_that_cannot_be_are_left_out(tmp_path: Path, moment: float) -> None:
    run = make_run(tmp_path, ranks=2, log_points=3)
    append(run.events_file(0), {"time": moment, "kind": "warning", "rank": 0, "text": "never"})
    append(run.metrics_file(0), row(90, 0, moment))
    shown = RunView(run).refresh()
    assert shown.header.step == 30 and "never" not in [message.text for message in shown.messages]
    assert layout(shown, 100, 40) and render(run)


@pytest.mark.parametrize(
    "hostile",
    [
        {"world": [1]},
        {"world": {"world_size": 10**400, "nodes": 10**400}},
        {"number": "<script>"},
        {"started": "0001-01-01T00:00:00+14:00", "ended": "9999-12-31T23:59:59-14:00"},
        {"started": "1969-12-31T00:00:00+00:00"},
    ],
    ids=str,
)
def test_an_attempt_may_say_anything(tmp_path: Path, hostile: dict[str, Any]) -> None:
    run = make_run(tmp_path, ranks=2, log_points=3)
    info = run.info()
    info["attempts"][0] |= hostile
    run.info_file.write_text(json.dumps(info))
    assert layout(RunView(run).refresh(), 100, 40)
    assert "<script" not in render(run)


def test_a_file_of_any_size_is_read_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_rows, "_THOROUGH_BYTES", 1 << 22)
    run = make_run(tmp_path, ranks=2, log_points=3)
    with run.metrics_file(0).open("r+b") as file:
        file.seek(1 << 40)  # a hole of a terabyte, which takes no room
        file.write(b"\n" + json.dumps(row(90, 0, time.time())).encode() + b"\n")
    assert RunView(run, thorough=True).refresh().header.step == 90


def test_names_of_metrics_take_bounded_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=1, log_points=3)
    now = time.time()
    texts = [row(40 + n, 0, now) | {"metrics": {f"t{n}-{m}": "x" for m in range(100)}} for n in range(50)]
    colors = [{f"lo\x1b[{n * 100 + m}mss": 1.0 for m in range(100)} for n in range(50)]
    same = [row(90 + n, 0, now) | {"metrics": metrics} for n, metrics in enumerate(colors)]
    append(run.metrics_file(0), *texts, *same)
    rows = MetricRows(run)
    rows.refresh()
    assert rows.curves["loss"].steps[-1] == 139
    assert not [name for name in rows._names if name.startswith("t0-")] and len(rows._names) < 2000


def test_numbers_of_any_size_are_written_for_browsers() -> None:
    assert to_json([1 << 60, 10**400, -(10**400), 7]) == b'[1.152921504606847e+18,"inf","-inf",7]'


def test_nothing_is_read_through_a_link_out_of_the_run(tmp_path: Path) -> None:
    inside, outside = tmp_path / "run", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "a.txt").write_text("secret")
    (inside / "log").symlink_to(outside)
    (inside / "b.txt").symlink_to(outside / "a.txt")
    for path in (inside / "log" / "a.txt", inside / "b.txt", inside / ".." / "outside" / "a.txt", inside):
        assert source.open_regular(inside, path) is None
    (inside / "c.txt").write_text("mine")
    assert source.read_text(inside, inside / "c.txt") == "mine"


def test_a_run_without_anything_is_shown(tmp_path: Path) -> None:
    run = Run.create(tmp_path, name="empty")
    shown = RunView(run).refresh()
    assert (shown.header.state, shown.header.step, shown.curves, shown.ranks) == ("new", None, {}, [])
    run.info_file.write_text("{")
    assert RunView(run).refresh().header.state == "new"


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        [
            "\x1b[2J",
            "<script>",
            "nan",
            "2026-11-16T00:00:00+00:00",
            10**400,
            1e14,
            -1e14,
            [],
            {},
            [[{}]],
            {"": []},
        ]
    ),
)


def poisoned(template: dict[str, Any], draw: Any) -> dict[str, Any]:
    """The same object with some of its values replaced, at any depth."""
    found: dict[str, Any] = {}
    for key, value in template.items():
        if draw(st.integers(0, 5)) == 0:
            found[key] = draw(HOSTILE)
        elif isinstance(value, dict):
            found[key] = poisoned(value, draw)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            found[key] = [poisoned(each, draw) for each in value]
        else:
            found[key] = value
    if draw(st.booleans()):
        found[draw(st.text(max_size=8))] = draw(HOSTILE)
    return found


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(tmp_path_factory.mktemp("hostile"), ranks=2, log_points=5)
    run.end_attempt(1, status="failed", exit_code=1)
    return run


@settings(max_examples=1000 if os.environ.get("HEADWAY_FAULTS") == "full" else 40, deadline=None)
@given(data=st.data())
def test_no_value_in_any_file_can_break_or_command_the_screen(victim: Run, data: st.DataObject) -> None:
    run, now = victim, time.time()
    write_rows(run.metrics_file(0), [poisoned(row(10 * n, 0, now), data.draw) for n in range(1, 5)])
    write_rows(run.metrics_file(1), [poisoned(row(10, 1, now), data.draw)])
    write_rows(run.events_file(0), [poisoned(each, data.draw) for each in events(now, 40)])
    write_rows(run.node_file("cn000"), [poisoned(node_sample("cn000", 2), data.draw)])
    failure = {"rank": 1, "host": "cn7", "step": 4, "error": "x", "traceback": "a\n b"}
    run.failure_file.write_text(json.dumps(poisoned(failure, data.draw)))
    run.plan_file.write_text(json.dumps(poisoned({"answers": {"time.step": {"value": 1.0}}}, data.draw)))
    snapshot = RunView(run).refresh()
    shown = "".join(line.plain for line in layout(snapshot, 120, 50)) + describe(snapshot)
    assert all(c.isprintable() for c in shown)
    page = render(run)
    assert "\x1b" not in page and "<script" not in page


def test_a_plan_is_compared_in_one_place(tmp_path: Path) -> None:
    """The screen, the report and `headway plan check` show the same comparison."""
    run = make_run(tmp_path, ranks=4, log_points=20)
    for rank, peak in enumerate((10, 40, 20, 30)):
        append(run.metrics_file(rank), row(300, rank, time.time()) | {"memory_peak": peak * 10**9})
    step = {"value": 0.08, "low": 0.05, "high": 0.2}
    run.plan_file.write_text(
        json.dumps(
            {"answers": {"time.step": step, "memory.allocated": {"value": 32e9, "low": 30e9, "high": 34e9}}}
        )
    )
    paced, memory = compare_with_plan(run)
    assert (paced.what, paced.differs) == ("step", False) and paced.ratio == pytest.approx(
        0.1 / 0.08, rel=0.2
    )
    assert (memory.what, memory.measured, memory.differs) == ("memory", 40e9, True)
    shown = RunView(run).refresh()
    assert shown.plan[1] == memory and blocks(shown)["speed"]["planned_step_s"] == 0.08
    run.plan_file.write_text(
        json.dumps({"answers": {"time.step": step | {"value": 0}, "memory.allocated": 3}})
    )
    assert RunView(run).refresh().plan == []


def test_the_runs_of_a_sweep_are_compared_with_their_plans_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, empty = make_run(tmp_path, log_points=20), Run.create(tmp_path, name="synthetic")
    sweep.join([slow, empty], sweep.grid(["lr=1,2"]))
    plan = {"answers": {"time.step": {"value": 0.01, "low": 0.005, "high": 0.02}}}
    for run in (slow, empty):
        run.plan_file.write_text(json.dumps(plan))
    assert main(["plan", "check", slow.id, "--root", str(tmp_path)]) == 1
    compared, missing = capsys.readouterr().out.splitlines()
    assert compared.startswith(f"{slow.id}: step: ") and compared.endswith(": differs")
    assert missing.startswith(
        f"{empty.id}: {empty.path} cannot be compared with its plan: the run has not measured step"
    )
    assert main(["plan", "check", slow.id, "--root", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(each["run"], "problem" in each) for each in found] == [(slow.id, False), (empty.id, True)]
    assert main(["plan", "check", empty.id, "--root", str(tmp_path)]) == 2
