"""No test changes what the next one in its process begins with: which is the next depends on the workers' speed.

A process that joined a group of ranks, as training does, leaves it after the test: its variables would make every
process that a later test starts take itself for one of its ranks.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_OTHERS_VARIABLES = re.compile("PYTEST_CURRENT_TEST|CUDA_DEVICE_MAX_CONNECTIONS|(TORCHINDUCTOR|TRITON)_.*")
"""that of pytest, one that a process sets once, before CUDA starts, and those of torch.compile"""
_OTHERS_SIGNALS = {signal.SIGALRM, signal.SIGCHLD}
"""those of pytest-timeout, and of the first torch loader with workers, which keeps its handler"""
_before = pytest.StashKey[dict[str, object]]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    item.stash[_before] = _state()
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    yield
    if "headway.dist.group" in sys.modules:
        sys.modules["headway.dist"].leave()
    before, after = item.stash[_before], _state()
    if "torch's threads" not in before:
        after = {name: value for name, value in after.items() if not name.startswith("torch's ")}
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        lines = (f"  {name}: {before.get(name)!r:.80} -> {after.get(name)!r:.80}" for name in changed)
        pytest.fail("the test left behind:\n" + "\n".join(lines), pytrace=False)


def _state() -> dict[str, object]:
    state: dict[str, object] = {
        f"${name}": value for name, value in os.environ.items() if not _OTHERS_VARIABLES.fullmatch(name)
    }
    state["working directory"] = Path.cwd()
    state["sys.excepthook"] = sys.excepthook
    state["umask"] = _umask()
    for number in signal.valid_signals() - _OTHERS_SIGNALS:
        state[f"handler of signal {number}"] = signal.getsignal(number)
    state |= _torch_state(sys.modules["torch"]) if "torch" in sys.modules else {}
    return state


def _torch_state(torch: Any) -> dict[str, object]:
    return {
        "torch's threads": torch.get_num_threads(),
        "torch's default type": torch.get_default_dtype(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "torch's gradients": torch.is_grad_enabled(),
        "torch's process group": torch.distributed.is_initialized(),
    }


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
