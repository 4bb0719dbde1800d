"""Lists and comparisons of runs. tests/run/test_status.py has the states."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.cli.watch import list_watched
from headway.errors import UsageError
from headway.launcher import sweep
from headway.run import Run, lock
from headway.run.info import write_info
from headway.run.job_record import record_end
from headway.schedulers.base import Queue
from headway.system.locks import ProcessIdentity
from headway.watch import comparison as comparing, runs as listing
from headway.watch.comparison import compare
from headway.watch.report import account, render
from headway.watch.terminal.screen import layout
from headway.watch.view.run_view import RunView
from headway.watch.web.blocks import to_json
from headway.watch.web.run_library import RunLibrary
from headway.watch.web.run_list import RunList

NOBODY = Queue()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "runs", name="digits", config={"lr": 0.1})


def submitted(run: Run, **facts: Any) -> None:
    run.submission_file.write_text(json.dumps({"array_task": None, **facts}))


def test_a_job_of_an_array_has_one_number(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here in a script of the user's own: SLURM gives each job of an array a number, too, which nobody sees."""
    for name, value in (("JOB_ID", "9"), ("ARRAY_JOB_ID", "7"), ("ARRAY_TASK_ID", "2")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    run.begin_attempt(world={})
    (row,) = listing.summarize([run], queue=NOBODY, heartbeat_wait_s=0)
    assert (row.job, RunView(run).refresh().header.job) == ("7_2", "7_2")


def test_a_heartbeat_elsewhere_is_looked_at_twice(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.begin_attempt(world={})
    with run.lock():
        owner = lock.newest_owner(run.path / "lock")
    assert owner
    file = run.path / "lock" / "owner-00001.json"
    elsewhere = dataclasses.replace(owner, machine="another", host="n7", released=False, beat=3)
    file.write_bytes(elsewhere.record())
    (row,) = listing.summarize([run], queue=NOBODY, heartbeat_wait_s=0.01)
    assert (
        row.status.state == "lost"
        and row.status.why == "on n7, according to its last heartbeat, which no longer changes"
    )
    monkeypatch.setattr(
        listing.time, "sleep", lambda _: file.write_bytes(dataclasses.replace(elsewhere, beat=4).record())
    )
    (row,) = listing.summarize([run], queue=NOBODY, heartbeat_wait_s=0.01)
    assert row.status.state == "running"


def test_damaged_files_do_not_hide_the_run(run: Run) -> None:
    for path in (run.submission_file, run.ended_file, run.failure_file, run.metrics_file(0), run.sweep_file):
        path.write_bytes(b"{")
    (row,) = listing.summarize([run], queue=NOBODY, heartbeat_wait_s=0.01)
    assert row.status.state == "new" and row.step is None


def metrics(run: Run, *rows: dict[str, Any], tail: str = "") -> None:
    run.metrics_file(0).write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


def test_the_time_of_attempts_that_were_killed_counts(run: Run) -> None:
    """Three attempts without an end, ten seconds of rows each, and a queue between them."""
    for _ in range(3):
        run.begin_attempt(world={})
    info, begin = run.info(), 1_800_000_000.0
    for at, attempt in enumerate(info["attempts"]):
        attempt["started"] = datetime.fromtimestamp(begin + 100 * at, UTC).isoformat()
    write_info(run.path, info)
    rows = [
        {
            "time": begin + 100 * at + s,
            "step": s,
            "stage": "a",
            "kind": "train",
            "metrics": {"train/loss": 1.0},
        }
        for at in range(3)
        for s in (5, 10)
    ]
    metrics(run, *rows)
    (row,) = listing.summarize([run], queue=NOBODY, heartbeat_wait_s=0.01)
    assert row.status.state != "running" and row.seconds == 30.0
    assert RunView(run).refresh().header.elapsed_s == 30.0


def test_a_killed_attempt_counts_however_many_rows_follow_it(run: Run) -> None:
    """Two attempts of 34 and 3,000 rows: the first one is far from the end of the file, in every place that counts."""
    for _ in range(2):
        run.begin_attempt(world={})
    info, begin = run.info(), 1_800_000_000.0
    first, second = info["attempts"]
    first |= {"started": datetime.fromtimestamp(begin, UTC).isoformat(), "step_started": 0}
    second |= {
        "started": datetime.fromtimestamp(begin + 40, UTC).isoformat(),
        "ended": datetime.fromtimestamp(begin + 44, UTC).isoformat(),
        "step_started": 30,
        "step_ended": 3030,
    }
    write_info(run.path, info)
    row = {"stage": "a", "kind": "train", "metrics": {"train/loss": 1.0}}
    first_rows = [row | {"time": begin + s / 4, "step": s, "seconds": {"compute": 0.2}} for s in range(1, 35)]
    later = [
        row | {"time": begin + 40 + s / 1000, "step": 30 + s, "seconds": {"compute": 0.001}}
        for s in range(1, 3001)
    ]
    metrics(run, *first_rows, *later)
    (summary,) = listing.summarize([run], queue=NOBODY, heartbeat_wait_s=0.01)
    view = RunView(run, thorough=True)
    snapshot = view.refresh()
    times = account(view, snapshot)
    assert summary.seconds == snapshot.header.elapsed_s == times.total_s == 34 / 4 + 4
    assert any("elapsed 12s in 2 attempts" in line.plain for line in layout(snapshot, 80, 24, None))
    assert times.between_s == 40 - 34 / 4
    assert times.repeated.count == 4 and times.parts["repeated"] == pytest.approx(4 * (6.8 + 3) / 3034)
    assert re.search("its last row</td><td>0 to at least 34</td>", render(run))


def test_a_run_that_cannot_be_read_is_named(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    broken = run.path.with_name("broken")
    broken.mkdir()
    (broken / "run.json").write_text("{")
    run.path.with_name("notes").mkdir()  # not a run
    assert main(["runs", "--root", str(run.path.parent)]) == 0
    shown = capsys.readouterr()
    assert run.id in shown.out
    assert shown.err.startswith(f"headway: {broken}/run.json is damaged") and shown.err.count("\n") == 1


def test_a_copy_of_a_run_is_another_run(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "copy")
    places = [str(run.path), str(tmp_path / "copy"), str(run.path)]
    assert [found.path for found in listing.resolve(places)] == [run.path, tmp_path / "copy"]


def test_the_table_and_its_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PATH", "")  # no SLURM here
    monkeypatch.chdir(tmp_path)
    first, second = Run.create("runs", name="digits"), Run.create("runs", name="other")
    (tmp_path / "runs" / "rubbish").mkdir()
    metrics(
        first,
        {"step": 50, "metrics": {"loss": 1.0}},
        {"step": 100, "kind": "checkpoint"},
        tail='{"step": 150, ',
    )
    first.end_attempt(first.begin_attempt(world={}), status="failed", exit_code=1)
    first.write_failure({"rank": 0, "error": "ValueError: " + "long " * 30})
    sweep.join([second], [{"lr": "1e-3"}])
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "step", "time", "job", "made", "tries"]
    assert lines[1].split()[:3] == [second.id, "new", "-"] and lines[2] == "    lr=1e-3"
    assert lines[3].split()[:3] == [first.id, "failed", "50"]
    assert lines[4].startswith("    rank 0: ValueError: long") and lines[4].endswith("…")
    assert lines[5] == "1 new, 1 failed" and max(map(len, lines)) <= 80
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["run", "state", "step"] and max(map(len, lines)) <= 60
    assert main(["runs", "--state", "failed", "lost", "--json"]) == 0
    assert [each["id"] for each in json.loads(capsys.readouterr().out)] == [first.id]
    assert main(["runs", "--name", "other", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["sweep"]["settings"]) == ("other", {"lr": "1e-3"})
    assert main(["runs", "-n", "1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
    assert main(["runs", "--state", "queued"]) == 0 and capsys.readouterr().out == "no such runs in runs\n"
    assert main(["runs", "--root", "nowhere"]) == 2
    assert "there is no directory 'nowhere'" in capsys.readouterr().err
    assert main(["runs", "show", "x7k2"]) == 2
    assert "'show' is not a verb of headway runs" in (said := capsys.readouterr().err)
    assert said.endswith("to see one run: headway watch RUN\n")


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    settings = (
        {"lr": 0.1, "model": {"depth": 2, "act": "gelu"}},
        {"lr": 0.2, "model": {"depth": 2, "act": "gelu"}, "x": [1]},
    )
    runs = [
        Run.create("runs", name=name, config=config)
        for name, config in zip(("one", "two"), settings, strict=True)
    ]
    for run, scale in zip(runs, (1.0, 2.0), strict=True):
        losses = [
            {"step": step, "metrics": {"val/loss": scale / step + (step > 2), "lr": 0.1}}
            for step in (1, 2, 3)
        ]
        metrics(run, *losses, {"step": 3, "metrics": {"val/accuracy": "nan"}})
    return runs


def test_side_by_side(pair: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    one, two = compare(pair)
    assert (one.settings, two.settings) == ({"lr": 0.1}, {"lr": 0.2, "x": [1]})
    loss = two.metrics["val/loss"]
    assert (loss.last, loss.best, loss.best_step) == (pytest.approx(5 / 3), 1.0, 2)
    assert one.metrics["val/accuracy"].last == "nan" and one.metrics["val/accuracy"].best is None
    assert list(one.metrics) == ["val/loss", "val/accuracy"], (
        "what cannot be better or worse is not shown unasked"
    )
    assert compare(pair, metrics=["max:val/loss", "lr"])[0].metrics["val/loss"].best == pytest.approx(4 / 3)
    assert main(["compare", pair[0].id, pair[1].id[-4:]]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["run", pair[0].id, pair[1].id] and out[1].split() == ["lr", "0.1", "0.2"]
    assert main(["compare", "runs/" + pair[0].id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["metrics"]["val/loss"]["best"] == 0.5
    assert main(["compare", pair[0].id, "--metric", "nope"]) == 2
    assert (
        "'nope' is not a valid metric of these runs; valid: val/loss, lr, val/accuracy"
        in capsys.readouterr().err
    )


def test_no_more_are_read_than_are_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root may hold thousands, on a slow file system."""
    runs = [run, *(Run.create(run.path.parent) for _ in range(2))]
    for each in runs:
        record_end(each, 0)
    read: list[Run] = []
    row = listing._summary
    monkeypatch.setattr(listing, "_summary", lambda each, *facts: read.append(each) or row(each, *facts))
    assert [found.run for found in listing.select(run.path.parent, most=1)] == [runs[-1]] == read
    assert len(listing.select(run.path.parent, states=["done"], most=2)) == 2


def test_the_best_is_a_number_and_validation_comes_first() -> None:
    values = [(1, math.nan), (2, 0.5), (3, math.inf), (4, -math.inf), (5, 0.25), (6, "nan")]
    assert [comparing._metric(values, better).best_step for better in ("min", "max")] == [5, 2]
    chosen = comparing._default_metrics([{"train/loss": [], "val/accuracy": [], "lr": [], "val/loss": []}])
    assert list(chosen.items()) == [("val/loss", "min"), ("val/accuracy", "max"), ("train/loss", "min")]


def test_metrics_that_are_not_compared_are_named(pair: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    metrics(pair[0], {"step": 1, "metrics": {"train/loss": 5.0, "train/d": 1.0, "train/g": 2.0}})
    assert main(["compare", *(str(run.path) for run in pair)]) == 0
    assert "; more with --metric NAME: train/d, train/g" in capsys.readouterr().out
    assert main(["compare", *(str(run.path) for run in pair), "--metric", "train/d"]) == 0
    assert "more with" not in capsys.readouterr().out


def test_steps_that_were_done_again_count_once(pair: list[Run]) -> None:
    rows = [{"step": 1, "metrics": {"loss": 5.0}}, {"step": 2, "metrics": {"loss": 0.1}}]
    metrics(pair[0], *rows, {"step": 2, "metrics": {"loss": 3.0}}, tail='7\n{"st\n{"step": 9')
    (one,) = compare(pair[:1])
    assert (one.metrics["loss"].last, one.metrics["loss"].best) == (3.0, 3.0)


def test_the_mean_of_an_epoch_does_not_replace_its_log_points(pair: list[Run]) -> None:
    losses = [(1, 0.5), (2, 0.2), (3, 0.4), (4, 0.3)]
    rows = [{"kind": "train", "step": step, "metrics": {"loss": loss}} for step, loss in losses]
    means = {
        step: {"kind": "epoch", "step": step, "metrics": {"loss": 0.35, "epoch/error": 0.1}}
        for step in (2, 4)
    }
    metrics(pair[0], *rows[:2], means[2], *rows[2:], means[4])
    (one,) = compare(pair[:1])
    loss = one.metrics["loss"]
    assert (loss.last, loss.best, loss.best_step, len(loss.curve)) == (0.3, 0.2, 2, 4)
    assert one.metrics["epoch/error"].last == 0.1, "what only epochs have is shown"


def test_a_sweep_stands_for_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    runs = [Run.create("runs", name="s", config={"seed": 1}) for _ in range(4)]
    settings = sweep.grid(["lr=1e-3,1e-4", "width=8,16"])
    sweep.join(runs, settings)
    for run in runs:
        metrics(run, {"step": 10, "metrics": {f"val/loss_{n}": 0.123456 for n in range(4)}})
    assert listing.resolve([runs[0].id]) == runs
    assert listing.resolve([runs[2].id, runs[2].id[-4:]]) == [runs[2]]
    assert listing.resolve(["s-"]) == runs
    with monkeypatch.context() as patch:
        patch.setattr(listing, "find_runs", lambda *_: runs[2:0:-1])
        with pytest.raises(UsageError, match="'s-' matches 2 runs"):
            listing.resolve(["s-"])  # a part of an id that only some of them have
    with pytest.raises(UsageError, match="'' matches no run"):
        listing.resolve([""])  # as `headway runs rm "$RUN" --yes` gives it where RUN is not set
    assert listing.resolve([runs[0].id, runs[2].id]) == [runs[0], runs[2]], "beside another it is itself"
    Run.create("runs", name="s")
    with pytest.raises(UsageError, match="'s-' matches 5 runs"):
        listing.resolve(["s-"])
    with pytest.raises(UsageError, match="'zz' matches no run"):
        listing.resolve(["zz"])
    assert main(["compare", runs[0].id]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "lr", "width", "state", "step", "time", "val/loss_0", "val/loss_1"]
    assert [line.split()[:3] for line in lines[1:5]] == [
        [run.id[-4:], each["lr"], each["width"]] for run, each in zip(runs, settings, strict=True)
    ]
    assert lines[5].endswith("not shown for lack of width: val/loss_2, val/loss_3")
    assert max(map(len, lines[:5])) <= 80


def test_a_link_in_another_directory_to_the_first_run_of_a_sweep_stands_for_its_runs(tmp_path: Path) -> None:
    runs = [Run.create(tmp_path / "runs", name="s") for _ in range(2)]
    sweep.join(runs, sweep.grid(["lr=1,2"]))
    link = tmp_path / "elsewhere" / "best"
    link.parent.mkdir()
    link.symlink_to(runs[0].path)
    assert listing.resolve([str(link)]) == runs
    assert [run.id for run in list_watched(str(link), "runs")] == [run.id for run in runs]


def test_squeue_and_sacct_in_their_own_words(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "squeue": "12|PENDING|Priority\n13_1|RUNNING|None\n",
        "sacct": "9|CANCELLED by 1000|None\n10|NODE_FAIL|None\n12|COMPLETED|\n",
    }.items():
        (tmp_path / name).write_text(
            f"#!/bin/sh\necho $* > {tmp_path}/{name}-was-asked\ncat <<'E'\n{text}E\n"
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    (tmp_path / "squeue").write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact' >&2; exit 1\n"
    )
    assert main(["runs", "--root", str(run.path.parent)]) == 0
    assert capsys.readouterr().err == "", "no run here is SLURM's"
    submitted(run, job_id="12")
    assert main(["runs", "--root", str(run.path.parent)]) == 0
    shown = capsys.readouterr()
    assert run.id in shown.out
    assert "Unable to contact; the states below are from the run directories alone" in shown.err


HUGE = 10**400
PROCESS = {"pid": 1, "host": "h", "machine": "m", "born": "1"}
HOSTILE_FILES: dict[str, list[object]] = {
    "submitted.json": [
        {"pid": 7},
        PROCESS | {"pid": HUGE, "machine": ProcessIdentity.of().machine},
        PROCESS | {"pid": "../x", "host": None},
        {"job_id": {}, "scheduler": ["x"], "cluster": {}, "array_task": []},
        {"job_id": HUGE, "scheduler": 7},
    ],
    "ended.json": [{}, {"time": HUGE, "exit_code": HUGE}, {"time": "9", "exit_code": []}, {"exit_code": 1}],
    "failure.json": [{"kind": [], "rank": HUGE, "step": HUGE, "error": {"a": 1}, "exit_code": {}}],
    "sweep.json": [
        {"sweep": HUGE, "index": HUGE, "size": 1, "settings": [1]},
        {"sweep": "a", "index": 0, "size": 1, "settings": 7},
        {"sweep": "a", "index": 0, "size": 1, "settings": {"lr": {"a": HUGE}}},
    ],
    "starts.jsonl": [
        {"time": HUGE, "event": "start"},
        {"time": 1e300, "event": "start", "output_before": HUGE},
    ],
    "metrics/rank-00000.jsonl": [
        {"kind": "train", "time": HUGE, "step": 3, "metrics": {"a": HUGE}},
        {"kind": "train", "time": 1e300, "step": HUGE, "metrics": [1]},
    ],
    "config.yaml": [
        f"lr: {':'.join(['1'] * 300)}.0",
        f"lr: 0x{'f' * 5000}",
        *("lr: !!timestamp x", "lr: !!int ''", "lr: !!bool x", "lr: !!float ''"),
    ],
}


@pytest.mark.parametrize("state", ["running", "done", "new"])
def test_no_file_of_one_run_ends_a_list_or_a_view(tmp_path: Path, state: str) -> None:
    victim = Run.create(tmp_path / "mine", name="mine")
    for name, contents in HOSTILE_FILES.items():
        for number, content in enumerate(contents):
            hostile = Run.create(tmp_path / f"{name.replace('/', '-')}{number}", name="x")
            if state != "new":
                hostile.begin_attempt(world={})
            if state == "done":
                hostile.end_attempt(1, status="done", exit_code=0)
            text = content if isinstance(content, str) else json.dumps(content)
            (hostile.path / name).parent.mkdir(exist_ok=True)
            (hostile.path / name).write_text(f"{text}\n")
            listed = listing.summarize([hostile, victim], heartbeat_wait_s=0)
            assert [each.run.id for each in listed][-1] == victim.id, (name, content)
            assert json.dumps([each.to_dict() for each in listed])
            RunView(hostile).refresh()
            rows = RunList(RunLibrary(runs=[hostile, victim])).rows()
            assert to_json(rows) and victim.id in [row["id"] for row in rows], (name, content)


@pytest.mark.parametrize(
    "facts",
    [
        {"created": "2026-11-15T10:00:00"},
        {"created": "2026-11-15"},
        {"code": ["x"]},
        {"code": "x"},
        {"code": {"commit": 7}},
    ],
)
def test_no_time_and_no_code_of_one_run_ends_a_list_or_a_comparison(
    run: Run, facts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another user, in a shared root: a time without a zone, and code that is no record of code."""
    theirs = Run.create(run.path.parent, name="theirs")
    write_info(theirs.path, theirs.info() | facts)
    for verb in (["runs"], ["compare", run.id, theirs.id]):
        assert main([*verb, "--root", str(run.path.parent)]) == 0
        shown = capsys.readouterr().out
        assert run.id in shown and theirs.id in shown
    rows = RunList(RunLibrary(runs=[run, theirs])).rows()
    assert {row["id"] for row in rows} == {run.id, theirs.id} and to_json(rows)


def test_a_damaged_run_is_not_left_out_of_a_comparison(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Run.create(run.path.parent, name="broken")
    write_info(broken.path, broken.info() | {"created": "yesterday"})
    for places in ([run.id, broken.id], [broken.id]):
        assert main(["compare", *places, "--root", str(run.path.parent)]) == 2
        said = capsys.readouterr().err
        assert str(broken.path) in said and "its files are damaged" in said and said.count("\n") == 1


def test_a_config_file_of_any_size_is_read_quickly(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr("yaml.safe_load", lambda text: given.append(len(text)))
    run.config_file.write_text("".join(f"k{j}: [1, 2, {{a: b}}]\n" for j in range(40_000)))
    comparing.settings_of(run, None)
    assert sum(given) <= 1 << 16


def test_a_long_config_file_is_cut_between_settings_and_says_so(run: Run) -> None:
    text = "x" * 90
    run.config_file.write_text("".join(f"key{j}:\n  list:\n  - 7\n  text: {text}\n" for j in range(1000)))
    found = comparing.settings_of(run, None)
    cut = found.pop("(settings)")
    assert cut == f"too long: only its first {len(found)} settings are compared"
    assert 500 < len(found) < 2000 and all(value in ([7], text) for value in found.values())
    assert len([name for name in found if name.endswith(".text")]) == len(found) / 2
    other = Run.create(run.path.parent, name="digits")
    other.config_file.write_bytes(run.config_file.read_bytes())
    assert all("(settings)" in each.settings for each in compare([run, other])), "also if they agree"
    assert "(settings)" not in comparing.settings_of(Run.create(run.path.parent, config={"lr": 1}), None)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        (
            [{"commit": "3f2a91c04bff"}, {"commit": "3f2a91c04bff", "untracked": ["a", "b"]}],
            "the same commit and uncommitted changes\nuntracked files of {other} are not compared: a, b",
        ),
        ([{"commit": "3f2a91c04bff"}] * 2, "the same commit and uncommitted changes"),
        (
            [{"commit": "3f2a91c04bff"}, {"commit": None, "note": "not a git repository"}],
            "the code of {other} was not recorded: not a git repository",
        ),
        ([{"commit": None}] * 2, "the code of {one} was not recorded\nthe code of {other} was not recorded"),
        (
            [
                {"commit": "3f2a91c04bff", "dirty": True, "note": "git diff took longer than 10 s"},
                {"commit": "3f2a91c04bff"},
            ],
            "the code of {one} was recorded only in part: git diff took longer than 10 s",
        ),
        (
            [{"commit": "3f2a91c04bff"}, {"commit": "3f2a91c04bff", "diff": "code/uncommitted.diff"}],
            "the uncommitted changes of {other} are missing in its directory",
        ),
    ],
)
def test_code_that_was_not_recorded_is_not_called_the_same(
    run: Run, codes: list[dict[str, Any]], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Run.create(run.path.parent, name="digits")
    for each, code in zip((run, other), codes, strict=True):
        write_info(each.path, each.info() | {"code": code})
        each.diff_file.unlink(missing_ok=True)
    places = [str(run.path), str(other.path)]
    assert main(["compare", *places, "--code"]) == 0
    assert capsys.readouterr().out == expected.format(one=run.id, other=other.id) + "\n"
    assert main(["compare", *places, "--code", "--json"]) == 0
    same = True if expected == "the same commit and uncommitted changes" else None
    assert json.loads(capsys.readouterr().out)["same"] is same


def test_code_before_the_first_commit_is_compared_by_what_was_staged(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Run.create(run.path.parent, name="digits")
    note = "no commit yet: the diff holds what is staged"
    for each, rate in ((run, 1), (other, 2)):
        write_info(each.path, each.info() | {"code": {"commit": None, "dirty": True, "note": note}})
        each.diff_file.parent.mkdir(exist_ok=True)
        each.diff_file.write_text(f"+lr = {rate}\n")
    assert main(["compare", str(run.path), str(other.path), "--code"]) == 0
    said = capsys.readouterr().out
    assert "-+lr = 1\n++lr = 2\n" in said and said.count(note) == 2 and "commits differ" not in said
