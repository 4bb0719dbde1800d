"""What training keeps in Python is found without looking at everything, and without naming what is no state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_registered_state import make
from torch import Tensor
from toys import Classify

from headway.train import Pipeline
from headway.train.resume.python_state import PythonState

alone = pytest.mark.usefixtures("alone")
TABLE: list[Any] = [
    {"words": list(range(1000)), "more": {n: [n] * 50 for n in range(50)}} for _ in range(2000)
]
LOOP: list[Any] = []
LOOP.append(LOOP)


class Notes(Classify):
    """Keeps what it has computed, a log, a cache and a flag; only the flag is read before it is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.cache: dict[int, float] = {1: 0.5}
        self.warm = False

    def train_step(self, batch: Any) -> Tensor:
        loss = self.loss = super().step(batch)
        self.seen.append(float(loss.detach()))
        self.cache[self.pipe.steps_done + 5] = 1.0
        if not self.warm and self.steps_done == 2:
            self.warm = True
        return loss


def found(pipe: Pipeline) -> set[str]:
    text = pipe.directory.log_file(0).read_text()
    lines = [line for line in text.splitlines() if "training changes state" in line]
    assert len(lines) <= 1
    return set(lines[0].partition("(")[2].partition(")")[0].split(", ")) if lines else set()


@alone
def test_only_what_a_later_step_reads_is_named(tmp_path: Path) -> None:
    pipe = make(tmp_path)
    pipe.append_stage(Notes(), max_epochs=1)
    pipe.run()
    assert "notes.warm" in found(pipe)
    assert not {"notes.seen", "notes.cache", "notes.loss"} & found(pipe)


@alone
def test_a_search_is_bounded(tmp_path: Path) -> None:
    """A table of a hundred million values among the globals, and a list that has itself."""
    pipe = make(tmp_path)
    pipe.append_stage(Notes(), max_epochs=1)  # of this module, so its globals count
    state = PythonState(pipe._state)
    walk = state._walk()
    assert any(path.endswith(".TABLE") for path in walk.slots)
    assert walk._contents.left > 0
    state.begin()
    TABLE[0]["words"][0] = -1
    LOOP.append(1)  # only added to: a log
    assert {path.rpartition(".")[2] for path in state.changed()} == {"TABLE"}
