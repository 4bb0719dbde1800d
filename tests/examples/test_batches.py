"""What the examples learn from: tokens that are counted, hours that come once, answers without their prompts."""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import headway as hw
from headway.testing import ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def names_of(script: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a script defines; its main() is not called."""
    monkeypatch.setattr(sys, "path", [str((EXAMPLES / script).parent), *sys.path])
    try:
        return runpy.run_path(str(EXAMPLES / script))
    finally:
        sys.modules.pop("prepare", None)  # two examples have one


def test_lm_is_a_mean_over_the_tokens_that_can_be_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = names_of("lm/train.py", monkeypatch)
    np.array([5, 6, 256, 7, 8, 9, 10, 11, 256], dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    windows = lm["Windows"](tmp_path / "tokens.bin", 4)
    assert len(windows) == 2
    inputs, labels = map(torch.stack, zip(windows[0], windows[1], strict=True))
    assert inputs.tolist() == [[5, 6, 256, 7], [8, 9, 10, 11]]
    assert labels.tolist() == [[6, 256, -100, 8], [9, 10, 11, 256]]
    torch.manual_seed(0)
    gpt = lm["Gpt"](layers=1, hidden=8, heads=2, vocab=257, context=4)
    loss, count = lm["LanguageModel"].step(SimpleNamespace(models={"gpt": gpt}), (inputs, labels))
    logits = gpt(inputs)
    known = [
        F.cross_entropy(logits[i, j], labels[i, j]) for i in range(2) for j in range(4) if (i, j) != (0, 2)
    ]
    assert count == 7
    torch.testing.assert_close(loss, torch.stack(known).mean())
    changed = inputs.clone()
    changed[:, 3] = 1
    torch.testing.assert_close(gpt(changed)[:, :3], logits[:, :3])  # no token sees a later one


@ranks(2)
def test_weather_has_every_pair_of_hours_once(monkeypatch: pytest.MonkeyPatch) -> None:
    xr = pytest.importorskip("xarray")
    weather = names_of("weather/train.py", monkeypatch)
    hours = 24 * 6 + 6
    values = np.broadcast_to(np.arange(hours, dtype=np.float32)[:, None, None], (hours, 2, 3)).copy()
    array = xr.DataArray(values, dims=("time", "latitude", "longitude"), coords={"latitude": [-45, 45]})
    mine = [states for states, _ in weather["chunks"](array, shuffle=True)]
    assert len(mine) == 3, "ranks share the chunks"
    pairs = Counter(
        (int(now), int(later))
        for states in mine
        for now, later in zip(states[:-6, 0, 0], states[6:, 0, 0], strict=True)
    )
    every = sum(hw.all_gather_object(pairs), Counter[tuple[int, int]]())
    assert every == {(hour, hour + 6): 1 for hour in range(hours - 6)}


def test_finetune_learns_answers_and_not_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    finetune = names_of("finetune/train.py", monkeypatch)
    lines = [{"prompt": "3 4", "answer": "7"}, {"prompt": "5 6 7", "answer": "8 9"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))

    class Numbers:
        eos_token_id, pad_token_id = 1, 0

        def __call__(self, text: str, **_: Any) -> Any:
            return SimpleNamespace(input_ids=[int(word) for word in text.split()])

    answers = finetune["Answers"](tmp_path / "data.jsonl", Numbers())
    batch = {name: value.tolist() for name, value in answers.collate([answers[0], answers[1]]).items()}
    assert batch == {
        "input_ids": [[3, 4, 7, 1, 0, 0], [5, 6, 7, 8, 9, 1]],
        "attention_mask": [[1, 1, 1, 1, 0, 0], [1] * 6],
        "labels": [[-100, -100, 7, 1, -100, -100], [-100, -100, -100, 8, 9, 1]],
    }
