"""Ranks by fork: torch is imported once, then every trial costs milliseconds. Started as a process of its own.

    python forker.py      reads {"folder", "ranks", "fault", "body", ...} line by line, answers with exit codes

Every rank runs the body: it saves step 1 without a fault, then step 2 with it. A rank that returns from a save has had
it acknowledged, and notes that.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import torch

import headway
import headway.checkpoint.write.saver  # now, not once per rank
from headway import checkpoint, dist
from headway.checkpoint.retention import Retention, prune
from headway.errors import HeadwayError
from headway.system import failpoints
from headway.system.environment import FAILPOINT


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"net": {name: torch.rand(50, generator=generator) for name in "abcd"}, "epoch": step}


def body_save(folder: Path, fault: str) -> None:
    save(folder, 1)
    failpoints.reset_calls()
    os.environ[FAILPOINT] = fault
    save(folder, 2)


def body_calls(folder: Path, fault: str) -> None:
    """`fault` is the number of the system call at which to die; 0 only counts them."""
    shim = ctypes.CDLL(None)
    save(folder, 1)
    state = state_of(2)
    shim.shim_arm(int(fault))
    checkpoint.save(folder, state, step=2, local={"rank": 0})
    (folder.parent / f"{folder.name}.count").write_text(str(shim.shim_disarm()))


def body_beside(folder: Path, fault: str) -> None:
    """As `body_save`, in the background: the fault strikes in the helper process, or in the rank."""
    with checkpoint.Saver(folder) as saver:
        save(folder, 1, saver)
        failpoints.reset_calls()
        os.environ[FAILPOINT] = fault
        save(folder, 2, saver)


def body_both(folder: Path, fault: str) -> None:
    """The fault stops the helper process of one rank; then that rank is killed, and the helper must follow."""
    with checkpoint.Saver(folder) as saver:
        save(folder, 1, saver)
        os.environ[FAILPOINT] = fault
        threading.Thread(target=die_when_stopped, args=psutil.Process().children(), daemon=True).start()
        save(folder, 2, saver)


def die_when_stopped(helper: psutil.Process) -> None:
    while helper.status() != psutil.STATUS_STOPPED:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)


def body_beside_calls(folder: Path, fault: str) -> None:
    """`fault` is "rank number": which helper dies, and at which of the system calls that change files."""
    with checkpoint.Saver(folder) as saver:
        save(folder, 1, saver)
    if fault.startswith(f"{os.environ['RANK']} "):
        os.environ["SHIM_KILL_AT"] = fault.split()[1]  # the next helper reads it
    with checkpoint.Saver(folder) as saver:
        save(folder, 2, saver)


def body_prune(folder: Path, fault: str) -> None:
    for step in range(1, 7):
        save(folder, step)
    os.environ[FAILPOINT] = fault
    prune(folder, Retention(keep_last=2))


def body_find(folder: Path, fault: str) -> None:
    """Step 2 is damaged; the fault strikes while it is looked for."""
    save(folder, 1)
    save(folder, 2)
    if dist.is_root():
        (folder / "step-000000000002" / "state.json").write_bytes(b"{}")
    dist.barrier()
    os.environ[FAILPOINT] = fault
    checkpoint.load_latest(folder)


def save(folder: Path, step: int, saver: checkpoint.Saver | None = None) -> None:
    rank = headway.rank() if dist.is_initialized() else 0
    if saver is None:
        checkpoint.save(folder, state_of(step), step=step, local={"rank": rank})
    else:
        state = state_of(step)
        saver.save(state, step=step, local={"rank": rank})
        for tensor in state["net"].values():
            tensor.fill_(-1)  # training goes on
        saver.wait()
    with (folder.parent / f"{folder.name}.acknowledged-{rank}").open("a") as file:
        file.write(f"{step}\n")


def become_rank(trial: dict[str, Any], rank: int, meeting: str) -> int:
    folder = Path(trial["folder"])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(trial["ranks"])}
    if trial["ranks"] > 1:
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(trial["ranks"]), "GROUP_RANK": "0"}
        os.environ["HEADWAY_RENDEZVOUS"] = f"{meeting}/address"
        headway.init(device="cpu", setup_timeout=60)
    try:
        globals()[f"body_{trial['body']}"](folder, trial["fault"])
    except HeadwayError as error:
        (folder.parent / f"{folder.name}.error-{rank}").write_text(str(error))
        if trial["ranks"] > 1 and trial["body"].startswith("beside"):
            dist.leave()  # all ranks were told
        return error.exit_code
    finally:
        calls = {name: next(count) - 1 for name, count in failpoints._calls.items()}
        (folder.parent / f"{folder.name}.calls-{rank}").write_text(json.dumps(calls))
        os.environ.pop(FAILPOINT, None)
        os.environ.pop("SHIM_KILL_AT", None)
    if trial["ranks"] > 1:
        dist.leave()
    return 0


def run(trial: dict[str, Any]) -> list[int]:
    """The wait statuses of all ranks: minus the signal, or the exit code."""
    with tempfile.TemporaryDirectory() as meeting:
        children = {}
        for rank in range(trial["ranks"]):
            if not (pid := os.fork()):
                code = 1
                try:
                    code = become_rank(trial, rank, meeting)
                except BaseException:  # noqa: BLE001  whatever it is, the parent sees the code
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children[pid] = rank
        codes = [999] * trial["ranks"]
        deadline = time.monotonic() + 100
        while children and time.monotonic() < deadline:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
            elif codes != [999] * trial["ranks"] and trial["ranks"] > 1 and "grace" not in trial:
                trial["grace"] = deadline = min(deadline, time.monotonic() + 40)
            else:
                time.sleep(0.005)
        for pid in children:  # a hang: the test sees 999
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return codes


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
