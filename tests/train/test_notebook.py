"""Cells of a notebook: one that was interrupted continues when it is run again, one that failed begins a new run."""

from __future__ import annotations

import sys
from pathlib import Path

import warm

import headway as hw

NOTEBOOK = """
import os, signal, sys, torch
sys.ps1 = "In : "  # as IPython sets it
import headway as hw

CELL = '''
class Fit(hw.TrainValStage):
    def step(self, batch):
        if self.pipe.steps_done == 5 and faults:
            faults.pop()()
        return self.models["net"](batch[0]).square().mean()

torch.manual_seed(0)
pipe = hw.Pipeline(name=name, config={"lr": 0.1})
pipe.register_model("net", torch.nn.Linear(2, 1))
pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=0.1), model="net")
data = torch.utils.data.TensorDataset(torch.ones(8, 2))
for each in ("train", "val"):
    pipe.register_dataset(each, hw.data.DataLoader(data, batch_size=2))
pipe.append_stage(Fit(log_every=1), max_epochs=2)
pipe.enable_checkpointing(every=1, background=False)
pipe.run()
'''

def run_cell(text):
    try:
        exec(text, globals())
        print(name, "done at step", pipe.steps_done, flush=True)
    except BaseException as error:
        print(name, type(error).__name__, flush=True)

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def fail():
    raise ZeroDivisionError

def leave():
    raise KeyboardInterrupt

for name, fault in (("ctrl-c", interrupt), ("twice", leave), ("bug", fail)):
    faults = [fault]
    run_cell(CELL)
    run_cell("pipe.run()")
    run_cell(CELL)
"""


def test_cells_that_are_run_again(tmp_path: Path) -> None:
    (tmp_path / "cells.py").write_text(NOTEBOOK)
    done = warm.run([sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ctrl-c", "twice", "bug"))]
    assert lines == [
        *("ctrl-c Stopped", "ctrl-c UsageError", "ctrl-c done at step 8"),
        *("twice KeyboardInterrupt", "twice UsageError", "twice done at step 8"),
        *("bug ZeroDivisionError", "bug UsageError", "bug done at step 8"),
    ], done.stderr
    attempts: dict[str, list[list[str]]] = {}
    failed = ""
    for path in (tmp_path / "runs").iterdir():
        run = hw.Run.open(path)
        found = [each["status"] for each in run.info()["attempts"]]
        attempts.setdefault(run.name, []).append(found)
        failed = run.id if found == ["failed"] else failed
    assert attempts["ctrl-c"] == [["stopped", "done"]]
    assert attempts["twice"] == [["interrupted", "done"]]
    assert sorted(attempts["bug"]) == [["done"], ["failed"]]
    call = f"pipe.enable_checkpointing(resume={str(tmp_path / 'runs' / failed)!r})"
    reason = f"{failed}: failed: ZeroDivisionError(); to resume it: {call}"
    (said,) = [line for line in done.stderr.splitlines() if "is not resumed" in line]
    assert said == f"headway: a new run begins, since this one is not resumed: {reason}"
    assert " instead of " not in done.stderr
