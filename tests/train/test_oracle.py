"""200 steps of headway equal 200 steps of a hand-written loop, to the last bit; on two ranks 60, or 200 in full."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import BATCH, Batches, Classify, by_hand, make_net, make_pipe, sgd_of_groups, warm_up

import headway as hw
from headway.testing import ranks

STEPS = 200
STEPS_ON_RANKS = 200 if os.environ.get("HEADWAY_FAULTS") == "full" else 60

CASES = {
    "fp32": ({}, {}, {}),
    "accumulation": ({"accumulate": 4}, {}, {"accumulate": 4}),
    "bf16": ({"precision": "bf16"}, {}, {"autocast": True}),
    "scheduler": ({}, {"scheduler": warm_up}, {"scheduler": warm_up}),
    "ema": ({}, {"ema": 0.99}, {"decay": 0.99}),
    "clipping": ({"gradient_clip": 0.5}, {}, {"clip": 0.5}),
    "groups": ({"gradient_clip": 0.5}, {"optimizer": sgd_of_groups}, {"clip": 0.5, "make": sgd_of_groups}),
    "all": (
        {"accumulate": 4, "precision": "bf16", "gradient_clip": 0.5},
        {"scheduler": warm_up, "ema": 0.99},
        {"accumulate": 4, "autocast": True, "clip": 0.5, "scheduler": warm_up, "decay": 0.99},
    ),
}


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), expected in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(mine, expected), name


def compare(
    folder: Path, stage: dict[str, Any], model: dict[str, Any], hand: dict[str, Any], rank: int, steps: int
) -> None:
    count = steps * stage.get("accumulate", 1)
    expected_net = make_net()
    torch.manual_seed(rank)
    losses, average = by_hand(expected_net, Batches(count, rank=rank), **hand)

    pipe = make_pipe(folder, **model)
    pipe.register_dataset("train", Batches(count, rank=rank))
    classify = Classify(**stage)
    pipe.append_stage(classify, max_epochs=1)
    torch.manual_seed(rank)
    pipe.run()

    assert pipe.steps_done == steps
    assert classify.losses == losses
    assert losses[-1] < losses[0]  # something was learned
    assert_same(pipe.registered_models["net"].bare, expected_net)
    if pipe.registered_models["net"].ema is not None:
        mine = pipe.registered_models["net"].ema.state_dict().values()
        assert all(torch.equal(a, b) for a, b in zip(mine, average, strict=True))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", CASES)
def test_one_process_equals_a_loop_by_hand(case: str, tmp_path: Path) -> None:
    compare(tmp_path, *CASES[case], rank=0, steps=STEPS)


@ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_ddp_by_hand(case: str, tmp_path: Path) -> None:
    compare(tmp_path, *CASES[case], rank=hw.rank(), steps=STEPS_ON_RANKS)


@ranks(2)
def test_accumulation_counts_samples_on_all_ranks(tmp_path: Path) -> None:
    """Ranks with different batches, a short last window: the gradient is that of the mean over all samples."""
    sizes = [[4, 16, 8, 2, 12, 6], [16, 16, 1, 3, 5, 16]]  # windows of 4: one whole, one of two batches
    net = make_net(norm=False, dropout=0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for window in (range(4), range(4, 6)):
        parts = [
            list(Batches(6, rank=rank, sizes=sizes[rank].__getitem__))[i] for rank in range(2) for i in window
        ]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    pipe = make_pipe(
        tmp_path,
        net=make_net(norm=False, dropout=0.0),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    )
    mine = Batches(6, rank=hw.rank(), sizes=sizes[hw.rank()].__getitem__)
    pipe.register_dataset("train", mine)
    pipe.append_stage(Classify(accumulate=4), max_epochs=1)
    pipe.run()
    assert pipe.steps_done == 2
    for ours, truth in zip(pipe.registered_models["net"].bare.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-6, atol=1e-7)


def test_batches_are_as_large_as_the_test_thinks() -> None:
    assert len(next(iter(Batches(1)))[0]) == BATCH
