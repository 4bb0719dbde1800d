"""A training that can be started, killed and started again many times: torch is imported once, ranks are forks.

python mill.py      reads {"run", "ranks", "epochs", "workers", "fault", "kill": [rank, rows, seconds] or null} line by
                    line, answers with exit codes
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from waiting import EXIT_LIMIT_S

import headway as hw
import headway.checkpoint.write.saver  # now, not once per rank
import headway.testing.verify
import headway.train.pipeline
from headway import dist
from headway.system.environment import FAILPOINT

SAMPLES, BATCH = 240, 24  # a batch for 1, 2, 3 or 4 ranks; 10 steps in an epoch
EVERY = 7
ROW = 230  # bytes of the ledger for a step, about


class Fit(hw.TrainValStage):
    def step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.models["net"](x), y)


def train(epochs: int, *, workers: int = 0) -> None:
    hw.seed(3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 8, generator=generator)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    hw.seed(3)
    pipe = hw.Pipeline(name="mill")
    pipe.register_model("net", net, ema=0.9)
    pipe.register_optimizer("adam", lambda params: torch.optim.Adam(params, lr=3e-3))
    how = {"num_workers": workers, "persistent_workers": workers > 0}
    train_loader = hw.data.DataLoader(data, global_batch_size=BATCH, shuffle=True, seed=5, **how)
    pipe.register_dataset("train", train_loader)
    pipe.register_dataset("val", hw.data.DataLoader(data, global_batch_size=BATCH * 2))
    pipe.append_stage(Fit(log_every=1, val_every="2 epochs"), max_epochs=epochs)
    pipe.enable_checkpointing(resume="must", every=EVERY, keep_last=3)
    pipe.enable_ledger()
    pipe.run()


def become_rank(trial: dict[str, Any], rank: int, meeting: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(trial["ranks"]), "HEADWAY_RUN": trial["run"]}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(trial["ranks"]), "GROUP_RANK": "0"}
    os.environ |= {FAILPOINT: trial["fault"]} if trial["fault"] else {}
    os.environ["HEADWAY_RENDEZVOUS"] = f"{meeting}/address"
    dist.init(device="cpu", setup_timeout=25)  # there is no agent to tell that a rank died before it came
    train(trial["epochs"], workers=trial["workers"])
    dist.leave()


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def run(trial: dict[str, Any]) -> dict[str, Any]:
    """The exit codes of all ranks, minus the signal for those that were killed; 999 for those that hung."""
    with tempfile.TemporaryDirectory() as meeting:
        pids = []
        for rank in range(trial["ranks"]):
            if not (pid := os.fork()):
                os.dup2(2, 1)  # stdout is for answers
                os.setpgid(0, pids[0] if pids else 0)
                code = 1
                try:
                    become_rank(trial, rank, meeting)
                    code = 0
                except BaseException:  # noqa: BLE001  whatever it is, the parent sees the code
                    traceback.print_exc()
                finally:
                    os._exit(code)
            pids.append(pid)
            with suppress(OSError):  # the child was faster
                os.setpgid(pid, pids[0])
        began = time.monotonic()
        codes: list[int | None] = [None] * len(pids)
        kill, written = trial["kill"], Path(trial["run"]) / "ledger.jsonl"
        enough = size(written) + (kill[1] * ROW if kill else 0)
        due = None
        deadline = began + 200
        while None in codes and time.monotonic() < deadline:
            for rank, pid in enumerate(pids):
                done, status = os.waitpid(pid, os.WNOHANG) if codes[rank] is None else (0, 0)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
            if kill and due is None and size(written) >= enough:
                due = time.monotonic() + kill[2]
            if kill and due is not None and time.monotonic() >= due:
                if codes[kill[0]] is None:
                    os.kill(pids[kill[0]], signal.SIGKILL)
                    deadline = time.monotonic() + EXIT_LIMIT_S
                kill = None
            time.sleep(0.002)
        for rank, pid in enumerate(pids):
            if codes[rank] is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[rank] = 999
        return {"codes": codes, "seconds": time.monotonic() - began, "left": wait_for_group(pids[0])}


def wait_for_group(group: int) -> bool:
    """Whether a data worker or a writer of the ranks outlives them; it is killed."""
    deadline = time.monotonic() + EXIT_LIMIT_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.01)
    os.killpg(group, signal.SIGKILL)
    return True


def import_what_ranks_import() -> None:
    """Lets a child train alone, and imports all that it has imported: once here, and not in every rank."""
    with tempfile.TemporaryDirectory() as folder:
        if not (pid := os.fork()):
            code = 1
            try:
                os.dup2(2, 1)
                os.environ["HEADWAY_RUN"] = str(hw.Run.create(folder, name="warm-up", world={}).path)
                train(epochs=2)
                (Path(folder) / "modules").write_text("\n".join(sys.modules))
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        for name in (Path(folder) / "modules").read_text().split("\n"):
            if name not in sys.modules and name.startswith(
                ("torch", "numpy", "headway", "safetensors", "rich")
            ):
                with suppress(ImportError):  # made by hand, as some of torch are
                    import_module(name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    import_what_ranks_import()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
