"""Random sequences of kills, edits and numbers of ranks: no run ends with another result unless a line has said so.

Two sequences here; `make faults` draws many (HEADWAY_FAULTS_SEED selects others).
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm

SCRIPT = Path(__file__).with_name("edited.py")
FULL = os.environ.get("HEADWAY_FAULTS") == "full"
SEED = int(os.environ.get("HEADWAY_FAULTS_SEED", "0"))
STEPS = 12
EDITS = {
    "a setting": ("MOMENTUM = 0.9", "MOMENTUM = 0.5"),
    "the rate": ("RATE = 0.02", "RATE = 0.2"),
    "the schedule": ("STEPS_PER_DECAY = 4", "STEPS_PER_DECAY = 2"),
    "the code": ("* SCALE", "* SCALE * 0.5"),
    "a group": ("GROUPS = 1", "GROUPS = 2"),
    "unfrozen": ("FROZEN = True", "FROZEN = False"),
}
_OF_EVERY_RESUME = ("headway: launched by:", "headway: resuming ")


@dataclass(frozen=True)
class End:
    code: int
    losses: dict[int, str]
    weights: str
    said: list[str]


def start(folder: Path, *, ranks: int, kill: int = 0) -> End:
    """Trains in a directory that has the script, until it is killed in a step."""
    trace = folder / f"trace{len(list(folder.glob('trace*')))}"
    script = [str(folder / SCRIPT.name), str(folder / "runs")]
    command = [
        sys.executable,
        *(["-m", "headway", "run", "--nproc", str(ranks)] if ranks > 1 else []),
        *script,
    ]
    done = warm.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        cwd=folder,
        env={**os.environ, "EXACT_TRACE": str(trace), "EXACT_KILL": str(kill)},
        fork=True,
    )
    file, end = Path(f"{trace}-0"), Path(f"{trace}-end")
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    lines = [line for line in done.stdout.splitlines() if line.startswith("headway: ")]
    said = [line for line in lines if not line.startswith(_OF_EVERY_RESUME)]
    return End(done.returncode, dict(rows), end.read_text() if end.exists() else "", said)


def new_folder(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(SCRIPT, folder)
    return folder


@pytest.mark.parametrize("number", range(40 if FULL else 2))
def test_no_edit_changes_a_result_in_silence(number: int, tmp_path: Path) -> None:
    chance = random.Random(SEED * 1000 + number)
    ranks, step, edited, said, story = chance.choice([1, 1, 2]), 0, set[str](), list[str](), list[str]()
    whole = start(new_folder(tmp_path, "whole"), ranks=ranks)
    assert whole.code == 0, whole.said
    folder = new_folder(tmp_path, "killed")
    before = ranks
    while True:
        step = chance.randint(step + 1, STEPS + 4)
        story.append(f"{ranks} ranks, killed in step {step}")
        end = start(folder, ranks=ranks, kill=step)
        changed = ranks != before or bool(edited)
        if story[1:]:
            said += end.said
        is_same = all(whole.losses[each] == loss for each, loss in end.losses.items())
        assert is_same or said, story
        assert changed or not end.said or end.code, (story, end.said)
        if end.code == 2:
            assert said, story
            return  # refused, in a sentence
        if step > STEPS:
            break
        before, edited = ranks, set[str]()
        what = chance.choice(["nothing", "nothing", "ranks", *EDITS])
        story.append(what)
        if what == "ranks":
            ranks = 3 - ranks
        elif what in EDITS:
            script, (old, new) = folder / SCRIPT.name, EDITS[what]
            text = script.read_text()
            edited |= {what} if old in re.sub(re.escape(new), "", text) else set()
            script.write_text(text.replace(new, old).replace(old, new))
    assert end.code == 0, (story, end.said)
    assert end.weights == whole.weights or said, story


def test_a_difference_without_a_line_is_found(tmp_path: Path) -> None:
    """An edit that no check can see: of a file that the script reads."""
    folder = new_folder(tmp_path, "run")
    script = folder / SCRIPT.name
    script.write_text(script.read_text().replace("SCALE = 1.0", 'SCALE = float(Path("scale").read_text())'))
    (folder / "scale").write_text("1.0")
    first = start(folder, ranks=1, kill=6)
    (folder / "scale").write_text("0.5")
    second = start(folder, ranks=1)
    assert (second.code, second.said) == (0, [])
    assert second.losses[5] != first.losses[5]
