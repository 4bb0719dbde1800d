"""The first step after a restart is like any other: also in the last bit of its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway import dist
from headway.testing import ranks
from headway.train.model.parallel import Ddp, prepare


def gradients(*, steps: int, frozen: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    if frozen:
        net[2].weight = nn.Parameter(net[2].weight[:64])
        net[2].weight.requires_grad_(False)
    world = dist.world()
    model = prepare(
        "net",
        net,
        world,
        parallel=Ddp(),
        sync_batchnorm=False,
        compile=False,
        ema=None,
        activation_checkpointing=(),
    )
    assert all(p.grad is None for p in net.parameters()), "nothing is left of the choice"
    batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(world.rank))
    found = []
    for _ in range(steps):
        net.zero_grad()
        model.wrapped(batch).square().mean().backward()
        found.append(torch.cat([p.grad.flatten().clone() for p in net.parameters() if p.grad is not None]))
    return found


@ranks(3)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_first_gradients_are_summed_as_the_later_ones(frozen: bool) -> None:
    first, *later = gradients(steps=3, frozen=frozen)
    assert first.abs().max() > 0
    assert all(torch.equal(first, each) for each in later)
