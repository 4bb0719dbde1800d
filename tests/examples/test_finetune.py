"""examples/finetune: a model in the format of Hugging Face is trained, fails, resumes, and returns to transformers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.record import ledger
from headway.run import Run, runs_under
from headway.testing import faults, verify_resume

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = ("--model", "tiny", "--data", "tiny/sums.jsonl", "--batch", "30", "--epochs", "2", "--lr", "1e-2")


def test_a_run_that_failed_ends_as_the_one_that_did_not_and_transformers_reads_it(
    play: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It fails in this process: another one would import transformers again, which takes longer than all else."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("HEADWAY_LEDGER", "1")
    monkeypatch.setenv("HEADWAY_SAVE_EVERY", "2 steps")
    monkeypatch.setenv("HEADWAY_SAVE_IN_BACKGROUND", "0")
    play("finetune/make_tiny.py", "tiny")
    if os.environ.get("HEADWAY_FAULTS") == "full":
        report = verify_resume(EXAMPLES / "finetune" / "train.py", WORDS, nproc=2)
        assert report.ok, report.table()
    play("finetune/train.py", *WORDS)
    assert "model lm: 21 of 21 tensors from" in capfd.readouterr().out
    (whole,) = runs_under("runs")
    with faults.at("train.step", nth=3, action="raise"), pytest.raises(Exception, match=r"train\.step"):
        play("finetune/train.py", *WORDS)
    play("finetune/train.py", *WORDS)
    (cut,) = [run for run in runs_under("runs") if run.id != whole.id]
    assert [each["step_started"] for each in cut.info()["attempts"]] == [0, 2]
    assert facts(cut) == facts(whole) and len(facts(whole)) == 6
    losses = [float.fromhex(row.loss or "nan") for row in ledger.read(whole)]
    assert losses[-1] < losses[0]

    hw.checkpoint.export(cut.checkpoint_dir(6), "tuned/model.safetensors", part="models.lm")
    shutil.copy("tiny/config.json", "tuned")
    tuned = AutoModelForCausalLM.from_pretrained("tuned").state_dict()
    saved = load_file("tuned/model.safetensors")
    assert all(tuned[name].equal(value) for name, value in saved.items())
    before = AutoModelForCausalLM.from_pretrained("tiny").state_dict()
    assert not tuned["model.embed_tokens.weight"].equal(before["model.embed_tokens.weight"])


def facts(run: Run) -> list[tuple[str | None, str | None, str]]:
    return [(row.loss, row.samples, row.random) for row in ledger.read(run)]
