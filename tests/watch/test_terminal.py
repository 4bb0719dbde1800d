"""The screen of a run: at any size, through a real terminal, and as lines in a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from synthetic_run import make_run, row, write_rows

from headway import schedulers
from headway.cli import main, watch as verb
from headway.run import Run, runs_under
from headway.run.lock import Owner
from headway.watch.terminal import Selection, charts, follow, layout
from headway.watch.terminal.live import Watcher, read_keys
from headway.watch.view import RunView, Snapshot
from headway.watch.view.series import Series


def text_of(run: Run, width: int, height: int, chosen: Selection | None = None) -> list[str]:
    return [line.plain for line in layout(RunView(run).refresh(), width, height, chosen)]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (60, 15), (20, 5), (500, 200)])
def test_every_size_is_filled_and_none_is_exceeded(tmp_path: Path, width: int, height: int) -> None:
    run = make_run(tmp_path, ranks=64, slow_rank=13)
    with run.lock():
        lines = text_of(run, width, height)
    assert len(lines) == height and max(map(len, lines)) <= width
    assert lines[-1].startswith("q quit")


def test_the_blocks_are_there_at_80_by_24(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=64, slow_rank=13)
    run.checkpoint_dir(100).mkdir(parents=True)
    with run.lock():
        shown = "\n".join(text_of(run, 80, 24))
    for expected in (
        r"synthetic-.* RUNNING",
        r"step 200 of 400 ━+─+ +50%  ETA 2\ds? · elapsed",
        r"epoch 1 of 4 · attempt 1 · 8 nodes x 8 cuda",
        r"learning  train/loss +\d\.\d+ +█",
        r"speed     4,096 samples/s \(64 per rank\)  step 100\.0 ms",
        r"▓ forward\+backward 70%  █ data wait 20%",
        r"data      train of rank 0: cache hits 90%, 3 bad",
        r"safety    saved step 100, 1m3\ds ago \(4\.2 GB in 12\.5 s\) · at risk",
        r"devices   64 GPUs: 97% busy, up to 64 °C, 41,600 W",
        r"\(slowest of 64\)\n +13 +2\.00x +33% +71\.0 GB +97% +64 +cn001  straggler",
        r"messages  .*warning the learning rate is high",
    ):
        assert re.search(expected, shown), f"{expected}\n{shown}"


def test_a_tall_screen_has_no_empty_lines_while_ranks_are_hidden(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=16)
    with run.lock():
        shown = text_of(run, 200, 50)
    assert sum(bool(re.search(r"\bcn00[01]$", line.rstrip())) for line in shown) == 16, shown


def test_a_failure_is_pinned_with_its_traceback(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.end_attempt(1, status="failed", exit_code=1)
    record = {"rank": 3, "host": "cn7", "step": 41, "error": "ValueError: \x1b[31mtoo hot"}
    run.write_failure(record | {"traceback": 'Traceback:\n  File "x.py", line 3\nValueError: too hot\n'})
    lines = text_of(run, 80, 24)
    assert lines[0].endswith("FAILED") and "rank 3 at step 41: ValueError: too hot" in lines[3]
    assert "ValueError: too hot" in lines[6] and not any("\x1b" in line for line in lines)


def test_what_is_said_again_is_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    again = [
        {"time": 1.0 + n, "kind": "straggler", "rank": 0, "text": f"rank 1 takes {n}.5 s"} for n in range(7)
    ]
    write_rows(run.events_file(0), again)
    (line,) = [line for line in text_of(run, 80, 24) if "straggler" in line and "rank 1" in line]
    assert line.endswith("straggler x7 rank 1 takes 6.5 s")


def test_keys_choose_run_curve_and_rank(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, ranks=4, slow_rank=2), make_run(tmp_path)]
    runs[0].log_file(2).write_text("epoch 1\n\x1b[2J  loss \x1b]0;x\x070.5\n")
    watcher = Watcher(runs)
    assert not watcher.press("c") and watcher.chosen.curve == 1
    watcher.press("down")
    assert watcher.chosen.rank == 2, "the slowest is first"
    shown = [line.plain for line in layout(watcher.snapshot, 80, 24, watcher.chosen)]
    assert any(line.startswith("log 2     epoch 1") for line in shown) and any(
        "  loss 0.5" in line for line in shown
    )
    watcher.press("m")
    assert watcher.chosen.rank is None
    assert watcher.press("n") and watcher.chosen.run == (2, 2)
    watcher.refresh()
    assert watcher.snapshot.header.path == str(runs[1].path)
    assert watcher.press("n") and watcher.chosen.run == (1, 2)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_the_real_terminal_is_filled_and_restored(tmp_path: Path, width: int, height: int) -> None:
    run = make_run(tmp_path, ranks=64)
    started = tmp_path / "started"
    pid, fd = pty.fork()
    if pid == 0:
        while not started.exists():  # the terminal has its size before anything is drawn
            time.sleep(0.01)
        command = [sys.executable, "-m", "headway", "watch", str(run.path)]
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        os.execve(sys.executable, command, {**kept, "TERM": "xterm-256color", "NO_COLOR": "1"})
    termios.tcsetwinsize(fd, (height, width))
    started.touch()
    shown, typed = "", False
    deadline = time.monotonic() + 60
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            shown += os.read(fd, 65536).decode("utf-8", "replace")
        except OSError:  # Linux says EIO when the last writer is gone
            break
        if "q quit" in shown and not typed:
            typed = os.write(fd, b"q") == 1
    os.close(fd)
    assert os.waitpid(pid, 0)[1] == 0, shown
    assert shown.startswith("\x1b[?1049h") and shown.rstrip().endswith("\x1b[?25h\x1b[?1049l"), (
        "the screen before is back"
    )
    assert run.id in shown and "train/loss" in shown
    first = next(frame for frame in shown.split("\x1b[H") if "q quit" in frame).partition("\x1b[?25h")[0]
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip("\r") for line in first.split("\n")]
    assert len(lines) == height and 0.9 * width < max(map(len, lines)) <= width, lines
    colors = set(re.findall(r"\x1b\[([0-9;]*)m", shown))
    assert not any(re.search(r"(^|;)(3\d|9\d)", code) for code in colors), "NO_COLOR"


def test_a_pipe_gets_lines_until_the_run_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    run.checkpoint_dir(100).mkdir(parents=True)
    run.end_attempt(1, status="done", exit_code=0)
    assert main(["watch", str(run.path)]) == 0
    warning, line = capsys.readouterr().out.splitlines()
    assert "warning: the learning rate is high" in warning
    assert re.search(
        r"done, step 200 of 400 \(50%\), train/loss 2\.96, .*4,096 samples/s, saved 1m3\ds ago", line
    )
    assert main(["watch", "--root", str(tmp_path), "--once"]) == 0
    assert run.id in capsys.readouterr().out
    assert main(["watch", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["header"]["id"] == run.id and len(found["curves"]["train/loss"]["steps"]) == 20


def test_json_has_no_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    with run.metrics_file(0).open("a") as rows:
        rows.write(json.dumps(row(210, 0, time.time()) | {"metrics": {"train/loss": "nan"}}) + "\n")
    assert main(["watch", str(run.path), "--json"]) == 0
    found = json.loads(
        capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON")
    )
    assert found["curves"]["train/loss"]["last"] == "nan"


def test_a_run_that_was_killed_is_not_shown_before_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> str:
        assert main(["watch", str(tmp_path), "--json"]) == 0
        return str(json.loads(capsys.readouterr().out)["header"]["id"])

    for _ in range(2):
        make_run(tmp_path)
    newest, killed = runs_under(tmp_path)
    newest.end_attempt(1, status="done", exit_code=0)
    assert killed.info()["attempts"][-1]["status"] == "running"
    assert shown() == newest.id
    with killed.lock():  # it runs
        assert shown() == killed.id


def test_the_first_screen_waits_neither_for_a_scheduler_nor_for_a_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of this machine come first, then those that may run on others."""
    for _ in range(3):
        make_run(tmp_path)
    over, elsewhere, here = runs_under(tmp_path)
    over.end_attempt(1, status="done", exit_code=0)
    owner = Owner(host="n7", machine="another", pid=1, born="5", attempt=1, job=None, beat=3)
    elsewhere.lock_dir.mkdir(exist_ok=True)
    (elsewhere.lock_dir / "owner-00001.json").write_bytes(owner.record())
    elsewhere.submission_file.write_text(json.dumps({"scheduler": "slurm", "job_id": "7"}))

    def wait(*_: object) -> None:
        raise AssertionError("the first screen waits")

    monkeypatch.setattr(schedulers, "queue", wait)
    monkeypatch.setattr(time, "sleep", wait)
    with here.lock():
        assert verb._running_first([over, elsewhere, here]) == [here, elsewhere, over]


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--root", str(tmp_path / "none")]) == 2
    assert main(["watch", str(tmp_path)]) == 2
    assert main(["watch", "x7k2", "--root", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_labels_of_a_curve_do_not_shift_its_rows() -> None:
    rates = Series(steps=[0, 1, 2], means=[0.0007053, -0.00001234, 0.0001])
    lines = charts.curve(rates, 30, 4)
    assert {line.index("┤") for line in lines} == {8} and lines[0].startswith("0.00071")


def test_keys_that_come_together_are_all_keys() -> None:
    """One that is held down, or a slow connection."""
    reading, writing = os.pipe()
    for typed, keys in (
        (b"\x1b[B\x1b[B\x1b[Aq", ["down", "down", "up", "q"]),
        (b"jj\x1b", ["j", "j", "m"]),
        (b"\x1b[5~n\x1bq\x1bOP", ["\x1b[5~", "n", "\x1bq", "\x1bOP"]),
    ):
        os.write(writing, typed)
        assert read_keys(reading, 60) == keys
    os.close(writing)
    assert read_keys(reading, 60) == ["q"], "the terminal is gone"
    os.close(reading)


def test_a_pipe_gets_every_message_whatever_the_clocks_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    run.end_attempt(1, status="done", exit_code=0)
    said = [("first", 5.0), ("at the same time", 5.0), ("a clock that was set back", 3.0)]
    write_rows(
        run.events_file(0),
        [{"time": 1e9 + at, "kind": "warning", "rank": 0, "text": text} for text, at in said],
    )
    assert main(["watch", str(run.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("warning: ")[2] for line in lines[:-1]] == [text for text, _ in said]


def test_a_loss_that_is_not_finite_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, log_points=1)
    with run.metrics_file(0).open("a") as file:
        file.write(json.dumps(row(20, 0, time.time()) | {"metrics": {"train/loss": "nan"}}) + "\n")
    run.end_attempt(1, status="done", exit_code=0)
    assert main(["watch", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["curves"]["train/loss"]["last"] == "nan"


def test_a_pipe_ends_with_a_run_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path, name="waits", config={})
    # without its run.json, it may be that this is replaced
    looks = iter([run.info_file.unlink, lambda: shutil.rmtree(run.path)])
    monkeypatch.setattr("headway.watch.terminal.lines.time", SimpleNamespace(sleep=lambda _: next(looks)()))
    assert main(["watch", str(run.path)]) == 2
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2 and f"{run.path} is gone: the run was removed or moved" in said.err
    assert not list(looks)


def test_a_pipe_does_not_end_with_a_run_that_looks_lost_for_a_moment(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    real = RunView(run).refresh()
    states = ["running", "lost", "lost", "running", "lost", "lost", "lost", "running"]

    class Stalls:
        """A run on another machine, seen through a file system that stalls."""

        def refresh(self) -> Snapshot:
            state = states.pop(0)
            return replace(real, header=replace(real.header, state=state, is_certain=state != "lost"))

    lines: list[str] = []
    assert follow(Stalls(), lines.append, every_s=0).header.state == "lost"  # type: ignore[arg-type]
    assert states == ["running"], "it is lost at the third look in a row"
