"""The examples resume exactly: killed with SIGKILL and started again with the same command, as a user would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from PIL import Image

from headway.cli import main
from headway.record import ledger
from headway.run import Run
from headway.testing import faults, verify_resume
from headway.testing.verify import compare, last_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
FULL = os.environ.get("HEADWAY_FAULTS") == "full"


@pytest.fixture(autouse=True)
def quick_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    monkeypatch.setenv("HEADWAY_LEDGER", "1")
    monkeypatch.setenv("HEADWAY_SAVE_IN_BACKGROUND", "0")


@dataclass
class Trial:
    """Starts one script, again and again: in this process where one rank is enough, which imports nothing again."""

    play: Any
    script: str
    words: Sequence[str]

    def start(self, run: Run, *, nproc: int, kill_at: int | None = None) -> None:
        fault = None if kill_at is None else faults.at("train.step", nth=kill_at, action="kill9")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HEADWAY_RUN", str(run.path))
            if nproc == 1 and fault is None and not FULL:  # a real process may compute on more cores
                self.play(self.script, *self.words)
            else:
                done = faults.run(EXAMPLES / self.script, self.words, nproc=nproc, fault=fault, timeout=250)
                assert (done.returncode == 0) == (fault is None), done.stdout + done.stderr


def check_resume(
    play: Any,
    script: str,
    *words: str,
    kill_at: int,
    every: int,
    nproc: int = 1,
    other_nproc: int | None = None,
) -> Run:
    """Compares a run with one that is killed; returns the one that is not. `make faults` kills at more points."""
    if FULL:
        report = verify_resume(EXAMPLES / script, words, nproc=2, other_nproc=other_nproc and 1)
        assert report.ok, report.table()
    trial = Trial(play, script, words)
    whole, cut = (Run.create("kept", name=name, world={}) for name in ("whole", "cut"))
    trial.start(whole, nproc=nproc)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_SAVE_EVERY", f"{every} steps")
        trial.start(cut, nproc=nproc, kill_at=kill_at)
        if other_nproc is not None:
            other = Run(path=cut.path.with_name("other"), id=cut.id, name=cut.name)
            shutil.copytree(cut.path, other.path)
            trial.start(other, nproc=other_nproc)
            assert compare(ledger.load(whole), ledger.load(other), same_ranks=False)[0]
        trial.start(cut, nproc=nproc)
    same, difference = compare(ledger.load(whole), ledger.load(cut), same_ranks=True)
    assert same, difference
    assert last_checkpoint(whole) == last_checkpoint(cut)
    assert 0 < cut.info()["attempts"][-1]["step_started"] < kill_at
    said = cut.log_file(0).read_text()
    assert "resuming" in said
    assert "training changes state" not in said, "an example has state that nobody saves"
    return whole


def rows(run: Run, kind: str) -> list[Any]:
    lines = (run.path / "metrics" / "rank-00000.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def metrics(run: Run, kind: str) -> dict[str, float]:
    """The metrics of the last row of a kind."""
    found: dict[str, float] = rows(run, kind)[-1]["metrics"]
    return found


def test_quickstart(play: Any) -> None:
    run = check_resume(play, "quickstart.py", kill_at=200, every=150)
    assert metrics(run, "validation")["val/accuracy"] > 0.9


def test_gan(play: Any) -> None:
    run = check_resume(play, "gan.py", "--epochs", "2", kill_at=22, every=10)
    assert {"critic_loss", "generator_loss", "distance"} <= metrics(run, "epoch").keys()


def test_bring_your_own_loop() -> None:
    report = verify_resume(EXAMPLES / "bring-your-own-loop.py", nproc=2, at=["first-epoch"])
    assert report.ok, report.table()
    assert (report.verdicts[0].killed_at, report.verdicts[0].resumed_from) == (31, 20)
    assert report.verdicts[0].words.startswith("losses, samples and random numbers"), "it logs its losses"


def test_weather(play: Any) -> None:
    run = check_resume(play, "weather/train.py", "--epochs", "1", kill_at=25, every=20)
    assert metrics(run, "validation")["val/loss"] < 0.5 * metrics(run, "validation")["val/persistence"]


def test_dino(play: Any) -> None:
    play("dino/make_photos.py", "shards")
    words = ["--data", "shards", "--tiny", "--batch", "8", "--epochs", "1", "--broaden-at", "4"]
    run = check_resume(play, "dino/train.py", *words, kill_at=7, every=5, other_nproc=2)
    assert {"train/dino", "train/ibot"} <= metrics(run, "epoch").keys()
    counted = rows(run, "train")[-1]["data"]["train"]
    assert counted["target/web"] == counted["target/curated"] == 0.5, "the curriculum has come to its end"


def test_lm(play: Any) -> None:
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("to be or not to be " * 200)
    Path("texts/b.md").write_text("that is the question " * 200)
    play("lm/prepare.py", "texts", "tokens.bin")
    tokens = np.fromfile("tokens.bin", dtype=np.uint16)
    assert (tokens == 256).sum() == 2 and tokens[-1] == 256, "each document ends"
    tiny = str(EXAMPLES / "lm/tiny.yaml")
    assert main(["plan", tiny, "--save", "plan.json"]) == 0
    words = ["tokens.bin", "--model", tiny, "--steps", "6", "--plan", "plan.json"]
    run = check_resume(play, "lm/train.py", *words, kill_at=5, every=3)
    planned = json.loads(run.plan_file.read_text())["answers"]["parameters"]["value"]
    assert f"model gpt: {planned:,} parameters, fsdp" in (run.path / "log" / "rank-00000.txt").read_text()


def test_imagenet(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared, split by class, staged, trained, validated, killed, resumed and tested; on what was staged alone."""
    random = np.random.default_rng(0)
    for part, count in {"train": 20, "val": 3}.items():
        for label in ("cat", "dog"):
            folder = Path("imagenet") / part / label
            folder.mkdir(parents=True)
            for number in range(count if label == "dog" else count // 2):
                pixels = random.integers(0, 255, (20, 30 + number, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{label}-{number}.JPEG")
    play("imagenet/prepare.py", "imagenet", "shards")
    assert labels("train") == {0: 9, 1: 18} and labels("val") == {0: 1, 1: 2}, "a tenth of each class"
    assert labels("test") == {0: 1, 1: 3}
    assert main(["data", "stage", "--tmp", "disk", str(Path("shards").absolute())]) == 0
    shutil.rmtree("shards")
    monkeypatch.setenv("HEADWAY_STAGED", str(Path("disk").absolute()))
    words = ["--data", "/gone/shards", "--size", "16", "--batch", "2", "--epochs", "1"]
    run = check_resume(play, "imagenet/train.py", *words, kill_at=5, every=3, nproc=2)
    assert metrics(run, "validation")["val/images"] == 3, "a short last batch, and no image twice"
    (tested,) = (run.path / "eval" / "test.jsonl").read_text().splitlines()
    assert json.loads(tested)["metrics"]["test/images"] == 4


def labels(split: str) -> dict[int, int]:
    (path,) = Path("shards", split).glob("*.tar")
    with tarfile.open(path) as shard:
        found = [int(shard.extractfile(name).read()) for name in shard.getnames() if name.endswith(".cls")]  # type: ignore[union-attr]
    return dict(Counter(found))
