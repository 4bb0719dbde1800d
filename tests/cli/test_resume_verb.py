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
