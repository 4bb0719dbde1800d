"""`headway resume` on this machine: the same command, directory and number of ranks, in the same run directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import warm

import headway as hw
from headway.cli import main
from headway.run.job_record import record_end

SCRIPT = """
import sys, torch
from pathlib import Path
import headway as hw

class Fit(hw.TrainValStage):
    def step(self, batch):
        if self.epoch == 1 and not Path("second").exists():
            raise RuntimeError("the first time")
        return self.models["net"](batch[0]).square().mean()

pipe = hw.Pipeline(name="fit", config={"word": sys.argv[1]})
pipe.register_model("net", torch.nn.Linear(2, 1))
pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=0.1), model="net")
data = torch.utils.data.TensorDataset(torch.ones(8, 2))
for name in ("train", "val"):
    pipe.register_dataset(name, hw.data.DataLoader(data, batch_size=2))
pipe.append_stage(Fit(), max_epochs=2)
pipe.enable_checkpointing("runs", resume="auto", every="1 epoch")
pipe.run()
"""


def headway(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("headway")), *words]
    return warm.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_a_failed_run_starts_again_as_it_was_started(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert headway("run", "--nproc", "2", "train.py", "a word", cwd=tmp_path).returncode == 1
    (path,) = (tmp_path / "runs").glob("fit-*")
    (tmp_path / "second").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shown = headway("resume", str(path), "--dry-run", cwd=elsewhere)
    assert shown.stdout.startswith("would start on 2 processes: ") and "train.py 'a word'" in shown.stdout
    done = headway("resume", str(path), cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    attempts = hw.Run.open(path).info()["attempts"]
    assert [attempt["status"] for attempt in attempts] == ["failed", "done"]
    assert [attempt["world"]["world_size"] for attempt in attempts] == [2, 2]
    again = headway("resume", path.name, "--root", str(path.parent), cwd=elsewhere)
    assert again.returncode == 2 and "is done: there is nothing to resume" in again.stderr
    hw.Run.open(path).note_attempt(2, script_ended=False)  # its script was killed after the run was done
    rest = headway("resume", str(path), cwd=elsewhere)
    assert rest.returncode == 0 and "is already finished (HEADWAY_RUN names it)" in rest.stderr, rest.stderr
    again = headway("resume", str(path), cwd=elsewhere)
    assert again.returncode == 2, "now the script has ended, too"


CHANGEABLE = """
import argparse, torch
import headway as hw

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.5)
parser.add_argument("--epochs", type=int, default=2)
options = parser.parse_args()

class Fit(hw.TrainValStage):
    def step(self, batch):
        return self.models["net"](batch[0]).square().mean()

torch.manual_seed(0)
pipe = hw.Pipeline(name="fit", config=vars(options))
pipe.register_model("net", torch.nn.Linear(2, 1))
pipe.register_optimizer("sgd", lambda params: torch.optim.SGD(params, lr=options.lr), model="net")
data = torch.utils.data.TensorDataset(torch.ones(8, 2))
for name in ("train", "val"):
    pipe.register_dataset(name, hw.data.DataLoader(data, batch_size=2))
pipe.append_stage(Fit(), max_epochs=options.epochs)
pipe.enable_checkpointing("runs", resume="auto", every="1 epoch")
pipe.run()
print("lr", pipe.optimizers["sgd"].param_groups[0]["lr"], "epochs", pipe.epoch, "steps", pipe.steps_done)
"""


def test_a_finished_run_is_trained_further_with_new_arguments_and_forked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHANGEABLE)
    first = headway("run", "train.py", "--lr", "0.1", cwd=tmp_path)
    assert first.stdout.splitlines()[-1] == "lr 0.1 epochs 2 steps 8", first.stderr
    (path,) = (tmp_path / "runs").glob("fit-*")
    refused = headway("resume", path.name, cwd=tmp_path)
    assert refused.returncode == 2
    assert (
        f"to train it further, change its limits, as in headway resume {path.name} -- --epochs 40"
        in refused.stderr
    )
    shown = headway("resume", path.name, "--dry-run", "--", "--epochs", "3", cwd=tmp_path)
    assert shown.stdout.endswith("train.py --lr 0.1 --epochs 3\n")

    further = headway("resume", path.name, "--", "--epochs", "3", cwd=tmp_path)
    assert further.stdout.splitlines()[-1] == "lr 0.1 epochs 3 steps 12", further.stderr
    assert "max_epochs: 3 instead of 2: in effect from here on" in further.stderr
    run = hw.Run.open(path)
    assert [attempt["status"] for attempt in run.info()["attempts"]] == ["done", "done"]

    forked = headway("resume", path.name, "--fork", "--", "--epochs", "4", "--lr", "0.01", cwd=tmp_path)
    assert forked.stdout.splitlines()[-1] == "lr 0.01 epochs 4 steps 16", forked.stderr
    assert "lr: 0.01 instead of 0.1" in forked.stderr
    (other,) = set((tmp_path / "runs").glob("fit-*")) - {path}
    fork = hw.Run.open(other)
    assert fork.info()["parent"]["run"] == run.id and fork.info()["parent"]["step"] == 12
    assert len(run.info()["attempts"]) == 2, "the run itself stays as it was"
    assert fork.config_file.read_text() == "lr: 0.01\nepochs: 4\n"

    again = headway("resume", fork.id, "--apply", cwd=tmp_path)
    assert "all stages have ended: to train further, raise max_epochs or max_steps" in again.stderr
    assert again.returncode == 0, again.stderr


def test_settings_that_were_changed_in_the_script_are_applied_with_new_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CHANGEABLE)
    headway("run", "train.py", "--epochs", "1", cwd=tmp_path)
    (path,) = (tmp_path / "runs").glob("fit-*")
    script.write_text(CHANGEABLE.replace("lr=options.lr", "lr=0.25"))
    done = headway("resume", path.name, "--", "--epochs", "2", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "lr 0.25 epochs 2 steps 8", done.stderr


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"command": ["train", "--api-key", "[redacted]"]}, [], "leaves out a secret of its command line"),
        ({"world": {"nodes": 2}}, [], "ran on 2 nodes, and headway did not submit it"),
        ({"cwd": "/no/such"}, [], "was started in /no/such, which no longer exists"),
        ({}, ["--nodes", "2"], "use --nproc instead of --nodes"),
        ({"command": ["python3"]}, [], "was started at a prompt or in a notebook: run it there again, with"),
        ({"command": ["/opt/bin/python3.12", "-Xdev", "-"]}, [], "HEADWAY_RUN="),
        (
            {"command": ["python", "-uW", "ignore", "-m", "ipykernel_launcher", "-f", "x.json"]},
            [],
            "in a notebook",
        ),
        ({"command": ["python", "/opt/bin/ipython", "-i"]}, [], "at a prompt"),
    ],
)
def test_what_cannot_be_started_again(
    changes: dict[str, object],
    options: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = hw.Run.create(tmp_path / "runs", command=["train"])
    record_end(run, 1)
    run.info_file.write_text(json.dumps(run.info() | changes))
    assert main(["resume", str(run.path), *options]) == 2
    assert words in capsys.readouterr().err
    run.path.chmod(0o777)
    assert main(["resume", str(run.path)]) == 2
    assert "can be written by others" in capsys.readouterr().err
