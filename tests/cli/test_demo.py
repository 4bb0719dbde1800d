"""`headway demo`: every command that it prints runs, the resumed run equals the other one, and failures are told."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import warm
from rich.console import Console

from headway.cli import main
from headway.demo.shell import Shell
from headway.demo.tour import FULL, QUICK
from headway.errors import HeadwayError
from headway.run import Run, runs_under


def losses(run: Run) -> dict[int, str]:
    """The loss of each step to the last bit, as the last attempt that made it wrote it."""
    rows = map(json.loads, run.ledger_file.read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


def test_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_RUN", "/nowhere")  # of the terminal, and none of the demo's business
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    assert main(["demo", "--quick"]) == 0, capfd.readouterr().err
    out, err = capfd.readouterr()
    assert [path.name for path in tmp_path.iterdir()] == ["headway-demo"]
    runs = runs_under(tmp_path / "headway-demo" / "runs")
    whole, killed = sorted(runs, key=lambda run: len(run.info()["attempts"]))
    run = f"headway run --nproc 2 train.py {QUICK.options}"
    assert [line[2:] for line in out.splitlines() if line.startswith("$ ")] == [
        "cd headway-demo",
        f"python draw.py pictures --each {QUICK.each}",
        "headway data pack pictures/train shards/train",
        "headway data pack pictures/val shards/val",
        "headway plan module train.py:make_net --loss cross_entropy --precision fp32 --batch-size 8",
        f"HEADWAY_FAILPOINT=train.step:rank=1:nth={QUICK.kill_step}:kill9 {run}",
        run,
        run,
        f"headway compare {killed.id[-4:]} {whole.id[-4:]} --exact",
        f"headway report {killed.id[-4:]} --times",
    ]
    assert "fits: needs" in out and "the same to the last bit: losses, samples" in out
    assert str(killed.report_file) in out.splitlines() and killed.report_file.exists()
    first, last = killed.info()["attempts"]
    assert first["status"] != "done" and last["status"] == "done" and "was killed by SIGKILL" in err
    assert last["step_started"] in (0, 6), (
        "whether a save in the background is complete at the kill depends on timing"
    )
    assert len(whole.info()["attempts"]) == 1
    assert losses(killed) == losses(whole) and len(losses(whole)) == 12


def test_the_rank_is_killed_half_way_and_within_an_epoch() -> None:
    for size in (FULL, QUICK):
        steps_per_epoch = size.each * 6 / size.batch
        done, part = divmod(size.kill_step / steps_per_epoch, 1)
        assert done == size.epochs // 2 and 0.3 < part < 0.7


def test_a_step_that_fails_ends_the_tour(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shell = Shell(tmp_path, Console(width=200))
    with pytest.raises(
        HeadwayError, match=r"`python -c .*` ended with exit code 3: .* its files are in"
    ) as failed:
        shell.type("python -c 'raise SystemExit(3)'")
    assert failed.value.exit_code == 1
    shell.type("python -c 'raise SystemExit(3)'", fails=True)
    with pytest.raises(HeadwayError, match="exit code 0, though a rank was to be killed"):
        shell.type("python -c pass", fails=True)
    assert capfd.readouterr().out.count("$ python -c") == 3


def test_a_directory_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").touch()
    assert main(["demo", str(tmp_path)]) == 2
    assert main(["demo", str(tmp_path / "mine.txt" / "demo")]) == 2
    assert [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()] == [
        f"{tmp_path} is not empty: give the demo a directory of its own",
        f"{tmp_path}/mine.txt/demo cannot be made: Not a directory; give another directory",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
