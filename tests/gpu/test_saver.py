"""Saving from the GPU while it goes on: what was copied is what was there, and the host memory is used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway import checkpoint
from headway.checkpoint import Saver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def state_of(value: float) -> dict[str, Any]:
    return {
        "large": torch.full((40_000_000,), value, device="cuda"),
        "turned": torch.full((300, 700), value, device="cuda").t(),
        "half": torch.full((1001,), value, device="cuda").bfloat16(),
        "host": torch.full((1000,), value),
        "scalar": torch.tensor(value, device="cuda"),
        "none": torch.empty(0, device="cuda"),
    }


def assert_is(folder: Path, step: int, value: float) -> None:
    loaded = checkpoint.load(folder / f"step-{step:012d}").state
    for name, expected in state_of(value).items():
        assert torch.equal(loaded[name], expected.cpu()), (step, name)


def test_kernels_after_the_save_do_not_reach_into_it(tmp_path: Path) -> None:
    state = state_of(0.0)
    with Saver(tmp_path) as saver:
        for step in range(5):
            saver.save(state, step=step)
            for tensor in state.values():
                tensor.add_(1.0)  # launched at once, while the copy is under way
        saver.wait()
        saved = saver.finished()
    for step in range(5):
        assert_is(tmp_path, step, float(step))
    assert [each.step for each in saved] == list(range(5))
    assert all(0 < each.stall_s < each.total_s for each in saved)


def test_work_that_was_launched_before_the_save_is_in_it(tmp_path: Path) -> None:
    state = state_of(0.0)
    busy = torch.rand(4096, 4096, device="cuda")
    with Saver(tmp_path) as saver:
        for _ in range(30):
            busy = busy @ busy / 4096
        for tensor in state.values():
            tensor.add_(3.0)  # queued behind the work above
        saver.save(state, step=1)
    assert_is(tmp_path, 1, 3.0)


def test_tensors_that_are_gone_right_after_the_save(tmp_path: Path) -> None:
    """Their memory goes back to the allocator, and to the next kernel, only after the copy."""
    with Saver(tmp_path) as saver:
        for step in range(4):
            saver.save(state_of(float(step)), step=step)
            [torch.full((40_000_000,), -1.0, device="cuda") for _ in range(3)]
    for step in range(4):
        assert_is(tmp_path, step, float(step))


def test_the_memory_is_page_locked_and_grows(tmp_path: Path) -> None:
    with Saver(tmp_path) as saver:
        for step, size in enumerate((1000, 1_000_000, 5_000_000, 10)):
            saver.save({"x": torch.full((size,), float(step), device="cuda")}, step=step)
            assert saver._background is not None and saver._background._memory._bytes.is_pinned()
    for step, size in enumerate((1000, 1_000_000, 5_000_000, 10)):
        loaded = checkpoint.load(tmp_path / f"step-{step:012d}").state["x"]
        assert torch.equal(loaded, torch.full((size,), float(step)))
