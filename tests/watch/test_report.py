"""The report of a run: complete in one file, true to the rows, and harmless whatever the run is called."""

from __future__ import annotations

import json
import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import make_run, row, write_rows

from headway import record
from headway.cli import main
from headway.cli.report import time_table
from headway.cli.screen import safe
from headway.record import attempt
from headway.run import Run
from headway.watch.report import account, figures, render
from headway.watch.report.accounting import RepeatedSteps, TimeAccount, count_repeated
from headway.watch.runs import timestamp
from headway.watch.view import RunView
from headway.watch.view.metric_rows import StepRange
from headway.watch.view.series import Series, smoothed, sparkline

VOID = {"meta", "br", "circle", "line", "polyline"}


class Page(HTMLParser):
    """Checks that tags are closed, and collects their names, their attributes and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def done(tmp_path: Path, **settings: Any) -> Run:
    run = make_run(tmp_path, **settings)
    run.end_attempt(1, status="done", exit_code=0)
    return run


def test_one_file_has_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = done(tmp_path, ranks=16, slow_rank=3, log_points=100)
    validation = {"kind": "validation", "metrics": {"val/loss": 0.25, "val/accuracy": 0.9}}
    with run.metrics_file(0).open("a") as file:
        file.write(json.dumps(row(1000, 0, time.time()) | validation) + "\n")
    with run.metrics_file(1).open("a") as file:
        file.write(json.dumps(row(1000, 1, time.time()) | {"memory_peak": 40 * 10**9}) + "\n")
    run.plan_file.write_text(
        json.dumps({"answers": {"time.step": {"value": 0.08}, "memory.allocated": {"value": 32e9}}})
    )
    assert main(["report", str(run.path), "--price", "2"]) == 0
    assert capsys.readouterr().out.strip() == str(run.report_file)
    page = Page(run.report_file.read_text())
    for expected in (
        r"done after 1,000 steps in 1m\d\ds; best val/loss 0.25 at step 1,000; best val/accuracy 0.9",
        r"train/loss 2\.81 *val/loss 0\.25",
        r"trainingforward, backward and optimizer steps that count1m\d\ds\d\d",
        r"seconds per step0\.08 s0\.1 s125%",
        r"memory, allocated32\.0 GB40\.0 GB125%",
        r"3 straggler2\.00x",
        r"lr: 0\.1\nmodel:\n  depth: 12",
        r"the learning rate is high",
        r"0\.4\dGPU-hours.*0\.\d\dcost",
    ):
        assert re.search(expected, page.text, re.S), expected
    assert not {"script", "link", "img", "iframe", "a"} & set(page.tags), "nothing from outside"
    assert not [value for _, value in page.attributes if value and "//" in value]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_where_the_time_went_is_also_printed(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 log points, each with 0.2 s of data, 0.78 of training and 0.02 of waiting, in 25 seconds."""
    monkeypatch.setenv("COLUMNS", str(columns))
    run = done(tmp_path)
    assert main(["report", str(run.path), "--times"]) == 0
    *lines, path = capsys.readouterr().out.splitlines()
    assert path == str(run.report_file)
    parts = {line.split()[0]: " ".join(line.split()) for line in lines if line[0] != " "}
    assert list(parts) == ["training", "data", "ranks", "rest", "total"]
    for name, seconds in (("training", 15.6), ("data", 4.0), ("ranks", 0.4)):
        assert parts[name].startswith(f"{name} {seconds:.1f} s")
    assert "█ forward, backward" in parts["training"]


def test_hostile_names_are_text(tmp_path: Path) -> None:
    run = done(tmp_path)
    evil = "<script>alert(1)</script>"
    rows = [
        row(10, 0, time.time())
        | {"stage": evil, "host": evil, "metrics": {f"{evil}/loss": 1.0, "'\"><b>": 2.0}}
    ]
    write_rows(run.metrics_file(0), rows)
    write_rows(run.events_file(0), [{"time": time.time(), "kind": evil, "text": evil, "rank": 0}])
    info = run.info()
    info |= {"command": ["python", evil], "code": {"commit": evil, "branch": evil, "dirty": True}}
    info["attempts"][0] |= {"host": evil, "step_started": evil, "step_ended": evil}
    run.info_file.write_text(json.dumps(info))
    run.config_file.write_text(f"name: {evil}\x1b[31m\n")
    (run.code_dir / "uncommitted.diff").write_text(f"+{evil}\n")
    page = Page(render(run))
    assert "script" not in page.tags and "b>" not in page.tags and evil in page.text
    assert "\x1b" not in page.text


def test_names_that_no_terminal_can_encode_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [done(tmp_path / name) for name in "ab"]
    for number, run in enumerate(runs):
        rows = [row(10, 0, time.time()) | {"metrics": {"loss\ud800": 1.0, "loss\x1b[2J": 2.0}}]
        write_rows(run.metrics_file(0), rows)
        run.config_file.write_text(f'lr: "\\ud800{number}"\n')
    assert main(["compare", *(str(run.path) for run in runs)]) == 0
    shown = capsys.readouterr().out
    shown.encode()
    assert "loss\\ud800" in shown and "\x1b[2J" not in shown
    assert main(["report", str(runs[0].path)]) == 0


def test_a_failure_is_at_the_top(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.end_attempt(1, status="failed", exit_code=1)
    run.write_failure(
        {"rank": 1, "host": "cn7", "step": 41, "error": "ValueError: hot", "traceback": "Traceback\n  x"}
    )
    run.log_file(1).write_text("the last words\n")
    text = Page(render(run)).text
    assert text.index("rank 1 at step 41: ValueError: hot") < text.index("rank 1, host cn7, step 41")
    assert text.index("the last words") < text.index("Curves")


def test_the_account_adds_up_and_restarts_cost(tmp_path: Path) -> None:
    run = make_run(tmp_path, log_points=100)
    info = run.info()
    begin = time.time() - 400
    stamp = lambda at: time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(at))  # noqa: E731
    first = info["attempts"][0] | {"started": stamp(begin), "ended": stamp(begin + 150), "status": "failed"}
    second = first | {
        "number": 2,
        "started": stamp(begin + 250),
        "ended": stamp(begin + 350),
        "status": "done",
    }
    run.info_file.write_text(json.dumps(info | {"attempts": [first, second]}))
    rows = [row(10 * n, 0, begin + n) for n in range(1, 101)]
    rows += [row(10 * n, 0, begin + 250 + n - 80) for n in range(81, 131)]
    write_rows(run.metrics_file(0), rows)
    view = RunView(run, thorough=True)
    times = account(view, view.refresh())
    assert times.total_s == pytest.approx(250) and times.between_s == pytest.approx(100)
    assert sum(times.parts.values()) == pytest.approx(250)
    assert times.repeated.count == pytest.approx(200, abs=10), "steps 801 to 1,000 came twice"
    assert not times.repeated.is_exact, "log points do not say where an attempt begins and ends"
    assert times.parts["repeated"] == pytest.approx(200 * 0.078, rel=0.1), "0.78 s of ten steps is training"
    assert times.parts["data"] == pytest.approx(30), "150 log points with 0.2 s each"
    assert times.goodput == pytest.approx((150 * 0.78 - 200 * 0.078) / 250, rel=0.05)
    assert times.rank_hours == pytest.approx(250 * 2 / 3600)


# each attempt: its first and last step in run.json, and the steps of its log points
@pytest.mark.parametrize(
    ("attempts", "repeated"),
    [
        pytest.param([(0, 25, (10, 20)), (10, 40, (20, 30, 40))], "15 steps repeated", id="recorded"),
        pytest.param([(0, None, (10, 20)), (10, 40, (20, 30))], "at least 10 steps repeated", id="killed"),
        pytest.param([(0, 20, (10, 20)), (20, 40, (30, 40))], "0 steps repeated", id="stopped"),
        pytest.param(
            [(0, 25, (10, 20)), (10, 18, ()), (10, 30, (30,))], "23 steps repeated", id="repeated twice"
        ),
        pytest.param([(0, 25, ()), (None, None, ()), (20, None, (30,))], "5 steps repeated", id="no step"),
        pytest.param([(0, 25, ()), (20, None, ())], "at least 0 steps repeated", id="no log point yet"),
        pytest.param([(0, None, ()), (0, None, (10,))], "at least 0 steps repeated", id="nothing known"),
    ],
)
def test_repeated_steps_are_counted_exactly_or_at_least(
    attempts: list[tuple[int | None, int | None, tuple[int, ...]]], repeated: str
) -> None:
    facts: list[dict[str, Any]] = []
    ranges: list[StepRange] = []
    for number, (first, last, points) in enumerate(attempts):
        steps = {"step_started": first, "step_ended": last}
        facts.append({"started": f"2026-11-15T{number:02}:00:00+00:00"})
        facts[-1] |= {name: step for name, step in steps.items() if step is not None}
        begin = timestamp(facts[-1]["started"])
        for point in points:
            if ranges and point > ranges[-1].last_step:
                ranges[-1] = ranges[-1]._replace(last_step=point, last_time=begin + point)
            else:
                ranges.append(StepRange(point, begin + point, point, begin + point))
    assert str(count_repeated(facts, ranges)) == repeated


def test_a_long_run_writes_its_report_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway import dist

    written: list[Run] = []
    write = attempt.run_report_command
    monkeypatch.setattr(attempt, "run_report_command", written.append)
    run = Run.create(tmp_path, name="digits")
    try:
        world = dist.init(device="cpu")
        with record.recording(run, world):
            pass
        assert written == [], "a short one does not"
        monkeypatch.setattr(attempt, "_REPORT_AFTER_S", 0.0)
        with pytest.raises(ValueError), record.recording(run, world):
            raise ValueError
        assert written == [], "the exit of one that fails is not delayed"
        with record.recording(run, world):
            pass
    finally:
        dist.leave()
    assert [each.path for each in written] == [run.path]
    write(run)
    assert "done without a step" in Page(run.report_file.read_text()).text


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import sys; sys.exit('one line\\nheadway: the disk is full')", "the disk is full"),
        ("raise SystemExit(3)", "the command ended with 3"),
    ],
)
def test_why_no_report_was_written_is_said_in_its_own_words(
    program: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(attempt.logger, "warning", lambda text, *parts: told.append(text % parts))
    monkeypatch.setattr(attempt, "module_command", lambda *_: [sys.executable, "-c", program])
    run = Run.create(tmp_path, name="digits")
    attempt.run_report_command(run)
    assert told == [f"no report was written: {why}; to write it: headway report {run.path}"]


def test_a_loss_that_ended_as_nan_is_not_shown_as_its_last_finite_value(tmp_path: Path) -> None:
    run = make_run(tmp_path, log_points=3)
    names = ("train/loss", "val/loss", "constraint/loss")
    with run.metrics_file(0).open("a") as file:
        for step, values in ((40, (0.5, "nan", 0.25)), (50, ("nan", "inf", 0.75)), (60, ("nan", "nan", 0.5))):
            metrics = dict(zip(names, values, strict=True))
            file.write(json.dumps(row(step, 0, time.time()) | {"metrics": metrics}) + "\n")
    run.end_attempt(1, status="done", exit_code=0)
    page = Page(render(run))
    assert re.search(r"train/loss nan 2 not finite *val/loss nan 3 not finite", page.text)
    assert "best constraint/loss 0.25 at step 40" in page.text and "best val/loss" not in page.text
    only = Series()
    only.add(1, 0.0, float("nan"))
    assert "<svg" not in figures.curves({"gap": only}) and "1 not finite" in figures.curves({"gap": only})


def test_times_say_in_which_zone_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = done(tmp_path)
    monkeypatch.setenv("TZ", "XYZ-9")
    time.tzset()
    try:
        text = Page(render(run)).text
    finally:
        monkeypatch.undo()
        time.tzset()
    assert len(re.findall(r"\d\d:\d\d:\d\d XYZ", text)) == 2, "when it began, and when this was written"


def test_averages_are_of_noise_alone_and_do_not_lag() -> None:
    rate, loss = Series(), Series()
    for step in range(10, 510, 10):
        rate.add(step, 0.0, 1e-3 * 0.5 ** (step // 100))
        loss.add(step, 0.0, 2.0 - step / 500 + 0.02 * (-1) ** (step // 10))
    stairs = figures.curves({"lr": rate})
    assert stairs.count("<polyline") == 1 and "moving average" not in stairs, "a staircase stays one"
    both = figures.curves({"train/loss": loss})
    assert both.count("<polyline") == 2 and "bold: moving average" in both
    average = smoothed(loss.steps, loss.means)
    assert max(abs(mean - (2.0 - step / 500)) for step, mean in zip(loss.steps, average, strict=True)) < 0.04
    assert smoothed([5], [1.0]) == [1.0]


def test_comparing_shows_curves_and_how_the_code_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [done(tmp_path), done(tmp_path)]
    for run, commit in zip(runs, ("3f2a91c04bff", "77ab01d2e9ff"), strict=True):
        run.info_file.write_text(
            json.dumps(run.info() | {"code": {"commit": commit, "dirty": commit[0] == "3"}})
        )
    (runs[0].code_dir / "uncommitted.diff").write_text("-lr = 1\n+lr = 2\x1b[31m\n")
    places = [str(run.path) for run in runs]
    assert main(["compare", *places]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"code +3f2a91c04b\* +77ab01d2e9", shown) and re.search(r"train/loss curve +█", shown)
    assert main(["compare", *places, "--code"]) == 0
    shown = capsys.readouterr().out
    assert (
        shown.startswith("commits differ: git diff 3f2a91c04b 77ab01d2e9\n") and "-+lr = 2\\x1b[31m" in shown
    )
    assert main(["compare", *places, "--code", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is False and [safe(each) for each in found["diff"]] == shown.splitlines()
    assert main(["compare", places[0], places[0], "--code"]) == 0, "its attempts"


def test_times_of_a_run_whose_attempts_took_no_time_are_printed() -> None:
    """Its clock was set back: rows of rank 0 have seconds, the attempt has none."""
    never = RepeatedSteps(count=0, made=0, is_exact=True)
    parts = {"training": 1.0, "data": 0.5}
    table = time_table(TimeAccount(parts=parts, total_s=0.0, between_s=0.0, repeated=never, rank_hours=0.0))
    assert table.row_count == 1


@pytest.mark.parametrize("values", [[0.0, 1e-310], [-1e-310, 0.0], [1e290, -1e290], [0.0, 0.0]])
def test_curves_of_extreme_values_are_drawn(values: list[float]) -> None:
    line = sparkline(Series(steps=[0, 1], means=values), 2)
    assert len(line) == 2 and (line[0] < line[1]) == (values[0] < values[1])


def test_without_a_name_it_is_that_of_the_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert "there is no run in runs; start one: headway run train.py" in capsys.readouterr().err
    made = [done(Path("runs")), done(Path("runs"))]
    newest = max(made, key=lambda run: str(run.info()["created"]))
    assert main(["report"]) == 0
    assert capsys.readouterr().out.strip() == str(newest.path / "report.html")
