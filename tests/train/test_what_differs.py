"""A script that is killed, edited and started again says what differs from the attempt before, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import warm

import headway as hw

SCRIPT = """
import argparse, os, signal, torch
from pathlib import Path
import headway as hw
from model import Net

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--workers", type=int, default=0)
options = parser.parse_args()

class Fit(hw.TrainValStage):
    def step(self, batch):
        if self.pipe.steps_done == 3 and not Path("survive").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return self.models["net"](batch[0]).square().mean()

torch.manual_seed(0)
pipe = hw.Pipeline(name="fit", config=vars(options), free=("workers",))
pipe.register_model("net", Net())
pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=0.1), model="net")
data = torch.utils.data.TensorDataset(torch.ones(8, 2))
for name in ("train", "val"):
    pipe.register_dataset(name, hw.data.DataLoader(data, global_batch_size=2))
pipe.append_stage(Fit(log_every=1), max_steps=options.steps)
pipe.enable_checkpointing("runs", every=1)
pipe.run()
"""
MODEL = (
    "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(2, 1)\n"
)


def start(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headway", *words]
    return warm.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of headway, but for the one that names the run that is resumed."""
    known = ("launched by", "resuming ")
    lines = [
        line.removeprefix("headway: ") for line in done.stderr.splitlines() if line.startswith("headway: ")
    ]
    return [line for line in lines if not line.startswith(known)]


@pytest.fixture
def killed(tmp_path: Path) -> hw.Run:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "model.py").write_text(MODEL)
    first = start(tmp_path, "run", "train.py")
    assert first.returncode and "SIGKILL" in first.stderr, first.stderr
    (tmp_path / "survive").touch()
    return hw.Run.open(next((tmp_path / "runs").glob("fit-*")))


def test_nothing_is_said_of_what_is_the_same(killed: hw.Run, tmp_path: Path) -> None:
    done = start(tmp_path, "run", "train.py")
    assert (done.returncode, said(done)) == (0, []), done.stderr
    assert len(killed.info()["attempts"]) == 2
    assert [path.name for path in killed.code_dir.iterdir()] == ["sources-1.json"]


def test_code_ranks_versions_and_free_settings(killed: hw.Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("lr=0.1", "lr=0.2").replace("log_every=1", "log_every=2")
    )
    (tmp_path / "model.py").write_text(MODEL.replace("2, 1)", "2, 1)  # one output"))
    rows = killed.diagnostics_file.read_text().splitlines()
    facts = json.loads(rows[0])
    facts["python"]["version"] = "3.9.1"
    killed.diagnostics_file.write_text(json.dumps(facts) + "\n")
    done = start(tmp_path, "run", "--nproc", "2", "train.py", "--workers", "1")
    assert done.returncode == 0, done.stderr
    code, machine, config, ranks, effect, kept = said(done)
    verb = f"headway compare {killed.id} --code"
    assert code == f"model.py: 1 line differs, train.py: 2 lines differ; {verb} shows them"
    assert machine.startswith("python 3.") and machine.endswith(" instead of 3.9.1, 2 ranks instead of 1")
    assert config == "config: workers 0 -> 1"
    assert ranks.startswith("saved by 1 rank")
    assert effect == "log_every: 2 instead of 1: in effect from here on"
    assert kept == (
        f"lr: 0.2 instead of 0.1; the checkpoint's is kept; headway resume {killed.id} --apply applies it"
    )
    info = killed.info()
    assert info["command"][-2:] == ["--workers", "1"], "headway resume starts what was started last"
    assert info["config"] == killed.config_file.read_text() == "steps: 6\nworkers: 1\n"
    kinds = [json.loads(line)["kind"] for line in killed.events_file(0).read_text().splitlines()]
    assert kinds.count("changes") == 5
    shown = start(tmp_path, "compare", killed.id, "--code").stdout.splitlines()
    assert "--- attempt 1: model.py" in shown and "+++ attempt 2: train.py" in shown
    assert any(line.startswith("+") and "lr=0.2" in line for line in shown)


def test_a_setting_that_identifies_the_run_begins_a_new_one_which_names_it(
    killed: hw.Run, tmp_path: Path
) -> None:
    done = start(tmp_path, "run", "train.py", "--steps", "8")
    (line,) = said(done)
    assert line == (
        f"a new run begins, since this one is not resumed: {killed.id}: other settings: steps 6 -> 8; "
        f"to resume it: headway resume {killed.id} -- --steps 8"
    )
    further = start(tmp_path, "resume", killed.id, "--", "--steps", "8")
    assert further.returncode == 0, further.stderr
    assert said(further) == ["config: steps 6 -> 8", "max_steps: 8 instead of 6: in effect from here on"]
    whole = start(tmp_path, "run", "train.py", "--steps", "8")
    assert said(whole)[0].startswith("a new run begins, since these are not resumed:")
    rows = [line for line in killed.metrics_file(0).read_text().splitlines() if '"train/loss"' in line]
    others = [hw.Run.open(path) for path in (tmp_path / "runs").glob("fit-*") if path != killed.path]
    for other in others:  # trained in one piece
        found = [line for line in other.metrics_file(0).read_text().splitlines() if '"train/loss"' in line]
        assert json.loads(found[-1])["metrics"]["train/loss"] == json.loads(rows[-1])["metrics"]["train/loss"]


def test_three_starts_at_once_of_one_killed_run_name_it(killed: hw.Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headway", "run", "train.py"]
    options = {"cwd": tmp_path, "stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    started = [warm.Popen(command, **options) for _ in range(3)]
    errors = [process.communicate(timeout=120)[1] for process in started]
    for error in errors:
        resumed = f"resuming {killed.id} from step" in error
        named = f"{killed.id}: " in error or f"run {killed.id} is in use" in error
        assert resumed or named, error
    assert any(f"resuming {killed.id} from step" in error for error in errors)
