"""Tests that do not pass, for test_reports.py to look at: it runs this file with pytest and reads the report."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import headway
from headway.testing import ranks

KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def notebook(request: pytest.FixtureRequest) -> str:
    """A file in which each rank writes its process number: which tests were served by the same processes?"""
    return os.environ["NOTEBOOK"] + "/" + request.node.name


def write(notebook: str) -> None:
    Path(f"{notebook}-{headway.rank()}").write_text(str(os.getpid()))


@ranks(2)
def test_passes(notebook: str, recipe: Any) -> None:
    assert recipe.name == "cake", "a class of a conftest.py, which has no name to import it by"
    write(notebook)


@ranks(2)
def test_all_fail_alike() -> None:
    print("said by all")
    recipe = {"flour": 500, "eggs": [1, 2, 3]}
    assert recipe == {"flour": 500, "eggs": [1, 2, 4]}


@ranks(2)
def test_skipped() -> None:
    pytest.skip("no oven here")


@ranks(2)
def test_expected_to_fail() -> None:
    pytest.xfail("the oven is known to be broken")


@ranks(2)
@pytest.mark.xfail
def test_marked_as_expected_to_fail() -> None:
    raise ValueError("as always")


@ranks(2)
@pytest.mark.filterwarnings("error")
def test_thread_dies() -> None:
    thread = threading.Thread(target=int, args=("flour",))
    thread.start()
    thread.join()


@ranks(2)
def test_after_what_was_alike(notebook: str) -> None:
    write(notebook)


@ranks(2)
def test_each_in_its_own_way() -> None:
    print(f"rank {headway.rank()} to stdout")
    os.write(2, f"rank {headway.rank()} to stderr\n".encode())
    deeper(headway.rank())


def deeper(rank: int) -> None:
    raise ValueError(f"cause {rank}")


@ranks(2)
def test_after_what_was_not_alike(notebook: str) -> None:
    write(notebook)


@ranks(2)
def test_collective_left_open(notebook: str) -> None:
    write(notebook)
    if headway.rank() == 0:
        KEPT.append(c10d.all_reduce(torch.ones(1), async_op=True))


@ranks(2)
def test_after_collective_left_open() -> None:
    numbers = torch.tensor([10.0])
    c10d.all_reduce(numbers)
    assert numbers.item() == 20


@ranks(2, leaks=False)
def test_leak_that_is_allowed(notebook: str) -> None:
    write(notebook)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


@ranks(2)
def test_leaks_everything(notebook: str, tmp_path: Path) -> None:
    write(notebook)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    if headway.rank() == 0:
        return
    KEPT.append(subprocess.Popen(["sleep", "600"]))
    KEPT.append(socket.create_server(("127.0.0.1", 0)))
    KEPT.append(open(tmp_path / "forgotten.txt", "w"))  # noqa: SIM115, PTH123
    KEPT.append(sys.stdout)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123
    threading.Thread(target=time.sleep, args=(600,), name="forgotten").start()
    os.environ["FORGOTTEN"] = "1"
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


@ranks(1)
def test_leaks_shared_memory() -> None:
    memory = shared_memory.SharedMemory(create=True, size=64, name=f"headway-test-{os.getpid()}")
    memory.close()
    resource_tracker.unregister(memory._name, "shared_memory")  # type: ignore[attr-defined]


@ranks(4)
def test_one_fails_and_the_others_wait_for_it() -> None:
    if headway.rank() == 2:
        raise ValueError("no more flour")
    c10d.barrier()


@ranks(2)
def test_one_skips_and_the_other_waits_for_it() -> None:
    if headway.rank() == 1:
        pytest.skip("not my task")
    c10d.barrier()


@ranks(3, timeout=8)
def test_hangs() -> None:
    print("before the hang")
    if headway.rank() == 1:
        time.sleep(600)
    if headway.rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


@ranks(2)
def test_is_killed(notebook: str) -> None:
    print("before the end")
    if headway.rank() == 1:
        memory = shared_memory.SharedMemory(create=True, size=64)
        Path(notebook).write_text(memory.name)
        if os.fork() == 0:
            time.sleep(600)  # a child that has all of the rank's connections
        os.kill(os.getpid(), signal.SIGKILL)
    c10d.barrier()


@ranks(2)
def test_root_leaves_with_exit_code_0() -> None:
    if headway.rank() == 0:
        os._exit(0)
    c10d.barrier()


@ranks(2, timeout=8)
def test_leaves_the_others_alone() -> None:
    if headway.rank() == 1:
        headway.dist.leave()
    else:
        c10d.barrier()


@ranks(1)
def test_crashes() -> None:
    ctypes.string_at(0)


@ranks(1)
def test_after_all_that(notebook: str) -> None:
    write(notebook)


@pytest.fixture
def lock() -> object:
    return threading.Lock()


@ranks(1)
def test_wants_a_lock(lock: object) -> None:
    pass


class TestCase(unittest.TestCase):
    @ranks(1)
    def test_in_unittest(self) -> None:
        raise AssertionError("ran")


@ranks(1)
async def test_async() -> None:
    raise AssertionError("ran")


@ranks(1)
def test_exit() -> None:
    pytest.exit("enough")


@ranks(1)
def test_never_run() -> None:
    pass
